"""The papers' figures, drawn from result files: ``bespoke figure NAME``.

A figure's file names the function that draws it, one of :data:`FIGURES`, and lists its runs as cells, as a table does.
What has no result yet is left out of the picture and named beside it. Options of the functions are keys of the file's
table ``options``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.files import make_folder
from bespoke.registry import closest
from bespoke.report import papers
from bespoke.report.charts import check_path, save
from bespoke.report.groups import kind
from bespoke.report.papers import Groups, Line, Lines, Points, Words
from bespoke.report.planes import perplexity, plane, tsne
from bespoke.report.summary import SELECTIONS
from bespoke.report.units import Unit
from bespoke.tables import found as read
from bespoke.tables import spec
from bespoke.tables.found import Found, Seeds, cell_name, metric, name
from bespoke.tables.results import Result
from bespoke.tables.spec import Cell, Entry, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".pdf")


def draw(figure: str, root: Path, out: Path | None = None) -> tuple[list[Path], list[str]]:
    """Draw a figure from the results in a folder; return the files and a sentence about each thing that is missing.

    ``out`` is the file to write, whose suffix decides its format, or a folder, which is made if it is not there; by
    default PNG and PDF are written to the working folder, named after the figure.
    """
    table, folder = spec.find(figure), out or Path()
    if folder.suffix and not folder.is_dir():
        check_path(folder)  # before anything is read
        drawn, missing = picture(table, root)
        return [save(drawn, folder)], missing
    drawn, missing = picture(table, root)
    make_folder(folder)
    return [save(drawn, folder / f"{table.name.replace('/', '_')}{suffix}") for suffix in SUFFIXES], missing


def picture(table: Table, root: Path) -> tuple["Figure", list[str]]:
    """Return a figure of the results in a folder, and a sentence about each thing that is missing."""
    if table.kind != "figure":
        raise UserError(f"{table.name} is a table: print it with bespoke table {table.name}")
    if table.figure not in FIGURES:
        known = ", ".join(FIGURES)
        raise UserError(f"{table.path}: nothing draws {table.figure!r}{closest(table.figure, FIGURES)}; use {known}")
    found = Found.read(table, root)
    return FIGURES[table.figure](found), found.missing


# --- lines ----------------------------------------------------------------------------------------------------------

_CURVES = {"pooled": "test {}", "mean": "mean test {}", "loss": "test loss", "train_loss": "training loss"}


def curves(found: Found) -> "Figure":
    """Draw a metric by round: a panel for each cell, a line for each row.

    ``show`` lists what is drawn: pooled (over all rows), mean (over clients), loss (on test rows), train_loss.
    """
    panels: list[Lines] = []
    drawn: dict[str, tuple[Entry, Seeds]] = {}
    named: dict[str, None] = {}
    for cell, own in found.cells():
        shown = found.option("show", [own[0][0].statistic])
        for key in shown:
            lines = {}
            for entry, seeds in own:
                told = {seed: _column(result.content["curve"], key) for seed, result in seeds.items()}
                if any(told.values()):
                    drawn[entry.id] = entry, seeds
                    lines[entry.row.name] = _line({seed: values for seed, values in told.items() if values})
                else:
                    found.missing.append(f"{name(entry)}: its result holds no {key} by round")
            if lines:
                of = "loss" if key in ("loss", "train_loss") else metric(*own[0])
                unit, words = Unit.of(of, []), _CURVES[key].format(of.replace("_", " "))
                named[words if key in ("loss", "train_loss") else f"test {of}, {spec.STATISTICS[key]}"] = None
                title = f"{cell_name(cell)}{f': {words}' if len(shown) > 1 else ''}"
                panels.append(Lines(title, "round", f"{words}{unit.name}", _scaled(lines, unit.scale)))
    if not panels:
        raise UserError(
            f"{found.table.name}: no run was evaluated in several rounds; set [evaluation] every in its file"
        )
    about = f"{_capital(' and '.join(named))}, in every evaluated round"
    return papers.line_chart(panels, found.words(_band(panels), about, list(drawn.values())))


def _column(table: Mapping[str, Sequence[Any]], key: str) -> dict[float, float]:
    """Return the known values of a column by round."""
    return {at: value for at, value in zip(table["round"], table.get(key, ()), strict=False) if value is not None}


def _line(told: Mapping[int, Mapping[float, float]]) -> Line:
    """Return the line through values by seed and place; where a seed has none it is unknown."""
    places = sorted({place for values in told.values() for place in values})
    return Line(places, np.array([[values.get(place, np.nan) for place in places] for values in told.values()]))


def _scaled(lines: Mapping[str, Line], scale: float) -> dict[str, Line]:
    return {label: Line(line.x, scale * line.values) for label, line in lines.items()}


def _band(panels: Sequence[Lines]) -> str:
    """Return how to read lines, of one seed or of several."""
    several = any(len(line.values) > 1 for panel in panels for line in panel.lines.values())
    return "Line: mean over seeds; band: from the lowest to the highest seed." if several else "One run per line."


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def epochs(found: Found) -> "Figure":
    """Draw the cells' values against the local epochs; cells that differ in them alone share a panel."""
    return _against(found, "training.epochs", "local epochs in a round")


def rows(found: Found) -> "Figure":
    """Draw the cells' values against the number of train rows that each new client has."""
    return _against(found, "data.keep_rows", "train rows of a new client", log_x=True)


def hierarchy(found: Found) -> "Figure":
    """Draw the error against the variance between clients' means, with the estimates that know it beside it."""
    return _against(found, "data.between", "variance between the clients' means", log_x=True, log_y=True)


def _against(found: Found, key: str, x: str, log_x: bool = False, log_y: bool = False) -> "Figure":
    """Draw values against a setting: ``key``, or the one that the option ``x`` names."""
    key, drawn = found.option("x", key), []
    for own in _panels(found, key):
        of, told = metric(*own[0]), dict[str, dict[int, dict[float, float]]]()
        for values in (_value, _estimates):  # the methods come first in the legend
            for entry, seeds in own:
                for seed, result in seeds.items():
                    for line, value in values(entry, result).items():
                        told.setdefault(line, {}).setdefault(seed, {})[_setting(result, key)] = value
        lines = {line: _line(values) for line, values in told.items()}
        unit = Unit.of(of, [])
        y = f"{read.statistic(*own[0])}{unit.name}" if log_y else f"test {of.replace('_', ' ')}{unit.name}"
        drawn.append(Lines(_title([entry.cell for entry, _ in own]), x, y, _scaled(lines, unit.scale), log_x, log_y))
    return papers.line_chart(drawn, found.words(_band(drawn), read.what(found.entries()), found.entries()))


def _panels(found: Found, key: str) -> list[list[tuple[Entry, Seeds]]]:
    """Return the entries by panel: cells that differ only in a setting share one."""
    panels: dict[Any, list[tuple[Entry, Seeds]]] = {}
    for entry, seeds in found.entries():
        cell = entry.cell
        others = [text for text in (*cell.set, *cell.evaluate) if text.partition("=")[0] != key]
        panels.setdefault((cell.base, *others, entry.group, entry.metric), []).append((entry, seeds))
    return list(panels.values())


def _title(cells: Sequence[Cell]) -> str:
    """Return what the names of a panel's cells have in common: all but what follows the last comma."""
    heads = dict.fromkeys(cell.label.rpartition(",")[0] for cell in cells)
    return next(iter(heads)) + (" (stand-in)" if cells[0].stand_in else "")


def _value(entry: Entry, result: Result) -> dict[str, float]:
    value = result.value(entry)
    return {} if value is None else {entry.row.name: value}


_ESTIMATES = {"local": "clients' own means", "paper": "the paper's estimate (3)", "bayes": "Bayes estimate (oracle)"}


def _estimates(entry: Entry, result: Result) -> dict[str, float]:
    """Return what a probe computed beside the run: errors of estimates that know the variances."""
    told = (result.content.get("probe") or {}).get("hierarchy", {})
    return {words: told[key] for key, words in _ESTIMATES.items() if told.get(key) is not None}


def _setting(result: Result, key: str) -> float:
    """Return a setting of the run, or of its evaluation where that changed it."""
    changed = dict(text.partition("=")[::2] for text in result.content["evaluate"])
    table, _, setting = key.partition(".")
    try:
        return float(changed[key] if key in changed else result.content["settings"][table][setting])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{result.path} has no number at {key}, against which the figure is drawn") from None


def gaussianity(found: Found) -> "Figure":
    """Draw how well one Gaussian per class with a common covariance fits the features of held-out and train rows."""
    probed, panels = found.probed("gaussianity"), []
    for split, title in (("test", "held-out rows"), ("train", "train rows, to which the Gaussians were fitted")):
        lines = {}
        for entry, seeds in probed:
            fits = {seed: {"round": own["round"], **own[split]} for seed, own in seeds.items() if split in own}
            if fits:
                lines[entry.row.name] = _line({seed: _column(fit, "nll") for seed, fit in fits.items()})
        if lines:
            panels.append(Lines(title, "round", "negative log likelihood", lines))
    about = (
        "Mean over clients of their rows' negative log likelihood under one Gaussian per class, one covariance for all"
    )
    words = found.words(f"Round 0 is before training. {_band(panels)}", about, probed, views=False)
    return papers.line_chart(panels, words)


# --- points ---------------------------------------------------------------------------------------------------------

Vectors = NDArray[np.float64]
_PLANES: dict[str, Callable[[Vectors], Vectors]] = {"PCA": plane, "t-SNE": tsne}
_SMALL, _MEDIUM, _LARGE = 14.0, 36.0, 90.0  # points squared of the dots for the lowest, an unknown, the highest level


def embeddings(found: Found) -> "Figure":
    """Draw each client's embedding in the plane, by PCA and by t-SNE; colour is its condition, size the level."""
    probed = found.probed("embeddings")
    first = {name(entry): next(iter(seeds.values())) for entry, seeds in probed}
    several = len(first) > 1
    panels = [panel for named, own in first.items() for panel in _planes(own, f"{named}: " if several else "")]
    words = _about_planes(found, probed, "Embedding", {named if several else "": own for named, own in first.items()})
    return papers.point_chart(panels, words, columns=2)


def norms(found: Found) -> "Figure":
    """Draw each client's scales and shifts of three norm layers in the plane, by PCA above and by t-SNE below."""
    entry, seeds = found.probed("norms")[0]
    layers = next(iter(seeds.values()))["layers"]
    both = [_planes(layer, "", f", norm layer {layer['layer']} ({layer['name']})") for layer in layers]
    panels = [panel for way in zip(*both, strict=True) for panel in way]
    named = {f"layer {layer['layer']}": layer for layer in layers}
    words = _about_planes(found, [(entry, seeds)], "Scales and shifts of norm layers", named)
    return papers.point_chart(panels, words, columns=len(layers))


def _planes(own: Mapping[str, Any], before: str, after: str = "") -> list[Points]:
    vectors, conditions = np.array(own["vectors"], dtype=np.float64), own["conditions"]
    kinds, areas = [kind(condition) for condition in conditions], _areas(conditions)
    return [Points(f"{before}{way}{after}", map_(vectors), kinds, areas) for way, map_ in _PLANES.items()]


def _about_planes(
    found: Found, probed: Sequence[tuple[Entry, Mapping[int, Any]]], vector: str, drawn: Mapping[str, Mapping[str, Any]]
) -> Words:
    """Return the words beside vectors of clients: how they were drawn, and how well their conditions separate them."""
    most = max(len(own["clients"]) for own in drawn.values())
    told = [f"{named} {own['silhouette']:.2f}".strip() for named, own in drawn.items() if own["silhouette"] is not None]
    facts = [
        f"{vector} of each client that took part, after the last round",
        f"t-SNE with perplexity {perplexity(most):g}, seed 0",
        *([f"silhouette of the conditions: {', '.join(told)}"] if told else []),
    ]
    subtitle = "One dot per client; colour: condition of its images; larger: stronger, where the condition has a level."
    return found.words(subtitle, "; ".join(facts), [(entry, list(seeds)[:1]) for entry, seeds in probed])


def _areas(conditions: Sequence[str]) -> Vectors:
    """Return the dots' areas by the rank of the condition's level among those of its kind; medium without one level."""
    areas, kinds = np.full(len(conditions), _MEDIUM), [kind(condition) for condition in conditions]
    for each in {*kinds}:
        own = [i for i, found in enumerate(kinds) if found == each]
        numbers = [re.findall(r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?", conditions[i].removeprefix(each)) for i in own]
        if all(len(found) == 1 for found in numbers):
            levels = np.array([float(found[0]) for found in numbers])
            if each == "imbalance":
                levels = -levels  # of a Dirichlet distribution: the smaller, the more unequal
            ranks = np.unique(levels, return_inverse=True)[1]
            areas[own] = _SMALL + (_LARGE - _SMALL) * ranks / max(1, ranks.max())
    return areas


def features(found: Found) -> "Figure":
    """Draw a sample of the features by t-SNE, a panel for each row; colour is the class."""
    probed = found.probed("features")
    first = [(entry, *next(iter(seeds.items()))) for entry, seeds in probed]
    panels = []
    for entry, seed, own in first:
        value = found.results[entry.id][seed].value(entry)
        unit = Unit.of(metric(entry, found.results[entry.id]), [value])
        told = {words: f"{share:.2f}" for words, share in own["scatter"].items() if share is not None}
        scatter = ", ".join(f"{words.removeprefix('between_')} {share}" for words, share in told.items())
        order = np.argsort(own["classes"], kind="stable")  # so that the legend is sorted
        points, classes = tsne(own["vectors"])[order], np.array(own["classes"])[order]
        title = f"{entry.row.name} ({unit.text(value)}{unit.sign})\nscatter: {scatter}"
        panels.append(Points(title, points, [f"class {number}" for number in classes], 7.0))
    own = first[0][2]
    kept, sample, dims = min(own["kept"] for *_, own in first), len(own["classes"]), len(own["vectors"][0])
    about = (
        f"Features of {sample:,} train rows after the last round, in {dims} principal components with at least "
        f"{int(100 * kept)} % of their variance; t-SNE with perplexity {perplexity(sample):g}, seed 0"
    )
    subtitle = (
        "One dot per row; colour: its class. In brackets the test value. Scatter of class means, and of clients' means "
        "within a class, over that of the rows within their class."
    )
    drawn = [(entry, [seed]) for entry, seed, _ in first]
    return papers.point_chart(panels, found.words(subtitle, about, drawn), columns=2)


# --- clients and rows -----------------------------------------------------------------------------------------------


def betas(found: Found) -> "Figure":
    """Draw each client's beta by the kind of its corruption; two panels where means and covariance have their own."""
    panels, drawn = [], []
    for entry, seeds in found.entries():
        told = [_betas(result, entry.group) for result in seeds.values()]
        if not any(told):
            found.missing.append(f"{name(entry)}: its result holds no betas")
            continue
        rows = [row for own in told for row in own]
        single = all(row[1] == row[2] for row in rows)
        order = sorted({row[0] for row in rows}, key=lambda own: np.mean([row[1] for row in rows if row[0] == own]))
        for place, x in [(1, "beta")] if single else [(1, "beta of the means"), (2, "beta of the covariance")]:
            values = {own: np.array([row[place] for row in rows if row[0] == own]) for own in order}
            labels = {f"{own} ({len(each) // len(seeds)})": each for own, each in values.items()}
            panels.append(Groups(name(entry), x, labels))
        drawn.append((entry, seeds))
    if not panels:
        raise UserError(f"{found.table.name}: no result holds betas, which pFedFDA logs: run bespoke sweep again")
    subtitle = (
        "0: the federation's statistics, 1: the client's own. One dot per client and seed; box: quartiles and median; "
        "in brackets the number of clients."
    )
    return papers.box_chart(panels, found.words(subtitle, "Beta of each client at the last evaluation", drawn))


def _betas(result: Result, group: str) -> list[tuple[str, float, float]]:
    """Return (kind of condition, beta of the means, beta of the covariance) of the group's clients."""
    told = result.content["clients"]
    own, logged = set(result.scores(group=group).clients), told["logged"]
    conditions = told["condition"] or ["clean"] * len(told["client"])
    if not {"beta_mean", "beta_cov"} <= logged.keys():
        return []
    columns = zip(told["client"], conditions, logged["beta_mean"], logged["beta_cov"], strict=True)
    return [(kind(c), mean, cov) for client, c, mean, cov in columns if client in own and None not in (mean, cov)]


def histogram(found: Found) -> "Figure":
    """Draw how many clients have which value of a share such as accuracy: a panel for each row, 20 bins."""
    panels = []
    for entry, seeds in found.entries():
        each = [result.scores(entry.metric, entry.group).values() for result in seeds.values()]
        values = np.full((len(each), max(map(len, each))), np.nan)
        for place, own in enumerate(each):
            values[place, : len(own)] = own
        alone = len(found.table.cells) == 1 and not entry.cell.stand_in
        title = entry.row.name if alone else name(entry)
        panels.append(Groups(title, f"a client's test {metric(entry, seeds)} in %", {title: values}))
    several = any(len(seeds) > 1 for _, seeds in found.entries())
    subtitle = f"Clients in each of 20 bins{' (mean over seeds)' if several else ''}; dashed: mean over clients."
    rounds = " or ".join(dict.fromkeys(SELECTIONS[entry.selection] for entry, _ in found.entries()))
    about = f"Each client's {metric(*found.entries()[0])} on its own test rows, {rounds}"
    return papers.histogram_chart(panels, found.words(subtitle, about, found.entries()))


def bubbles(found: Found) -> "Figure":
    """Draw how many rows of each class every client has, a panel for each cell; from the data, without any results."""
    panels, table = {}, found.table
    for cell in (cell for cell in table.cells if not cell.missing):
        try:
            panels[cell_name(cell)] = _class_counts(table, cell)
        except UserError as error:
            found.missing.append(f"{cell_name(cell)}: {error}")
    if not panels:
        raise UserError(f"{table.name} cannot be drawn: {'; '.join(found.missing)}")
    subtitle = "One bubble per client and class; its area is in proportion to the rows."
    about = [f"Rows of each client, for training and for test together; partition of seed {table.seed}."]
    words = read.titled(table, subtitle, [*about, *read.stand_ins(table.cells), *read.lacking(found.missing)])
    return papers.bubble_panels(panels, words)


def _class_counts(table: Table, cell: Cell) -> NDArray[np.int64]:
    """Return the rows by client and class [clients, classes] of a cell's federation with the table's seed."""
    from bespoke.data import partitioned
    from bespoke.runs.experiment import load

    overrides = [*cell.set, *(f"{key}={number + table.seed}" for key, number in cell.by_seed.items())]
    loaded, _ = load(spec.run_file(table.path, cell.base), None, overrides, table.seed, any_method=True)
    pool, _ = partitioned(loaded.located()[0], loaded.seed, loaded.training.skip_empty)
    counts = np.zeros((pool.total_clients, pool.num_classes), dtype=np.int64)
    for part in (pool.train, pool.test, pool.val):
        for client in range(pool.total_clients):
            counts[client] += np.bincount(pool.y[part.client(client)].numpy(), minlength=pool.num_classes)
    return counts


FIGURES: dict[str, Callable[[Found], "Figure"]] = {
    function.__name__: function
    for function in (
        betas,
        bubbles,
        curves,
        embeddings,
        epochs,
        features,
        gaussianity,
        hierarchy,
        histogram,
        norms,
        rows,
    )
}
