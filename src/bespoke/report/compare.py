"""Several runs side by side: one row a method, its seeds together, paired with a baseline."""

from __future__ import annotations

from typing import Any

import numpy as np

from bespoke.errors import UserError
from bespoke.report.metrics import accuracies, aggregate, paired_difference, seed_statistics
from bespoke.report.runs import Groups, Paths, differing, group_runs, view_of
from bespoke.report.summary import GROUPS, SELECTIONS, Counts, totals
from bespoke.report.table import Comparison, Difference, Row

TITLES = {"last": "last round", "best_val": "best validation round", "best_test": "best on test (oracle)"}
PEOPLE = {
    "all": "all clients of the training population",
    "train": "clients that took part in training",
    "unseen": "clients of the training population that never took part",
    "new": "new clients, held out from training",
}
Chosen = dict[str, dict[int, tuple[int, Counts]]]  # label -> seed -> (round, its counts)


def compare(
    paths: Paths,
    baseline: str | None = None,
    select: str | None = None,
    view: str | None = None,
    group: str = "all",
) -> Comparison:
    """Compares the runs at `paths`: run folders, or folders that hold them one or two levels below.

    `baseline` is the label that the other rows are paired with (default `fedavg`, else the first), `select`
    the round that counts (`last`, `best_val`, `best_test`; default: what the runs' `[evaluation] select` says,
    `last` where they disagree), `view` the prediction that counts (default: each
    method's headline), `group` the clients: `all` (the training population), `train`, `unseen` or `new`.
    """
    groups, warnings = group_runs(paths)
    if select is None:
        wanted = {
            r.config.get("evaluation", {}).get("select", "last") for runs in groups.values() for r in runs.values()
        }
        select = wanted.pop() if len(wanted) == 1 else "last"
    for name, value, allowed in (("select", select, SELECTIONS), ("group", group, tuple(GROUPS))):
        if value not in allowed:
            raise UserError(f"unknown {name} {value!r}; use one of {', '.join(allowed)}")
    averaged = [label for label, runs in groups.items() if next(iter(runs.values())).algorithm == "fedavg"]
    baseline = baseline or next(iter([*averaged, *groups]))
    if baseline not in groups:
        raise UserError(f"no runs of the baseline {baseline!r}; there are {', '.join(groups)}")
    chosen = _choose(groups, select, view, group)
    warnings += _inequalities(groups, chosen, select)
    rows = []
    for label in groups:
        row, refused, mismatch = _row(label, groups, chosen, baseline, view)
        rows.append(row)
        if mismatch:
            warnings.append(f"{label} was not tested on the rows of {baseline}, so the two are not paired")
        if refused:
            warnings.append(f"{label}: {refused} uploads were refused and left out of the aggregate")
    title = f"Test accuracy, {TITLES[select]}"
    return Comparison(tuple(rows), baseline, select, title, _caption(rows, select, group), tuple(warnings))


def _row(label: str, groups: Groups, chosen: Chosen, baseline: str, view: str | None) -> tuple[Row, int, bool]:
    """A method's row, how many of its uploads were refused, and whether it was tested on other rows."""
    runs, costs = groups[label], [totals(run.folder) for run in groups[label].values()]
    counts = [counts for _, counts in chosen[label].values()]
    values = [aggregate(c.correct, c.total).as_dict() for c in counts]
    spreads = [value["std"] for value in values if value["std"] is not None]
    both = [{"data": run.config.get("data", {})} for run in (*runs.values(), *groups[baseline].values())]
    difference, pairs, mismatch = None, 0, False
    if label != baseline and not differing(both):
        difference, pairs, mismatch = _pair(chosen[label], chosen[baseline])
    row = Row(
        label=label,
        view=" or ".join(dict.fromkeys(view_of(run, view) for run in runs.values())),
        rounds=tuple(number for number, _ in chosen[label].values()),
        seeds=tuple(runs),
        mean=seed_statistics([value["mean"] for value in values]),
        std=float(np.mean(spreads)) if spreads else None,
        pooled=seed_statistics([value["pooled"] for value in values]),
        worst10=seed_statistics([value["worst10"] for value in values]),
        bytes_per_round=float(np.mean([(c["bytes_down"] + c["bytes_up"]) / max(1, c["rounds"]) for c in costs])),
        seconds=float(np.mean([cost["seconds"] for cost in costs])),
        difference=difference,
        pairs=pairs,
        excluded=max(value["excluded"] for value in values),
        accuracies=np.concatenate([accuracies(c.correct, c.total) for c in counts]),
    )
    return row, sum(cost["refused"] for cost in costs), mismatch


def _choose(groups: Groups, select: str, view: str | None, group: str) -> Chosen:
    chosen: Chosen = {label: {} for label in groups}
    for label, runs in groups.items():
        for seed, run in runs.items():
            name = view_of(run, view)
            number = run.evaluations.choose(name, select)
            if number is None:
                cure = "run with [data] validation" if select == "best_val" else "give its clients test rows"
                raise UserError(f"{run.folder.path} has no {TITLES[select]}: {cure}, or select the last round")
            counts = run.evaluations.counts(name, number, group)
            if not counts.total.sum():
                raise UserError(f"{run.folder.path} has no test rows of {PEOPLE[group]}; choose another group")
            chosen[label][seed] = number, counts
    return chosen


def _inequalities(groups: Groups, chosen: Chosen, select: str) -> list[str]:
    """One sentence for each thing that makes the rows not comparable."""
    warnings = []
    everyone = [run for runs in groups.values() for run in runs.values()]
    for table in ("data", "model"):
        for key, values in differing([{table: run.config.get(table, {})} for run in everyone]).items():
            warnings.append(f"not the same {table}: {key} is {' or '.join(dict.fromkeys(values))}")
    seeds = {label: " ".join(map(str, runs)) for label, runs in groups.items()}
    rounds = {label: sorted({number for number, _ in runs.values()}) for label, runs in chosen.items()}
    if len(set(seeds.values())) > 1:
        each = "; ".join(f"{label}: {text}" for label, text in seeds.items())
        warnings.append(f"not the same seeds, hence not the same data ({each}); only common seeds are paired")
    if select == "last" and len({number for numbers in rounds.values() for number in numbers}) > 1:
        each = "; ".join(f"{label}: {' '.join(map(str, numbers))}" for label, numbers in rounds.items())
        warnings.append(f"not the same last round ({each})")
    return warnings


def _pair(
    own: dict[int, tuple[int, Counts]], other: dict[int, tuple[int, Counts]]
) -> tuple[Difference | None, int, bool]:
    """The difference over the clients that both have, how many, and whether their test rows disagree.

    A client's accuracies are averaged over the common seeds in which it has test rows.
    """
    pairs: dict[Any, list[tuple[float, float]]] = {}
    for seed in own.keys() & other.keys():
        a, b = own[seed][1], other[seed][1]
        theirs = {client: (c, n) for client, c, n in zip(b.clients, b.correct, b.total, strict=True)}
        for client, correct, total in zip(a.clients, a.correct, a.total, strict=True):
            if client not in theirs:
                continue
            if theirs[client][1] != total:
                return None, 0, True
            if total:
                pairs.setdefault(client, []).append((correct / total, theirs[client][0] / total))
    if not pairs:
        return None, 0, False
    means = np.array([np.mean(values, axis=0) for values in pairs.values()])  # [clients, 2]
    return paired_difference(means[:, 0], means[:, 1]), len(means), False


def _caption(rows: list[Row], select: str, group: str) -> str:
    views = list(dict.fromkeys(row.view for row in rows))
    models = f"{views[0]} model"
    if len(views) > 1:
        models = f"headline model of each method ({', '.join(f'{row.label}: {row.view}' for row in rows)})"
    rounds = {number for row in rows for number in row.rounds}
    when = TITLES[select] + (f" ({rounds.pop()})" if select == "last" and len(rounds) == 1 else "")
    seeds = sorted({seed for row in rows for seed in row.seeds})
    which = f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}"
    spread = "± std over seeds, (std) over clients" if len(seeds) > 1 else "(std) over clients"
    excluded = max(row.excluded for row in rows)
    without = f" ({excluded} without test rows left out)" if excluded else ""
    return f"test accuracy in %, {PEOPLE[group]}{without}, {models}, {when}, {which}; {spread}"
