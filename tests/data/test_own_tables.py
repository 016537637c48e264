"""Clients from CSV and Parquet tables, and what is wrong with tables in one sentence."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import bespoke
from bespoke.core.inputs import Column, InputContract
from bespoke.data import DataSettings, federate_data, from_arrays, from_csv, from_parquet, read_rows
from bespoke.errors import UserError

HEADER = "age,sex,bmi,outcome\n"
ROWS = ["30,F,21.5,well", "41,M,30,ill", "52,F,28.25,ill", "63,M,22,well"]


def write(path, *lines, header=HEADER, encoding="utf-8"):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes((header + "\n".join(lines) + "\n").encode(encoding))
    return path


@pytest.fixture
def hospitals(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / "clients" / f"{name}.csv", *ROWS[: 3 if name == "a" else 4])
    return str(tmp_path / "clients" / "*.csv")


CONTRACT = InputContract(
    (4,), "float32", (Column("age"), Column("sex", ("F", "M")), Column("bmi")), ("ill", "well"), "outcome"
)
X = [[30, 1, 0, 21.5], [41, 0, 1, 30], [52, 1, 0, 28.25], [63, 0, 1, 22]]


def test_a_client_per_file(hospitals):
    found = from_csv(hospitals, label="outcome")
    assert list(found) == ["a", "b"] and found.contract == CONTRACT
    assert found.contract.features == ("age", "sex=F", "sex=M", "bmi")
    x, y = found["b"]
    assert x.dtype == np.float32 and x.tolist() == X and y.tolist() == [1, 0, 0, 1]
    assert found["a"][0].tolist() == X[:3]
    assert found.notes == ("whole numbers are read as float32 in the columns age",)
    assert "2 clients ['a', 'b'], 7 rows of shape (4,), classes ['ill', 'well']" in repr(found)


def test_clients_by_a_column_in_their_order(tmp_path):
    path = write(tmp_path / "all.csv", "10,1.5,x", "2,2.5,y", "10,3.5,x", "1,4.5,y", header="site,v,kind\n")
    found = from_csv(path, client="site", label="kind")
    assert list(found) == ["1", "2", "10"]
    assert {name: x[:, 0].tolist() for name, (x, _) in found.items()} == {"1": [4.5], "2": [2.5], "10": [1.5, 3.5]}
    again = write(tmp_path / "more.csv", "2,9.5,x", "north,8.5,x", header="site,v,kind\n")
    found = from_csv([path, again], client="site", label="kind")
    assert list(found) == ["1", "10", "2", "north"] and found["2"][0][:, 0].tolist() == [2.5, 9.5]


def test_chosen_and_categorical_features(tmp_path):
    path = write(tmp_path / "a.csv", "1,,7,x,9", "2,NA,8,NA,9", "10,q,7,z,8", header="code,rest,v,w,y\n")
    found = from_csv(path, label="y", features=["w", "v", "code"], categorical=["code", "w"])
    assert [c.name for c in found.contract.columns] == ["w", "v", "code"]
    assert found.contract.columns[0].categories == ("NA", "x", "z")  # declared: only an empty cell has no value
    assert found.contract.columns[2].categories == ("1", "2", "10")
    assert found["a"][0][1].tolist() == [1, 0, 0, 8, 0, 1, 0]
    assert found.contract.classes == ("8", "9")


@pytest.mark.parametrize(
    ("labels", "classes", "y"),
    [
        (["b", "a", "10"], ("10", "a", "b"), [2, 1, 0]),
        (["2", "10", "2.0"], ("2", "10"), [0, 1, 0]),
        (["-1", "1", "1"], ("-1", "1"), [0, 1, 1]),
        (["1.5", "2", "3"], (), [1.5, 2, 3]),
    ],
)
def test_labels(tmp_path, labels, classes, y):
    found = from_csv(write(tmp_path / "a.csv", *(f"1.5,{label}" for label in labels), header="x,y\n"), label="y")
    assert found.contract.classes == classes and found["a"][1].tolist() == y


def test_odd_but_sound_text(tmp_path):
    text = '\ufeff"age", "a ""name"", it is",y \r\n 1.5 , "x, y",1\r\n\r\n2e1,"two\nlines",0\r\n'
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())
    found = from_csv(path, label="y")
    assert [column.name for column in found.contract.columns] == ["age", 'a "name", it is']
    assert found.contract.columns[1].categories == ("two\nlines", "x, y")
    assert found["a"][0].tolist() == [[1.5, 0, 1], [20, 1, 0]]


def test_many_rows_are_read_in_blocks(tmp_path):
    lines = [f"{i}.5,{'ab'[i % 2]},{i % 3}" for i in range(9000)]
    x, y = from_csv(write(tmp_path / "a.csv", *lines, header="v,w,y\n"), label="y")["a"]
    assert (x[:, 0] == np.arange(9000) + 0.5).all() and (y == np.arange(9000) % 3).all()
    assert (x[:, 2] == np.arange(9000) % 2).all()
    lines[8999] = "late,a,0"
    with pytest.raises(UserError, match=r"number '0.5' \(line 2 of .*a.csv\) and the word 'late' \(line 9001 of"):
        from_csv(write(tmp_path / "a.csv", *lines, header="v,w,y\n"), label="y")


BAD_CELLS = [
    ("40,,21,ill", r"column 'sex' has no value in line 6 of .*a\.csv: fill it in, or remove the row"),
    ("NA,F,21,ill", r"column 'age' has no value in line 6 of"),
    ("nan,F,21,ill", r"column 'age' has no value in line 6 of"),
    ("40,F,21,", r"column 'outcome' has no value in line 6 of"),
    ("inf,F,21,ill", r"column 'age' has inf in line 6 of .*beyond float32"),
    ("40,F,1e39,ill", r"column 'bmi' has 1e\+39 in line 6 of"),
    ("old,F,21,ill", r"'age' holds the number .*30.* \(line 2 .*\) and the word 'old' \(line 6 .*categorical"),
    ("1_0,F,21,ill", r"the word '1_0' \(line 6"),
    ("40,7,21,ill", r"'sex' holds the number '7' \(line 6 .*\) and the word 'F' \(line 2"),
    ('40,F,"21,5",ill', r"the word '21,5' \(line 6"),
    ("40,F,21", r"a\.csv, line 6: 3 cells under 4 names: correct the line"),
    ("40,F,21,5,ill", r"line 6: 5 cells under 4 names"),
    ('40,"F,21,ill', r"line 6: unexpected end of data: check the quotation marks"),
    ('40,"F"x,21,ill', r"line 6: ',' expected after '\"': check the quotation marks"),
    ("40," + "F" * 200_000 + ",21,ill", r"line 6: a cell of more than 131,072 characters"),
]


@pytest.mark.parametrize(("line", "sentence"), BAD_CELLS)
def test_unfit_lines_are_named(tmp_path, line, sentence):
    path = write(tmp_path / "a.csv", *ROWS, line)
    with pytest.raises(UserError, match=sentence) as caught:
        from_csv(path, label="outcome")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


BAD_FILES = [
    (b"", "a.csv is empty"),
    (b"\n\n", "a.csv is empty"),
    (HEADER.encode(), "has no rows below its header"),
    (b"age;sex;outcome\n1;F;ill\n", r"one column, 'age;sex;outcome': its cells are separated by ';', so set delimiter"),
    (b"age\toutcome\n1\till\n", r"separated by '\\t', so set delimiter"),
    (b"age,age,outcome\n1,2,ill\n", "has two columns 'age': rename one"),
    (b"age,,outcome\n1,2,ill\n", "has no name for column 2"),
    (b"age,out\n1,ill\n", r"has no column 'outcome'.*it has \['age', 'out'\]"),
    (b"outcome\nill\n", "has no column beside"),
    (b"age,outcome\n1,ill\n2,gr\xfcn\n", r"a.csv, line 3: it is not UTF-8 text"),
    ("age,outcome\n1,ill\n".encode("utf-16"), "UTF-16 text: save it as UTF-8"),
    (b"id,outcome\n" + b"".join(b"p%d,ill\n" % i for i in range(1001)), "'id' holds 1,001 different words"),
]


@pytest.mark.parametrize(("content", "sentence"), BAD_FILES)
def test_unfit_files_are_named(tmp_path, content, sentence):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        from_csv(tmp_path / "*.csv", label="outcome")
    assert "\n" not in str(caught.value)


BAD_ARGUMENTS = [
    ({"label": ""}, "label is empty: name the column"),
    ({"label": "outcome", "client": "outcome"}, "cannot be both label and client"),
    ({"label": "outcome", "features": ["age", "outcome"]}, "column 'outcome' is the label: take it out of features"),
    ({"label": "outcome", "features": ["agee"]}, r"no column 'agee' \(did you mean 'age'\?\)"),
    ({"label": "outcome", "categorical": ["sexx"]}, r"categorical names 'sexx' \(did you mean 'sex'\?\)"),
    ({"label": "outcome", "client": "site"}, "has no column 'site'"),
    ({"label": "outcome", "delimiter": ", "}, "cannot separate cells"),
    ({"label": "outcome", "delimiter": ""}, "cannot separate cells"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD_ARGUMENTS)
def test_unfit_arguments(hospitals, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        from_csv(hospitals, **arguments)


def test_unfit_paths(tmp_path, hospitals):
    for paths, sentence in (([], "path is empty"), ("", "path is empty"), (tmp_path / "no.csv", "no file matches")):
        with pytest.raises(UserError, match=sentence):
            from_csv(paths, label="outcome")
    with pytest.raises(UserError, match="Is a directory"):
        from_csv(tmp_path / "clients", label="outcome")
    write(tmp_path / "others" / "a.csv", *ROWS)
    with pytest.raises(UserError, match="several files are named 'a'"):
        from_csv([hospitals, tmp_path / "others" / "*.csv"], label="outcome")


def test_files_with_other_columns(tmp_path, hospitals):
    write(tmp_path / "clients" / "c.csv", "1,F,ill", header="age,sex,outcome\n")
    with pytest.raises(UserError, match=r"c\.csv has no column 'bmi', which .*a\.csv has: name the columns"):
        from_csv(hospitals, label="outcome")
    assert from_csv(hospitals, label="outcome", features=("sex", "age"))["c"][0].tolist() == [[1, 0, 1]]
    write(tmp_path / "clients" / "c.csv", "1,F,2,ill,3", header="age,sex,bmi,outcome,more\n")
    with pytest.raises(UserError, match=r"a\.csv has no column 'more', which .*c\.csv has"):
        from_csv(hospitals, label="outcome")


def test_large_whole_numbers_are_told(tmp_path):
    found = from_csv(write(tmp_path / "a.csv", "20000001,0", "5,1", header="patient,y\n"), label="y")
    assert "float32 rounds whole numbers beyond 16,777,216, which the columns patient have" in found.notes[1]


# --- the pool and a run ---------------------------------------------------------------------------------------------


def test_toml_and_python_give_the_same_pool(hospitals):
    settings = DataSettings(name="csv", path=hospitals, label="outcome", test=0.5)
    pool, own = federate_data(settings, 3), from_arrays(from_csv(hospitals, label="outcome"), test=0.5, seed=3)
    assert pool.names == own.names == ("a", "b") and pool.num_classes == own.num_classes == 2
    assert torch.equal(pool.x, own.x) and torch.equal(pool.y, own.y)
    assert pool.train.index.tolist() == own.train.index.tolist()
    assert pool.contract == own.contract == CONTRACT and pool.notes == own.notes != ()
    spread = federate_data(DataSettings(name="csv", path=hospitals, label="outcome", partition="iid", clients=3), 0)
    assert spread.total_clients == 3 and spread.contract == CONTRACT


def test_kept_classes_keep_their_names(tmp_path):
    path = write(tmp_path / "a.csv", *(f"{i}.5,{'abc'[i % 3]}" for i in range(30)), header="v,y\n")
    pool = federate_data(DataSettings(name="csv", path=str(path), label="y", classes=(2, 0)), 0)
    assert pool.num_classes == 2 and pool.contract.classes == ("c", "a")


def test_a_run_notes_what_was_read_once(hospitals):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    run = bespoke.federate(from_csv(hospitals, label="outcome"), model, "0", rounds=1, test=0.5, device="cpu")
    assert run.notes.count("whole numbers are read as float32 in the columns age") == 1
    assert list(run.models) == ["a", "b"] and run.pool.contract == CONTRACT


@pytest.mark.parametrize("number", ["{}", "{}.0"])
def test_regression_sees_the_numbers_and_not_their_classes(tmp_path, number):
    lines = [f"{i}.5,{number.format(100 * (i % 3))}" for i in range(12)]
    path = write(tmp_path / "a.csv", *lines, header="v,y\n")
    settings = DataSettings(name="csv", path=str(path), label="y")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    options = {"objective": "regression", "rounds": 1, "device": "cpu", "lr": 1e-6}
    runs = [
        bespoke.federate(from_csv(path, label="y"), model, "0", **options),
        bespoke.run(
            bespoke.Experiment(
                data=settings,
                model=bespoke.ModelSettings("linear"),
                objective=bespoke.ObjectiveSettings("regression"),
                training=bespoke.Training(rounds=1, lr=1e-6),
            ),
            device="cpu",
        ),
    ]
    for run in runs:
        assert sorted(set(run.pool.y.tolist())) == [0.0, 100.0, 200.0]
        assert run.pool.num_classes == 0 and run.pool.contract.classes == ()


def test_regression_on_words_is_refused(hospitals):
    with pytest.raises(UserError, match="the targets are words, such as 'ill'"):
        bespoke.federate(
            from_csv(hospitals, label="outcome"),
            torch.nn.Sequential(torch.nn.Linear(4, 1)),
            "0",
            objective="regression",
        )


# --- the contract ---------------------------------------------------------------------------------------------------


def test_a_contract_goes_through_json():
    assert InputContract.from_json(CONTRACT.to_json()) == CONTRACT
    picture = InputContract((3, 8, 8), "uint8", classes=("a", "b"), resized=True)
    assert InputContract.from_json(picture.to_json()) == picture


def changed(**fields):
    return json.dumps(json.loads(CONTRACT.to_json()) | fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        changed(shape=[3]),
        changed(shape=["4"]),
        changed(shape=4),
        changed(shape=[0], columns=[]),
        changed(shape=[True], columns=[]),
        changed(dtype="object"),
        changed(classes=["a", "a"]),
        changed(classes=[1]),
        changed(columns=[{"name": "a"}]),
        changed(columns=[{"name": 1, "categories": []}]),
        changed(resized="no"),
        changed(shape=[], columns=[]),
        changed(shape=[1] * 33, columns=[]),
        changed(shape=[10**6, 10**6], columns=[]),
    ],
)
def test_a_damaged_contract_is_refused(text):
    with pytest.raises(UserError, match="contract"):
        InputContract.from_json(text)


class Frame(dict):
    """Columns by name, in no order that matters."""


def table(**changes):
    columns = {"bmi": np.array([21.5, 30]), "sex": ["F", "M"], "age": [30, 41], "unused": [None, None]}
    return Frame({name: values for name, values in (columns | changes).items() if values is not None})


def test_new_rows_are_encoded_as_the_old_ones():
    assert CONTRACT.encode(table()).tolist() == X[:2] and CONTRACT.encode(table()).dtype == np.float32
    assert CONTRACT.encode(table(age=["30", "41.0"])).tolist() == X[:2]
    assert CONTRACT.encode(np.array(X)).tolist() == X
    assert CONTRACT.encode_labels(["well", "ill"]).tolist() == [1, 0]
    assert CONTRACT.named(torch.tensor([1, 0])) == ["well", "ill"]
    codes = InputContract((2,), "float32", (Column("code", ("1", "2")),), ("0", "5"))
    assert codes.encode({"code": [1, 2.0]}).tolist() == [[1, 0], [0, 1]]
    assert codes.encode_labels([5, 0.0, "5"]).tolist() == [1, 0, 1]


PICTURES = InputContract((1, 8, 8), "uint8")
BAD_TABLES = [
    (table(sex=["F", "X"]), r"column 'sex' holds 'X' in row 1, an unknown category: the model knows 'F', 'M'"),
    (table(age=None), r"has no column 'age', and the model needs \['age', 'sex', 'bmi'\]: add it"),
    (table(bmi=[1.0, np.nan]), "column 'bmi' has no value in row 1"),
    (table(bmi=[None, 1.0]), "column 'bmi' has no value in row 0"),
    (table(sex=["F", None]), "column 'sex' has no value in row 1"),
    (table(sex=["F", float("nan")]), "column 'sex' has no value in row 1"),
    (table(sex=["", "F"]), "column 'sex' has no value in row 0"),
    (table(age=["30", "old"]), "column 'age' holds 'old' in row 1, which is no number"),
    (table(age=[30, datetime.date(2000, 1, 1)]), r"column 'age' holds datetime.date\(2000, 1, 1\) in row 1"),
    (table(age=[30, np.inf]), "column 'age' has inf in row 1, beyond float32"),
    (table(age=[30, 41, 52]), "unequal lengths"),
    (table(age=[[30], [41]]), r"column 'age' has shape \(2, 1\)"),
    (
        np.zeros((2, 5), np.float32),
        r"x has the shape \(2, 5\), but this model takes float32 \(rows, 4\), which are age, sex=F",
    ),
    (np.zeros(4, np.float32), r"x is one example of shape \(4,\), not a batch: give x\[None\]"),
    (np.zeros((2, 4), np.uint8), "x is uint8, but this model takes float32: scale it as the rows were"),
    (np.diag([0, 0, np.nan, 1]), "row 2 of x holds NaN, infinity or a number beyond float32: fix or remove it"),
    (np.diag([0, 0, 0, 1e300]), "row 3 of x holds NaN, infinity or a number beyond float32: fix or remove it"),
    ("text", "x holds <U4 values: give real numbers"),
    (np.zeros((2, 4), complex), "x holds complex128 values: give real numbers"),
    ([[1, 2], [3]], "x is not an array: "),
]


@pytest.mark.parametrize(("rows", "sentence"), BAD_TABLES)
def test_unfit_new_rows(rows, sentence):
    with pytest.raises(UserError, match=sentence):
        CONTRACT.encode(rows)


@pytest.mark.parametrize(
    ("contract", "rows", "sentence"),
    [
        (
            InputContract((6,), "float32"),
            table(),
            r"the inputs are float32 \(rows, 6\), not rows of a table: give an ar",
        ),
        (InputContract((6,), "float32"), np.zeros((2, 5)), r"this model takes float32 \(rows, 6\)$"),
        (PICTURES, np.zeros((2, 1, 8, 8)), "x is float64, but this model takes uint8 and scales it itself"),
        (PICTURES, np.zeros((1, 8, 8), np.uint8), r"one example of shape \(1, 8, 8\), not a batch: give x\[None\]"),
        (
            PICTURES,
            np.zeros((2, 8, 8), np.uint8),
            r"x has the shape \(2, 8, 8\), but .* takes uint8 \(rows, 1, 8, 8\)$",
        ),
        (
            InputContract((3,), "int64"),
            np.zeros((2, 3)),
            "x is float64, but this model takes tokens: give whole numbers",
        ),
    ],
)
def test_unfit_arrays(contract, rows, sentence):
    with pytest.raises(UserError, match=sentence):
        contract.encode(rows)


def test_an_unknown_class():
    sentence = "column 'outcome' holds 'dead' in row 1, an unknown class: the model knows 'ill', 'well'"
    with pytest.raises(UserError, match=sentence):
        CONTRACT.encode_labels(["ill", "dead"])


def test_the_word_none_is_a_category_and_none_is_not():
    contract = InputContract((2,), "float32", (Column("drug", ("None", "aspirin")),))
    assert contract.encode({"drug": ["None"]}).tolist() == [[1, 0]]
    with pytest.raises(UserError, match="'drug' has no value in row 0"):
        contract.encode({"drug": [None]})


def test_new_files_are_read_in_the_contract_s_form(tmp_path):
    path = write(tmp_path / "new.csv", "M,ill,30,41,z", header="sex,outcome,bmi,age,more\n")
    x, y = read_rows(path, CONTRACT)
    assert x.tolist() == X[1:2] and y.tolist() == [0]
    path = write(tmp_path / "new.csv", "M,30,41", header="sex,bmi,age\n")
    assert read_rows(path, CONTRACT)[1] is None
    path = write(tmp_path / "new.csv", "M,30,41", "Q,30,41", header="sex,bmi,age\n")
    with pytest.raises(UserError, match=r"column 'sex' holds 'Q' in line 3 of .*new.csv, an unknown category"):
        read_rows(path, CONTRACT)
    np.savez(tmp_path / "new.npz", x=np.array(X), y=[1, 0, 0, 1])
    x, y = read_rows(tmp_path / "new.npz", CONTRACT)
    assert x.tolist() == X and x.dtype == np.float32 and y.tolist() == [1, 0, 0, 1]
    plain = InputContract((4,), "float32")
    for path, contract, sentence in (
        (tmp_path / "new.csv", plain, "is a table, and the model's inputs have no columns"),
        (tmp_path / "new.txt", CONTRACT, "is no .csv, .parquet or .npz file"),
        (tmp_path, CONTRACT, "the model's inputs are no pictures"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_rows(path, contract)


# --- Parquet --------------------------------------------------------------------------------------------------------


def arrow(**changes):
    columns = {
        "age": pa.array([30, 41], pa.int32()),
        "sex": pa.array(["F", "M"]).dictionary_encode(),
        "bmi": pa.array([21.5, 30.0], pa.float32()),
        "outcome": pa.array(["well", "ill"]),
    }
    return pa.table(columns | changes)


def test_parquet_gives_what_csv_gives(tmp_path, hospitals):
    pq.write_table(arrow(), tmp_path / "a.parquet")
    found = from_parquet(tmp_path / "*.parquet", label="outcome")
    assert found.contract == CONTRACT and found["a"][0].tolist() == X[:2] and found["a"][1].tolist() == [1, 0]
    pool = federate_data(DataSettings(name="parquet", path=str(tmp_path / "*.parquet"), label="outcome"), 0)
    assert pool.contract == CONTRACT
    assert read_rows(tmp_path / "a.parquet", CONTRACT)[0].tolist() == X[:2]
    assert CONTRACT.encode(arrow()).tolist() == X[:2] and CONTRACT.encode_labels(arrow()["outcome"]).tolist() == [1, 0]


def test_types_of_parquet_columns(tmp_path):
    table = pa.table(
        {
            "site": pa.array([2**60, 2**60 + 1, 5]),
            "flag": pa.array([True, False, True]),
            "price": pa.array([1, 2, 3], pa.decimal128(5, 1)),
            "when": pa.array([0, 1, 2], pa.timestamp("s")),
            "kind": pa.array([0, 1, 1], pa.int8()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    found = from_parquet(tmp_path / "a.parquet", client="site", label="kind", features=["flag", "price"])
    assert list(found) == ["5", str(2**60), str(2**60 + 1)] and found["5"][0].tolist() == [[1, 3]]
    with pytest.raises(
        UserError, match=r"column 'when' of .* holds timestamp\[ms\] values: leave it out with features"
    ):
        from_parquet(tmp_path / "a.parquet", client="site", label="kind")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"age": pa.array([30, None])}, "column 'age' has no value in row 1 of"),
        ({"sex": pa.array(["F", None])}, "column 'sex' has no value in row 1 of"),
        ({"outcome": pa.array([None, "ill"])}, "column 'outcome' has no value in row 0 of"),
        ({"bmi": pa.array([1.0, float("inf")])}, "column 'bmi' has inf in row 1"),
        ({"bmi": pa.array([[1.0], [2.0]])}, "holds list"),
    ],
)
def test_unfit_parquet_columns(tmp_path, changes, sentence):
    pq.write_table(arrow(**changes), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=sentence):
        from_parquet(tmp_path / "a.parquet", label="outcome")


def test_damaged_parquet(tmp_path):
    pq.write_table(arrow(), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", b"x,y\n1,2\n", whole[:-20], whole[: len(whole) // 2]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet is truncated or damaged") as caught:
            from_parquet(tmp_path / "a.parquet", label="outcome")
        assert "\n" not in str(caught.value)
    word = pa.array([b"w", b"\xe9"]).view(pa.binary())
    broken = pa.StringArray.from_buffers(2, *word.buffers()[1:])
    pq.write_table(arrow(outcome=broken), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet is truncated or damaged"):
        from_parquet(tmp_path / "a.parquet", label="outcome")
    pq.write_table(arrow().slice(0, 0), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has no rows"):
        from_parquet(tmp_path / "a.parquet", label="outcome")


def test_numbers_with_a_comma_are_no_categories(tmp_path):
    (tmp_path / "a.csv").write_text("dose;y\n1,5;u\n2,5;v\n")
    with pytest.raises(UserError, match=r"column 'dose' holds '1,5', a number with a comma: write it with a point"):
        bespoke.data.from_csv(tmp_path / "a.csv", label="y", delimiter=";")
    kept = bespoke.data.from_csv(tmp_path / "a.csv", label="y", delimiter=";", categorical=["dose"])
    assert kept.contract.features == ("dose=1,5", "dose=2,5")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_floating_type_smuggles_infinity(dtype):
    contract = InputContract((2,), "float32")
    with pytest.raises(UserError, match="row 1 of x holds NaN, infinity or a number beyond float32"):
        contract.encode(np.array([[1.0, 2.0], [1.0, np.inf]], dtype))
    assert contract.encode(np.array([[1.0, 6e4]], dtype)).tolist() == [[1.0, 60000.0]]
    with pytest.raises(UserError, match="row 0 of x"):
        contract.encode(np.array([[1e300, 1.0]]))
