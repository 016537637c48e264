"""A finished run is a thing one can open: from its folder alone, for a client that comes later."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from personal_models import CLASSES, DIM, NEW, Net, federated, hospitals

import bespoke
from bespoke import UserError, load_model, open_run
from bespoke.clients.states import OWNER
from bespoke.core import tree
from bespoke.runs.evaluating import evaluate
from bespoke.runs.lock import FolderLock

LATE = np.random.default_rng(3).normal(size=(10, DIM)).astype(np.float32), np.arange(10) % CLASSES
FEW = dict(list(hospitals().items())[:3])


def first_newcomer(run):
    """The model of the first new client of a run, and its train rows."""
    client = run.pool.num_clients
    down = run.federation.down(run.server, [client])
    (personal,) = run.federation.inspect().personal(run.last_round, [client], *down)
    rows = run.pool.train.client(client)
    return personal, run.pool.x[rows], run.pool.y[rows]


def equal(one, two):
    one, two = tree.flatten(one), tree.flatten(two)
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", sorted(bespoke.ALGORITHMS.shipped))
def test_a_client_that_comes_later_equals_one_that_was_new_from_the_start(name, tmp_path):
    with_new = federated(name, clients=FEW | {"late": LATE}, new_clients=1, rounds=2, batch=4)
    personal, x, y = first_newcomer(with_new)
    federated(name, clients=FEW, out=tmp_path / "run", rounds=2, batch=4)
    model = open_run(tmp_path / "run", model=Net).personalize(x, y)
    assert equal(model.personal, personal)
    assert equal(with_new.personalize(x, y).personal, personal)


CIFAR = {"name": "random", "like": "cifar10", "rows": 60, "clients": 4, "new_clients": 1}
CNN = {"name": "cnn", "width": 4, "hidden": 8}


def trained(data, model, out=None, name="fedper", **settings):
    parts = {"data": bespoke.DataSettings(**data), "model": bespoke.ModelSettings(**model), **settings}
    training = bespoke.Training(rounds=1, batch=4, lr=0.1, steps=2)
    return bespoke.run(
        bespoke.Experiment(algorithm=name, training=training, **parts), out, device="cpu", backend="loop"
    )


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (CIFAR, CNN),
        (CIFAR | {"normalise": "cifar", "augment": "fedpce"}, CNN),
        (CIFAR | {"normalise": "pixel"}, {"name": "linear"}),
        ({"name": "random", "like": "sent140", "rows": 40, "clients": 4, "partition": "iid", "new_clients": 1},
         {"name": "sent140_lstm", "vocabulary": 10000}),
    ],
    ids=["bytes", "augmented", "pixel", "tokens"],
)  # fmt: skip
def test_what_is_done_to_examples_is_done_to_those_of_a_new_client(data, model, tmp_path):
    run = trained(data, model, tmp_path / "run")
    personal, x, y = first_newcomer(run)
    found = open_run(tmp_path / "run").personalize(x, y)
    assert equal(found.personal, personal)
    assert torch.equal(found.logits(x), list(run.models.values())[-1].logits(x))


def test_other_objectives(tmp_path):
    clients = {name: (x, x[:, :2].astype(np.float64)) for name, (x, _) in (FEW | {"late": LATE}).items()}
    net = torch.nn.Sequential(torch.nn.Linear(DIM, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    options = {"rounds": 1, "lr": 0.1, "objective": "regression", "device": "cpu", "backend": "loop", "new_clients": 1}
    run = bespoke.federate(clients, net, "2", "ditto", out=tmp_path / "run", **options)
    personal, x, y = first_newcomer(run)
    opened = open_run(tmp_path / "run", model=net)
    assert equal(opened.personalize(x, y).personal, personal)
    with pytest.raises(UserError, match="y has 3 numbers per row, but this model has 2"):
        opened.personalize(x, np.zeros((len(x), 3)))


# --- what is there --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three clients with named columns and classes, in a folder."""
    folder = tmp_path_factory.mktemp("finished")
    for i, (x, y) in enumerate(FEW.values()):
        rows = [
            f"{','.join(map(str, row))},{['ill', 'unsure', 'well'][label]}" for row, label in zip(x, y, strict=True)
        ]
        (folder / f"h{i}.csv").write_text("\n".join(["a,b,c,d,e,f,outcome", *rows]) + "\n")
    clients = bespoke.data.from_csv(folder / "*.csv", label="outcome")
    return federated("ditto", clients=clients, out=folder / "run", rounds=2)


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished.folder.path, tmp_path / "run")


def test_records_server_and_method_without_data(finished, folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    run = open_run(folder, model=Net)
    assert run.summary == finished.summary and run.accuracy == finished.accuracy and run.last_round == 2
    assert equal(run.server, finished.server) and run.experiment.method == finished.experiment.method
    assert equal(run.federation.params, finished.federation.params) and not len(run.pool.x)
    assert run.pool.names == finished.pool.names and run.pool.train.sizes == finished.pool.train.sizes
    assert run.pool.contract == finished.pool.contract and not run.notes
    assert "ditto on arrays, seed 0, 2 of 2 rounds\nclients: 3\n" in repr(run)
    run.personalize(*LATE)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_row_is_in_the_beginning(finished, folder):
    data = (folder / "start.safetensors").read_bytes()
    assert not any(row.numpy().tobytes() in data for row in finished.pool.x)


def test_a_new_client_brings_a_table_and_names(finished, folder, tmp_path):
    run, (x, y) = open_run(folder, model=Net), LATE
    frame = {name: x[:, i] for i, name in enumerate("abcdef")}
    words = [["ill", "unsure", "well"][label] for label in y]
    model = run.personalize(frame, words, name="h9")
    assert equal(model.personal, finished.personalize(x, y).personal)
    assert model.about["client"] == "h9" and model.about["rows"] == 10 and model.about["score"] is None
    model.scored(frame, words, "its own rows").save(tmp_path / "h9.safetensors")
    loaded = load_model(tmp_path / "h9.safetensors", model=Net)
    assert torch.equal(loaded.logits(frame), model.logits(x)) and loaded.class_names == ("ill", "unsure", "well")
    score = {"metric": "accuracy", "value": loaded.score(x, y), "of": "its own rows", "rows": 10}
    assert loaded.about["score"] == score and loaded.about["experiment"] == finished.experiment.hash()


def test_models_of_an_opened_run_are_the_saved_files(finished, folder):
    run = open_run(folder, model=Net)
    with pytest.raises(
        UserError, match=r"run holds no saved models .*save them with run.save_models\(\) .*--save-models"
    ):
        _ = run.models
    with pytest.raises(UserError, match="opened without its clients' data, of which models are made"):
        run.save_models()
    finished.save_models(folder / "models")
    assert list(run.models) == ["h0", "h1", "h2"] and "h1" in run.models and "h7" not in run.models
    assert torch.equal(run.models["h1"].logits(NEW), finished.models["h1"].logits(NEW))
    with pytest.raises(
        UserError, match=r"^there is no model of a client 'h7' in .*models: there are 'h0', 'h1', 'h2'$"
    ):
        run.models["h7"]
    assert run.models.get("h7") is None
    shutil.copy(folder / "models" / "h1.safetensors", folder / "models" / "h0.safetensors")
    with pytest.raises(UserError, match=r"h0.safetensors is of client 'h1', not 'h0': save the models again"):
        run.models["h0"]
    federated(clients=FEW).models["h0"].save(folder / "models" / "h0.safetensors")
    with pytest.raises(UserError, match=r"h0.safetensors is no model of this run: save the models again"):
        run.models["h0"]
    (folder / "models" / "h2.safetensors").unlink()
    with pytest.raises(UserError, match=r"there is no model of a client 'h2' in .*: there are 'h0', 'h1'$"):
        open_run(folder, model=Net).models["h2"]


def test_what_needs_rows_says_so(folder):
    run = open_run(folder, model=Net)
    with pytest.raises(UserError, match=r"opened without its data: give evaluate\(...\) its folder"):
        evaluate(run)
    with pytest.raises(UserError, match="these clients cannot be inspected"):
        run.federation.inspect()


# --- a new client's rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (LATE[0][:, :5], LATE[1], r"x has the shape \(10, 5\), but this model takes float32"),
        (LATE[0], LATE[1][:9], "there are 10 rows in x and 9 in y"),
        (LATE[0][:0], LATE[1][:0], "there are no rows to learn from"),
        (LATE[0], LATE[1] + 1, r"y has the label 3, outside 0\.\.2"),
        (LATE[0] * np.float32(1e30), LATE[1], "the new client's model holds NaN or infinity: look at the scale"),
    ],
)  # fmt: skip
def test_unfit_rows_of_a_new_client(finished, x, y, why):
    with pytest.raises(UserError, match=why) as error:
        finished.personalize(x, y)
    assert "\n" not in str(error.value)


def test_clients_with_constants_of_their_own_have_no_successor(tmp_path):
    data = CIFAR | {"degrade": "fedpce", "partition": "degradations", "clients": 6, "new_clients": 0}
    run = trained(data, {"name": "linear"}, tmp_path / "run")
    x, y = run.pool.x[:4], run.pool.y[:4]
    for each in (run, open_run(tmp_path / "run")):
        with pytest.raises(UserError, match=r"constants of its own for its examples \(.*variance.*\) *, and a client"):
            each.personalize(x, y)


def test_a_long_adaptation_is_announced_once(tmp_path, capsys):
    run = federated("fedpce", clients=FEW, batch=4)
    run.personalize(*LATE)
    assert capsys.readouterr().err == ""
    longer = run.personalize(*LATE, adapt_rounds=7)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "fedpce adapts to a new client for 7 rounds, about 3 steps of 4 rows each, 21 in all" in said
    once = run.personalize(*LATE).personal
    assert not equal(longer.personal, once) and not equal(run.personalize(*LATE, adapt_rounds=0).personal, once)
    federated("fedavg", clients=FEW).personalize(*LATE, adapt_rounds=7)  # which has nothing to adapt
    assert capsys.readouterr().err == ""
    for wrong, why in ((-1, "at least 0 and at most 10,000"), (10**5, "at most 10,000"), (True, "a"), (1.5, "a whole")):
        with pytest.raises(UserError, match=rf"personalize\(...\) adapt_rounds must be .*{why}.*, not {wrong}"):
            run.personalize(*LATE, adapt_rounds=wrong)


# --- somebody's own -------------------------------------------------------------------------------------------------


def test_own_models_and_methods(folder, tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match=r"start.safetensors: its model was an object of a program, 'Net', .*model=\.\.\."
    ):
        open_run(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "whose.py").write_text(
        "from dataclasses import dataclass\nfrom pathlib import Path\nimport torch\nimport bespoke\n\n"
        "Path('imported').touch()\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))\n\n\n"
        "@dataclass(frozen=True)\nclass Own(bespoke.Algorithm):\n    rate: float = 0.5\n\n"
        "    def client_update(self, local, state, down):\n"
        "        return state, {'model': local.sgd(local.task.loss, down['model'])}\n\n"
        "    def personalize(self, local, state, down):\n"
        "        return {'model': local.sgd(local.task.loss, down['model'])}\n"
    )
    import whose

    run = bespoke.federate(
        FEW, whose.Net, "1", whose.Own(rate=0.25), rounds=1, out=tmp_path / "own", device="cpu", backend="loop"
    )
    wanted = run.personalize(*LATE).personal
    Path("imported").unlink()
    del sys.modules["whose"]
    with pytest.raises(
        UserError, match=r"its method is code .*'whose:Own'.*trust_code=True .--trust-code., or give algorithm="
    ):
        open_run(tmp_path / "own")
    assert not Path("imported").exists()
    opened = open_run(tmp_path / "own", trust_code=True)
    assert opened.experiment.method.rate == 0.25 and equal(opened.personalize(*LATE).personal, wanted)
    again = open_run(tmp_path / "own", model=whose.Net, algorithm=whose.Own())  # with the settings of the run
    assert again.experiment.method.rate == 0.25 and equal(again.personalize(*LATE).personal, wanted)
    del sys.modules["whose"]
    bespoke.ALGORITHMS.pop("whose:Own", None)


# --- damage ---------------------------------------------------------------------------------------------------------


def test_folders_that_are_no_runs(folder, tmp_path):
    with pytest.raises(UserError, match="gone holds no run"):
        open_run(tmp_path / "gone")
    lock = FolderLock(folder)
    try:
        with pytest.raises(UserError, match="run is in use by another process"):
            open_run(folder, model=Net)
    finally:
        lock.close()


def test_a_beginning_of_an_earlier_version_is_added_by_resuming(folder, tmp_path):
    (folder / "start.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"has no start.safetensors, which earlier .*--resume \(resume=True in Python\)"
    ):
        open_run(folder, model=Net)
    run = federated("ditto", clients=FEW, out=tmp_path / "other", rounds=1)
    (tmp_path / "other" / "start.safetensors").unlink()
    run = federated("ditto", clients=FEW, out=tmp_path / "other", rounds=1, resume=True)
    opened = open_run(tmp_path / "other", model=Net)
    assert equal(opened.personalize(*LATE).personal, run.personalize(*LATE).personal)


def rewritten(path, told=None, tensors=None, owner=None, entry="bespoke_start"):
    """Write a beginning anew, with some of its parts changed."""
    with safetensors.safe_open(path, "pt") as file:
        said = file.metadata()
    card = json.loads(said["bespoke_start"]) | (told or {})
    held = safetensors.torch.load_file(path) | (tensors or {})
    held = {name: leaf for name, leaf in held.items() if leaf is not None}
    path.write_bytes(safetensors.torch.save(held, {OWNER: owner or said[OWNER], entry: json.dumps(card)}))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"owner": "somebody"}, "start.safetensors is not of this run: restore it"),
        ({"entry": "bespoke"}, "start.safetensors is no beginning of a run"),
        ({"told": {"inputs": {}}}, "is damaged: a contract of inputs is damaged"),
        ({"told": {"about": {}}}, "start.safetensors is damaged: restore it"),
        ({"told": {"outputs": 4}}, r"is damaged: its outputs have the shape \(3,\), not \(4,\)"),
        ({"told": {"method": {"name": "nothing"}}}, "there is no method 'nothing'"),
        ({"tensors": {"model/fc.bias": torch.full((3,), torch.nan)}}, "holds NaN or infinity"),
        ({"tensors": {"model/fc.bias": torch.zeros(4)}}, r"has the shape \[4\], and the model's is \[3\]"),
        ({"tensors": {"model/fc.bias": None}}, "it has no tensor 'model/fc.bias'"),
    ],
)
def test_a_damaged_beginning_is_refused_in_one_sentence(change, why, folder):
    rewritten(folder / "start.safetensors", **change)
    with pytest.raises(UserError, match=why) as error:
        open_run(folder, model=Net)
    assert "\n" not in str(error.value)


def test_other_damaged_files(folder):
    start = folder / "start.safetensors"
    sound = {name: (folder / name).read_bytes() for name in ("start.safetensors", "federation.json", "config.toml")}
    for name, data, why in [
        ("start.safetensors", b"\x80\x04 no model", "is not a sound .safetensors file"),
        ("start.safetensors", start.read_bytes()[:-9], "is not a sound .safetensors file"),
        ("start.safetensors", start.read_bytes()[:-1] + b"\x00", "is damaged: its checksum does not match"),
        ("start.safetensors", start.read_bytes().replace(b"ditto", b"other"), "is damaged: its checksum does not"),
        ("federation.json", b"{}", "federation.json is damaged"),
        ("federation.json", b"nothing", "cannot read .*federation.json"),
        ("config.toml", sound["config.toml"].replace(b"seed = 0", b"seed = 1"), "is not as the run wrote it"),
        ("config.toml", sound["config.toml"].replace(b'name = "ditto"', b""), "names no method: restore it"),
    ]:
        (folder / name).write_bytes(data)
        with pytest.raises(UserError, match=why) as error:
            open_run(folder, model=Net)
        assert "\n" not in str(error.value)
        (folder / name).write_bytes(sound[name])
    (folder / "timing.jsonl").unlink()
    run = open_run(folder, model=Net)
    assert run.notes == [f"{folder / 'timing.jsonl'} is missing: how long the rounds took is not known"]
    assert run.summary["views"] and run.summary["round_seconds"] is None
    (folder / "environment.json").unlink()
    assert open_run(folder, model=Net).last_round == 2  # the hash of the settings tells as much
    (folder / "federation.json").unlink()
    with pytest.raises(UserError, match=r"federation.json is missing or damaged: restore it"):
        open_run(folder, model=Net)
    (folder / "federation.json").write_bytes(sound["federation.json"])
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="holds no intact checkpoint, so no model: continue the run with --resume"):
        open_run(folder, model=Net)


def test_pipes_in_place_of_files_are_not_waited_for(folder):
    kept = sorted(path for path in (folder / "checkpoints").iterdir() if path.is_file())
    for path in (*kept, *(folder / name for name in ("federation.json", "start.safetensors", "config.toml"))):
        sound = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        try:
            opened = open_run(folder, model=Net)  # as of an older checkpoint, or not at all
            assert path.parent != folder and opened.last_round in (1, 2)
        except UserError as error:
            assert "\n" not in str(error)
        path.unlink()
        path.write_bytes(sound)
    assert open_run(folder, model=Net).last_round == 2


def test_an_unfinished_run_says_how_far_it_came(tmp_path):
    stopped = federated(clients=FEW, out=tmp_path / "run", rounds=3, stop=lambda: True)
    run = open_run(tmp_path / "run", model=Net)
    assert run.last_round == 1 and "the run has done 1 of 3 rounds" in run.notes
    assert equal(run.personalize(*LATE).personal, stopped.personalize(*LATE).personal)


def test_a_run_without_a_folder_serves_new_clients_too():
    with pytest.raises(
        UserError, match=r"^\S+ is of a run that was given no folder, and lasts as long as the run: use"
    ):
        open_run(federated(clients=FEW))
    run, (x, y) = federated("pfedfda", clients=FEW), (part.copy() for part in LATE)
    x.flags.writeable = y.flags.writeable = False
    model = run.personalize(x, y)
    assert equal(model.personal, run.personalize(*LATE).personal)
    assert model.logits(x).shape == (10, CLASSES) and model.score(x, y) == model.score(*LATE)
