"""What one bad client of ten costs the other nine, method by method, and how large uploads are on clean data.

Handwritten digits over ten clients, 30 rounds, seeds 0 to 2. The last client is bad: its inputs are in other units or
at float32's maximum, or its upload of every round is scaled or overwritten. The accuracy of the nine good clients
(pooled over their test rows, headline view, last round) is compared with a run of the nine alone. Clean runs, of these
clients and of others with more skew, other optimisers and fewer participants, are repeated without the bound and
compared to the bit; their largest upload relative to the median says how much room the bound leaves.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

import bespoke
from bespoke.clients import SequentialClients, Trained
from bespoke.core import rng, tree
from bespoke.core.data import FederatedData, Rows
from bespoke.core.settings import Training
from bespoke.data import partitioned
from bespoke.files import write_atomic
from bespoke.runs import api, bounds

CLIENTS, ROUNDS, SEEDS = 10, 30, (0, 1, 2)
BAD = CLIENTS - 1  # the last one, so that the others keep their places
LOSS = 3.0  # points that the good clients may lose
RESULTS = Path(__file__).parents[1] / "results"
PAGE = """# What one bad client of ten costs the others

Written by `python benchmarks/poison.py` from `poison.json`, {bound}, on a {machine}. Nine alone: the accuracy of the
nine good clients in a run of their own, pooled over their test rows, headline view, last round, in percent, mean of
{seeds} seeds. The next columns: the points that these nine lose when the bad one takes part. Refused: how many of the
bad client's {most} uploads, attack by attack. [reliability.md](../docs/reliability.md) says more.

"""
LARGEST = torch.finfo(torch.float32).max

INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "inputs x 1e4": lambda x: x * 1e4,
    "inputs at the maximum": lambda x: x / x.max() * LARGEST,
}
UPLOADS: dict[str, Callable[[Tensor], Tensor]] = {
    "upload x 1e20": lambda x: x * 1e20 if x.is_floating_point() else x,
    "upload of 1e38": lambda x: torch.full_like(x, 1e38) if x.is_floating_point() else x,
}
DIRICHLET = {"partition": "dirichlet", "alpha": 0.3, "clients": CLIENTS, "min_rows": 10}
TRAINING = {"rounds": ROUNDS, "batch": 32, "lr": 0.1, "momentum": 0.5}
RATES = {"pfedvmp": 0.05}  # it diverges at 0.1, with nobody bad
CLEAN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes to data and training
    "as attacked": ({}, {}),
    "skewed, half take part": ({"alpha": 0.1, "clients": 20, "min_rows": 2}, {"rate": 0.5}),
    "two classes each": ({"partition": "pathological", "classes_per_client": 2, "clients": CLIENTS}, {}),
    "cosine, no momentum": ({}, {"schedule": "cosine", "momentum": 0.0}),
    "adam, kept": ({}, {"optimizer": "adam", "lr": 0.003, "keep_optimizer": True}),
    "three take part": ({"min_rows": 2}, {"rate": 0.3}),
}


def experiment(name: str, seed: int, data: dict[str, Any], training: dict[str, Any]) -> bespoke.Experiment:
    """Return a method's experiment on digits."""
    return bespoke.Experiment(
        data=bespoke.DataSettings(name="digits", **(DIRICHLET if "partition" not in data else {}) | data),
        model=bespoke.ModelSettings(name="cnn", norm="group" if name in ("fedbn", "fedpce") else "none"),
        algorithm=name,
        training=bespoke.Training(**TRAINING | ({"lr": RATES[name]} if name in RATES else {}) | training),
        seed=seed,
    )


class Tampered(SequentialClients):
    """Clients of which the last sends something else than it should."""

    change: Callable[[Tensor], Tensor]

    def train(self, *args: Any) -> Trained:
        done = super().train(*args)
        clients = done.uploads.clients.tolist()
        if BAD not in clients:
            return done
        place = clients.index(BAD)

        def leaf(x: Tensor) -> Tensor:
            x = x.clone()
            x[place] = self.change(x[place])
            return x

        return replace(done, uploads=done.uploads._replace(tree=tree.map(leaf, done.uploads.tree)))


def as_floats(pool: FederatedData) -> FederatedData:
    """Return the pool with inputs as the model takes them."""
    x = pool.transform(rng.key(0), pool.x, {}, False) if pool.transform else pool.x
    return replace(pool, x=x.float(), transform=None)


def without_bad(pool: FederatedData) -> FederatedData:
    """Return the pool of the good clients."""
    lists = {split: Rows.of([getattr(pool, split).client(c) for c in range(BAD)]) for split in ("train", "test", "val")}
    return replace(pool, **lists, num_clients=BAD, names=pool.names[:BAD])


@contextmanager
def attacked(attack: str) -> Iterator[None]:
    """Let runs of this process suffer an attack; "absent" leaves the bad client out."""
    usual, loop = api.partitioned, api.BACKENDS["loop"]

    def prepared(*args: Any) -> Any:
        pool, described = partitioned(*args)
        pool = as_floats(pool)
        if attack == "absent":
            return without_bad(pool), described
        if attack in INPUTS:
            rows = torch.cat([split.client(BAD) for split in (pool.train, pool.test, pool.val)])
            x = pool.x.clone()
            x[rows] = INPUTS[attack](x[rows])
            pool = replace(pool, x=x)
        return pool, described

    api.partitioned = prepared
    if attack in UPLOADS:
        api.BACKENDS["loop"] = type("Attacked", (Tampered,), {"change": staticmethod(UPLOADS[attack])})
    try:
        yield
    finally:
        api.partitioned, api.BACKENDS["loop"] = usual, loop


def good_accuracy(name: str, seed: int, attack: str, training: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracy of the good clients in percent, and how many uploads were refused."""
    torch.set_num_threads(1)
    with attacked(attack):
        run = bespoke.run(experiment(name, seed, {}, training), backend="loop", device="cpu")
    rounds = run.folder.rounds()
    view = run.summary["headline"]
    lines = [line for line in run.folder.clients() if line["view"] == view and line["split"] == "test"]
    counted = [line["metrics"]["accuracy"] for line in lines if line["client"] != BAD]
    refused = [int(client) for row in rounds for client in row["refused"]]
    return {
        "accuracy": 100.0 * sum(c for c, _ in counted) / sum(n for _, n in counted),
        "refused": refused.count(BAD),
        "good refused": sum(client != BAD for client in refused),
        "why": next((why for row in rounds for why in row["refused"].values()), ""),
    }


def clean(name: str, seed: int, case: str) -> dict[str, Any]:
    """Return the largest ratios to the median by top-level name, and whether runs with and without a bound are equal.

    The bound looks only at uploads that moved further than the norm of what was sent: ``beyond`` has their ratios.
    """
    torch.set_num_threads(1)
    largest: dict[str, float] = defaultdict(float)
    beyond: dict[str, float] = defaultdict(float)
    judge = bounds.Bound.judge

    def watched(self: bounds.Bound, up: Any, clients: Any, shared: Any, own: Any) -> Any:
        for part, column in bounds.sizes(up, shared, own).items():
            usual = self._usual(part, column) or float("inf")  # nothing to compare with
            sent = bounds.norms_sent(part, up, shared, own)
            over = [size for size, norm in zip(column, sent, strict=True) if size > norm]
            largest[part] = max(largest[part], max(column) / usual)
            beyond[part] = max(beyond[part], max(over, default=0.0) / usual)
        return judge(self, up, clients, shared, own)

    with tempfile.TemporaryDirectory() as folder:
        results = []
        for bound in ({}, {"bound": 0.0}):
            if not bound:
                bounds.Bound.judge = watched  # type: ignore[method-assign]
            data, training = CLEAN[case]
            out = f"{folder}/{bool(bound)}"
            try:
                run = bespoke.run(experiment(name, seed, data, training | bound), out, backend="loop", device="cpu")
            finally:
                bounds.Bound.judge = judge  # type: ignore[method-assign]
            lines = [json.dumps(line) for line in [*run.folder.rounds(), *run.folder.clients()]]
            results.append((tree.flatten(run.server), lines))
    (a, first), (b, second) = results
    equal = first == second and all(torch.equal(a[name], b[name]) for name in a)
    return {"equal": equal, "largest": dict(largest), "beyond": dict(beyond)}


def page(stored: dict[str, Any]) -> str:
    """Return what the attacks cost as a Markdown page."""
    attacks = [*INPUTS, *UPLOADS]
    head = ["method", "nine alone", *attacks, "refused", "good ones refused"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in stored["attacks"]:
        costs = [f"{row[attack]:.1f}" for attack in attacks]
        times = ", ".join(str(row["times"][attack]) for attack in attacks)
        cells = [f"`{row['method']}`", f"{row['alone']:.1f}", *costs, times, str(row["good refused"])]
        lines.append("| " + " | ".join(cells) + " |")
    bound = "without a bound" if stored["bound"] is None else f"with a bound of {stored['bound']:,.0f}"
    return (
        PAGE.format(bound=bound, machine=stored["machine"], seeds=len(SEEDS), most=ROUNDS * len(SEEDS))
        + "\n".join(lines)
        + "\n"
    )


def main() -> int:
    """Run everything, print two tables, and return 1 if a method loses more than it may or a clean run changes."""
    arguments = report.parser(__doc__, __file__)
    arguments.set_defaults(out=str(RESULTS / "poison.json"))
    arguments.add_argument("--jobs", type=int, default=1, help="processes")
    arguments.add_argument("--names", nargs="*", default=list(bespoke.ALGORITHMS), help="methods")
    arguments.add_argument("--parts", nargs="+", default=["attacks", "clean"], choices=["attacks", "clean"])
    arguments.add_argument("--off", action="store_true", help="without the bound, to see what it prevents")
    given = arguments.parse_args()
    attacks = ["absent", *INPUTS, *UPLOADS] if "attacks" in given.parts else []
    cases = CLEAN if "clean" in given.parts else {}
    training = {"bound": 0.0} if given.off else {}
    rows, ratios, failed = [], [], 0
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        work = {
            name: (
                {
                    (attack, seed): pool.submit(good_accuracy, name, seed, attack, training)
                    for attack in attacks
                    for seed in SEEDS
                },
                {case: pool.submit(clean, name, 0, case) for case in cases},
            )
            for name in given.names
        }
        for name, (attacked_runs, clean_runs) in work.items():
            if attacks:
                found = {key: run.result() for key, run in attacked_runs.items()}
                mean = {a: sum(found[a, seed]["accuracy"] for seed in SEEDS) / len(SEEDS) for a in attacks}
                losses = {attack: mean["absent"] - mean[attack] for attack in attacks[1:]}
                refused = {a: sum(found[a, seed]["refused"] for seed in SEEDS) for a in attacks[1:]}
                others = sum(run["good refused"] for run in found.values())
                why = {attack: found[attack, 0]["why"] for attack in attacks[1:]}
                failed += any(loss > LOSS for loss in losses.values())
                rows.append(
                    {
                        "method": name,
                        "alone": mean["absent"],
                        **losses,
                        "good refused": others,
                        "times": refused,
                        "why": why,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
            calm = {case: run.result() for case, run in clean_runs.items()}
            failed += sum(not one["equal"] for one in calm.values())
            parts = dict.fromkeys(part for one in calm.values() for part in one["largest"])
            for part in parts:
                by_case = {case: one["largest"].get(part, 0.0) for case, one in calm.items()}
                beyond = max(one["beyond"].get(part, 0.0) for one in calm.values())
                ratios.append(
                    {
                        "method": name,
                        "name": part,
                        "largest": max(by_case.values()),
                        "beyond": beyond,
                        "by case": by_case,
                    }
                )
                print(json.dumps(ratios[-1]), flush=True)
            if calm:
                print(
                    name,
                    "clean runs",
                    "equal" if all(one["equal"] for one in calm.values()) else "NOT EQUAL",
                    flush=True,
                )
    print(report.table(rows))
    print(report.table(ratios))
    report.store(given.out, "cpu", bound=None if given.off else Training.bound, attacks=rows, clean=ratios)
    if rows:
        write_atomic(Path(given.out).with_suffix(".md"), page(json.loads(Path(given.out).read_text())))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
