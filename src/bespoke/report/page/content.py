"""What a page about runs shows, read from their records alone."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import distinct, listed, natural, short
from bespoke.records import RESUME_OPTION
from bespoke.report import probes
from bespoke.report.charts import curve_of
from bespoke.report.compare import Chosen, baseline_of, choose, compare_groups, refusals
from bespoke.report.groups import kind, people
from bespoke.report.metrics import Scores, overflowing, tenth
from bespoke.report.page.figures import (
    Floats,
    Line,
    Strip,
    axis,
    bubbles,
    lines,
    plain,
    scatter,
    sizes,
    strips,
    whole,
    wrapped,
)
from bespoke.report.page.parts import Cell, Chart, Code, Details, Page, Section, Table
from bespoke.report.planes import plane
from bespoke.report.runs import BRIEF, LONGEST, Groups, Paths, RecordedRun, differing, flatten, group_runs, view_of
from bespoke.report.summary import often_refused, trouble
from bespoke.report.table import Comparison, human_bytes
from bespoke.report.units import Unit

NAMED = 20  # clients or methods that a list names
UPRIGHT = 28  # letters of a name along a vertical axis
BEFORE = "global"  # the view of the shared model, before personalisation
IN_ROUND = "round {:.0f}".format
COSTS = {"bytes_up", "bytes_down"}  # logged values that are counted among the bytes


@overflowing
def page_of(
    paths: Paths,
    baseline: str | None = None,
    select: str | None = None,
    view: str | None = None,
    group: str = "all",
    metric: str | None = None,
    ended: bool = True,
) -> Page:
    """Return the page about the runs at `paths`; the settings are those of `compare`.

    Once they have `ended`, those that lack rounds are named.
    """
    found, warnings = group_runs(paths)
    labels = distinct(found)
    groups = {labels[label]: runs for label, runs in found.items()}
    first = labels[baseline_of(found, baseline)]  # a part of a label may be one that its short form lacks
    comparison = compare_groups(groups, warnings, first, select, view, group, metric)
    chosen = {label: choose(groups, label, comparison.select, view, group, comparison.metric) for label in groups}
    own = _Runs(groups, comparison, chosen, view, group)
    sections = [_compared(own), _new(own), _curves(own), _clients(own), _fairness(own), _partition(own), _logged(own)]
    sections += [_probed(own), _setup(own)]
    return Page(
        title="Report of " + (f"{len(own.every)} runs" if len(own.every) > 1 else next(iter(groups))),
        lead=comparison.title + ".",
        methods=tuple(own.places),
        warnings=tuple(dict.fromkeys(_warnings(own, ended))),
        sections=tuple(each for each in sections if each.paragraphs or each.charts or each.tables or each.details),
    )


@dataclass(frozen=True)
class _Runs:
    """The runs of a page and how they are compared."""

    groups: Groups
    comparison: Comparison
    chosen: dict[str, Chosen]  # by label, then by seed
    view: str | None
    group: str

    @cached_property
    def every(self) -> list[tuple[str, RecordedRun]]:
        """Each run with the label of its method."""
        return [(label, run) for label, runs in self.groups.items() for run in runs.values()]

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each label, which has a colour: by name, so that runs in another order look the same."""
        return {label: place for place, label in enumerate(sorted(self.groups, key=natural))}

    @cached_property
    def _several_seeds(self) -> bool:
        return len({run.seed for _, run in self.every}) > 1

    @property
    def unit(self) -> Unit:
        """How the metric's values are written."""
        return self.comparison.unit

    def name(self, run: RecordedRun, client: Any) -> str:
        """Return a client's whole name, with the seed where several make other clients of the same name."""
        return self._seeded(run, run.client_name(client, LONGEST))

    def brief(self, run: RecordedRun, client: Any) -> str:
        """Return a client's name for a table or a sentence: short, unlike all others of its run, in its direction."""
        return self._seeded(run, _isolated(run.client_name(client, BRIEF)))

    def _seeded(self, run: RecordedRun, name: str) -> str:
        return name + (f" (seed {run.seed})" if self._several_seeds else "")

    def titled(self, label: str, run: RecordedRun) -> str:
        """Return the label of a run's method, with the seed where the method has several."""
        return label + (f", seed {run.seed}" if len(self.groups[label]) > 1 else "")

    def scored(self, label: str) -> Iterator[tuple[RecordedRun, Scores]]:
        """Yield each seed's run and its chosen scores of the clients that have any."""
        for seed, (_, scores) in self.chosen[label].items():
            yield self.groups[label][seed], scores.take(scores.defined)


def _isolated(text: str) -> str:
    """Return a name for the middle of a sentence, whose order letters from right to left would change."""
    changes = any(unicodedata.bidirectional(c) in ("R", "AL") for c in text)
    return f"\u2068{text}\u2069" if changes else text


# --- comparison ----------------------------------------------------------------------------------------------------


def _compared(own: _Runs) -> Section:
    """Return the comparison's table."""
    return Section("comparison", "Comparison", tables=(_table(own.comparison),))


def _new(own: _Runs) -> Section:
    """Return the same table of clients that were held out from training, of the methods that met any."""
    section, shown = Section("new", "New clients"), own.comparison
    met = {label: runs for label, runs in own.groups.items() if own.group == "all" and _met_new(own, label)}
    if not met:
        return section
    baseline = shown.baseline if shown.baseline in met else None
    lacking = [label for label in own.groups if label not in met]
    text = "Clients that were held out from training; each adapts by its own train rows, as its method tells."
    text += f" Without any: {listed(lacking, NAMED)}." if lacking else ""
    table = _table(compare_groups(met, [], baseline, shown.select, own.view, "new", shown.metric))
    return replace(section, paragraphs=((text,),), tables=(table,))


def _met_new(own: _Runs, label: str) -> bool:
    """Return whether every run of a method tested clients that were held out from training, in the chosen round."""
    return all(
        run.evaluations.scores(
            view_of(run, own.view), own.comparison.metric, own.chosen[label][seed][0], "new"
        ).defined.any()
        for seed, run in own.groups[label].items()
    )


def _table(shown: Comparison) -> Table:
    header = ["method", "mean (std)", "pooled", "worst 10 %", "CV", "bytes/round", "seconds"]
    several = len(shown.rows) > 1
    header += [f"minus {short(shown.baseline, 24)} [95 %]"] if several else []
    best = shown.best() if several else {}
    rows = []
    for i, (row, texts) in enumerate(zip(shown.rows, shown.cells()[1], strict=True)):
        label, mean, pooled, worst10, sent, seconds, difference, *_ = texts
        minus = 0.0 if row.label == shown.baseline else row.difference.mean if row.difference else None
        cells = [
            Cell(label),
            Cell(mean, row.mean.mean, (i, 1) in best),
            Cell(pooled, row.pooled.mean, (i, 2) in best),
            Cell(worst10, row.worst10.mean, (i, 3) in best),
            Cell("-" if row.cv.mean is None else f"{row.cv.mean:.3f}", row.cv.mean),
            Cell(sent, row.bytes_per_round),
            Cell(seconds, row.seconds),
            *([Cell(difference, minus)] if several else []),
        ]
        rows.append((*cells, Cell(str(len(row.seeds)), len(row.seeds))))
    caption = (
        f"{_sentence(shown.caption)} Worst 10 %: mean of the worst tenth of the clients. CV: standard deviation over "
        "clients by the pooled value; smaller is more even. Bytes: both directions, all clients of a round. Seconds: a "
        f"whole run with its evaluations.{' Bold: the best value.' if several else ''}"
    )
    return Table((*header, "seeds"), tuple(rows), caption)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


# --- over rounds, bytes and seconds --------------------------------------------------------------------------------


def _curves(own: _Runs) -> Section:
    """Return the mean over clients by round, by bytes and by seconds."""
    unit, metric = own.unit, own.comparison.metric
    drawn: dict[str, list[Line]] = {"rounds": [], "bytes": [], "seconds": []}
    for label, runs in own.groups.items():
        place = own.places[label]
        rounds, means = curve_of(runs.values(), own.view, metric, own.group)
        if not rounds:
            continue
        values = unit.scale * means  # [seeds, R]
        low, high = (values.min(0), values.max(0)) if len(values) > 1 else (None, None)
        costs = [_spent(run) for run in runs.values()]
        for name, lists in drawn.items():
            if name == "rounds":
                lists.append(Line(label, place, place, np.array(rounds, dtype=np.float64), values.mean(0), low, high))
            elif all(cost[name] for cost in costs):
                x = np.array([[cost[name].get(n, math.nan) for n in rounds] for cost in costs]).mean(0)
                lists.append(Line(label, place, place, x, values.mean(0), low, high, tuple(rounds)))
    title = f"Test {short(metric, 40)} while training"
    if not _curved(drawn["rounds"]):
        told = "No method has two evaluated rounds, so there is no curve to draw; "
        return Section("curves", title, ((told, Code("[evaluation] every"), " sets how often a run is evaluated."),))
    several = any(line.low is not None for line in drawn["rounds"])
    caption = f"Mean over {people(own.group)}, on their test rows."
    caption += " Line: mean over seeds; band: lowest to highest seed." if several else ""
    y = axis(f"mean test {short(metric, UPRIGHT - 10)}{unit.name}", hoverformat=unit.code)
    axes = {
        "rounds": ("Over rounds", whole("round", _span(drawn["rounds"])), "", IN_ROUND),
        "bytes": (
            "Over bytes",
            axis("bytes sent and received, all clients", tickformat="~s", ticksuffix="B", hoverformat=".3s"),
            "",
            human_bytes,
        ),
        "seconds": (
            "Over seconds",
            axis("seconds of training and aggregation", ticksuffix=" s"),
            " Seconds of the clients' training and the server's steps, without evaluation.",
            "{:.4g} s".format,
        ),
    }
    charts = [
        lines(f"{over}: test {short(metric, 40)}", caption + more, x, y, drawn[name], place, wide=name == "rounds")
        for name, (over, x, more, place) in axes.items()
        if _curved(drawn[name])
    ]
    return Section("curves", title, charts=tuple(charts), legend=True)


def _curved(drawn: Sequence[Line]) -> bool:
    """Return whether any line has two points, so that there is something to draw."""
    return any(len(line.x) > 1 for line in drawn)


def _span(drawn: Sequence[Line]) -> float:
    """Return how far the lines reach along x."""
    ends = [end for line in drawn for end in (line.x[0], line.x[-1])]
    return float(max(ends) - min(ends))


def _spent(run: RecordedRun) -> dict[str, dict[int, float]]:
    """Return bytes and seconds of all rounds up to each one, by round."""
    found: dict[str, dict[int, float]] = {"bytes": {}, "seconds": {}}
    total = 0.0
    for row in run.rounds:
        total += row["bytes_down"] + row["bytes_up"]
        found["bytes"][row["round"]] = total
    total = 0.0
    for row in run.timing:
        total += row["train"] + row["aggregate"]
        found["seconds"][row["round"]] = total
    return found


# --- who gains -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gains:
    """Clients of one method with a value before and after, [N]."""

    label: str
    who: list[tuple[RecordedRun, Any]]  # a run and its client
    before: Floats
    after: Floats


def _clients(own: _Runs) -> Section:
    """Return who gains and who loses: by personalisation, and against the baseline; and who is in neither, and why."""
    personal, paired = list[_Gains](), list[_Gains]()
    alone, unpaired = dict[str, list[str]](), dict[str, list[str]]()  # by reason, who is left out
    theirs, base = own.chosen[own.comparison.baseline], own.comparison.baseline
    for row in own.comparison.rows:
        runs, ours, label = own.groups[row.label], own.chosen[row.label], row.label
        views = [_views(own, runs[seed], number) for seed, (number, _) in ours.items()]
        if gains := _joined(row.label, own, views):
            personal.append(gains)
        else:
            alone.setdefault(_no_gain(own, runs.values()), []).append(label)
        if row.label == own.comparison.baseline:
            continue
        both = sorted(ours.keys() & theirs.keys()) if row.difference is not None else []
        if gains := _joined(row.label, own, [(runs[seed], theirs[seed][1], ours[seed][1]) for seed in both]):
            paired.append(gains)
        else:
            unpaired.setdefault(f"not the same seeds, clients and test rows as {base}", []).append(label)
    parts = [
        (
            "Gain by personalisation",
            f"from the shared model's value ({BEFORE}) to the personal model's",
            personal,
            alone,
        ),
        (f"Gain over {base}", f"from {base} to the method, the same client with the same test rows", paired, unpaired),
    ]
    paragraphs, charts, tables = [], [], []
    for title, words, rows, missing in parts:
        absent = "; ".join(f"{listed(labels, NAMED)} ({why})" for why, labels in missing.items())
        if rows:
            charts.append(_gain_chart(own, title, words, rows, f" Not drawn: {absent}." if absent else ""))
            tables.append(_gain_table(own, title, rows))
        elif missing:
            paragraphs.append((f"{title} is not drawn: {absent if len(missing) > 1 else next(iter(missing))}.",))
    title = "Each client: who gains, who loses"
    return Section("clients", title, tuple(paragraphs), tuple(charts), tuple(tables), legend=bool(charts))


def _no_gain(own: _Runs, runs: Collection[RecordedRun]) -> str:
    """Return why runs show no gain by personalisation."""
    views = {view_of(run, own.view) for run in runs}
    if views == {BEFORE}:
        return "what is compared is the shared model itself"
    if any(BEFORE in run.evaluations.views for run in runs):
        return "no client has both values"
    return "no value of a shared model was recorded beside the personal one's"


_Pair = tuple[RecordedRun, Scores, Scores]  # before and after


def _views(own: _Runs, run: RecordedRun, number: int) -> _Pair | None:
    """Return a run's values of the shared and of the headline view, None unless it recorded both."""
    view = view_of(run, own.view)
    if view == BEFORE or BEFORE not in run.evaluations.views:
        return None
    metric = own.comparison.metric
    before, after = (run.evaluations.scores(name, metric, number, own.group) for name in (BEFORE, view))
    return run, before, after


def _joined(label: str, own: _Runs, pairs: Sequence[_Pair | None]) -> _Gains | None:
    """Return the clients that have both values, seed after seed; None if no run has."""
    who: list[tuple[RecordedRun, Any]] = []
    values: list[tuple[float, float]] = []
    for run, before, after in filter(None, pairs):
        known = dict(zip(before.clients, before.values().tolist(), strict=True))
        for client, value in zip(after.clients, after.values().tolist(), strict=True):
            if math.isfinite(value) and math.isfinite(known.get(client, math.nan)):
                who.append((run, client))
                values.append((known[client], value))
    if not values:
        return None
    two = own.unit.scale * np.array(values, dtype=np.float64)
    return _Gains(label, who, two[:, 0], two[:, 1])


def _gained(own: _Runs, gains: _Gains) -> Floats:
    """Return by how much each client is better, [N]."""
    return (gains.after - gains.before) * (1 if own.comparison.higher else -1)


def _gain_chart(own: _Runs, title: str, words: str, rows: Sequence[_Gains], absent: str) -> Chart:
    code = own.unit.code
    found = []
    for gains in rows:
        gained = _gained(own, gains)
        hover = [
            f"{wrapped(own.name(*who))}<br>{before:{code}} to {after:{code}}: <b>{gain:+{code}}</b>"
            for who, before, after, gain in zip(gains.who, gains.before, gains.after, gained, strict=True)
        ]
        place = own.places[gains.label]
        note = f": {int((gained > 0).sum())} gain, {int((gained < 0).sum())} lose"
        found.append(Strip(gains.label, place, place, gained, hover, note))
    points = "percentage points" if own.unit.sign else own.comparison.metric
    x = axis(f"{'gain' if own.comparison.higher else 'reduction'} in {points}", ticksuffix="")
    caption = f"A point is a client: {words}; right of 0 is better. The thick line is the mean.{absent}"
    return strips(title, caption, x, found, zero=True)


def _gain_table(own: _Runs, title: str, rows: Sequence[_Gains]) -> Table:
    unit, body = own.unit, []
    for gains in rows:
        gained = _gained(own, gains)
        low, high = int(gained.argmin()), int(gained.argmax())
        counts = [int((gained > 0).sum()), int((gained == 0).sum()), int((gained < 0).sum())]
        ends = [Cell(f"{own.brief(*gains.who[i])}: {gained[i]:+{unit.code}}", float(gained[i])) for i in (high, low)]
        median = float(np.median(gained))
        middle = Cell(f"{median:+{unit.code}}", median)
        body.append((Cell(gains.label), *(Cell(str(n), n) for n in counts), middle, *ends))
    return Table(
        ("method", "gain", "same", "lose", "median", "largest gain", "smallest gain"), tuple(body), title + "."
    )


# --- fairness ------------------------------------------------------------------------------------------------------


def _fairness(own: _Runs) -> Section:
    """Return the distribution over clients and the worst tenth by name."""
    unit, metric, higher = own.unit, own.comparison.metric, own.comparison.higher
    found, body = [], []
    for label in own.groups:
        values: list[float] = []
        hover: list[str] = []
        for run, scores in own.scored(label):
            names = [own.name(run, client) for client in scores.clients]
            own_values = unit.scale * scores.values()
            hover += [
                f"{wrapped(name)}<br><b>{value:{unit.code}}{unit.sign}</b> over {rows:,} test rows"
                for name, value, rows in zip(names, own_values, scores.rows.tolist(), strict=True)
            ]
            values += own_values.tolist()
            finite = np.flatnonzero(np.isfinite(own_values))
            order = finite[np.argsort(own_values[finite] if higher else -own_values[finite], kind="stable")]
            worst = order[: tenth(len(order))]
            if not len(worst):
                continue
            texts = [f"{own.brief(run, scores.clients[i])}: {own_values[i]:{unit.code}}" for i in worst]
            named = listed(texts, NAMED)
            mean = float(own_values[worst].mean())
            body.append((Cell(own.titled(label, run)), Cell(f"{mean:{unit.code}}", mean), Cell(named)))
        found.append(Strip(label, own.places[label], own.places[label], np.array(values, dtype=np.float64), hover))
    x = axis(f"test {metric}{unit.name}")
    caption = f"A point is a client ({people(own.group)}), the thick line the mean over clients."
    chart = strips(f"Test {short(metric, 40)} of every client", caption, x, found)
    header = ("method", f"worst 10 %: mean{unit.name}", "clients, the worst first")
    worst_caption = "The worst tenth of the clients, rounded up; in brackets their seed, where there are several."
    table = Table(header, tuple(body), worst_caption, numbers=False)
    return Section("fairness", "Fairness", (), (chart,), (table,), legend=True)


# --- partition -----------------------------------------------------------------------------------------------------


def _partition(own: _Runs) -> Section:
    """Return the clients' rows and classes of each federation that differs from those before it."""
    seen: dict[str, tuple[str, RecordedRun]] = {}
    for label, run in own.every:
        if told := run.federation:
            seen.setdefault(repr([told.get(key) for key in ("names", "train", "val", "test", "content")]), (label, run))
    charts: list[Chart] = []
    for label, run in list(seen.values())[:1]:
        told = run.federation
        held_out = len(told["names"]) - told["clients"]
        new = f", {held_out} of them new" if held_out > 0 else ""
        which = f"{len(told['names'])} clients{new}; seed {run.seed}"
        if len(seen) > 1:
            which += f", as in {label}, the first of {len(seen)} federations of these runs"
        names = [own.name(run, client) for client in range(len(told["names"]))]
        rows = {split: told[split] for split in ("train", "val", "test") if any(told[split])}
        if counts := _by_class_name(told):
            caption = f"Train rows by client and class: {which}. Clients are numbered in the order of the data."
            charts.append(bubbles("Classes of every client", caption, names, counts))
        if rows:
            charts.append(sizes("Rows of every client", f"Rows by client: {which}.", names, rows))
    return Section("partition", "Partition", charts=tuple(charts))


def _by_class_name(told: dict[str, Any]) -> list[dict[str, int]]:
    """Return each client's rows by class, named where the data name their classes and by number elsewhere."""
    names = _class_names(told)
    return [{names.get(number, number): n for number, n in own.items()} for own in told.get("class_counts", ())]


def _class_names(told: dict[str, Any]) -> dict[str, str]:
    """Return the names of classes by number, as records write it; none where the data give none."""
    return {str(number): name for number, name in enumerate(told.get("class_names", ()))}


# --- what methods log ----------------------------------------------------------------------------------------------


LOGGED = 40  # values that are drawn
TICKS = 8  # at most, of a logarithmic axis
_Kind = tuple[str, str]  # a value's name, and the kind of condition of the clients that logged it


def _logged(own: _Runs) -> Section:
    """Return each logged value by round, and its last value of every client, by kind of condition if there are any."""
    last: dict[str, list[Strip]] = {}
    by_round: dict[str, list[Line]] = {}
    several_kinds = False
    for label, place in own.places.items():
        values, final = _logged_by(own, label)
        for (name, condition), ends in final.items():
            said = f"{label}, {condition}" if condition else label
            several_kinds |= bool(condition)
            colour = len(last.get(name, ())) if condition else place
            if found := values.get((name, condition)):
                rounds = sorted(found)
                low, middle, high = np.array([np.quantile(found[n], (0.1, 0.5, 0.9)) for n in rounds]).T
                x = np.array(rounds, dtype=np.float64)
                by_round.setdefault(name, []).append(Line(said, place, colour, x, middle, low, high))
            hover = [
                f"{wrapped(own.name(own.groups[label][seed], client))}<br>round {number}: <b>{value:.4g}</b>"
                for (seed, client), (number, value) in ends.items()
            ]
            own_values = np.array([value for _, value in ends.values()], dtype=np.float64)
            last.setdefault(name, []).append(Strip(said, place, colour, own_values, hover))
    charts = []
    for name, rows in list(last.items())[:LOGGED]:
        title, groups = short(name, 40), " by kind of condition" if several_kinds else ""
        scale = _scale(np.concatenate([row.values for row in rows]))
        if _curved(drawn := by_round.get(name, [])):
            caption = f"{title} that clients logged in training{groups}. Line: median over the clients of a round; "
            caption += "band: from the tenth to the ninetieth percentile."
            along, up = whole("round", _span(drawn)), axis(short(name, UPRIGHT)) | scale
            charts.append(lines(f"{title} by round", caption, along, up, drawn, IN_ROUND, legend=several_kinds))
        caption = f"{title} of every client when it last logged it{groups}; the thick line is the mean."
        charts.append(strips(f"{title} of every client", caption, axis(title) | scale, rows))
    text = f"Of {len(last)} logged values the first {LOGGED} are drawn." if len(last) > LOGGED else ""
    paragraphs = ((text,),) if text else ()
    return Section("logged", "What the methods logged", paragraphs, tuple(charts), legend=not several_kinds)


def _logged_by(
    own: _Runs, label: str
) -> tuple[dict[_Kind, dict[int, list[float]]], dict[_Kind, dict[tuple[int, Any], tuple[int, float]]]]:
    """Return what a method's clients logged in training, by round, and the last round and value by seed and client."""
    values: dict[_Kind, dict[int, list[float]]] = {}
    final: dict[_Kind, dict[tuple[int, Any], tuple[int, float]]] = {}
    for run in own.groups[label].values():
        conditions = dict(enumerate(run.federation.get("conditions", ())))
        for client, number, name, value, trained in _notes(run):
            if name in COSTS or value is None:
                continue
            key, who = (name, kind(conditions[client]) if client in conditions else ""), (run.seed, client)
            if trained:
                values.setdefault(key, {}).setdefault(number, []).append(value)
            if final.setdefault(key, {}).get(who, (0, 0.0))[0] <= number:
                final[key][who] = number, value
    return values, final


def _notes(run: RecordedRun) -> Iterator[tuple[int, int, str, float | None, bool]]:
    """Yield client, round, name and value of what was logged, and whether in training or in an evaluation."""
    for row in run.rounds:
        for name, logged in row["logged"].items():
            for client, value in zip(row["cohort"], logged, strict=False):
                yield client, row["round"], name, value, True
    for client, (number, told) in run.evaluations.logged.items():  # also of clients that never trained
        for name, value in told.items():
            yield client, number, name, value, False


def _scale(values: Floats) -> dict[str, Any]:
    """Return a logarithmic axis for positive values of very different size, which precisions and variances are."""
    known = values[np.isfinite(values)]
    if not known.size or known.min() <= 0:
        return {}
    low, high = np.quantile(known, (0.1, 0.9))
    if not high > 30 * low:
        return {}
    decades = np.log10(known.max()) - np.log10(known.min())
    return {"type": "log", "exponentformat": "power", "dtick": max(1, math.ceil(decades / TICKS))}


# --- what a probe kept -----------------------------------------------------------------------------------------------

PROBED = 8  # runs whose features are drawn


def _probed(own: _Runs) -> Section:
    """Return the features of sampled rows in the plane, by class and by client, and the clients' embeddings."""
    firsts = [(label, next(iter(runs.values()))) for label, runs in own.groups.items()]
    found = [(label, run, probe) for label, run in firsts if (probe := probes.read(run.folder.path)) is not None]
    charts: list[Chart] = []
    embedded: list[Chart] = []
    for label, run, probe in found[:PROBED]:
        named = f"{label}, seed {run.seed}" if len(own.every) > 1 else label
        who = [own.name(run, client) for client in probe.clients.tolist()]
        class_names = _class_names(run.federation)
        classes = [f"class {class_names.get(str(n), n)}" for n in probe.classes.tolist()]
        several = f"{len(set(probe.clients.tolist()))} clients, after round {probe.round}"
        if len(probe.vectors) > 1:
            flat, kept = _plane(probe.vectors)
            caption = (
                f"{named}: what enters the model's last layer, of {len(flat):,} {probe.rows} rows of {several}; the "
                f"first two principal components, {kept:.0%} of the variance."
            )
            both = zip(who, classes or [""] * len(who), strict=True)
            hover = [f"{wrapped(name)}<br>{plain(own_class)}" for name, own_class in both]
            briefs = [own.brief(run, client) for client in probe.clients.tolist()]
            for words, marks in (("class", classes), ("client", briefs)):
                if marks:
                    charts.append(scatter(f"Features by {words}: {label}", caption, marks, flat, hover))
        if len(probe.embeddings) > 1:
            flat, kept = _plane(probe.embeddings)
            conditions = run.federation.get("conditions") or []
            members = probe.members.tolist()
            names = [own.name(run, client) for client in members]
            marks = [kind(conditions[client]) if client < len(conditions) else "clients" for client in members]
            caption = (
                f"{named}: each client's embedding after round {probe.round}; the first two principal components, "
            )
            caption += f"{kept:.0%} of the variance." + (" Colour: kind of condition." if conditions else "")
            title = f"Embeddings of the clients: {label}"
            embedded.append(scatter(title, caption, marks, flat, [wrapped(name) for name in names], size=9))
    text = f"Of {len(found)} runs with features the first {PROBED} are drawn." if len(found) > PROBED else ""
    return Section("probe", "Features", ((text,),) if text else (), (*charts, *embedded))


def _plane(vectors: NDArray[np.float32]) -> tuple[Floats, float]:
    """Return vectors (N, d) in the plane of their first two principal components, and its share of the variance."""
    flat = plane(vectors)
    whole_variance = float(np.square(vectors - vectors.mean(0, dtype=np.float64)).sum())
    return flat, float(np.square(flat).sum()) / whole_variance if whole_variance else 1.0


# --- settings, environment, warnings -------------------------------------------------------------------------------


def _setup(own: _Runs) -> Section:
    """Return the settings in which runs differ, and each run's settings and environment."""
    marked = differing([run.config for _, run in own.every])
    tables = []
    if marked:
        runs = [short(run.folder.path.name) for _, run in own.every]
        grid = [["run", *runs]]
        for key, values in marked.items():
            cut = distinct(values, 60)
            grid.append([short(key, 60), *(cut[value] for value in values)])
        if len(runs) >= len(marked):  # the longer side goes down the page: a print has no room for it across
            grid = [list(row) for row in zip(*grid, strict=True)]
        header, *rows = [tuple(row) for row in grid]
        tables.append(
            Table(
                header,
                tuple(tuple(map(Cell, row)) for row in rows),
                "Settings in which the runs differ.",
                numbers=False,
            )
        )
    details = []
    for label, run in own.every:
        told = [f"{key} = {short(str(value), 200)}" for key, value in flatten(run.config).items()]
        told += ["", *(f"{key}: {short(str(value), 200)}" for key, value in run.environment.items())]
        title = f"{label}, seed {run.seed}: {short(str(run.folder.path))}"
        details.append(Details(title, "\n".join(told)))
    return Section("setup", "Settings and environment", tables=tuple(tables), details=tuple(details))


def _warnings(own: _Runs, ended: bool) -> list[str]:
    """Return what a reader should know: of the comparison, and of single runs, who was refused, missing or untested.

    Refusals are told once, by client: their sum, and what the run noted of them at its end, say the same again.
    """
    sums = {refusals(label, runs) for label, runs in own.groups.items()}
    found = [text for text in own.comparison.warnings if text not in sums]
    looped = [own.titled(label, run) for label, run in own.every if run.environment.get("backend") == "loop"]
    if 0 < len(looped) < len(own.every):
        names = listed(looped, NAMED)
        found.append(f"ran one client after another, so that seconds cannot be compared with the others': {names}")
    for label, run in own.every:
        said = list(filter(None, [trouble(run.costs)]))
        told = {*said, *_noted(run)}
        for what in ("refused", "missing"):
            said += _left_out(own, run, what)
        noted = run.environment.get("notes", [])
        notes = [*run.costs["notes"], *(noted if isinstance(noted, list) else ())]
        said += [short(str(note), 400) for note in notes if note not in told]
        done, wanted = run.progress
        if ended and done < wanted:
            said.append(f"only {done} of {wanted} rounds are there; finish it with {RESUME_OPTION}")
        if without := [i for i, rows in enumerate(run.federation.get("test", ())) if not rows]:
            said.append(f"without test rows: {listed([own.brief(run, client) for client in without], NAMED)}")
        found += [f"{own.titled(label, run)}: {text}" for text in said]
    return found


def _noted(run: RecordedRun) -> list[str]:
    """Return what the run noted of refusals at its end; nothing where it does not name its clients."""
    names = run.federation.get("names", ())
    refused = {client for row in run.rounds for client in row["refused"]}
    known = refused <= {str(client) for client in range(len(names))}
    return often_refused(run.rounds, names) if known else []


def _left_out(own: _Runs, run: RecordedRun, what: str) -> list[str]:
    """Return who was `refused` or `missing` how often, with the last reason."""
    times: Counter[str] = Counter()
    why: dict[str, str] = {}
    for row in run.rounds:
        for client, reason in row.get(what, {}).items():
            times[client] += 1
            why[client] = reason
    said = []
    for client, count in times.most_common(NAMED):
        name = own.brief(run, int(client) if re.fullmatch(r"[0-9]{1,18}", client) else client)
        often = "once" if count == 1 else f"{count} times"
        said.append(f"{name} was {what} {often}: {short(why[client], 200)}")
    return said + ([f"{len(times) - NAMED} more clients were {what}"] if len(times) > NAMED else [])
