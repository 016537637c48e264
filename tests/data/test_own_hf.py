"""Clients from Hugging Face data sets; those of the package itself are tried where the extra hf is installed."""

import io
import sys

import pyarrow as pa
import pytest
from PIL import Image

from bespoke.core.inputs import Column, InputContract
from bespoke.data import DataSettings, federate_data, from_hf
from bespoke.errors import UserError


class ClassLabel:
    def __init__(self, names):
        self.names = names


ImageFeature = type("Image", (), {})


class Split:
    """What is used of a ``datasets.Dataset``: an Arrow table and the types of its columns."""

    def __init__(self, columns, features=None):
        self.table = pa.table(columns)
        self.column_names = self.table.column_names
        self.features = dict.fromkeys(self.column_names) | (features or {})

    def with_format(self, kind):
        assert kind == "arrow"
        return self

    def __getitem__(self, rows):
        assert rows == slice(None)
        return self.table


ROWS = {"site": [2, 1, 2], "age": [30, 41, 52], "sex": ["F", "M", "F"], "y": [1, 0, 1]}


def test_a_table_by_its_column_of_clients():
    found = from_hf(Split(ROWS, {"y": ClassLabel(["well", "ill"])}), client="site", label="y")
    columns = (Column("age"), Column("sex", ("F", "M")))
    assert found.contract == InputContract((3,), "float32", columns, ("ill", "well"), "y")
    assert {name: (x.tolist(), y.tolist()) for name, (x, y) in found.items()} == {
        "1": ([[41, 0, 1]], [1]),
        "2": ([[30, 1, 0], [52, 1, 0]], [0, 0]),
    }


def png(level, size=(4, 4)):
    file = io.BytesIO()
    Image.new("L", size, level).save(file, "PNG")
    return file.getvalue()


def images(*cells, **more):
    columns = {"who": ["b", "a", "b"], "image": list(cells), "digit": [7, 3, 3], **more}
    return Split(columns, {"image": ImageFeature()})


def test_images_by_their_column_of_clients(tmp_path):
    (tmp_path / "there.png").write_bytes(png(30))
    cells = [{"bytes": png(10), "path": None}, {"bytes": png(20), "path": "x.png"}]
    cells.append({"bytes": None, "path": str(tmp_path / "there.png")})
    found = from_hf(images(*cells), client="who", label="digit")
    assert found.contract == InputContract((1, 4, 4), "uint8", classes=("3", "7"), label="digit")
    assert {name: (x[:, 0, 0, 0].tolist(), y.tolist()) for name, (x, y) in found.items()} == {
        "a": ([20], [0]),
        "b": ([30, 10], [0, 1]),
    }
    assert from_hf(images(*cells), client="who", label="digit", size=2)["b"][0].shape == (2, 1, 2, 2)
    with pytest.raises(UserError, match="column 'image' holds images, which cannot be mixed with others"):
        from_hf(images(*cells, age=[1, 2, 3]), client="who", label="digit")
    cells[1] = {"bytes": b"GIF89a", "path": None}
    with pytest.raises(UserError, match="row 1 of the data set is truncated or damaged"):
        from_hf(images(*cells), client="who", label="digit")


@pytest.mark.parametrize(
    ("dataset", "arguments", "sentence"),
    [
        ({"train": 1}, {"client": "site", "label": "y"}, "takes one split of a datasets.Dataset, not {'train': 1}"),
        (Split(ROWS), {"client": "", "label": "y"}, "client is empty"),
        (Split(ROWS), {"client": "sit", "label": "y"}, r"has no column 'sit' \(did you mean 'site'\?\)"),
        (
            Split(ROWS | {"age": [1, None, 2]}),
            {"client": "site", "label": "y"},
            "'age' has no value in row 1 of the data",
        ),
        (Split(ROWS, {"y": ClassLabel(["well"])}), {"client": "site", "label": "y"}, "'y' has no value in row 0 of"),
    ],
)
def test_unfit_data_sets(dataset, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        from_hf(dataset, **arguments)


def test_without_the_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'needs the package datasets: pip install "bespoke-fl\[hf\]"'):
        federate_data(DataSettings(name="hf", path=str(tmp_path), client="site", label="y"), 0)


@pytest.mark.filterwarnings("default")
def test_the_package_s_own_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")
    label = datasets.ClassLabel(names=["well", "ill"])
    rows = datasets.Dataset.from_dict(ROWS).cast_column("y", label)
    rows.save_to_disk(str(tmp_path / "rows"))
    pool = federate_data(DataSettings(name="hf", path=str(tmp_path / "rows"), client="site", label="y"), 0)
    assert pool.names == ("1", "2") and pool.contract == from_hf(rows, client="site", label="y").contract
    assert pool.contract.classes == ("ill", "well")
    cells = [{"bytes": png(level), "path": None} for level in (1, 2, 3)]
    pictures = datasets.Dataset.from_dict({"who": ["a", "b", "b"], "image": cells, "y": [0, 1, 0]})
    pictures = pictures.cast_column("image", datasets.Image())
    found = from_hf(pictures, client="who", label="y")
    assert found["b"][0][:, 0, 0, 0].tolist() == [3, 2] and found.contract.shape == (1, 4, 4)
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "splits"))
    for path, sentence in (("splits", r"holds several splits, \['train'\]"), ("no", "no folder"), ("", "no folder")):
        with pytest.raises(UserError, match=sentence):
            federate_data(DataSettings(name="hf", path=path and str(tmp_path / path), client="site", label="y"), 0)
