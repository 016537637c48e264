"""Several runs side by side: one row per method, its seeds together, paired with a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bespoke.errors import UserError
from bespoke.report.groups import parse, people
from bespoke.report.metrics import Scores, aggregate, overflowing, seed_statistics, t_interval
from bespoke.report.runs import Groups, Paths, RecordedRun, differing, group_runs, metric_of, view_of
from bespoke.report.summary import SELECTIONS
from bespoke.report.table import Comparison, ConditionRow, Difference, Row
from bespoke.report.units import Unit

Chosen = dict[int, tuple[int, Scores]]  # seed -> (round, the metric's scores)


def compare(
    paths: Paths,
    baseline: str | None = None,
    select: str | None = None,
    view: str | None = None,
    group: str = "all",
    metric: str | None = None,
    by: str | None = None,
) -> Comparison:
    """Compare the runs at `paths`: run folders, or folders that hold them one or two levels below.

    `baseline` is the label that the other rows are paired with, or a part that only one label has (default `fedavg`,
    else the first); `select` the round that counts (`last`, `best_val`, `best_test`; default: the runs'
    `[evaluation] select`, or `last` if they disagree); `view` the prediction that counts (default: each method's
    headline); `group` the clients: `all` (the training population), `train`, `unseen` or `new`, or of these the ones
    with a condition, `train:noise`; `metric` any metric that all runs recorded (default: their headline metric, which
    always chooses the best rounds); `by="condition"` shows the mean over the clients of each kind of condition that the
    data name, in place of costs and differences.

    A difference from the baseline has a 95 % t interval. With several common seeds it is over the seeds: each gives one
    difference of the clients' means. With one it is over clients, and says nothing about other partitions or seeds.
    """
    return compare_groups(*group_runs(paths), baseline, select, view, group, metric, by)


def compare_groups(
    groups: Groups,
    warnings: list[str],
    baseline: str | None = None,
    select: str | None = None,
    view: str | None = None,
    group: str = "all",
    metric: str | None = None,
    by: str | None = None,
) -> Comparison:
    """Compare runs that were read before, as :func:`compare` does; `warnings` is what was found in reading them."""
    warnings = list(warnings)
    if select is None:
        configs = [run.config for runs in groups.values() for run in runs.values()]
        wanted = {config.get("evaluation", {}).get("select", "last") for config in configs}
        select = wanted.pop() if len(wanted) == 1 else "last"
    parse(group)
    for name, value, allowed in (("select", select, SELECTIONS), ("by", by or "condition", ("condition",))):
        if value not in allowed:
            raise UserError(f"unknown {name} {value!r}; use one of {', '.join(allowed)}")
    metric, higher = metric_of(groups, metric)
    baseline = baseline_of(groups, baseline)
    chosen = {label: choose(groups, label, select, view, group, metric) for label in groups}
    warnings += _inequalities(groups, chosen, select)
    rows = []
    for label, runs in groups.items():
        costs = [run.costs for run in runs.values()]
        row = _row(label, groups, chosen[label], costs, view, higher)
        if by:
            row = replace(row, conditions=_by_condition(groups, label, chosen[label], higher))
        if label != baseline and _same_data(groups, label, baseline):
            difference, disagree = _pair(chosen[label], chosen[baseline])
            row = replace(row, difference=difference)
            if disagree:
                warnings.append(f"{label} and {baseline} were tested on different rows, so they are not paired")
        if row.mean.mean is None:
            warnings.append(f"{label}: {metric} is not finite for some client")
        if refused := refusals(label, runs):
            warnings.append(refused)
        rows.append(row)
    rows = _of_one_kind(rows)
    others = {run.evaluations.metric for runs in groups.values() for run in runs.values()} - {metric}
    chosen_by = f" by {' or '.join(sorted(map(str, others)))}" if others and select != "last" else ""
    rounds = {number for row in rows for number in row.rounds}
    number = f" ({rounds.pop()})" if select == "last" and len(rounds) == 1 else ""
    unit = Unit.of(metric, [row.mean.mean for row in rows])
    direction = "" if higher else ", lower is better"
    scope = _scope(rows, metric, SELECTIONS[select] + chosen_by + number, people(group))
    return Comparison(
        rows=tuple(rows),
        baseline=baseline,
        metric=metric,
        higher=higher,
        select=select,
        title=f"Test {metric}{direction}, {SELECTIONS[select]}",
        scope=f"test {metric}{unit.name}{direction}, {scope}",
        spread=_spread(rows, by),
        warnings=tuple(warnings),
    )


def refusals(label: str, runs: Mapping[int, RecordedRun]) -> str:
    """Return how many uploads of a method's runs were refused, in words; "" if none was."""
    count = sum(run.costs["refused"] for run in runs.values())
    said = "uploads were" if count > 1 else "upload was"
    return f"{label}: {count} {said} refused and left out of the aggregate" if count else ""


def baseline_of(groups: Groups, wanted: str | None) -> str:
    """Return the label that `wanted` names: in full, by its beginning, or by any part that no other label has."""
    if wanted is None:
        averaged = [label for label, runs in groups.items() if next(iter(runs.values())).algorithm == "fedavg"]
        return next(iter([*averaged, *groups]))
    if wanted in groups:
        return wanted
    found = [label for label in groups if label.startswith(wanted)] or [label for label in groups if wanted in label]
    if not found:
        raise UserError(f"there are no runs of the baseline {wanted!r}; use one of {', '.join(groups)}")
    if len(found) > 1:
        raise UserError(f"the baseline {wanted!r} may mean {' or '.join(found)}; give more of the label")
    return found[0]


def choose(groups: Groups, label: str, select: str, view: str | None, group: str, metric: str) -> Chosen:
    """Return the chosen round of each seed of a method, and its clients' scores."""
    chosen: Chosen = {}
    for seed, run in groups[label].items():
        name = view_of(run, view)
        number = run.evaluations.choose(name, select)
        if number is None:
            cure = "run with [data] validation" if select == "best_val" else "give its clients test rows"
            raise UserError(f"{run.folder.path} has no {SELECTIONS[select]}: {cure}, or select the last round")
        scores = run.evaluations.scores(name, metric, number, group)
        if not scores.defined.any():
            raise UserError(f"{run.folder.path} has no test rows of {people(group)}; choose another group")
        chosen[seed] = number, scores
    return chosen


def _row(
    label: str, groups: Groups, chosen: Chosen, costs: list[dict[str, Any]], view: str | None, higher: bool
) -> Row:
    """Return a method's row, not yet paired with the baseline."""
    runs, scores = groups[label], [scores for _, scores in chosen.values()]
    found = [aggregate(s, higher) for s in scores]
    spreads = [value.std for value in found if value.std is not None]
    return Row(
        label=label,
        view=" or ".join(dict.fromkeys(view_of(run, view) for run in runs.values())),
        rounds=tuple(number for number, _ in chosen.values()),
        seeds=tuple(runs),
        mean=seed_statistics([value.mean for value in found]),
        std=float(np.mean(spreads)) if spreads else None,
        pooled=seed_statistics([value.pooled for value in found]),
        worst10=seed_statistics([value.worst10 for value in found]),
        top10_samples=seed_statistics([value.top10_samples for value in found]),
        cv=seed_statistics([value.cv for value in found]),
        bytes_per_round=float(np.mean([(c["bytes_down"] + c["bytes_up"]) / max(1, c["rounds"]) for c in costs])),
        seconds=float(np.mean([cost["seconds"] for cost in costs])),
        difference=None,
        excluded=max(value.excluded for value in found),
        values=np.concatenate([s.values()[s.defined] for s in scores]),
    )


def _by_condition(groups: Groups, label: str, chosen: Chosen, higher: bool) -> dict[str, ConditionRow]:
    """Return a method's values by kind of condition, of the kinds that every seed has."""
    found = []
    for seed, run in groups[label].items():
        kinds = run.evaluations.by_kind(chosen[seed][1])
        if not kinds:
            raise UserError(
                f"{run.folder.path} names no conditions of its clients; compare it without --by (by= in Python)"
            )
        found.append({name: aggregate(scores, higher) for name, scores in kinds.items()})
    return {
        name: ConditionRow(
            found[0][name].clients,
            seed_statistics([seed[name].mean for seed in found]),
            seed_statistics([seed[name].pooled for seed in found]),
        )
        for name in found[0]
        if all(name in seed for seed in found)
    }


def _same_data(groups: Groups, label: str, baseline: str) -> bool:
    runs = (*groups[label].values(), *groups[baseline].values())
    return not differing([{"data": run.config.get("data", {})} for run in runs])


def _inequalities(groups: Groups, chosen: dict[str, Chosen], select: str) -> list[str]:
    """Return one sentence for each thing that makes the rows not comparable."""
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


@overflowing
def _pair(own: Chosen, other: Chosen) -> tuple[Difference | None, bool]:
    """Return the difference over common seeds, or over clients if there is one seed, and whether the test rows differ.

    A partition is drawn anew for each seed, so client i of one seed is not client i of another: clients are paired
    only within a seed.
    """
    paired = []  # for each common seed: the differences of the common clients
    for seed in sorted(own.keys() & other.keys()):
        a, b = own[seed][1], other[seed][1]
        places = {client: i for i, client in enumerate(b.clients)}
        both = [(i, places[client]) for i, client in enumerate(a.clients) if client in places]
        mine, theirs = np.array(both, dtype=int).reshape(-1, 2).T
        if (a.rows[mine] != b.rows[theirs]).any():
            return None, True
        differences = a.values()[mine] - b.values()[theirs]
        paired.append(differences[a.defined[mine] & b.defined[theirs]])
    paired = [differences for differences in paired if differences.size]
    if not paired or not np.isfinite(np.concatenate(paired)).all():
        return None, False
    if len(paired) == 1:
        return Difference(*t_interval(paired[0]), "clients", paired[0].size), False
    return Difference(*t_interval([differences.mean() for differences in paired]), "seeds", len(paired)), False


def _of_one_kind(rows: list[Row]) -> list[Row]:
    """Drop the intervals over clients if there are some over seeds: a column has one meaning."""
    if not any(row.difference and row.difference.over == "seeds" for row in rows):
        return rows
    return [
        replace(row, difference=replace(row.difference, low=None, high=None))
        if row.difference and row.difference.over == "clients"
        else row
        for row in rows
    ]


def _scope(rows: list[Row], metric: str, when: str, people: str) -> str:
    """Return whose values are compared: clients, model, round and seeds."""
    views = list(dict.fromkeys(row.view for row in rows))
    models = f"{views[0]} model"
    if len(views) > 1:
        models = f"headline model of each method ({', '.join(f'{row.label}: {row.view}' for row in rows)})"
    seeds = sorted({seed for row in rows for seed in row.seeds})
    which = f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}"
    excluded = max(row.excluded for row in rows)
    lacking = "test rows" if metric == "accuracy" else f"a defined {metric}"
    without = f" ({excluded} without {lacking} left out)" if excluded else ""
    return f"{people}{without}, {models}, {when}, {which}"


def _spread(rows: list[Row], by: str | None) -> str:
    """Return what the measures of uncertainty in the table cover."""
    spread = "± std over seeds, (std) over clients" if any(len(row.seeds) > 1 for row in rows) else "(std) over clients"
    if by:
        return f"{spread}; by condition: mean over its clients"
    over = {row.difference.over for row in rows if row.difference and row.difference.low is not None}
    if "seeds" in over:
        return f"{spread}, [95 %] over seeds (t interval of the seeds' own paired differences)"
    if "clients" in over:
        return f"{spread}, [95 %] over clients (paired t interval, for this partition and seed only)"
    return spread
