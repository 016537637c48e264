"""The page ``results/fmnist_all.md``: every method on Fashion-MNIST, after 30 and after 300 rounds, with what it did.

The trainings are those of the table file ``experiments/checks/comparisons/fmnist_all.toml``. ``bespoke sweep`` of that
file runs them; ``python benchmarks/fmnist_all.py`` writes the page from their results and from the counts of work
below, which a test counts again.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespoke.files import write_atomic
from bespoke.report.table import markdown_table
from bespoke.tables import results, spec
from bespoke.tables.results import Result
from bespoke.tables.spec import Entry

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "experiments" / "checks" / "comparisons" / "fmnist_all.toml"
SEEDS = 3
ROUNDS = (30, 300)
PASS = 14.4  # minibatches in a pass over a client's rows: the mean over the 20 clients of seeds 0 to 2
ONE_MODEL = "one model for all"  # in the label of a method that is not expected to beat FedAvg


@dataclass(frozen=True)
class Work:
    """What a client does in a round and before prediction, in passes over its rows."""

    passes: float = 2.0  # of minibatches on which gradients are taken
    per_step: int = 1  # minibatches for each step
    besides: tuple[tuple[str, float], ...] = ()  # other steps on these or further minibatches: whose, and how many
    before: float = 0.0  # steps before prediction
    told: str = ""  # what else there is to know of its steps
    fixed: int = 0  # steps a round, where they do not depend on the rows

    @property
    def steps(self) -> float:
        """Gradient steps of the model in a round."""
        return self.fixed or self.passes * PASS / self.per_step

    @property
    def batches(self) -> float:
        """Minibatches read in a round."""
        return self.fixed or PASS * (self.passes + sum(n for whose, n in self.besides if whose not in SAME_BATCHES))

    def words(self) -> str:
        """Return the steps that are not those of the model in a round."""
        parts = [f"{whose} {PASS * n:.0f}" for whose, n in self.besides]
        parts += [f"before prediction {PASS * self.before:.0f}"] if self.before else []
        return "; ".join(filter(None, [*parts, self.told]))


SAME_BATCHES = ("inner model", "meta steps")  # whose steps are on the minibatches of the model's own
USUAL = Work()
TUNED = Work(before=5.0)
WORK: dict[str, Work] = {
    "qlsd": Work(fixed=29, told="one step in each of 29 rounds"),
    "qlsd_ft": Work(fixed=29, before=5.0, told="one step in each of 29 rounds"),
    "fedavg_ft": TUNED,
    "fedpa_ft": TUNED,
    "fedep_ft": TUNED,
    "fedbabu": Work(before=5.0, told="the head is fixed in training"),
    "per_fedavg": Work(4.0, 2, told="each after a trial step; one before prediction, on all rows"),
    "fedrep": Work(besides=(("head", 10.0),), told="body and head apart"),
    "fedpac": Work(besides=(("head", 2.0),), told="body and head apart"),
    "fedala": Work(besides=(("mixing weights", 0.8),), before=0.8, told="of these ten times as many at first"),
    "ditto": Work(besides=(("own model", 2.0),)),
    "apfl": Work(told="each moves both models"),
    "pfedme": Work(besides=(("inner model", 10.0),)),
    "pfedbred": Work(4.0, 2, besides=(("inner model", 10.0), ("meta steps", 2.0))),
    "pfedgp": Work(told="no head is trained"),
    "pfedfda": Work(told="the head is computed"),
    "fedlda": Work(told="the head is computed"),
    "self_fl": Work(fixed=29, told="in the first two rounds; then 1 to 40, by its rule"),
}

INTRODUCTION = """\
# Every method on Fashion-MNIST
<!-- Written by `python benchmarks/fmnist_all.py`; do not edit. -->

One setting for every method, that of [experiments/checks/fmnist.toml](../experiments/checks/fmnist.toml): train and
test rows pooled, a quarter kept, 20 clients by Dir(0.1), split 80/20, pFedVMP's CNN, SGD at a learning rate of 0.01
with momentum 0.5, batches of 50, two epochs, every client in every round. **No method was tuned:** each has its
defaults, but for what is made equal below. Another rate, or another strength of a method's own terms, may change its
place; three seeds of one data set rank no methods.

Accuracy is the mean over the 20 clients, in percent. Shown are its mean and, where there are several of seeds 0 to 2,
its standard deviation (ddof 1), after 30 and after 300 rounds of one training, and how far the mean is above that of
FedAvg's global model (in brackets: for how many of the seeds it is). Nothing in this setting depends on the number of
rounds, so what stands under 30 is what a training of 30 rounds gives; a test compares the two for every method.
{machine}

## What is equal, and what is not

**Equal: the number of the model's gradient steps, and how far a client's go.** A client has 700 train rows on average,
which are {a_pass:.1f} batches, so in FedAvg it takes {usual:.1f} steps a round (4 to 72, by its rows). No part of a
model that is trained in rounds takes fewer: FedRep's body and FedPAC's head have two epochs instead of one; Per-FedAvg
and pFedBreD, which use two batches for a step, have four epochs instead of two; QLSD, whose round is a single step,
has 29 times as many rounds, 870 and 8700; Self-FL starts with 29 steps instead of 20. Methods whose published steps
are plain (pFedMe, Per-FedAvg, pFedBreD, QLSD's chain) have the rate 0.02, which is lr / (1 - momentum): as far as a
gradient moves a model in the long run at 0.01 with momentum 0.5. Rates of a method's own, such as pFedMe's inner one,
FedPAC's for the head and those of servers, are its defaults.

**Not equal: all else.** Steps that a method takes beyond these are part of it, and stand in the fourth column: those
of second models, of heads trained apart, inner and meta steps, fine-tuning before prediction. Nor are batches equal,
of which Per-FedAvg, pFedBreD and methods with a second pass read more; nor messages, of which QLSD sends 29 times as
many; nor time (the README's table has both); nor how far a server goes: with its default rate and momentum FedAvgM's
goes in the long run ten times as far as the mean of its clients, that of FedPA and FedPA-FT five times. From its third
round on, Self-FL's own rule sets a client's steps, 1 to 40 whatever its rows. MOON makes one model for all; it is
tested before averaging, where it is personal, and so is FedAvg in the row above it.

The columns: gradient steps of the model that a client takes in a round, and minibatches on which it takes gradients,
both means over clients; its other steps, in a round unless it says otherwise; accuracies.
"""
ENDING = """
What other pages cite are [earlier results](fmnist_all.jsonl), 30 rounds with the methods' own numbers of steps.
[The check](fmnist_check.md) explains why FedPCE is level with FedAvg and pFedVMP below Local in those.

The trainings are in [one file](../experiments/checks/comparisons/fmnist_all.toml), their results in
`results/checks/fmnist_all/`. The first two commands run what is missing, the last writes this page:

```bash
bespoke data fetch fashion_mnist
bespoke sweep experiments/checks/comparisons/fmnist_all.toml --seeds 0 1 2
python benchmarks/fmnist_all.py
```
"""


def accuracy(result: Result, number: int) -> float:
    """Return the mean accuracy of the clients after a round of FedAvg, or after as many steps of the row's method."""
    rounds, curve = result.content["settings"]["training"]["rounds"], result.content["curve"]
    return 100.0 * curve["mean"][curve["round"].index(number * rounds // ROUNDS[-1])]


def found(root: Path, entry: Entry) -> dict[int, Result]:
    """Return an entry's results by seed that came to their end with the settings that the table has now."""
    there, _ = results.current(root, entry)
    return {seed: result for seed, result in there.items() if result.done and seed < SEEDS}


def cells(own: Mapping[int, Result], base: Mapping[int, Result], number: int) -> tuple[str, str, float | None]:
    """Return the accuracy after a round and how far it is above another's, as printed, and that as a number."""
    values = {seed: accuracy(result, number) for seed, result in own.items()}
    others = {seed: accuracy(result, number) for seed, result in base.items()}
    spread = f" ± {statistics.stdev(values.values()):.2f}" if len(values) > 1 else ""
    shown = f"{statistics.fmean(values.values()):.2f}{spread}" if values else ""
    both = sorted(values.keys() & others.keys())
    if not both or own == base:
        return shown, "", None
    points = statistics.fmean(values[seed] - others[seed] for seed in both)
    return shown, f"{points:+.2f} ({sum(values[s] > others[s] for s in both)} of {len(both)})", points


def line(entry: Entry, own: Mapping[int, Result], base: Mapping[int, Result]) -> list[str]:
    """Return a row of the table; a personal method that is not above FedAvg is in bold."""
    work = WORK.get(entry.row.id, USUAL)
    broke = any(_broke(result.content) for result in own.values())
    label, parts, behind = f"{entry.row.name}{' (broke, see the notes)' * broke}", list[str](), False
    for number in ROUNDS:
        shown, gap, points = cells(own, base, number)
        low = points is not None and points <= 0 and ONE_MODEL not in label
        parts += [shown, f"**{gap}**" if low else gap]
        behind = behind or low
    numbers = [f"{work.steps:.0f}", f"{work.batches:.0f}", work.words()]
    return [f"**{label}**" if behind else label, *numbers, *parts]


def page(root: Path) -> str:
    """Return the whole page from the results under a folder."""
    table = spec.read(TABLE)
    there = {entry.id: found(root, entry) for entry in table.entries}
    heads = [part for number in ROUNDS for part in (f"{number} rounds", "above FedAvg")]
    text = INTRODUCTION.format(machine=_machine(there), a_pass=PASS, usual=USUAL.steps)
    for cell in table.cells:
        rows = [
            line(entry, there[entry.id], there[f"{cell.id}/fedavg"])
            for entry in table.entries
            if entry.cell.id == cell.id
        ]
        text += f"\n## {cell.name[0].upper()}{cell.name[1:]}\n\n"
        text += "\n".join(markdown_table(["method", "steps", "batches", "other steps", *heads], rows)) + "\n"
    notes = dict.fromkeys(
        f"{entry.row.name}: {note}"
        for entry in table.entries
        for result in there[entry.id].values()
        for note in _notes(result.content)
    )
    if notes:
        text += "\nNotes of the runs:\n\n" + "".join(f"- {note}\n" for note in notes)
    return text + ENDING


def _machine(there: Mapping[str, Mapping[int, Result]]) -> str:
    """Return what the trainings ran on and how many there are, as sentences."""
    told = [result.content["environment"] for own in there.values() for result in own.values()]
    if not told:
        return "Nothing has been run with these settings yet."
    where = dict.fromkeys(f"{each['device']} in {each.get('precision', 'fp32')}" for each in told)
    missing = len(there) * SEEDS - len(told)
    left = f" Of {len(there) * SEEDS} results, one for each row and seed, {missing} are missing." if missing else ""
    return f"Run on {' and '.join(where)}.{left}"


def _notes(content: Mapping[str, Any]) -> list[str]:
    """Return what a reader should know of a run; where it was interrupted changes no number."""
    refused, sent = _refused(content)
    told = [note for note in content["notes"] if "checkpoint" not in note and " uploads " not in note]
    if not refused:
        return told
    broke = ", so its model is hardly trained" if _broke(content) else ""
    return [*told, f"{refused:,} of {sent:,} uploads were refused with seed {content['seed']}{broke}"]


def _refused(content: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many uploads were refused, of how many."""
    totals = content["totals"]
    return totals.get("refused") or 0, totals.get("participations") or 0


def _broke(content: Mapping[str, Any]) -> bool:
    refused, sent = _refused(content)
    return 2 * refused > sent


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the results")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "fmnist_all.md", help="the page")
    chosen = parser.parse_args()
    write_atomic(chosen.out, page(chosen.results))
    print(f"{chosen.out} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
