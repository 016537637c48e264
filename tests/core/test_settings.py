"""Every number has bounds: what no run can hold is refused in one sentence before anything is made of it."""

import dataclasses
import math
import typing

import pytest
from odd_settings import TABLES
from small_runs import write

import bespoke
from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.core.settings import knob, problem
from bespoke.errors import UserError, shown
from bespoke.runs.experiment import load

# As TOML text: beyond a counter, beyond a float32, no number, and beyond what Python reads or writes as digits.
ABSURD = (
    "1" + 40 * "0",
    "-1" + 40 * "0",
    "1e300",
    "nan",
    "inf",
    "-inf",
    5000 * "9",
    "0x" + 5000 * "f",
    "1" + 400 * "0",
)
KNOBS = [(table, None, field) for table, kind in TABLES.items() for field in dataclasses.fields(kind)]
KNOBS += [("algorithm", name, field) for name in ALGORITHMS for field in dataclasses.fields(method_class(name))]


@pytest.mark.parametrize(("table", "method", "field"), KNOBS, ids=lambda part: getattr(part, "name", part))
def test_every_setting_refuses_absurd_numbers(table, method, field, tmp_path):
    path = tmp_path / "x.toml"
    for text in ABSURD:
        path.write_text(f"[{table}]\n" + (f'name = "{method}"\n' if method else "") + f"{field.name} = {text}\n")
        with pytest.raises(UserError) as caught:
            load(path)
        found = str(caught.value)
        assert str(path) in found and "\n" not in found and len(found) < len(str(path)) + 500
        if len(text) < 500:
            assert f"[{table}] {field.name} must be" in found


def test_every_setting_keeps_its_default():
    for _, name, field in KNOBS:
        default = getattr(ALGORITHMS[name](), field.name) if name else field.default
        assert problem(field, default) == ""


@dataclasses.dataclass(frozen=True)
class Mine:
    whole: int = knob(1, "no bounds")
    real: float = knob(1.0, "no bounds")
    rate: float = knob(0.5, "a share", above=0, high=1)
    several: tuple[int, ...] = knob((), "numbers", low=0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("whole", 2**31, "must be at least -2,147,483,647 and at most 2,147,483,647, not 2147483648"),
        ("whole", 2**31 - 1, ""),
        ("real", math.nan, "must be at least -3.4e+38 and at most 3.4e+38, not nan"),
        ("real", -1e39, "must be at least -3.4e+38 and at most 3.4e+38, not -1e+39"),
        ("real", 10**400, "must be at least -3.4e+38 and at most 3.4e+38, not 1" + 76 * "0" + "..."),
        ("real", 10**10, ""),
        ("real", 0.0, ""),
        ("real", 1e-40, "must be 0 or at least 1.2e-38 in size, not 1e-40"),
        ("rate", 1e-300, "must be at least 1.2e-38 in size, not 1e-300"),
        ("rate", 2.0, "must be greater than 0 and at most 1, not 2.0"),
        ("several", (1, 2), ""),
        ("several", (1, -2), "must be at least 0, not -2"),
        ("several", (10**30,), "must be at least 0 and at most 2,147,483,647, not 1000000000000000000000000000000"),
    ],
)
def test_the_bounds_in_words(name, value, words):
    (field,) = (f for f in dataclasses.fields(Mine) if f.name == name)
    assert problem(field, value) == words


def test_a_setting_of_python_has_the_same_bounds(tmp_path):
    for text, value in (("1" + 40 * "0", 10**40), ("1e300", 1e300)):
        with pytest.raises(UserError) as typed:
            load(write(tmp_path / "x.toml"), overrides=[f"training.lr={text}"])
        with pytest.raises(UserError) as given:
            bespoke.Experiment(training=bespoke.Training(lr=value))
        assert str(typed.value).endswith(str(given.value))
    with pytest.raises(UserError, match=r"Ditto: lam must be at least 0 and at most 3\.4e\+38, not 1e\+300"):
        bespoke.Ditto(lam=1e300)


def test_any_value_is_shown_in_one_short_line():
    deep: typing.Any = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, 10**5000, "x" * 1000, "a\nb", list(range(1000)), {"a": deep}):
        assert len(shown(value)) <= 80 and "\n" not in shown(value)
    assert shown("fedavg") == "'fedavg'"
