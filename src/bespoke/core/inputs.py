"""The form of a model's inputs: columns, categories and classes by name, and new rows brought into that form."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bespoke.errors import UserError, reason, shown

MISSING = frozenset({"", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null"})  # spellings of "no value"
DTYPES = ("float32", "float64", "uint8", "int64")

_LARGEST = float(np.finfo(np.float32).max)
_MOST_NUMBERS, _MOST_AXES = 2**24, 32  # of one example: a file's word must not fill the memory
_CURE = "fill it in, or remove the row"
_DAMAGED = "a contract of inputs is damaged: get the file again"

Where = Callable[[int], str]  # the place of a row, such as "line 7 of a.csv"


def row_number(row: int) -> str:
    """Return the place of a row of a table in memory, counted from 0."""
    return f"row {row}"


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers, or one of the ``categories``, each of which becomes a feature of its own."""

    name: str
    categories: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of its features: its own, or one for each category, ``sex=F``."""
        return tuple(f"{self.name}={category}" for category in self.categories) or (self.name,)

    def encode(self, values: Any, where: Where) -> np.ndarray:
        """Return its features (n, F) of values (n,): the number as it is, or 1 for the row's category and 0 else."""
        if not self.categories:
            return numbers(self.name, values, where)[:, None]
        place = {category: i for i, category in enumerate(self.categories)}
        return np.eye(len(place), dtype=np.float32)[_places(self.name, values, place, where, "category")]


@dataclass(frozen=True)
class InputContract:
    """What a model's inputs are: the form of one example, and the names that the data gave to it.

    It goes through JSON unchanged, and turns new rows into inputs with :meth:`encode`.
    """

    shape: tuple[int, ...]  # of one example
    dtype: str  # one of DTYPES
    columns: tuple[Column, ...] = ()  # in the order of the features; none where examples are not rows of a table
    classes: tuple[str, ...] = ()  # the name of each class; none where targets are numbers, or have no names
    label: str = ""  # the column of the targets, where they came from a table
    resized: bool = False  # pictures of any size were resized to the shape

    def __post_init__(self) -> None:
        width = len(self.features)
        if self.columns and tuple(self.shape) != (width,):
            raise UserError(f"a contract's columns have {width} features, but its shape is {self.shape}")
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names) or len(set(self.classes)) < len(self.classes):
            raise UserError("a contract names a column or a class twice")

    @property
    def features(self) -> tuple[str, ...]:
        """Return the name of each feature of a table's row, in order."""
        return tuple(feature for column in self.columns for feature in column.features)

    def encode(self, rows: Any, where: Where = row_number) -> np.ndarray:
        """Return inputs x (n, ...) of new rows: columns by name (a dict, a data frame, an Arrow table) or an array.

        An unknown category, a missing column, a missing value, and an array of another form are refused.
        """
        names = rows.keys() if hasattr(rows, "keys") else getattr(rows, "column_names", None)
        if names is None:
            return self._checked(rows)
        if not self.columns:
            raise UserError(f"the inputs are {self._form()}, not rows of a table: give an array")
        absent = [column.name for column in self.columns if column.name not in names]
        if absent:
            raise UserError(f"the table has no column {absent[0]!r}, and the model needs {self._names()}: add it")
        parts = [column.encode(rows[column.name], where) for column in self.columns]
        lengths = {column.name: len(part) for column, part in zip(self.columns, parts, strict=True)}
        if len(set(lengths.values())) > 1:
            raise UserError(f"the columns have unequal lengths, {shown(lengths)}: give a value for every row")
        return np.concatenate(parts, axis=1).astype(self.dtype)

    def encode_labels(self, values: Any, where: Where = row_number) -> np.ndarray:
        """Return targets (n,) of a table's new rows: int64 class numbers of the classes' names, or float64 numbers."""
        name = self.label or "label"
        if not self.classes:
            return numbers(name, values, where)
        place = {category: i for i, category in enumerate(self.classes)}
        return _places(name, values, place, where, "class")

    def named(self, numbers: Any) -> list[str]:
        """Return the names of class numbers (n,); a class without a name is called by its number."""
        return [self.classes[i] if i < len(self.classes) else str(i) for i in np.asarray(numbers).tolist()]

    def class_values(self) -> np.ndarray | None:
        """Return the classes' names as numbers (C,), or None where they are words."""
        found = [as_number(name) for name in self.classes]
        return np.array(found, np.float64) if all(value is not None for value in found) else None

    def to_json(self) -> str:
        """Return the contract as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "InputContract":
        """Return the contract that :meth:`to_json` wrote; anything else is refused."""
        try:
            return InputContract.from_dict(json.loads(text))
        except (ValueError, RecursionError):
            raise UserError(_DAMAGED) from None

    @staticmethod
    def from_dict(given: Any) -> "InputContract":
        """Return the contract whose JSON was read as ``given``; anything else is refused."""
        try:
            shape, columns = tuple(given["shape"]), [(c["name"], tuple(c["categories"])) for c in given["columns"]]
            classes, dtype, label, resized = tuple(given["classes"]), given["dtype"], given["label"], given["resized"]
        except (LookupError, TypeError):
            raise UserError(_DAMAGED) from None
        texts = (dtype, label, *classes, *(text for name, words in columns for text in (name, *words)))
        whole = 0 < len(shape) <= _MOST_AXES and all(type(side) is int and side > 0 for side in shape)
        sound = whole and isinstance(resized, bool) and all(isinstance(text, str) for text in texts)
        if not sound or dtype not in DTYPES:
            raise UserError(_DAMAGED)
        if math.prod(shape) > _MOST_NUMBERS:
            raise UserError(f"a contract of inputs has more than {_MOST_NUMBERS:,} numbers per example: get it again")
        return InputContract(shape, dtype, tuple(Column(*column) for column in columns), classes, label, resized)

    def _checked(self, x: Any) -> np.ndarray:
        """Return examples (n, ...) that have the form of x already, in the contract's type."""
        x = as_reals(x, "x")
        if x.shape == self.shape:
            raise UserError(f"x is one example of shape {x.shape}, not a batch: give x[None]")
        if x.ndim != 1 + len(self.shape) or x.shape[1:] != self.shape:
            called = f", which are {', '.join(self.features)}" if self.columns else ""
            raise UserError(f"x has the shape {x.shape}, but this model takes {self._form()}{called}")
        if self.dtype == "uint8" and x.dtype != np.uint8:
            raise UserError(
                f"x is {x.dtype}, but this model takes uint8 and scales it itself: give the raw 8-bit numbers"
            )
        if self.dtype == "int64" and x.dtype.kind == "f":
            raise UserError(f"x is {x.dtype}, but this model takes tokens: give whole numbers")
        if self.dtype.startswith("float") and x.dtype == np.uint8:
            raise UserError(
                f"x is uint8, but this model takes {self.dtype}: scale it as the rows were that it learned from"
            )
        with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and is refused as such
            floats = x.astype(np.float32, copy=False) if x.dtype.kind == "f" else np.zeros((0, *self.shape))
        sound = np.isfinite(floats).reshape(len(floats), math.prod(self.shape)).all(axis=1)
        if not sound.all():
            raise UserError(
                f"row {int(sound.argmin())} of x holds NaN, infinity or a number beyond float32: fix or remove it"
            )
        return x.astype(self.dtype, copy=False)

    def _form(self) -> str:
        return f"{self.dtype} (rows, {', '.join(map(str, self.shape))})"

    def _names(self) -> str:
        return shown([column.name for column in self.columns], 200)


def as_array(values: Any, what: str) -> np.ndarray:
    """Return a list, an array or a tensor as an array; ``what`` it is starts the sentence on anything else."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # such as ragged lists
        raise UserError(f"{what} is not an array: {reason(error)}") from None


def as_reals(values: Any, what: str) -> np.ndarray:
    """Return a list, an array or a tensor of real numbers as an array; refuse other types."""
    found = as_array(values, what)
    if found.dtype.kind not in "fiub":
        raise UserError(f"{what} holds {found.dtype} values: give real numbers")
    return found


def as_number(text: str) -> float | None:
    """Return the number that a text spells, as programs write it, or None."""
    if "_" in text or not text.isascii():  # Python alone reads 1_000, and digits of all scripts
        return None
    try:
        return float(text)
    except ValueError:
        return None


def ordered(words: Sequence[str]) -> list[str]:
    """Return distinct words in order: by value if all are numbers, else by text."""
    values = {word: as_number(word) for word in set(words)}
    if all(value is not None and math.isfinite(value) for value in values.values()):
        return sorted(values, key=lambda word: (values[word], word))
    return sorted(values)


def numbers(name: str, values: Any, where: Where = row_number) -> np.ndarray:
    """Return a column's values (n,) as float64; refuse words, missing values, and what is beyond float32."""
    given = np.asarray(values)
    if given.ndim != 1:
        raise UserError(f"column {name!r} has shape {given.shape}: give one value for every row")
    if given.dtype.kind in "fiub":
        found = given.astype(np.float64)
    else:
        found = np.array([_number(name, value, where, row) for row, value in enumerate(given.tolist())], np.float64)
    for row in np.flatnonzero(~(np.abs(found) <= _LARGEST)).tolist():
        if math.isnan(found[row]):
            raise UserError(missing(name, where(row)))
        raise UserError(f"column {name!r} has {found[row]:g} in {where(row)}, beyond float32: correct it")
    return found


def missing(name: str, place: str) -> str:
    """Return the sentence on a cell without a value."""
    return f"column {name!r} has no value in {place}: {_CURE}"


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value: None, NaN, or one of the spellings in MISSING."""
    if isinstance(value, str):
        return value in MISSING
    return value is None or type(value).__name__ == "NAType" or bool(value != value)  # pandas's NA equals nothing


def _number(name: str, value: Any, where: Where, row: int) -> float:
    if is_missing(value):
        return math.nan
    found = as_number(value) if isinstance(value, str) else value if isinstance(value, int | float) else None
    if found is None:
        raise UserError(f"column {name!r} holds {shown(value)} in {where(row)}, which is no number: correct it")
    return float(found)


def _plain(value: Any) -> str:
    """Return a category or class as text: whole numbers without a point."""
    number = as_number(value) if isinstance(value, str) else value
    if isinstance(number, int | float | np.number) and not isinstance(value, bool):
        return str(int(number)) if math.isfinite(number) and number == int(number) else str(value)
    return str(value)


def _places(name: str, values: Any, place: dict[str, int], where: Where, kind: str) -> np.ndarray:
    """Return the numbers of categories or classes (n,) as int64."""
    values = np.asarray(values, dtype=object).tolist()  # Python's words, whatever holds them
    return np.array(
        [
            place[value] if type(value) is str and value in place else _place(name, value, place, where, row, kind)
            for row, value in enumerate(values)
        ],
        np.int64,
    )


def _place(name: str, value: Any, place: Mapping[str, int], where: Where, row: int, kind: str) -> int:
    """Return the number of a category or class that may be spelled in another way."""
    absent = is_missing(value)
    if isinstance(value, str) or not absent:  # None is never the word "None"
        found = place.get(str(value), place.get(_plain(value)))
        if found is not None:
            return found
    if absent:
        raise UserError(missing(name, where(row)))
    raise UserError(
        f"column {name!r} holds {shown(value)} in {where(row)}, an unknown {kind}: the model knows "
        f"{', '.join(shown(each, 30) for each in list(place)[:10])}{', ...' if len(place) > 10 else ''}"
    )
