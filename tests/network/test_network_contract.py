"""The data contract of an experiment: what it may say, and clients' own files of every kind that keep it."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import same_tensors

import bespoke
from bespoke.core import tree
from bespoke.data.agreed import agreed, contract_of
from bespoke.errors import UserError
from bespoke.models.start import write_start
from bespoke.network.settings import FederationSettings
from bespoke.runs.agreement import agreement
from bespoke.runs.experiment import from_tables
from bespoke.runs.joining import member

PLAIN = {"name": "contract", "shape": [4], "num_classes": 3, "clients": 2}


def made(data=None, federation=None, **tables):
    """An experiment with a contract, from its tables; None removes a key."""
    given = {key: value for key, value in (PLAIN | (data or {})).items() if value is not None}
    tables = {"data": given, "model": {"name": "linear"}, "federation": federation or {}} | tables
    return from_tables(tables, "here")


def test_the_hash_covers_the_contract_and_not_how_the_server_waits():
    own = made().hash()
    assert made(federation={"quorum": 2, "round_timeout": 5, "interval": 1.5, "most_rows": 9}).hash() == own
    changes = {"shape": [5]}, {"dtype": "float64"}, {"num_classes": None, "class_names": ["a", "b", "c"]}
    more = {"clients": 3}, {"transform": ["flip"]}, {"validation": 0.1}, {"test": 0.3}
    assert len({own, *(made(data=change).hash() for change in (*changes, *more))}) == 8


def test_the_table_of_a_federation_is_written_only_where_it_says_something():
    assert "federation" not in made().tables() and "federation" not in bespoke.Experiment().tables()
    own = made(federation={"quorum": 2})
    assert from_tables(own.tables(), "there") == own and own.federation == FederationSettings(quorum=2)


WRONG = {
    "round_timeout": ({"round_timeout": 0}, r"round_timeout must be greater than 0 and at most 604,800, not 0.0"),
    "too long": ({"round_timeout": 1e9}, "round_timeout must be greater than 0 and at most 604,800, not 1000000000.0"),
    "quorum": ({"quorum": 0}, "quorum must be at least 1, not 0"),
    "interval": ({"interval": -1}, "interval must be greater than 0 and at most 60, not -1.0"),
    "most_rows": ({"most_rows": 0}, "most_rows must be at least 1, not 0"),
    "words": ({"quorum": "all"}, "quorum must be a whole number, not 'all'"),
    "unknown": ({"timeout": 5}, r"has no key 'timeout' \(did you mean 'round_timeout'\?\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_nonsense_in_the_federations_table_is_refused(case):
    table, why = WRONG[case]
    with pytest.raises(UserError, match=rf"^here: \[federation\] {why}"):
        made(federation=table)


def test_a_quorum_of_more_than_all_clients_is_refused():
    with pytest.raises(UserError, match=r"^\[federation\] quorum = 3 is more than the 2 clients of \[data\] clients"):
        agreement(made(federation={"quorum": 3}))


BROKEN = {
    "shape": ({"shape": None}, "needs the shape of one example"),
    "clients": ({"clients": None}, "needs the number of clients"),
    "features": ({"features": ["a", "b"], "label": "y"}, r"shape = \[4\], but features names 2 numbers"),
    "label": ({"shape": None, "features": ["a", "b"]}, "needs label"),
    "twice": ({"shape": None, "label": "y", "features": ["a", "b", "a"]}, "names a column or a class twice"),
    "mixed": ({"shape": None, "label": "y", "features": ["a=1", "a"]}, "has 'a' with a category and without"),
    "classes": ({"class_names": ["a", "b"]}, "num_classes = 3, but class_names has 2"),
    "targets": ({"targets": 2}, "targets = 2 means nothing beside classes"),
    "no classes": ({"num_classes": None}, "the objective 'classification' needs classes"),
    "path": ({"path": "rows.npz"}, "path = 'rows.npz' means nothing to data set contract"),
    "partition": ({"partition": "iid"}, "partition = 'iid' means nothing to a contract"),
    "new": ({"new_clients": 1}, "new_clients = 1 means nothing to a contract"),
    "pixel": ({"shape": [1, 4, 4], "dtype": "uint8", "normalise": "pixel"}, "needs all rows"),
    "size": ({"size": 8, "shape": [3, 9, 9], "dtype": "uint8"}, r"set dtype = \"uint8\" and shape = \[3, 8, 8\]"),
    "dtype": ({"dtype": "bfloat16"}, "dtype must be one of"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_contract_that_makes_no_sense_is_refused(case):
    data, why = BROKEN[case]
    with pytest.raises(UserError, match=why):
        agreement(made(data=data))


def test_a_simulation_is_no_contract():
    with pytest.raises(UserError, match='name = "digits" is for simulations'):
        agreement(bespoke.Experiment())


def test_both_sides_have_the_same_terms():
    one, two = agreement(made()).terms, agreement(made()).terms
    assert one.experiment == two.experiment == made().hash() and one.down == two.down
    assert same_tensors(tree.flatten(one.params), tree.flatten(two.params))


def test_other_start_weights_are_another_experiment(tmp_path):
    own = made(model={"name": "linear", "start": str(tmp_path / "start.safetensors")})
    names = []
    task = agreement(made()).terms.task
    for seed in (0, 0, 1):
        write_start(own.model.start, task.init(bespoke.rng.key(seed)), task)
        names.append(agreement(own).terms.experiment)
    assert names[0] == names[1] != names[2] and own.hash() not in names


# --- files --------------------------------------------------------------------------------------------------------


def test_a_table_keeps_the_columns_and_categories_of_the_contract(tmp_path):
    table = {
        "shape": None,
        "num_classes": None,
        "features": ["age", "sex=F", "sex=M", "weight"],
        "label": "ill",
        "class_names": ["no", "yes"],
    }
    own, path = made(data=table), tmp_path / "clinic.csv"
    assert contract_of(own.data).features == ("age", "sex=F", "sex=M", "weight")
    with path.open("w", newline="") as file:
        rows = [[str(20 + i), "FM"[i % 2], "70.5", ("no", "yes")[i // 5]] for i in range(10)]
        csv.writer(file).writerows([["age", "sex", "weight", "ill"], *rows])
    node = member(own, path, tmp_path / "home")
    assert node.rows["train"].x.shape == (8, 4) and node.rows["test"].x.shape == (2, 4)
    found = sorted(
        [*x.tolist(), y] for split in node.rows.values() for x, y in zip(split.x, split.y.tolist(), strict=True)
    )
    assert found[0] == [20.0, 1.0, 0.0, 70.5, 0] and found[-1] == [29.0, 0.0, 1.0, 70.5, 1]
    with pytest.raises(UserError, match=r"breaks the contract of the federation: .*'X'.*an unknown category"):
        path.write_text(path.read_text().replace(",M,", ",X,"))
        member(own, path, tmp_path / "home")


def test_pictures_keep_the_size_and_classes_of_the_contract(tmp_path):
    own = made(
        data={"shape": [1, 6, 6], "dtype": "uint8", "size": 6, "num_classes": None, "class_names": ["cat", "dog"]}
    )
    for word, level in (("cat", 0), ("dog", 200)):
        (tmp_path / "mine" / word).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((9, 9), level, np.uint8)).save(tmp_path / "mine" / word / f"{i}.png")
    node = member(own, tmp_path / "mine", tmp_path / "home")
    assert {split: len(rows.rows) for split, rows in node.rows.items()} == {"train": 6, "test": 2}
    assert all(int(x.max()) == 200 * int(y) for x, y in zip(node.rows["train"].x, node.rows["train"].y, strict=True))


def test_numbers_as_targets_and_rows_of_their_own_for_tests(tmp_path):
    data = {"num_classes": None, "targets": 2, "validation": 0.25}
    own = made(data=data, objective={"name": "regression"})
    assert agreed(own.data).y.shape == (0, 2) and agreement(own).terms.task.num_outputs == 2
    for name, n in (("train", 8), ("test", 3)):
        np.savez(tmp_path / f"{name}.npz", x=np.random.rand(n, 4).astype(np.float32), y=np.random.rand(n, 2))
    node = member(own, tmp_path / "train.npz", tmp_path / "home", test=tmp_path / "test.npz")
    assert {split: len(rows.rows) for split, rows in node.rows.items()} == {"train": 6, "val": 2, "test": 3}
    np.savez(tmp_path / "nan.npz", x=np.zeros((2, 4), np.float32), y=np.array([[0, 1], [0, np.nan]]))
    with pytest.raises(UserError, match="row 1 of y holds NaN"):
        member(own, tmp_path / "nan.npz", tmp_path / "home")
    with pytest.raises(UserError, match="2 numbers per row, but this model has 1"):
        member(made(data=data | {"targets": 1}, objective={"name": "regression"}), tmp_path / "train.npz", tmp_path)


def test_the_split_of_a_clients_rows_is_the_same_every_time(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(40.0, dtype=np.float32).reshape(10, 4), y=np.arange(10) % 3)
    one, two = (member(made(), tmp_path / "a.npz", tmp_path / "home").rows["test"].x for _ in range(2))
    other = member(replace(made(), seed=1), tmp_path / "a.npz", tmp_path / "home").rows["test"].x
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_scaling_by_name_is_part_of_the_contract(tmp_path):
    own = made(data={"shape": [3, 4, 4], "dtype": "uint8", "normalise": "cifar"})
    np.savez(tmp_path / "a.npz", x=np.full((5, 3, 4, 4), 255, np.uint8), y=np.arange(5) % 3)
    rows = member(own, tmp_path / "a.npz", tmp_path / "home").rows["train"]
    x, _ = rows.gather(torch.arange(2), bespoke.rng.key(0), train=False)
    assert float(x[0, 0, 0, 0]) == pytest.approx((1 - 0.4914) / 0.2470, abs=1e-5)
