"""Find run folders and sort them by method and seed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, distinct, natural, short, shown
from bespoke.records import EVALUATION, RESUME_OPTION, RunFolder, is_list_of, is_text
from bespoke.report.summary import Evaluations, totals

BRIEF, LONGEST = 40, 240  # letters of a client's name in a table or a sentence, and at most


@dataclass(frozen=True)
class RecordedRun:
    """One run folder, each of its files read once."""

    folder: RunFolder
    config: dict[str, Any]
    evaluations: Evaluations

    @property
    def algorithm(self) -> str:
        """The name of its method."""
        return self.config["algorithm"]["name"]

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.config.get("seed", 0)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The lines of `rounds.jsonl`."""
        return self.evaluations.trained

    @cached_property
    def timing(self) -> list[dict[str, Any]]:
        """The lines of `timing.jsonl`."""
        return self.folder.timing()

    @cached_property
    def costs(self) -> dict[str, Any]:
        """What :func:`totals` returns."""
        return totals(self.rounds, self.timing)

    @cached_property
    def federation(self) -> dict[str, Any]:
        """What `federation.json` says of the clients, empty without one."""
        return self.folder.federation() or {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What `environment.json` says, empty without one."""
        path = self.folder.path / "environment.json"
        found = self.folder.read_json(path.name) if path.exists() else {}
        if not isinstance(found, dict) or not is_list_of(is_text)(found.get("notes", [])):
            raise UserError(f"{path} is damaged; restore it or run the experiment again")
        return found

    @property
    def progress(self) -> tuple[int, int]:
        """How many rounds are recorded, and how many there should be; as many where that cannot be known."""
        done = max((row["round"] for row in self.rounds), default=0)
        wanted = self.config.get("training", {}).get("rounds")
        patient = self.config.get("evaluation", {}).get("patience")  # so that it may have ended by itself
        evaluates = (self.folder.path / EVALUATION).exists()
        return done, wanted if isinstance(wanted, int) and not patient and not evaluates else done

    def client_name(self, client: Any, longest: int) -> str:
        """Return a client's name in words, by its place; a record may name others too.

        Names longer than `longest`, `BRIEF` or `LONGEST`, are cut so that they differ from each other.
        """
        names = self._names
        name = names[client] if isinstance(client, int) and 0 <= client < len(names) else _in_words(str(client), client)
        return self._cut[longest].get(name) or short(name, longest)

    @cached_property
    def _names(self) -> list[str]:
        return [_in_words(name, place) for place, name in enumerate(self.federation.get("names", ()))]

    @cached_property
    def _cut(self) -> dict[int, dict[str, str]]:
        return {longest: distinct(self._names, longest) for longest in (BRIEF, LONGEST)}


def _in_words(name: str, client: Any) -> str:
    """Return a client's name: a number alone would read as a value, and nothing as nobody."""
    name = name.strip()
    return name if name and not name.isdigit() else f"client {name or client}"


Groups = dict[str, dict[int, RecordedRun]]  # label -> seed -> run
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def find_runs(paths: Paths) -> list[RunFolder]:
    """Return the run folders at `paths` (one or several) or at most two levels below, each once, in order."""
    found: dict[Path, RunFolder] = {}
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not len(given):
        raise UserError("no folder was given; give run folders or folders that contain them")
    for path in map(Path, given):
        if not path.is_dir():
            raise UserError(f"there is no folder {path}; give run folders or folders that contain them")
        there = [path, *path.glob("*"), *path.glob("*/*")]
        runs = [p for p in there if RunFolder(p).holds_run()]
        inner = [p for p in runs if not any(q in p.parents for q in runs)]
        if not inner:
            raise UserError(f"no run in {path} or two levels below it: a run folder holds a config.toml")
        ordered = sorted(inner, key=lambda p: [natural(part) for part in p.parts])
        found |= {p.resolve(): RunFolder(p) for p in ordered if p.resolve() not in found}
    return list(found.values())


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of tables in tables by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def differing(configs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the dotted keys whose values differ between configs, with the values as text."""
    flat = [flatten(config) for config in configs]
    shown = {key: [str(f.get(key, "unset")) for f in flat] for key in dict.fromkeys(k for f in flat for k in f)}
    return {key: values for key, values in shown.items() if len(set(values)) > 1}


def group_runs(paths: Paths) -> tuple[Groups, list[str]]:
    """Return `{label: {seed: run}}` of the runs at `paths`, and warnings about runs left out or changed.

    A label is the method's name, followed by the settings in which runs of one method differ.
    """
    by_method: dict[str, list[RecordedRun]] = {}
    warnings: list[str] = []
    for folder in find_runs(paths):
        run = RecordedRun(folder, _config(folder), Evaluations(folder))
        warnings += filter(None, [folder.changed()])
        if run.evaluations.views:
            by_method.setdefault(run.algorithm, []).append(run)
        else:
            warnings.append(f"{folder.path} is left out: it holds no evaluation; finish it with {RESUME_OPTION}")
    if not by_method:
        raise UserError("; ".join(warnings))
    groups: Groups = {}
    for name, runs in by_method.items():
        marked = differing([{k: v for k, v in run.config.items() if k != "seed"} for run in runs])
        for i, run in enumerate(runs):
            marks = ", ".join(f"{key.removeprefix('algorithm.')}={v[i]}" for key, v in marked.items())
            seeds = groups.setdefault(f"{name} ({marks})" if marks else name, {})
            if run.seed in seeds:
                first = seeds[run.seed].folder.path
                warnings.append(f"{run.folder.path} is left out: it repeats {first} (same settings and seed)")
            else:
                seeds[run.seed] = run
    return {label: dict(sorted(seeds.items())) for label, seeds in groups.items()}, warnings


def _config(folder: RunFolder) -> dict[str, Any]:
    """Return a run's settings, after checking what every comparison reads of them."""
    config, cure = folder.config(), "give the folder of a run"
    if not isinstance(config.get("algorithm"), dict) or not isinstance(config["algorithm"].get("name"), str):
        raise UserError(f"{folder.path / 'config.toml'} names no [algorithm]; {cure}")
    seed = config.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"{folder.path / 'config.toml'} has the seed {shown(seed)}, which is no whole number; {cure}")
    for table, values in config.items():
        if table != "seed" and not isinstance(values, dict):
            raise UserError(f"{folder.path / 'config.toml'} has {table} = {shown(values)} in place of a table; {cure}")
    select = config.get("evaluation", {}).get("select", "last")
    if not isinstance(select, str):
        raise UserError(f"{folder.path / 'config.toml'} selects the round {shown(select)}, which is no name; {cure}")
    return config


def view_of(run: RecordedRun, view: str | None) -> str:
    """Return `view` if the run has it, its headline if `view` is None."""
    if view is None:
        return run.evaluations.views[0]
    if view not in run.evaluations.views:
        raise UserError(f"{run.folder.path} has no view {view!r}; it has {', '.join(run.evaluations.views)}")
    return view


def metric_of(groups: Groups, metric: str | None) -> tuple[str, bool]:
    """Return `metric` or the runs' headline metric, which all must have recorded, and whether larger is better."""
    runs = [run for seeds in groups.values() for run in seeds.values()]
    if metric is None:
        named = {run.evaluations.metric: run for run in runs}
        if len(named) > 1:
            each = "; ".join(f"{run.folder.path}: {name}" for name, run in named.items())
            raise UserError(f"the runs have different headline metrics ({each}); name the metric to compare")
        metric = str(next(iter(named)))
    for run in runs:
        if metric not in run.evaluations.higher:
            raise UserError(f"{run.folder.path} has no metric {metric!r}; it has {', '.join(run.evaluations.higher)}")
    directions = {run.evaluations.higher[metric] for run in runs}
    if len(directions) > 1:
        raise UserError(f"the runs disagree on whether a larger {metric} is better; compare another metric")
    return metric, directions.pop()
