"""Experiment files that are wrong in every way: one of them is an experiment, or is refused in one sentence."""

import dataclasses
import tempfile
from pathlib import Path
from unittest import mock

from fuzz_profile import hostile
from hypothesis import given
from hypothesis import strategies as st
from odd_settings import KINDS, OTHERS, SMALL, fitting, often, seldom, tables, values

from bespoke.algorithms import ALGORITHMS
from bespoke.core import memory
from bespoke.errors import UserError
from bespoke.runs import api
from bespoke.runs.experiment import load, to_toml

odd_lines = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            f"a = {3000 * '['}",
            f"a = {300 * '{a='}",
            f"{'.'.join(500 * 'a')} = 1",
            f"seed = {5000 * '9'}",
            f"seed = 0x{5000 * 'f'}",
            "seed = 1979-05-27T07:32:00Z",
            "[data.name]",
            "[[training]]",
            "[algorithm]",
            "algorithm = 'fedrep'",
            "training.lr = 3",
            '"" = 1',
            "#" + 300_000 * "x",
            "\x00",
            "\r",
        ]
    ),
)


@st.composite
def experiments(draw):
    """The text of a small experiment with some settings changed, and perhaps its characters as well."""
    found = {table: dict(values) if isinstance(values, dict) else values for table, values in SMALL.items()}
    found |= {table: dict(values) for table, values in draw(st.sampled_from(OTHERS)).items()}
    if draw(st.booleans()):
        found["algorithm"]["name"] = draw(st.sampled_from(list(ALGORITHMS)))
    for _ in range(draw(st.integers(0, 4))):
        table = draw(tables)
        fields = dataclasses.fields(KINDS[found["algorithm"]["name"] if table == "algorithm" else table])
        if fields and draw(often):
            field = draw(st.sampled_from(fields))
            found[table][field.name] = draw(fitting(field) if draw(often) else values)
        else:
            found[table][draw(st.text(min_size=1, max_size=5))] = draw(values)
    if draw(seldom):
        found[draw(st.sampled_from(list(found)))] = draw(values)
    text = to_toml({t: {_key(k): v for k, v in v.items()} if isinstance(v, dict) else v for t, v in found.items()})
    if draw(seldom):
        lines = text.split("\n")
        lines.insert(draw(st.integers(0, len(lines))), draw(odd_lines))
        text = "\n".join(lines)
    if draw(seldom):
        start, length = draw(st.integers(0, len(text))), draw(st.integers(0, 20))
        text = text[:start] + draw(st.text(max_size=5)) + text[start + length :]
    return text


def _key(name):
    return name if name.isidentifier() and name.isascii() else to_toml({"x": name}).strip().removeprefix("x = ")


def refused(action):
    """The result of an action, or None where it is refused in one sentence."""
    try:
        return action()
    except UserError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 3000, str(error)
        return None


@hostile()
@given(experiments(), st.sampled_from([None, None, "fedrep", "FedRep", "nothing", "os:system"]))
def test_any_text_is_an_experiment_or_is_refused(text, algorithm):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.toml"
        path.write_bytes(text.encode(errors="surrogatepass"))
        read = refused(lambda: load(path, algorithm))
        if read is None:
            return
        found = read[0]
        assert load(path, algorithm)[0].hash() == found.hash()
        path.write_text(found.toml())
        assert load(path)[0] == found
        with mock.patch.object(api, "execute", lambda *_: "ready"), mock.patch.object(memory, "free", lambda: 2e8):
            refused(lambda: api.run(found, Path(folder) / "run", device="cpu"))
        assert not (Path(folder) / "run").exists()
