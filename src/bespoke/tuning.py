"""Search for good settings on the clients' validation rows, which are train rows set aside; test rows are taken out.

The search is optuna's (the extra ``tune``); every try is a line of a log, from which a search goes on.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespoke.errors import UserError, reason, shown
from bespoke.files import make_folder, write_atomic, write_error
from bespoke.runs.api import built, carry_out, objective_of
from bespoke.runs.experiment import Experiment, load, to_toml
from bespoke.runs.recording import validation_curve

LOG, BEST = "trials.jsonl", "best.toml"
_ELSEWHERE = "choose another folder with --out"


@dataclass(frozen=True)
class Range:
    """The values that a setting may take: some of its own, or all between two, evenly or by their logarithm."""

    key: str  # "training.lr"
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def holds(self, value: Any) -> bool:
        """Return whether a value is one of these."""
        if self.choices:
            return value in self.choices
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return _is_number(value, int if whole else int | float) and self.low <= value <= self.high

    def distribution(self) -> Any:
        """Return the values as a distribution of optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.choices:
            return CategoricalDistribution(self.choices)
        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)


def parse_range(text: str) -> Range:
    """Read ``training.lr=0.001:0.1:log``, ``algorithm.head_epochs=1:10`` or ``training.momentum=0,0.5,0.9``."""
    key, _, values = (part.strip() for part in text.partition("="))
    where = f"--search {shown(text, 100)}"
    if not values or key.count(".") != 1:
        raise UserError(f"{where}: write TABLE.KEY=LOW:HIGH, TABLE.KEY=LOW:HIGH:log or TABLE.KEY=A,B,C")
    ends, log = values.removesuffix(":log").split(":"), values.endswith(":log")
    if len(ends) == 1 and not log:
        found = tuple(_value(part) for part in values.split(","))
        if len(set(map(repr, found))) < 2:
            raise UserError(f"{where}: give at least two values")
        return Range(key, choices=found)
    numbers = [_value(end) for end in ends]
    if len(numbers) != 2 or not all(isinstance(number, int | float) for number in numbers):
        raise UserError(f"{where}: give two numbers, as in training.lr=0.001:0.1:log")
    low, high = numbers
    if not low < high or (log and low <= 0) or not math.isfinite(high - low):
        raise UserError(f"{where}: the first number must be smaller{' and above 0' if log else ''}")
    return Range(key, low=low, high=high, log=log)


def _value(text: str) -> Any:
    """Return a whole number, a number, true or false, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.strip(), text.strip())


def tune(
    name: str | Path,
    ranges: Sequence[Range],
    out: Path,
    *,
    algorithm: str | None = None,
    overrides: Sequence[str] = (),
    trials: int = 20,
    seed: int = 0,
    device: str = "auto",
    told: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Try settings of an experiment, and return the line of the best trial: its values, and the validation value.

    The value is the headline metric pooled over the clients' validation rows after the last round. ``out`` holds the
    log and ``best.toml``, the method's settings as a preset; a search that is there goes on. A trial that fails is
    noted with its sentence.
    """
    optuna = _optuna()
    base, _ = load(name, algorithm, overrides, seed)
    if not base.data.validation:
        raise UserError(
            "tuning needs validation rows, because test rows are not for choosing: --set data.validation=0.2"
        )
    if not ranges:
        raise UserError(
            "there is nothing to tune: name settings with --search, as in --search training.lr=0.001:0.1:log"
        )
    for each in ranges:
        _check_range(each, name, algorithm, overrides)
    make_folder(out, _ELSEWHERE)
    about = {"experiment": base.tables(), "search": [str(each) for each in ranges]}
    lines = _log(out / LOG, about, ranges)
    higher = _higher(base)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize" if higher else "minimize", sampler=optuna.samplers.TPESampler(seed=seed + len(lines))
    )
    distributions = {each.key: each.distribution() for each in ranges}
    for line in lines:
        if line["value"] is not None:
            study.add_trial(
                optuna.trial.create_trial(params=line["values"], distributions=distributions, value=line["value"])
            )
    while len(lines) < trials:
        trial = study.ask(distributions)
        values = trial.params
        chosen = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        begin, error, value = time.monotonic(), "", None
        try:
            value = validated(load(name, algorithm, [*overrides, *chosen], seed)[0], device)
        except UserError as problem:
            error = str(problem)
        except (RuntimeError, MemoryError) as problem:  # no memory, or a model that the settings break
            error = reason(problem)
        state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
        study.tell(trial, value, state=state)
        line = {"trial": len(lines), "values": values, "value": value, "seconds": round(time.monotonic() - begin, 2)}
        lines.append(line | ({"error": error or "not finite"} if value is None else {}))
        _append(out / LOG, lines[-1])
        told(lines[-1])
    sound = [line for line in lines if line["value"] is not None]
    if not sound:
        raise UserError(f"all {len(lines)} trials failed, the last one because: {lines[-1]['error']}")
    best = (max if higher else min)(sound, key=lambda line: line["value"])
    write_atomic(out / BEST, _preset(best, base, len(lines)))
    return best


def _check_range(each: Range, name: str | Path, algorithm: str | None, overrides: Sequence[str]) -> None:
    """Refuse a setting that is not there, that takes none of the values, or that changes the rows to choose by."""
    if each.key.startswith("data."):
        raise UserError(f"--search {each.key}: values of [data] cannot be compared, since each has its own rows")
    problems = []
    for value in each.choices or (each.low, each.high):
        try:
            load(name, algorithm, [*overrides, f"{each.key}={json.dumps(value)}"])
            return
        except UserError as error:
            problems.append(error)
    raise problems[0]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("tuning needs optuna: pip install 'bespoke-fl[tune]'") from None
    return optuna


def _higher(experiment: Experiment) -> bool:
    """Return whether a larger value of the headline metric is better."""
    return next(iter(objective_of(experiment).metrics.values())).higher


def validated(experiment: Experiment, device: str = "auto") -> float | None:
    """Run an experiment without its test rows, and return the headline metric pooled over all validation rows."""
    parts = built(experiment, device, "auto")
    run = carry_out(experiment, parts._replace(pool=parts.pool.without_test()), progress=False)
    name, metric = next(iter(parts.task.objective.metrics.items()))
    value = (validation_curve(run.folder, name) or [None])[-1]
    return value if value is None or metric.higher else -value


def _log(path: Path, about: Mapping[str, Any], ranges: Sequence[Range]) -> list[dict[str, Any]]:
    """Return the trials of a log, which must be of this search; begin it if there is none."""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a kill may cut the last line short
        lines = [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {reason(error)}: {_ELSEWHERE}") from None
    if lines[:1] != [json.loads(json.dumps(about))] and (lines or not json.dumps(about).startswith(text)):
        raise UserError(f"{path} is the log of another search: {_ELSEWHERE}")
    if whole != text:
        write_atomic(path, whole)
    if not lines:
        _append(path, about)
        return []
    for number, line in enumerate(lines[1:]):
        if not _is_trial(line, number, ranges):
            raise UserError(f"{path}, line {number + 2}, is no trial of this search: restore it, or {_ELSEWHERE}")
    return lines[1:]


def _is_trial(line: Any, number: int, ranges: Sequence[Range]) -> bool:
    """Return whether a line of a log is what the trial with this number writes."""
    if not isinstance(line, dict) or line.get("trial") != number:
        return False
    values, value = line.get("values"), line.get("value", math.nan)
    if not isinstance(values, dict) or values.keys() != {each.key for each in ranges}:
        return False
    scored = isinstance(line.get("error"), str) if value is None else _is_number(value) and math.isfinite(value)
    return scored and all(each.holds(values[each.key]) for each in ranges)


def _is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _append(path: Path, line: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise write_error(path, error, ", then run the same command again") from None


def _preset(best: Mapping[str, Any], base: Experiment, trials: int) -> str:
    """Return the best trial's settings as a method's file, with where they are from."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in best["values"].items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    first = f"# {base.algorithm_name}: the best of {trials} trials, {best['value']:.6g} on validation rows."
    return f"{first}\n{to_toml(tables)}"
