"""From a finished run to the results of the cells that it serves."""

import re
from pathlib import Path
from typing import Any

from bespoke import __version__
from bespoke.errors import UserError
from bespoke.records import RunFolder
from bespoke.report.summary import SELECTIONS, Evaluations, totals
from bespoke.runs.experiment import Experiment
from bespoke.runs.results import Run
from bespoke.tables.plan import Job
from bespoke.tables.results import modules_of, source_hash
from bespoke.tables.spec import Entry

_ENVIRONMENT = (
    "device",
    "precision",
    "dtype",
    "backend",
    "torch",
    "python",
    "platform",
    "side_by_side",
    "device_seconds",
)


def result(job: Job, entry: Entry, run: Run, evaluated: Run, seconds: float, probe: Any = None) -> dict[str, Any]:
    """Return the content of an entry's result file.

    ``evaluated`` is the run itself, or its evaluation on other rows; ``seconds`` is what the training took.
    """
    folder = evaluated.folder
    found = Evaluations(folder)
    view = entry.view or (found.views[0] if found.views else "")
    if view not in found.views:
        raise UserError(f"{entry.id}: {job.experiment.algorithm_name} has no view {view!r}; it has {found.views}")
    number = found.choose(view, entry.selection)
    if number is None:
        raise UserError(f"{entry.id}: there is no {SELECTIONS[entry.selection]}: give the clients such rows")
    if entry.metric and entry.metric not in found.higher:
        raise UserError(f"{entry.id}: the run recorded no {entry.metric}; it has {', '.join(found.higher)}")
    environment = run.folder.read_json("environment.json")
    told = totals(run.folder.rounds(), run.folder.timing())
    return {
        **about(entry, job.experiment, job.source),
        "status": "done",
        "view": view,
        "headline": found.views[0],
        "selection": entry.selection,
        "group": entry.group,
        "round": number,
        "metric": found.metric,
        "higher": found.higher,
        "clients": _clients(folder, view, number),
        "curve": _curve(found, view, entry),
        "totals": {key: value for key, value in told.items() if key != "notes"},
        "notes": list(dict.fromkeys(without(note, run.folder.path) for note in [*evaluated.notes, *told["notes"]])),
        **({"probe": probe} if probe is not None else {}),
        "source": _source(job, environment.get("git")),
        "environment": {key: environment[key] for key in _ENVIRONMENT if key in environment},
        "seconds": seconds,
        "shared_with": [other.id for other in job.entries if other != entry],
    }


def without(text: str, run: Path, *around: Path) -> str:
    """Return a note or a sentence without the paths of the run's folder and of those around it, from the innermost.

    They are on one machine.
    """
    text = _renamed(text, run, "the run's folder")
    for folder in around:
        text = _renamed(text, folder, folder.name)
    return text


def _renamed(text: str, folder: Path, name: str) -> str:
    """Return a text in which a folder has another name, and what is in it none of that; not where it is half a name."""
    if not folder.name:
        return text
    path = rf"(?<![\w./-]){re.escape(str(folder))}"
    return re.sub(rf"{path}(?![\w/-]|\.\w)", lambda found: name, re.sub(rf"{path}/", "", text))


def failure(job: Job, entry: Entry, sentence: str) -> dict[str, Any]:
    """Return the content of the result file of an entry whose run failed."""
    told = {"status": "failed", "error": sentence, "view": entry.view, "source": _source(job, None), "seconds": 0.0}
    return about(entry, job.experiment, job.source) | told


def about(entry: Entry, experiment: Experiment, source: str) -> dict[str, Any]:
    """Return what every result file begins with: its place, and the settings with their source."""
    return {
        "table": entry.table,
        "cell": entry.id,
        "seed": experiment.seed,
        "base": entry.cell.base,
        "settings": experiment.tables(),
        "settings_from": source.rpartition("experiments/")[2],
        "evaluate": list(entry.cell.evaluate),
    }


def _source(job: Job, commit: str | None) -> dict[str, Any]:
    modules = modules_of(type(job.experiment.method).__module__)
    return {"bespoke": __version__, "commit": commit, "modules": modules, "method": source_hash(tuple(modules))}


def _clients(folder: RunFolder, view: str, number: int) -> dict[str, Any]:
    """Return one round's clients on their test rows, as columns in the order of their numbers."""
    conditions = folder.conditions()
    lines = [
        line
        for line in folder.clients()
        if line["round"] == number and line["view"] == view and line["split"] == "test"
    ]
    lines.sort(key=lambda line: line["client"])
    metrics = {name: None for line in lines for name in line["metrics"]}
    logged = {name: None for line in lines for name in line["logged"]}
    pairs = {name: [line["metrics"].get(name, [None, 0]) for line in lines] for name in metrics}
    return {
        "client": [line["client"] for line in lines],
        "group": [line["group"] for line in lines],
        "condition": [conditions[line["client"]] for line in lines] if conditions else None,
        "rows": [line["total"] for line in lines],
        "metrics": {n: {"sum": [p[0] for p in own], "weight": [p[1] for p in own]} for n, own in pairs.items()},
        "logged": {name: [line["logged"].get(name) for line in lines] for name in logged},
    }


def _curve(found: Evaluations, view: str, entry: Entry) -> dict[str, Any]:
    """Return the metric (pooled, and its mean over clients) and the losses of test and training by evaluated round."""
    metric, group = entry.metric or str(found.metric), entry.group
    trained = {row["round"]: row["train_loss"] for row in found.trained}
    curve: dict[str, list[Any]] = {"round": [], "pooled": [], "mean": [], "loss": [], "train_loss": []}
    for number in found.rounds(view):
        scores = found.scores(view, metric, number, group)
        if not scores.clients:
            continue
        values = scores.take(scores.defined).values()
        curve["round"].append(number)
        curve["pooled"].append(scores.pooled())
        curve["mean"].append(float(values.mean()) if len(values) else None)
        curve["loss"].append(found.scores(view, "loss", number, group).pooled() if "loss" in found.higher else None)
        curve["train_loss"].append(trained.get(number))
    return curve
