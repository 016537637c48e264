"""Run folders: the sole contract between a run and its reports.

A run folder holds

    config.toml       the resolved experiment
    environment.json  versions, device, git hash
    rounds.jsonl      one line per round
    clients.jsonl     one line per (round, client, split, view): the sum and weight of each metric
    timing.jsonl      one line per round: seconds by phase
    summary.json      values derived from the lines above
    federation.json   the clients, their rows and a hash of them, of a classification each client's train rows by
                      class, and where the data name any, each client's condition (a corruption, a degradation, a
                      domain); written once
    start.safetensors the initial model and the form of its inputs, for opening the run without data; written once
    probe.npz         features of a sample of train rows, and embeddings of clients (optional)
    checkpoints/      states to resume from
    *.parquet         exports of rounds and clients: `logged` becomes columns `logged.NAME`, `metrics` becomes
                      `metric.NAME.sum` and `metric.NAME.weight`, `refused` becomes two lists, `refused` (ids)
                      and `reasons`, `evaluated` becomes `evaluated.view` and `evaluated.metric`

The columns of the three `.jsonl` files are in `COLUMNS`. A line is compact JSON with its keys in that order;
NaN and infinities are null. Lines are appended and fsynced, so that a crash can leave at most one torn last
line (without its newline); readers skip it and the next append removes it.

Clients were once recorded with the columns `correct` and `loss_sum` in place of `metrics`; such lines are read
as the metrics accuracy and loss.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from itertools import count, islice
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.files import check_regular, fsync_folder, open_regular, read_toml, write_atomic, write_error

ROUNDS, CLIENTS, TIMING = "rounds.jsonl", "clients.jsonl", "timing.jsonl"
FEDERATION, START, SUMMARY = "federation.json", "start.safetensors", "summary.json"
EVALUATION = "evaluation.json"  # in the folder of an evaluation: of which run, and how
RESUME_OPTION = "--resume (resume=True in Python)"
RESUME = f", then continue a started run with {RESUME_OPTION}"
_PIECE = 2**20  # bytes read at once
_LONGEST, _LARGEST = 2**28, 2**30  # bytes of a line, and of a JSON file: what is longer is no record

COLUMNS: dict[str, dict[str, str]] = {
    ROUNDS: {
        "round": "number of the round, from 1",
        "cohort": "ids of the clients asked to train",
        "refused": "{id: reason} of the clients whose upload was left out",
        "train_loss": "mean training loss of the accepted clients, or null",
        "bytes_down": "bytes sent to the cohort",
        "bytes_up": "bytes received from the clients that answered",
        "padding_waste": "share of the computed rows that were padding",
        "host_breaks": "calls to the host between captured parts",
        "logged": "{name: [value or null per client of the cohort]}",
        "missing": "{id: reason} of the clients that did not answer, in a federation over a network (optional)",
        "note": "what a reader of the round should know (optional)",
        "evaluated": "{view, metric, higher} of an evaluated round: the headline view, the headline metric, and "
        "for every metric whether larger is better (optional); with `missing`, {id: reason}, where clients of a "
        "federation over a network were not evaluated",
    },
    CLIENTS: {
        "round": "round after which the client was evaluated",
        "client": "id of the client",
        "group": "train (has taken part), unseen (not yet), or new (held out from training)",
        "split": "test or val",
        "view": "name of the prediction",
        "total": "rows",
        "metrics": "{name: [sum, weight]}, two numbers or two lists of equal length; null for what is not finite",
        "logged": "{name: value} that the method logged for the client",
    },
    TIMING: {
        "round": "number of the round, from 1",
        "train": "seconds for the clients' training",
        "aggregate": "seconds for the server's step",
        "evaluate": "seconds for the evaluation",
        "checkpoint": "seconds for writing the checkpoint before this round",
    },
}
_OPTIONAL = {"missing", "note", "evaluated"}
_REQUIRED = {name: columns.keys() - _OPTIONAL for name, columns in COLUMNS.items()}
_NESTED = {"logged", "metrics", "evaluated", "missing"}  # columns that become several in an export, or none
_TYPES = {  # of the columns of an export that hold no plain integer; "id" is text if clients have names
    **dict.fromkeys(("train_loss", "padding_waste"), "float64"),
    **dict.fromkeys(("group", "split", "view", "note", "evaluated.view", "evaluated.metric"), "string"),
    **{"client": "id", "cohort": "[id]", "refused": "[string]", "reasons": "[string]"},
}


def _plain(value: Any) -> Any:
    """Convert `value` for JSON: arrays and 0-d tensors to Python values, NaN and infinities to None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _no_constant(text: str) -> None:
    """Refuse NaN and infinities, which Python reads although JSON has none."""
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)

Sound = Callable[[Any], bool]  # whether a value read from JSON is what it should be


def is_count(value: Any) -> bool:
    """Return whether a value is an integer that an export can hold, and not negative."""
    return type(value) is int and 0 <= value < 2**63


def is_text(value: Any) -> bool:
    """Return whether a value is text."""
    return isinstance(value, str)


def is_list_of(sound: Sound) -> Sound:
    """Return the check of a list whose items are `sound`."""
    return lambda value: isinstance(value, list) and all(map(sound, value))


def is_table_of(sound: Sound) -> Sound:
    """Return the check of a table whose values are `sound`."""
    return lambda value: isinstance(value, dict) and all(map(sound, value.values()))


def _is_number(value: Any) -> bool:
    """Return whether a value is a finite JSON number that an array can hold, or null."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return value is None or (type(value) is float and math.isfinite(value))


def _is_client(value: Any) -> bool:
    """Return whether a value is a client's id: a name or a number."""
    return is_text(value) or is_count(value)


def _are_clients(value: Any) -> bool:
    """Return whether a value is a list of clients' ids; numbers, of which records have many, are checked at once."""
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return is_list_of(_is_client)(value)
    return min(value) >= 0 and is_count(max(value))


def _is_pair(total: Any, weight: Any) -> bool:
    """Return whether two values are JSON numbers or null, and the weight is not negative."""
    return _is_number(total) and _is_number(weight) and (weight is None or weight >= 0)


def _is_metric(value: Any) -> bool:
    """Return whether a value is [sum, weight]: two numbers, or two lists of equal length."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    sums, weights = value
    if isinstance(sums, list):
        return isinstance(weights, list) and len(sums) == len(weights) and all(map(_is_pair, sums, weights))
    return _is_pair(sums, weights)


def _is_headline(value: Any) -> bool:
    """Return whether a value is {view, metric, higher}, and `higher` contains the metric."""
    return (
        isinstance(value, dict)
        and is_text(value.get("view"))
        and is_table_of(lambda better: isinstance(better, bool))(value.get("higher"))
        and value.get("metric") in value["higher"]
        and is_table_of(is_text)(value.get("missing", {}))
    )


_SOUND: dict[str, dict[str, Sound]] = {  # what the values of a column look like
    ROUNDS: {
        "round": is_count,
        "cohort": _are_clients,
        "refused": is_table_of(is_text),
        "train_loss": _is_number,
        "bytes_down": is_count,
        "bytes_up": is_count,
        "padding_waste": _is_number,
        "host_breaks": is_count,
        "logged": is_table_of(is_list_of(_is_number)),
        "missing": is_table_of(is_text),
        "note": is_text,
        "evaluated": _is_headline,
    },
    CLIENTS: {
        "round": is_count,
        "client": _is_client,
        "group": is_text,
        "split": is_text,
        "view": is_text,
        "total": is_count,
        "metrics": is_table_of(_is_metric),
        "logged": is_table_of(_is_number),
    },
    TIMING: {
        "round": is_count,
        **dict.fromkeys(
            ("train", "aggregate", "evaluate", "checkpoint"), lambda value: value is not None and _is_number(value)
        ),
    },
}


_BY_CLIENT: dict[str, Sound] = {  # lists of federation.json with an entry for each client
    "names": is_list_of(is_text),
    **dict.fromkeys(("train", "val", "test"), is_list_of(is_count)),
    "content": is_list_of(is_text),  # hashes, which older runs do not have
    "conditions": is_list_of(is_text),  # only where the data name any
    "class_counts": is_list_of(is_table_of(is_count)),  # train rows by class, only where targets are classes
}


def _is_federation(value: Any) -> bool:
    """Return whether a value describes clients, with lists of equal length."""
    if not isinstance(value, dict):
        return False
    lists = [key for key in _BY_CLIENT if key in value or key not in ("content", "conditions", "class_counts")]
    sound = is_count(value.get("clients")) and all(_BY_CLIENT[key](value.get(key)) for key in lists)
    sound = sound and is_list_of(is_text)(value.get("class_names", []))  # only where the data name any
    return sound and len({len(value[key]) for key in lists}) == 1


def _fault(name: str, row: dict[str, Any]) -> str:
    """Return the column that is missing or malformed in a row of the record file `name`, or nothing."""
    if not _REQUIRED[name] <= row.keys():
        return min(_REQUIRED[name] - row.keys())
    return next((column for column, sound in _SOUND[name].items() if column in row and not sound(row[column])), "")


def _parse(name: str, line: bytes) -> dict[str, Any] | None:
    """Parse a line of the record file `name`; return None for a damaged line."""
    try:
        row = _DECODER.decode(line.decode())
        _check_characters(line, row)
        if name == CLIENTS and "correct" in row:
            row = _with_metrics(row)
        return None if _fault(name, row) else row
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def _with_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a line with counts of correct answers to one with metrics."""
    correct, total = row["correct"], row["total"]
    if not 0 <= correct <= total:
        raise ValueError("more correct answers than rows")
    row["metrics"] = {"accuracy": [correct, total], "loss": [row["loss_sum"], total]}
    return {key: row[key] for key in COLUMNS[CLIENTS]}


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. `RunFolder(path)` only names them; `RunFolder.create(path)` makes the folder."""

    path: Path
    _sums: dict[str, tuple[int, Any]] = field(compare=False, repr=False)  # file -> bytes read, their running hash

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))
        object.__setattr__(self, "_sums", {})

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Make the folder (an existing one is left as it is) and check that it is writable."""
        folder = cls(path)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            if not os.access(folder.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(f"cannot write to the folder {path}: {reason}; choose another output") from error
        return folder

    def holds_run(self) -> bool:
        """Return whether a run was started here."""
        return (self.path / "config.toml").is_file()

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows to `name` (a key of `COLUMNS`) in one fsynced write, or leave the file unchanged."""
        if name not in COLUMNS:
            raise ValueError(f"no record file {name!r}; there are {', '.join(COLUMNS)}")
        lines = []
        for row in rows:
            wrong = (row.keys() ^ COLUMNS[name].keys()) - (_OPTIONAL - row.keys())
            if wrong:
                raise ValueError(f"a row of {name} has missing or unknown columns: {', '.join(sorted(wrong))}")
            row = _plain(row)
            if fault := _fault(name, row):
                raise ValueError(f"a row of {name} is malformed: {fault} is {row[fault]!r}")
            lines.append(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n")
        path, data = self.path / name, "".join(lines).encode()
        if not data:
            return
        try:
            is_new = not path.exists()
            with path.open("ab+", buffering=0) as file:
                good = _end_of_lines(file)
                file.truncate(good)
                digest = self._sum(name, good)
                try:
                    done = 0
                    while done < len(data):
                        done += file.write(data[done:]) or 0
                    os.fsync(file.fileno())
                except BaseException:
                    file.truncate(good)
                    raise
            digest.update(data)
            self._sums[name] = good + len(data), digest
            if is_new:
                fsync_folder(self.path)
        except OSError as error:
            raise write_error(path, error, RESUME) from error

    def offsets(self) -> dict[str, int]:
        """Return the length in bytes of each record file (0 for one not yet written), for `truncate`."""
        files = {name: self.path / name for name in COLUMNS}
        return {name: path.stat().st_size if path.exists() else 0 for name, path in files.items()}

    def sums(self, offsets: dict[str, int]) -> dict[str, str]:
        """Return the SHA-256 of each record file up to its offset; what was appended here is not read again."""
        return {name: self._sum(name, offset).hexdigest() for name, offset in offsets.items()}

    def _sum(self, name: str, offset: int) -> Any:
        """Return the running hash of a record file up to an offset, which is at most its length."""
        done, digest = self._sums.get(name, (0, hashlib.sha256()))
        if done > offset:  # it was cut back
            done, digest = 0, hashlib.sha256()
        if done < offset:
            digest = digest.copy()
            with open_regular(self.path / name) as file:
                file.seek(done)
                while done < offset and (piece := file.read(min(_PIECE, offset - done))):
                    digest.update(piece)
                    done += len(piece)
        self._sums[name] = done, digest
        return digest

    def verify(self, offsets: dict[str, int], sums: dict[str, str] | None) -> None:
        """Refuse record files that do not begin with what a checkpoint knows: their offsets and, if kept, `sums`."""
        cure = "restore the file or start the run again in another folder"
        sizes = self.offsets()
        for name, offset in offsets.items():
            path = self.path / name
            if name not in COLUMNS:
                raise ValueError(f"no record file {name!r}; there are {', '.join(COLUMNS)}")
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise UserError(f"{path} is no plain file; {cure}")
            try:
                if not 0 <= offset <= sizes[name] or not self._line_ends_at(name, offset):
                    raise UserError(f"{path} does not fit its checkpoint (no line ends at byte {offset}); {cure}")
                if sums is not None and self._sum(name, offset).hexdigest() != sums[name]:
                    raise UserError(f"{path} is not as the run wrote it{self._first_damage(name, offset)}; {cure}")
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}; {cure}") from error

    def changed(self) -> str:
        """Return how the records differ from what the newest checkpoint knows of them, or "".

        This finds damage and careless edits; whoever can change records can change checkpoints.
        """
        manifests = sorted(self.path.glob("checkpoints/*.json"), key=lambda path: (len(path.name), path.name))
        try:
            known = _read_json(manifests[-1])
            self.verify({name: int(known["offsets"][name]) for name in COLUMNS}, known["sums"])
        except UserError as error:
            return str(error)
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            pass  # there is none, or a resume will say what is wrong with it
        return ""

    def _first_damage(self, name: str, offset: int) -> str:
        """Return where a record file that was changed is no longer a record, if it is not."""
        damaged = (number for number, row in self._lines(name, offset) if row is None)
        if number := next(damaged, 0):
            return f": line {number} is damaged"
        return f": something in its first {offset} bytes was changed"

    def truncate(self, offsets: dict[str, int]) -> None:
        """Truncate all record files to `offsets`, or none of them if one does not fit."""
        self.verify(offsets, None)
        sizes = self.offsets()
        for name, offset in offsets.items():
            if offset == sizes[name]:
                continue
            try:
                with (self.path / name).open("rb+") as file:
                    file.truncate(offset)
                    os.fsync(file.fileno())
            except OSError as error:
                raise write_error(self.path / name, error, RESUME) from error

    def _line_ends_at(self, name: str, offset: int) -> bool:
        """Return whether a line of a record file ends at an offset, or it begins there."""
        if offset == 0:
            return True
        with open_regular(self.path / name) as file:
            file.seek(offset - 1)
            return file.read(1) == b"\n"

    def _lines(self, name: str, end: int | None = None) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield number and row of the whole lines of a record file, or of those before the byte `end`.

        The row of a damaged line is None. A line without an end in sight is damaged, and the last.
        """
        read = 0
        with open_regular(self.path / name) as file:
            for number in count(1):
                line = file.readline(_LONGEST + 1)
                read += len(line)
                if end is not None and read > end:
                    return
                if len(line) > _LONGEST:
                    yield number, None
                    return
                if not line.endswith(b"\n"):
                    return
                yield number, _parse(name, line)

    def _read(self, name: str, end: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of a record file, or those before the byte `end`; refuse a damaged one."""
        path = self.path / name
        if not self.path.is_dir():
            raise UserError(f"there is no run folder {self.path}; check the path")
        if not path.exists():
            return
        cure = "restore it or run the experiment again"
        try:
            for number, row in self._lines(name, end):
                if row is None:
                    raise UserError(f"{path} is damaged at line {number}; {cure}")
                yield row
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; {cure}") from error

    def rounds(self, end: int | None = None) -> list[dict[str, Any]]:
        """Return the lines of `rounds.jsonl`, or those before the byte `end`."""
        return list(self._read(ROUNDS, end))

    def timing(self) -> list[dict[str, Any]]:
        """Return the lines of `timing.jsonl`."""
        return list(self._read(TIMING))

    def clients(self) -> Iterator[dict[str, Any]]:
        """Iterate over the lines of `clients.jsonl`: there may be millions."""
        return self._read(CLIENTS)

    def federation(self) -> dict[str, Any] | None:
        """Return what `federation.json` says of the clients, None if there is no such file; refuse a damaged one."""
        path = self.path / FEDERATION
        if not os.path.lexists(path):
            return None
        told = self.read_json(FEDERATION)
        if not _is_federation(told):
            raise UserError(f"{path} is damaged; restore it or run the experiment again")
        return dict(told)

    def conditions(self) -> list[str]:
        """Return the condition of each client, by its id, that `federation.json` names; empty if it names none."""
        return list((self.federation() or {}).get("conditions", ()))

    def config(self) -> dict[str, Any]:
        """Return the resolved experiment, `config.toml`."""
        path = self.path / "config.toml"
        try:
            check_regular(path)
            return read_toml(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"cannot read {path}: {why}; give the folder of a run") from error

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` as indented JSON to the file `name`, atomically; NaN and infinities become null."""
        write_atomic(self.path / name, json.dumps(_plain(value), indent=2, allow_nan=False) + "\n", RESUME)

    def read_json(self, name: str) -> Any:
        """Return the value that `write_json` wrote."""
        path = self.path / name
        try:
            return _read_json(path)
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"cannot read {path}: {why}; restore it or run the experiment again") from error

    def export_parquet(self) -> list[Path]:
        """Write `rounds.parquet` and `clients.parquet`, atomically, and return their paths."""
        cohorts = (client for row in self.rounds() for client in row["cohort"])
        named = any(isinstance(client, str) for client in cohorts)
        named = named or any(isinstance(row["client"], str) for row in self.clients())
        return [self._export(name, "string" if named else "int64") for name in (ROUNDS, CLIENTS)]

    def _export(self, name: str, ids: str) -> Path:
        """Write a record file as parquet, where clients' ids are of the type `ids`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        def kind(name: str) -> Any:
            inner = pa.type_for_alias({"id": ids}.get(name.strip("[]"), name.strip("[]")))
            return pa.list_(inner) if name.startswith("[") else inner

        columns = {key: _TYPES.get(key, "int64") for key in COLUMNS[name] if key not in _NESTED}
        if name == ROUNDS:
            columns |= {key: _TYPES[key] for key in ("reasons", "evaluated.view", "evaluated.metric")}
        columns |= _nested_columns(self._read(name), "[float64]" if name == ROUNDS else "float64")
        schema = pa.schema([(key, kind(value)) for key, value in columns.items()])
        rows, sink = (_flat(row, ids == "string") for row in self._read(name)), BytesIO()
        try:
            with pq.ParquetWriter(sink, schema) as writer:
                while chunk := list(islice(rows, 50_000)):
                    writer.write_table(pa.Table.from_pylist(chunk, schema))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            why = next(iter(str(error).splitlines()), "")
            raise UserError(f"{self.path / name} cannot be exported ({why}): are its lines of one run?") from error
        path = (self.path / name).with_suffix(".parquet")
        write_atomic(path, sink.getvalue(), RESUME)
        return path


def _read_json(path: Path) -> Any:
    """Return the value of a JSON file; a ValueError says why it is none, an OSError that it cannot be read."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST:,} bytes")
        text = file.read()
    value = _DECODER.decode(text.decode())
    _check_characters(text, value)
    return value


def _check_characters(text: bytes, value: Any) -> None:
    """Raise a ValueError if a value that was read from JSON holds half a character, which no page can show."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a character") from None


def _nested_columns(rows: Iterable[dict[str, Any]], logged: str) -> dict[str, str]:
    """Return the type of each column an export makes from `metrics` and `logged`; `logged` is that of the latter."""
    metrics: dict[str, str] = {}
    values: set[str] = set()
    for row in rows:
        values |= row["logged"].keys()
        for name, (sums, _) in row.get("metrics", {}).items():
            metrics[name] = "[float64]" if isinstance(sums, list) else metrics.get(name, "float64")
    columns = {f"metric.{name}.{part}": kind for name, kind in metrics.items() for part in ("sum", "weight")}
    return columns | {f"logged.{name}": logged for name in sorted(values)}


def _flat(row: dict[str, Any], named: bool) -> dict[str, Any]:
    """Return a row of an export; with named clients every id is text, since a column has one type."""
    flat = row | {f"logged.{name}": value for name, value in row["logged"].items()}
    for name, (sums, weights) in row.get("metrics", {}).items():
        flat |= {f"metric.{name}.sum": sums, f"metric.{name}.weight": weights}
    flat |= {f"evaluated.{key}": value for key, value in row.get("evaluated", {}).items()}
    if "refused" in row:
        flat |= {"refused": list(row["refused"]), "reasons": list(row["refused"].values())}
    if named and "cohort" in row:
        flat["cohort"] = [str(client) for client in row["cohort"]]
    elif named:
        flat["client"] = str(row["client"])
    return flat


def _end_of_lines(file: Any) -> int:
    """Return the offset after the last newline of an open file; anything beyond is a torn line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65_536)
        file.seek(start)
        block = file.read(end - start)
        if (found := block.rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
