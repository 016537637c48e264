"""Every method on Fashion-MNIST, in the one fixed setting of ``experiments/checks/fmnist.toml``, for 30 rounds.

``python benchmarks/fmnist_all.py --jobs 6`` runs each method with seeds 0 to 2, six processes at a time, and prints one
line per finished run: the mean accuracy of the clients in the last round. Finished runs are lines of
``results/fmnist_all.jsonl`` and are not repeated, so the same command continues after an interruption. At the end
``results/fmnist_all.md`` is written, with Local and FedAvg beside every method. The data must be stored first:
``bespoke data fetch fashion_mnist``, or ``bespoke data import fashion_mnist FILES`` without internet.

No method is tuned: all use their defaults, except that QLSD, whose chain steps on the server, uses the setting's
learning rate as its step. FedBN and FedPCE, which need normalisation layers, use the CNN with GroupNorm, compared
with a FedAvg of that CNN; MOON is evaluated where it is personal, before averaging.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROUNDS = 30


@dataclass(frozen=True)
class Case:
    """A line of the table: how to run a method, and which FedAvg it has to beat."""

    algorithm: str
    label: str
    overrides: tuple[str, ...] = ()
    beside: str = "fedavg"
    counts: bool = True  # a personalised method, which is expected to beat one model for all


GROUP = ("model.norm=group",)
NOT_COUNTED = {"counts": False}
CASES: dict[str, Case] = {
    "local": Case("local", "Local"),
    "fedavg": Case("fedavg", "FedAvg, one model for all", **NOT_COUNTED),
    "fedprox": Case("fedprox", "FedProx, one model for all", **NOT_COUNTED),
    "fedpa": Case("fedpa", "FedPA, one model for all", **NOT_COUNTED),
    "fedep": Case("fedep", "FedEP, one model for all", **NOT_COUNTED),
    "qlsd": Case("qlsd", "QLSD, one model for all", **NOT_COUNTED),
    "fedavgm": Case("fedavgm", "FedAvgM, one model for all", **NOT_COUNTED),
    "fedadam": Case("fedadam", "FedAdam, one model for all", **NOT_COUNTED),
    "fedyogi": Case("fedyogi", "FedYogi, one model for all", **NOT_COUNTED),
    "scaffold": Case("scaffold", "SCAFFOLD, one model for all", **NOT_COUNTED),
    "feddyn": Case("feddyn", "FedDyn, one model for all", **NOT_COUNTED),
    "fedavg_ft": Case("fedavg_ft", "FedAvg-FT"),
    "fedpa_ft": Case("fedpa_ft", "FedPA-FT"),
    "fedep_ft": Case("fedep_ft", "FedEP-FT"),
    "qlsd_ft": Case("qlsd_ft", "QLSD-FT"),
    "per_fedavg": Case("per_fedavg", "Per-FedAvg"),
    "fedbabu": Case("fedbabu", "FedBABU"),
    "moon": Case("moon", "MOON, before averaging", ("evaluation.when=local",)),
    "fedper": Case("fedper", "FedPer"),
    "fedrep": Case("fedrep", "FedRep"),
    "lg_fedavg": Case("lg_fedavg", "LG-FedAvg"),
    "fedrod": Case("fedrod", "FedRoD"),
    "fedpac": Case("fedpac", "FedPAC"),
    "fedcp": Case("fedcp", "FedCP"),
    "gpfl": Case("gpfl", "GPFL"),
    "fedproto": Case("fedproto", "FedProto"),
    "fedala": Case("fedala", "FedALA"),
    "ditto": Case("ditto", "Ditto"),
    "apfl": Case("apfl", "APFL"),
    "pfedme": Case("pfedme", "pFedMe"),
    "pfedbred": Case("pfedbred", "pFedBreD"),
    "pfedgp": Case("pfedgp", "pFedGP"),
    "pfedfda": Case("pfedfda", "pFedFDA"),
    "fedlda": Case("fedlda", "FedLDA"),
    "pfedvmp": Case("pfedvmp", "pFedVMP"),
    "self_fl": Case("self_fl", "Self-FL"),
    "fedavg_group": Case("fedavg", "FedAvg, one model for all", GROUP, "fedavg_group", counts=False),
    "fedbn": Case("fedbn", "FedBN", GROUP, "fedavg_group"),
    "fedpce": Case("fedpce", "FedPCE", GROUP, "fedavg_group"),
}

INTRODUCTION = """\
# Every method on Fashion-MNIST

One fixed setting for every method, that of [experiments/checks/fmnist.toml](../experiments/checks/fmnist.toml), with
{rounds} rounds: train and test rows pooled, a quarter kept, 20 clients by Dir(0.1), 80/20, the CNN of pFedVMP, SGD at
0.01 with momentum 0.5, batches of 50, two epochs, everyone in every round. No method was tuned: each has its defaults,
and QLSD this learning rate as the step of its chain.

Mean accuracy of the 20 clients in the last round, in percent, on {machine}; and how far the mean over seeds is above
that of FedAvg's one model for all (in brackets: in how many of the seeds it is).

Arithmetic was in {precision}. Budgets are not equal: what a method reaches in {rounds} rounds is compared, not what
equal work gives or where training ends, and nothing here ranks methods. QLSD takes one gradient step per round where
others take dozens; on digits it had 27 % after 30 rounds and 91 % after 400. pFedMe, Per-FedAvg and pFedBreD take plain
steps as published, without the momentum of 0.5, which halves their effective step, and the last two use two batches for
each, so they take half as many. The ties of FedCP and GPFL slow the start: after 120 rounds both were ahead of FedPer.
FedPAC's mixed heads cost 2.5 points on digits. MOON's row is of local models before averaging, and FedAvg's own models
before averaging are as good.
"""
ENDING = """
Why FedPCE is level with FedAvg here, and why pFedVMP is below Local: [the check](fmnist_check.md).

```bash
bespoke data fetch fashion_mnist
python benchmarks/fmnist_all.py
```
"""


def child(name: str, seeds: list[int], rounds: int, device: str, extra: list[str], records: Path) -> None:
    """Run one method with some seeds; write one line per seed to the records and the screen."""
    import torch

    from bespoke.runs import api
    from bespoke.runs.experiment import load

    case = CASES[name]
    for seed in seeds:
        begin = time.perf_counter()
        overrides = [f"training.rounds={rounds}", *case.overrides, *extra]
        experiment, _ = load(ROOT / "experiments" / "checks" / "fmnist.toml", case.algorithm, overrides, seed)
        run = api.run(experiment, device=device)
        last = run.summary["views"][run.summary["headline"]]["last"]["all"]
        row = {
            "case": name,
            "seed": seed,
            "rounds": rounds,
            "set": extra,
            "mean": last["mean"],
            "pooled": last["pooled"],
            "clients": last["clients"],
            "refused": run.summary["refused"],
            "seconds": round(time.perf_counter() - begin, 1),
            "machine": torch.cuda.get_device_name() if run.federation.task.device.type == "cuda" else "a CPU",
            "precision": run.federation.task.precision,
            "notes": [*run.notes, *run.summary["notes"]],
        }
        with records.open("a") as file:
            file.write(json.dumps(row) + "\n")
        notes = "; ".join(row["notes"])
        print(f"{name} seed {seed}: {100 * row['mean']:.2f} % ({row['seconds']:.0f} s) {notes}", flush=True)


def finished(records: Path, rounds: int, extra: list[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the finished runs of this setting, by case and seed."""
    rows = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    return {(r["case"], r["seed"]): r for r in rows if r["rounds"] == rounds and r["set"] == extra}


def table(names: list[str], seeds: list[int], done: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Return the table of some cases as Markdown; a counted method that is not above its FedAvg is in bold."""
    lines = [
        "| method | " + " | ".join(f"seed {s}" for s in seeds) + " | mean | above FedAvg |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for name in names:
        case = CASES[name]
        found = {s: 100 * done[name, s]["mean"] for s in seeds if (name, s) in done}
        base = {s: 100 * done[case.beside, s]["mean"] for s in seeds if (case.beside, s) in done}
        both = sorted(found.keys() & base.keys())
        cells = [f"{found[s]:.2f}" if s in found else "" for s in seeds]
        cells.append(f"{sum(found.values()) / len(found):.2f}" if found else "")
        gap, label = "", case.label
        if both and name != case.beside:
            points = sum(found[s] - base[s] for s in both) / len(both)
            gap = f"{points:+.2f} ({sum(found[s] > base[s] for s in both)} of {len(both)})"
            if case.counts and points <= 0:
                label, gap = f"**{label}**", f"**{gap}**"
        lines.append(f"| {label} | {' | '.join(cells)} | {gap} |")
    return "\n".join(lines) + "\n"


def page(seeds: list[int], rounds: int, done: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Return the whole page."""
    machines = dict.fromkeys(r["machine"] for r in done.values())
    plain = [n for n, case in CASES.items() if case.beside == "fedavg"]
    group = [n for n, case in CASES.items() if case.beside != "fedavg"]
    precisions = " and ".join(dict.fromkeys(r["precision"] for r in done.values() if "precision" in r))
    text = INTRODUCTION.format(
        rounds=rounds, machine=" and ".join(machines) or "nothing yet", precision=precisions or "fp32"
    )
    text += "\n" + table(plain, seeds, done)
    text += "\nWith GroupNorm after each convolution:\n\n" + table(group, seeds, done)
    notes = dict.fromkeys(f"{CASES[c].label}: {note}" for (c, _), r in done.items() for note in r["notes"])
    if notes:
        text += "\nNotes of the runs:\n\n" + "".join(f"- {note}\n" for note in notes)
    return text + ENDING


def main() -> int:
    """Run the missing cases, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], help="change a setting, for a smaller test")
    parser.add_argument("--records", type=Path, default=ROOT / "results" / "fmnist_all.jsonl")
    parser.add_argument("--table", type=Path, default=ROOT / "results" / "fmnist_all.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    names, seeds = chosen.methods.split(","), [int(s) for s in chosen.seeds.split(",")]
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if chosen.child:
        child(names[0], seeds, chosen.rounds, chosen.device, chosen.set, chosen.records)
        return 0
    chosen.records.parent.mkdir(parents=True, exist_ok=True)
    done = finished(chosen.records, chosen.rounds, chosen.set)
    left = {name: [s for s in seeds if (name, s) not in done] for name in names}

    def run(name: str) -> bool:
        command = [sys.executable, __file__, "--child", "--methods", name, "--device", chosen.device]
        command += ["--seeds", ",".join(map(str, left[name])), "--rounds", str(chosen.rounds)]
        command += ["--records", str(chosen.records), *(word for s in chosen.set for word in ("--set", s))]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        if ended.returncode:
            print(f"{name} failed:\n{ended.stderr}", flush=True)
        return ended.returncode == 0

    with ThreadPoolExecutor(chosen.jobs) as pool:
        sound = all(list(pool.map(run, [name for name in names if left[name]])))
    text = page(seeds, chosen.rounds, finished(chosen.records, chosen.rounds, chosen.set))
    chosen.table.write_text(text)
    print(text)
    return int(not sound)


if __name__ == "__main__":
    sys.exit(main())
