"""``data show``: the numbers of a federation, its text, and the bubble chart."""

import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from bespoke.cli.show import describe, show
from bespoke.data import DataSettings, Partition, pool_of
from bespoke.data.sources import store
from bespoke.errors import UserError
from bespoke.report.bubbles import bubble_chart
from bespoke.runs.experiment import load, shipped

PFEDFDA = [name for name in shipped() if name.startswith("pfedfda/cifar")]


def small():
    """Three clients, the last one new; rows 0..11, classes 0, 1, 2, 3."""
    y = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3])
    train = [np.array([0, 1, 4]), np.array([6, 7, 8]), np.array([9])]
    test = [np.array([2, 5]), np.array([10]), np.array([11])]
    val = [np.array([3]), np.array([], int), np.array([], int)]
    pool = pool_of(np.zeros((12, 2)), y, train, test, val, num_classes=4, new_clients=1)
    return describe("mine", "toy", pool, Partition([np.arange(6)] * 3, 17, conditions=("clean", "fog:3", "clean")))


def test_the_numbers_are_those_counted_by_hand():
    found = small()
    assert found.counts.tolist() == [[4, 2, 0, 0], [0, 0, 3, 1], [0, 0, 0, 2]]
    assert (found.clients, found.new_clients, found.rows, found.num_classes) == (3, 1, 12, 4)
    assert found.sizes == (2, 4.0, 6)
    assert found.train_sizes == (1, 3.0, 3)
    assert found.test_sizes == (1, 1.0, 2)
    assert found.classes == (1, 5 / 3, 2)
    assert found.single_class == 1
    assert found.few == pytest.approx(1.0)  # class 1; class 3; class 3
    assert found.test_only == pytest.approx(1 / 3)  # class 3 of the second client
    everyone = np.array([4, 2, 3, 3]) / 12
    apart = [np.abs(np.array(own) / sum(own) - everyone).sum() / 2 for own in found.counts.tolist()]
    assert found.skew == pytest.approx(np.mean(apart))
    assert found.tries == 17 and len(found.partition) == 16


def test_the_text_says_it_all():
    text = small().text()
    for part in (
        "mine: toy, 12 rows of 4 classes",
        "3 (1 of them new)",
        "2 to 6, median 4",
        "mean 1.67; clients with only one: 1",
        "tries              17",
        "2 x clean, 1 x fog:3",
        "new clients        1: 2 (clean)\n",
        small().partition,
    ):
        assert part in text
    assert json.loads(json.dumps(small().as_dict()))["counts"] == [[4, 2, 0, 0], [0, 0, 3, 1], [0, 0, 0, 2]]


def test_a_shipped_experiment_is_shown_with_its_chart(tmp_path):
    found = show("demo", tmp_path / "demo.png", ["data.clients=5", "data.validation=0.1"], seed=3)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert found.clients == 5 and found.rows == 1797
    assert found.counts.sum(axis=0).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert found.partition != show("demo", None, ["data.clients=5"], seed=3).partition
    with pytest.raises(UserError, match="no experiment file 'nothing'"):
        show("nothing")


def test_a_bubble_stands_for_every_client_and_class_with_rows(tmp_path):
    counts = np.array([[5, 0, 20], [0, 10, 0]])
    path = bubble_chart(counts, tmp_path / "chart.svg", "A title with $", "A subtitle.")
    text = path.read_text()
    assert text.count("<use ") >= 3
    assert "stands for 20 rows" in text
    again = bubble_chart(counts, tmp_path / "again.svg", "A title with $", "A subtitle.")
    assert again.read_text() == text  # the same chart gives the same bytes
    assert bubble_chart(counts[:, :2], tmp_path / "other.svg", "A title with $", "A subtitle.").read_text() != text


def test_the_area_of_a_bubble_is_in_proportion_to_its_rows(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    seen = []
    plain = Axes.scatter

    def scatter(self, *args, **keys):
        seen.append((np.asarray(args[0]), np.asarray(args[1]), np.asarray(keys["s"])))
        return plain(self, *args, **keys)

    monkeypatch.setattr(Axes, "scatter", scatter)
    bubble_chart(np.array([[5, 0, 20], [0, 10, 0]]), tmp_path / "chart.png", "", "")
    ((x, y, area),) = seen
    assert (x.tolist(), y.tolist()) == ([0, 0, 1], [0, 2, 1])
    assert (area / area.max()).tolist() == [0.25, 1.0, 0.5]


def test_charts_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.png, \.svg or \.pdf"):
        bubble_chart(np.ones((2, 2), int), tmp_path / "chart.gif", "", "")
    with pytest.raises(UserError, match="nothing to draw"):
        bubble_chart(np.zeros((2, 2), int), tmp_path / "chart.png", "", "")


def test_the_chart_needs_no_torch():
    script = "import sys, bespoke.report.bubbles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


@pytest.mark.parametrize("name", PFEDFDA)
def test_the_papers_settings(name):
    loaded, _ = load(name)
    data, training = loaded.data, loaded.training
    assert (data.pool, data.partition, data.clients, data.min_rows, data.test) == (
        "train+test",
        "dirichlet",
        100,
        63,
        0.2,
    )
    assert f"dir{data.alpha:g}" in name and name.split("/")[1].startswith(data.name)
    assert (training.rounds, training.epochs, training.batch, training.last_batch) == (200, 5, 50, "drop")
    assert (training.lr, training.momentum, training.weight_decay) == (0.01, 0.5, 5e-4)
    assert (training.sampling, training.rate, training.full_last) == ("bernoulli", 0.3, True)
    assert loaded.model.name == "cifar_cnn"
    assert data.corrupt == ("cifar_s" if "s_dir" in name else "")


def test_there_are_six_of_them():
    assert len(PFEDFDA) == 6


@pytest.mark.skipif(not store.holds("cifar10"), reason="CIFAR-10 is not in the folder of data sets")
def test_the_papers_federation_on_the_real_cifar10():
    found = show("pfedfda/cifar10_dir0.5", overrides=["data.replay=42"])
    assert (found.sizes, found.tries) == ((213, 609.0, 1036), 1)
    assert found.counts[0].tolist() == [36, 10, 56, 2, 5, 218, 10, 83, 107, 111]
    assert (round(found.classes[1], 2), round(found.few, 2)) == (8.34, 0.86)
    mine = show("pfedfda/cifar10_dir0.5")
    assert 64 <= mine.sizes[0] <= 262 and 600 <= mine.sizes[1] <= 637 and 926 <= mine.sizes[2] <= 1793
    assert 7.8 <= mine.classes[1] <= 8.5 and 0.6 <= mine.few <= 1.0


@pytest.mark.skipif(not store.holds("cifar100"), reason="CIFAR-100 is not in the folder of data sets")
@pytest.mark.parametrize(("alpha", "sizes", "first"), [(0.5, (480, 605.0, 759), 600), (0.1, (295, 613.0, 768), 443)])
def test_the_papers_federation_on_the_real_cifar100(alpha, sizes, first):
    found = show(f"pfedfda/cifar100_dir{alpha}", overrides=["data.replay=42"])
    assert found.sizes == sizes and found.counts[0].sum() == first


def test_settings_have_a_line_each():
    assert all(f.metadata["doc"] for f in DataSettings.__dataclass_fields__.values())


def test_own_tables_are_shown_with_the_names_of_features_and_classes(tmp_path, monkeypatch):
    (tmp_path / "here" / "sites").mkdir(parents=True)
    for name in ("b", "a"):
        states = ("ill", "well", "a\x1b")
        lines = [f"{i},{'FM'[i % 2]},{states[i % 3]}" for i in range(12)]
        (tmp_path / "here" / "sites" / f"{name}.csv").write_text("\n".join(["age,sex,state", *lines]))
    path = tmp_path / "here" / "own.toml"
    path.write_text('[data]\nname = "csv"\npath = "sites/*.csv"\nlabel = "state"\n')
    monkeypatch.chdir(tmp_path)
    found = show(str(path))
    assert (found.features, found.class_names) == (("age", "sex=F", "sex=M"), ("a\x1b", "ill", "well"))
    assert found.text().splitlines()[-3:] == [
        "features           3: age, sex=F, sex=M",
        "class names        3: a\\x1b, ill, well",
        "note               whole numbers are read as float32 in the columns age",
    ]
    assert json.loads(json.dumps(found.as_dict()))["class_names"] == ["a\x1b", "ill", "well"]


def test_own_parquet_files_and_pictures_are_shown(tmp_path, monkeypatch):
    table = {"age": [20.5, 30.5, 40.5, 50.5], "site": ["b", "a", "b", "a"], "state": ["ill", "well", "well", "ill"]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "own.parquet")
    for client in "ab":
        for label in ("clear", "shadow"):
            (tmp_path / "scans" / client / label).mkdir(parents=True)
            for i in range(3):
                image = Image.fromarray(np.full((4, 5), 10 * i, np.uint8))
                image.save(tmp_path / "scans" / client / label / f"{i}.png")
    tables = {
        "own.parquet": 'name = "parquet"\nlabel = "state"\nclient = "site"',
        "scans": 'name = "image_folder"\ntransform = ["flip", "nowhere:noise"]',
    }
    for name, lines in tables.items():
        (tmp_path / f"{name}.toml").write_text(f'[data]\npath = "{name}"\n{lines}\n')
    monkeypatch.chdir("/")
    found = show(str(tmp_path / "own.parquet.toml"))
    assert (found.features, found.class_names, found.rows) == (("age",), ("ill", "well"), 4)
    found = show(str(tmp_path / "scans.toml"))  # no module is imported
    assert (found.features, found.class_names, found.rows, found.clients) == ((), ("clear", "shadow"), 12, 2)
