"""Command lines that are wrong in every way end in a result or in one sentence, never in a traceback."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

from fuzz_profile import hostile
from hypothesis import given
from hypothesis import strategies as st
from odd_settings import KINDS, NAMES, TABLES, values
from small_runs import command, write

from bespoke.algorithms import ALGORITHMS
from bespoke.core import memory
from bespoke.data.home import VARIABLE
from bespoke.errors import UserError
from bespoke.runs import api
from bespoke.runs.experiment import to_toml

RUNS = Path(__file__).parents[1] / "report" / "old_run"
OPTIONS = [
    *("--algorithm", "--set", "--backend", "--device", "--precision", "--states", "--seed", "--seeds", "--out"),
    *(
        "--save-models",
        "--resume",
        "--checkpoint-every",
        "--threads",
        "--log",
        "--quiet",
        "--json",
        "-q",
        "-h",
        "--help",
    ),
    *("--baseline", "--select", "--view", "--group", "--metric", "--chart", "--curves", "--markdown", "--trust"),
    *("--lr", "--rounds", "--version", "--", "-", "--sed"),
]
WORDS = [
    *("run", "compare", "list", "data", "show", "import", "fetch", "algorithms", "models", "datasets", "experiments"),
    *("x.toml", "bad.toml", "runs", "runs/fedavg", "runs/fedavg/config.toml", "empty", "nothing", "no/x.png", "x.png"),
    *("x.svg", ".", "", "/dev/null", "/proc/none", "~", "a" * 300, "a" * 5000, "x\ny", "demo", "cpu", "cuda"),
    *("cuda:7", "meta", "loop", "batched", "disk", "host", "fp32", "tf32", "0", "1", "-1", "1.5", "nan"),
    *("1e400", "9" * 30, "9" * 5000, "²", "last", "best_val", "personal", "new", "loss", "accuracy", "caf\udce9", "[]"),
    *("mnist", "cifar10", "digits"),
]
words = st.one_of(
    st.sampled_from(WORDS), st.sampled_from(NAMES), st.text(st.characters(exclude_characters="\0"), max_size=8)
)
keys = sorted(
    {f"{t if t in TABLES else 'algorithm'}.{key}" for t, kind in KINDS.items() for key in kind.__dataclass_fields__}
)
STARTS = [
    *(["run", "x.toml", "--algorithm"], ["run", "x.toml"], ["run", "x.toml", "--quiet"], ["run"], ["compare", "runs"]),
    *(
        ["compare"],
        ["list"],
        ["data", "show", "x.toml"],
        ["data", "import"],
        ["data", "fetch"],
        ["data", "list"],
        ["data"],
    ),
    [],
]


@st.composite
def settings(draw):
    """A word for --set: of a known setting or any other, with a value of any kind."""
    value = draw(values)
    text = draw(words) if draw(st.booleans()) else to_toml({"x": value}).strip().removeprefix("x = ")
    return f"{draw(st.one_of(st.sampled_from(keys), words))}={text}"


@st.composite
def lines(draw):
    """The words after ``bespoke``."""
    line = list(draw(st.sampled_from(STARTS)))
    if line[-1:] == ["--algorithm"]:
        line.append(draw(st.sampled_from(list(ALGORITHMS))))
    for _ in range(draw(st.integers(0, 3))):
        option = draw(st.one_of(st.sampled_from(OPTIONS), st.just("--set"), st.none()))
        line += [] if option is None else [option]
        line.append(draw(settings()) if option == "--set" else draw(words))
    return line


def unreachable(*_, **__):
    raise UserError("nothing is downloaded here")


@hostile()
@given(lines())
def test_any_command_line_ends_in_a_result_or_a_sentence(line):
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write(home / "x.toml")
        (home / "bad.toml").write_text("seed = 'x'")
        (home / "empty").mkdir()
        shutil.copytree(RUNS, home / "runs")
        os.chdir(home)
        try:
            with (
                mock.patch.object(memory, "free", lambda: 2e8),
                mock.patch.object(api, "execute", unreachable),
                mock.patch("pooch.retrieve", unreachable),
                mock.patch.dict(os.environ, {VARIABLE: str(home / "store")}),
                mock.patch.object(sys, "path", list(sys.path)),
            ):
                done = command(*line)
        finally:
            os.chdir(before)
    assert done.code in (0, 1, 2), (line, done)
    assert "Traceback" not in done.err
    if done.code:
        assert len(done.err.splitlines()) <= 4 or "Usage" in done.err, (line, done)
