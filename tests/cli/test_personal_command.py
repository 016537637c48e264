"""``bespoke personalize`` and ``bespoke predict``: a model for a client that comes later, and its predictions."""

import csv
import dataclasses
import os

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import command, experiment

import bespoke

HEADER = "age,sex,bmi,outcome"
CONFIG = """
[data]
name = "csv"
path = "hospitals/*.csv"
label = "outcome"

[model]
name = "mlp"
hidden = 4

[algorithm]
name = "ditto"

[training]
rounds = 1
batch = 5
lr = 0.1
"""


def rows(n, seed):
    draw = np.random.default_rng(seed)
    numbers = draw.normal(size=(n, 2)).round(3)
    return [f"{age},{'FM'[i % 2]},{bmi},{['ill', 'well'][int(age > 0)]}" for i, (age, bmi) in enumerate(numbers)]


def table(path, lines, header=HEADER):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A trained run, and the rows of a client that never took part."""
    folder = tmp_path_factory.mktemp("home")
    for i in range(3):
        table(folder / "hospitals" / f"h{i}.csv", rows(20, i))
    (folder / "hospitals.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert command("run", "hospitals.toml", "--out", "run", "--quiet", "--processes", 1).code == 0
    table(folder / "new.csv", rows(12, 7))
    table(folder / "test.csv", rows(9, 8))
    return folder


@pytest.fixture(autouse=True)
def inside(home, monkeypatch):
    monkeypatch.chdir(home)


def ok(*words):
    done = command(*words)
    assert done.code == 0, (done.out, done.err)
    return done


def test_a_model_for_a_new_client_and_its_predictions(home):
    done = ok("personalize", "run", "--data", "new.csv", "-o", "new.safetensors", "--evaluate", "test.csv")
    opened, model = bespoke.open_run("run"), bespoke.load_model("new.safetensors")
    x, y = bespoke.data.read_rows("new.csv", opened.pool.contract)
    other, labels = bespoke.data.read_rows("test.csv", opened.pool.contract)
    assert torch.equal(model.logits(other), opened.personalize(x, y).logits(other))
    assert model.about["client"] == "new" and model.about["rows"] == 12
    score = {"metric": "accuracy", "value": model.score(other, labels), "of": "the rows in test.csv", "rows": 9}
    assert model.about["score"] == score
    told = f"accuracy {100 * score['value']:.2f} % on the 9 rows in test.csv; model in new.safetensors\n"
    assert done.out == f"ditto after round 1, 12 rows of new: {told}" and done.err == ""
    table(home / "x.csv", [",".join(line.split(",")[:-1]) for line in rows(9, 8)], "age,sex,bmi")
    done = ok("predict", "new.safetensors", "--data", "x.csv", "-o", "predictions.csv")
    assert done.out == "9 predictions in predictions.csv\n"
    with open("predictions.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["row", "prediction", "p_ill", "p_well"]
    assert [row["row"] for row in found] == [str(i) for i in range(9)]
    assert [row["prediction"] for row in found] == model.contract.named(model.predict(other))
    assert np.array_equal(
        np.array([[row["p_ill"], row["p_well"]] for row in found], np.float32), model.predict_proba(other).numpy()
    )


def test_arrays_are_data_too(home):
    x, y = bespoke.data.read_rows("new.csv", bespoke.open_run("run").pool.contract)
    np.savez("new.npz", x=x, y=y)
    np.savez("names.npz", x=x, y=np.array(["ill", "well"])[y])
    np.savez("x.npz", x=x)
    for data in ("new.csv", "new.npz", "names.npz"):
        ok("personalize", "run", "--data", data, "-o", "a.safetensors", "--name", "h9")
        ok("predict", "a.safetensors", "--data", "x.npz", "-o", f"{data}.predicted")
    texts = {(home / f"{data}.predicted").read_text() for data in ("new.csv", "new.npz", "names.npz")}
    assert len(texts) == 1 and bespoke.load_model("a.safetensors").about["client"] == "h9"
    assert "x.npz has no labels: it needs an array 'y'" in refused("personalize", "run", "--data", "x.npz", *OUT)


def test_pictures_are_data_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for client in ("a", "b", "new"):
        for word, level in (("ill", 40), ("well", 200)):
            for i in range(4):
                path = tmp_path / ("scans" if client != "new" else "") / client / word / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (5, 4), level + i).save(path)
    data = (
        CONFIG.replace('"csv"', '"image_folder"').replace("hospitals/*.csv", "scans").replace('label = "outcome"', "")
    )
    (tmp_path / "scans.toml").write_text(data)
    ok("run", "scans.toml", "--out", "run", "--quiet", "--processes", 1)
    ok("personalize", "run", "--data", "new", "-o", "new.safetensors")
    assert bespoke.load_model("new.safetensors").about["rows"] == 8
    ok("predict", "new.safetensors", "--data", "new/well", "-o", "p.csv")
    with open("p.csv", newline="") as file:
        assert [row["picture"] for row in csv.DictReader(file)] == [f"{i}.png" for i in range(4)]
    for _ in range(2):  # the second time over its own file
        ok("predict", "new.safetensors", "--data", "new", "-o", "p.csv")
    with open("p.csv", newline="") as file:
        found = {row["picture"]: row["prediction"] for row in csv.DictReader(file)}
    paths = sorted(path for path in (tmp_path / "new").rglob("*.png"))
    model = bespoke.load_model("new.safetensors")
    named = model.contract.named(model.predict(bespoke.data.read_rows("new", model.contract)[0]))
    assert found == dict(zip((path.relative_to(tmp_path / "new").as_posix() for path in paths), named, strict=True))


def test_numbers_have_no_probabilities(tmp_path):
    run = bespoke.federate(
        [(np.eye(6, 2, dtype=np.float32), np.arange(6.0))] * 2, torch.nn.Sequential(torch.nn.Linear(2, 1)), "0",
        objective="regression", rounds=1, lr=0.1, device="cpu", out=tmp_path / "run",
    )  # fmt: skip
    run.models["0"].save(tmp_path / "a.safetensors")
    np.savez(tmp_path / "x.npz", x=np.eye(3, 2, dtype=np.float32))
    asked = refused("predict", tmp_path / "a.safetensors", "--data", tmp_path / "x.npz", "-o", tmp_path / "p.csv")
    assert "its model was an object of a program, 'Sequential'" in asked
    numbers = dataclasses.replace(experiment(rounds=1), objective=bespoke.ObjectiveSettings("regression"))
    done = bespoke.run(numbers, device="cpu")
    next(iter(done.models.values())).save(tmp_path / "b.safetensors")
    np.savez(tmp_path / "x.npz", x=done.pool.x[:3].numpy())
    ok("predict", tmp_path / "b.safetensors", "--data", tmp_path / "x.npz", "-o", tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "row,prediction"


# --- mistakes -------------------------------------------------------------------------------------------------------

OUT = ("-o", "out.safetensors")


def refused(*words):
    return command(*words).sentence


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("gone", "--data", "new.csv"), "gone holds no run (there is no config.toml)"),
        (("run", "--data", "gone.csv"), "gone.csv"),
        (("run", "--data", "no_label.csv"), "no_label.csv has no labels: it needs the column 'outcome'"),
        (("run", "--data", "no_sex.csv"), "no_sex.csv has no column 'sex'"),
        (("run", "--data", "dead.csv"), "column 'outcome' holds 'dead' in line 2 of dead.csv, an unknown class"),
        (("run", "--data", "new.csv", "--evaluate", "no_label.csv"), "no_label.csv has no labels"),
        (("run", "--data", "hospitals"), "hospitals is a folder, and the model's inputs are no pictures"),
        (("run", "--data", "new.csv", "--device", "gpu"), "there is no device 'gpu'"),
        (("run", "--data", "new.csv", "--adapt-rounds", "-1"), "adapt_rounds must be at least 0"),
    ],
)  # fmt: skip
def test_mistakes_of_personalize_in_one_sentence(home, words, why):
    table(home / "no_label.csv", ["1,F,2"], "age,sex,bmi")
    table(home / "no_sex.csv", ["1,2,ill"], "age,bmi,outcome")
    table(home / "dead.csv", ["1,F,2,dead"])
    assert why in refused("personalize", *words, *OUT)
    assert not (home / "out.safetensors").exists()


def test_mistakes_of_predict_in_one_sentence(home):
    ok("personalize", "run", "--data", "new.csv", "-o", "b.safetensors")
    before = (home / "new.csv").read_bytes()
    for words, why in [
        (("gone.safetensors", "--data", "new.csv", "-o", "p.csv"), "gone.safetensors cannot be read"),
        (("new.csv", "--data", "new.csv", "-o", "p.csv"), "new.csv is not a sound .safetensors file"),
        (("b.safetensors", "--data", "new.csv", "-o", "new.csv"), "-o new.csv would overwrite a file that"),
        (("b.safetensors", "--data", "new.csv", "-o", "b.safetensors"), "holds no predictions: choose"),
        (("b.safetensors", "--data", "new.csv", "-o", "test.csv"), "-o test.csv would overwrite a file that"),
        (("b.safetensors", "--data", "new.csv", "-o", "no/p.csv"), "cannot write no/p.csv"),
    ]:
        assert why in refused("predict", *words)
    assert (home / "new.csv").read_bytes() == before and not (home / "p.csv").exists()
    for _ in range(2):  # the second time over its own file
        ok("predict", "b.safetensors", "--data", "new.csv", "-o", "p.csv")
    os.mkfifo(home / "pipe")
    table(home / "dates.csv", ["1,2"], "row,prediction_date")
    for name in ("pipe", "dates.csv", "hospitals"):
        why = f"-o {name} would overwrite a file that holds no predictions"
        assert why in refused("predict", "b.safetensors", "--data", "new.csv", "-o", name)
    for out, why in [
        ("new.csv", "new.csv is there and is no model"),
        ("no/a.safetensors", "cannot write no/a.safetensors: there is no folder no; make it"),
        ("b.safetensors", "-o b.safetensors would overwrite the model of client 'new': choose another file"),
    ]:
        assert why in refused("personalize", "run", "--data", "test.csv", "-o", out)
    ok("personalize", "run", "--data", "new.csv", "-o", "b.safetensors")  # over its own


def test_an_unfinished_run_says_so(home, tmp_path):
    stopped = bespoke.Experiment(
        data=bespoke.DataSettings(name="csv", path=str(home / "hospitals" / "*.csv"), label="outcome"),
        model=bespoke.ModelSettings(name="mlp", hidden=4),
        training=bespoke.Training(rounds=5, lr=0.1),
    )
    bespoke.run(stopped, tmp_path / "half", device="cpu", stop=lambda: True)
    done = ok("personalize", tmp_path / "half", "--data", "new.csv", "-o", tmp_path / "m.safetensors")
    assert "note: the run has done 1 of 5 rounds\n" in done.err
