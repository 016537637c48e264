"""A run's folder opened again without a trace, and one trained run evaluated on other rows and other clients."""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import command, experiment, federated, last_tensors, same_tensors, tables, write
from toy import same_bits

import bespoke
from bespoke.clients import BatchedClients
from bespoke.core import tree
from bespoke.errors import UserError
from bespoke.records import RunFolder
from bespoke.report.summary import Evaluations
from bespoke.runs import evaluating
from bespoke.runs.evaluating import evaluate, reopened
from bespoke.runs.lock import FolderLock

DIGITS = {"name": "digits", "subsample": 0.2, "clients": 8, "new_clients": 3, "partition": "dirichlet"}
MODEL = {"name": "mlp", "hidden": 6}


def trained(folder, **data):
    """A small run of FedRep, which keeps a head on each client: digits of eight clients, of whom three are new."""
    spec = experiment("fedrep", model=MODEL, rounds=2, batch=16)
    return bespoke.run(replace(spec, data=bespoke.DataSettings(**DIGITS | data)), folder)


@pytest.fixture(scope="module")
def run_made(tmp_path_factory):
    """A finished run."""
    return trained(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="module")
def made(run_made):
    """Its folder."""
    return run_made.folder.path


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def content(folder):
    """Everything in a folder: bytes, times and modes of its files, and its folders."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        what = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path)] = what, path.stat().st_mtime_ns, path.stat().st_mode
    return found | {".": Path(folder).stat().st_mtime_ns}


def lines(folder, number=None, **wanted):
    rows = RunFolder(folder).clients()
    wanted |= {} if number is None else {"round": number}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


# --- opening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["device", "host", "disk"])
def test_an_opened_run_is_the_run_and_its_folder_stays_as_it_was(states, run_made, copy, tmp_path):
    run = run_made
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = content(copy)
    again = reopened(copy, device="cpu", states=states)
    assert same_bits(again.server, run.server) and again.last_round == 2
    assert again.summary == run.summary and again.experiment == run.experiment
    for name, model in run.models.items():
        assert same_bits(again.models[name].personal, model.personal)
    x = run.pool.x[:5]
    assert torch.equal(again.models["7"].logits(x), run.models["7"].logits(x))
    done = evaluate(again, out=tmp_path / "evaluation")
    assert content(copy) == before and done.metric() == run.metric()
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755)


def test_an_opened_store_never_writes(copy):
    run = reopened(copy, states="disk")
    before = content(copy)
    store = run.federation.clients.store
    store.put(store.ids(), store.get(store.ids()))
    with pytest.raises(ValueError, match="cannot write before it has a folder"):
        store.flush()
    assert content(copy) == before


def test_a_run_that_goes_on_is_refused_with_its_holder(copy):
    lock = FolderLock(copy)
    with pytest.raises(UserError, match=rf"{copy} is in use by another process \(host .*, pid {os.getpid()}\)"):
        reopened(copy)
    lock.share()  # as the processes of one run do
    with pytest.raises(UserError, match="is in use by another process"):
        reopened(copy)
    lock.close()
    reopened(copy)
    lock = FolderLock(copy)
    (copy / ".bespoke.lock").unlink()  # people remove lock files
    with pytest.raises(UserError, match=r"is in use by another process \(of unknown name\)"):
        reopened(copy)
    lock.close()
    reopened(copy)
    assert not (copy / ".bespoke.lock").exists()


def test_an_interrupted_run_is_opened_at_its_checkpoint(tmp_path):
    def cut(event):
        if event.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bespoke.run(experiment("ditto", rounds=9), tmp_path, checkpoint_every=2, callbacks=[cut])
    run = reopened(tmp_path)
    assert run.last_round == 2 and "2 of 9 rounds" in str(run)
    assert "the records go on to round 3, and the models are those of round 2" in run.notes
    assert same_tensors(
        tree.flatten({"server": run.server}),
        {name: leaf for name, leaf in last_tensors(tmp_path).items() if name.startswith("server")},
    )
    short = bespoke.run(experiment("ditto", rounds=2))
    assert same_bits(run.models["0"].personal, short.models["0"].personal)
    done = evaluate(run)
    assert [row["round"] for row in done.folder.rounds()] == [2]
    assert "the run has done 2 of 9 rounds" in done.notes


def damage(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def newest(folder, pattern="*.json"):
    return max((folder / "checkpoints").glob(pattern))


WRONG = {
    "no folder": (shutil.rmtree, "holds no run"),
    "no config": (lambda run: (run / "config.toml").unlink(), "holds no run"),
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "holds no intact checkpoint, so no model"),
    "server": (lambda run: damage(newest(run, "0*.safetensors")), "checksum does not match), and was skipped), so no"),
    "states": (lambda run: damage(newest(run, "states*")), "holds no intact checkpoint (checkpoint "),
    "manifest": (lambda run: damage(newest(run)), "holds no intact checkpoint (checkpoint "),
    "records": (lambda run: damage(run / "clients.jsonl", 9), "clients.jsonl is not as the run wrote it"),
    "rounds": (lambda run: damage(run / "rounds.jsonl", 9), "rounds.jsonl is not as the run wrote it"),
    "data": (
        lambda run: (run / "federation.json").write_text(
            (run / "federation.json").read_text().replace('"content": [\n    "', '"content": [\n    "0')
        ),
        "client '0' has other rows; give it the same data, or run the experiment again",
    ),
    "description": (lambda run: (run / "federation.json").write_text("{}"), "federation.json is damaged"),
    "settings": (
        lambda run: (run / "config.toml").write_text((run / "config.toml").read_text().replace("lr = 0.1", "lr = 0.2")),
        "config.toml is not as the run wrote it",
    ),
    "toml": (lambda run: (run / "config.toml").write_text("= 3"), "is not valid TOML"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_damaged_is_told_in_one_sentence(what, copy):
    change, words = WRONG[what]
    change(copy)
    with pytest.raises(UserError) as caught:
        reopened(copy)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert command("evaluate", copy).sentence == str(caught.value)


def test_an_older_checkpoint_serves_where_the_newest_is_damaged(tmp_path):
    bespoke.run(experiment(rounds=4), tmp_path, checkpoint_every=2)
    damage(newest(tmp_path, "0*.safetensors"))
    run = reopened(tmp_path)
    assert run.last_round == 2 and "000004.json is damaged" in run.notes[0]


def test_settings_of_another_version_are_noted(copy):
    path = copy / "environment.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | {"bespoke": "0.0.1"}))
    assert not any("version" in note for note in reopened(copy).notes)  # the hash is the same
    (copy / "config.toml").write_text((copy / "config.toml").read_text().replace("lr = 0.1", "lr = 0.2"))
    assert "is of version 0.0.1: whether its settings were changed is not known" in reopened(copy).notes[0]


def test_arrays_and_models_given_in_python_are_not_in_the_folder(tmp_path):
    federated(out=tmp_path)
    with pytest.raises(UserError, match=r"use the object that bespoke\.federate returned"):
        reopened(tmp_path)


def test_modules_are_imported_with_a_note_and_paths_start_where_they_did(tmp_path, monkeypatch, capsys):
    (tmp_path / "there" / "data").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in "ab":
        x, y = draw.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2
        np.savez(tmp_path / "there" / "data" / f"{name}.npz", x=x, y=y)
    (tmp_path / "there" / "my_reopened_net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, input_shape, num_classes):\n"
        "        super().__init__()\n        self.head = nn.Linear(input_shape[0], num_classes)\n"
    )
    spec = tables(model={"name": "my_reopened_net:Net"})
    spec["data"] = {"name": "files", "path": "data/*.npz"}
    (tmp_path / "there" / "x.toml").write_text(bespoke.runs.experiment.to_toml(spec))
    monkeypatch.syspath_prepend(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    first = bespoke.run("there/x.toml", "run")
    monkeypatch.setattr("bespoke.registry._ANNOUNCED", set())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    run = reopened(tmp_path / "run")
    assert "note: importing the module 'my_reopened_net' from" in capsys.readouterr().err
    assert same_bits(run.server, first.server)


# --- evaluating ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"), [("fedavg_ft", "loop"), ("ditto", "loop"), ("pfedfda", "batched"), ("fedper", "batched")]
)
def test_without_changes_the_last_evaluation_is_repeated_to_the_bit(name, backend, tmp_path):
    settings = {"every": 2, "adapt_rounds": 2}
    spec = experiment(name, rounds=3, data={"new_clients": 2}, model={"name": "mlp", "hidden": 5}, evaluation=settings)
    run = bespoke.run(spec, tmp_path / "run", backend=backend)
    for given, where in ((run, {}), (tmp_path / "run", {"backend": backend})):
        done = evaluate(given, **where)
        assert lines(done.folder.path) == lines(tmp_path / "run", 3)
        (row,) = done.folder.rounds()
        assert row["round"] == 3 and row["evaluated"] == run.folder.rounds()[-1]["evaluated"]
        for view, found in run.summary["views"].items():
            assert done.summary["views"][view]["last"] == found["last"]
        assert done.folder.read_json("federation.json") == run.folder.read_json("federation.json")
        assert done.experiment == run.experiment
        assert all(same_bits(done.models[c].personal, run.models[c].personal) for c in run.models)


def test_corrupted_rows_of_new_clients_from_one_training(made, tmp_path):
    """The same model on clean and on corrupted images: only new clients' rows change, those they adapt to included."""
    run = reopened(made)
    overrides = ["data.corrupt=contrast:5", "data.corrupt_clients=new"]
    done = evaluate(run, overrides, tmp_path / "contrast")
    assert same_bits(done.server, run.server)
    clean = {(row["client"], row["view"]): row for row in lines(made, 2)}
    for row in lines(tmp_path / "contrast"):
        assert (row == clean[row["client"], row["view"]]) == (row["group"] != "new")
    assert len(lines(tmp_path / "contrast")) == len(clean)
    for split in ("train", "test"):
        for client in range(8):
            old, new = (getattr(pool, split).client(client) for pool in (run.pool, done.pool))
            assert torch.equal(old, new)
            assert torch.equal(run.pool.x[old], done.pool.x[new]) == (client < 5)
    # as if the run had been given them from the start: training never saw a new client
    whole = trained(tmp_path / "whole", corrupt="contrast:5", corrupt_clients="new")
    assert lines(tmp_path / "contrast") == lines(whole.folder.path, 2)
    told = json.loads((tmp_path / "contrast" / "evaluation.json").read_text())
    assert told == {"run": str(made), "experiment": run.experiment.hash(), "round": 2, "overrides": overrides}


def test_fewer_rows_for_new_clients_to_adapt_to(made, tmp_path):
    only = ["evaluation.clients=new"]
    found = {}
    for rows in (2, 12):
        done = evaluate(made, [f"data.keep_rows={rows}", *only], tmp_path / str(rows))
        assert done.pool.train.sizes[-3:] == (rows,) * 3
        assert {row["group"] for row in lines(tmp_path / str(rows))} == {"new"}
        found[rows] = done.metric("loss", group="new")
    full = evaluate(made, only).metric("loss", group="new")
    assert len({full, *found.values()}) == 3
    assert full == reopened(made).metric("loss", group="new")


def test_all_clients_corrupted_and_other_fine_tuning(made, tmp_path):
    done = evaluate(
        made, ["data.corrupt=fog:3", "data.corrupt_clients=all", "evaluation.clients=train"], tmp_path / "a"
    )
    assert {row["group"] for row in lines(tmp_path / "a")} <= {"train", "unseen"}
    assert done.metric("loss") != reopened(made).metric("loss")
    run = reopened(made)
    more = evaluate(run, ["algorithm.head_epochs=1", "training.lr=0.3", "evaluation.adapt_rounds=3"], tmp_path / "b")
    assert "the run was trained with algorithm.head_epochs = 10, not 1" in more.notes
    assert "the run was trained with training.lr = 0.1, not 0.3" in more.notes
    assert more.metric("loss", group="new") != run.metric("loss", group="new")
    assert lines(tmp_path / "b", group="train") == lines(made, 2, group="train")  # who fine-tunes nothing


def test_other_metrics_of_a_trained_run(made):
    done = evaluate(made, ['objective.metrics=["balanced_accuracy", "accuracy"]'])
    assert done.summary["metric"] == "balanced_accuracy"
    assert done.metric("accuracy") == reopened(made).metric("accuracy")


REFUSED = {
    "seed=1": "seed cannot change in an evaluation of a trained run",
    "training.rounds=9": "training.rounds cannot change in an evaluation",
    "model.hidden=7": "model.hidden cannot change in an evaluation",
    "algorithm.name=fedavg": "an evaluation keeps the method that was trained",
    "data.alpha=0.5": "with data.alpha = 0.5 the client '0', who trained, would have other test rows",
    "data.partition=iid": "with data.partition = 'iid' the client '0', who trained, would have other test rows",
    "data.test=0.4": "with data.test = 0.4 the client '0', who trained, would have other test rows",
    "data.validation=0.3": "with data.validation = 0.3 the client '0', who trained, would have other validation rows",
    "data.new_clients=2": "with data.new_clients = 2 the client '5', who did not train, is no new client",
    "data.new_clients=4": "with data.new_clients = 4 the client '4', who trained, would lose its place",
    "data.corupt=fog:3": "has no key 'corupt' (did you mean 'corrupt'?)",
    "data.corrupt=frog:3": "frog",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_an_evaluation_cannot_change_is_refused(override, made, tmp_path):
    with pytest.raises(UserError) as caught:
        evaluate(made, [override], tmp_path / "out")
    assert REFUSED[override] in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_corruption_hides_no_other_partition(made):
    with pytest.raises(UserError, match="the client '0', who trained, would have other test rows"):
        evaluate(made, ["data.corrupt=fog:3", "data.alpha=0.5"])


def test_rows_of_another_source_are_others_although_their_numbers_are_the_same():
    run = bespoke.run(experiment(rounds=1))
    with pytest.raises(UserError, match=r"with data\.spread = 3\.0 the client '0', who trained, would have other test"):
        evaluate(run, ["data.spread=3.0"])


@dataclass(frozen=True)
class Wide(bespoke.Algorithm):
    """A method whose settings change what its server and its clients keep."""

    server: int = 2
    client: int = 2
    step: float = 1.0

    def server_init(self, task, params, num_clients, key):
        return {"model": params, "more": torch.zeros(self.server)}

    def client_init(self, task, params, client):
        return {"more": torch.zeros(self.client)}

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        return tree.map(lambda x: self.step * x, down["model"])


def test_settings_of_a_method_that_change_what_is_kept_are_refused(tmp_path):
    run = bespoke.run(experiment(Wide()))
    for key in ("server", "client"):
        with pytest.raises(UserError, match=rf"algorithm\.{key} changes what the server or a client keeps"):
            evaluate(run, [f"algorithm.{key}=3"])
    assert evaluate(run, ["algorithm.step=-1.0"]).accuracy < run.accuracy  # a method that is not listed, in memory


def test_more_clients_of_ones_own_files(tmp_path):
    """A clinic that joins after training: the others keep their rows, and it gets a model."""

    def clinics(folder, names):
        for name in names:
            draw = np.random.default_rng(ord(name))
            y = np.arange(24) % 3
            (tmp_path / folder).mkdir(exist_ok=True)
            np.savez(tmp_path / folder / f"{name}.npz", x=(draw.normal(size=(24, 3)) + y[:, None]).astype("f4"), y=y)

    clinics("old", "ab")
    clinics("more", "abc")
    clinics("others", "acd")
    spec = experiment(rounds=2)
    data = bespoke.DataSettings(name="files", path=str(tmp_path / "old" / "*.npz"))
    run = bespoke.run(replace(spec, data=data), tmp_path / "run")
    more = ["data.new_clients=1", "evaluation.clients=new"]
    done = evaluate(tmp_path / "run", [f"data.path={tmp_path}/more/*.npz", *more])
    assert [(row["client"], row["group"]) for row in done.folder.clients()] == [(2, "new")]
    assert list(done.models) == ["a", "b", "c"] and same_bits(done.models["c"].personal, run.server["model"])
    with pytest.raises(UserError, match="the client 'b', who trained, would lose its place"):
        evaluate(tmp_path / "run", [f"data.path={tmp_path}/others/*.npz", *more])


def test_what_participants_had_just_trained_is_not_kept(tmp_path):
    settings = {"when": "local", "adapt_rounds": 6, "every": 1}
    run = bespoke.run(experiment("fedper", data={"new_clients": 1}, evaluation=settings), tmp_path / "run")
    done = evaluate(run)
    assert lines(done.folder.path) == lines(tmp_path / "run", 3, group="new") != []
    assert 'only new clients: what participants had just trained, for when = "local", is not kept' in done.notes
    after = evaluate(run, ["evaluation.when=aggregated"])
    assert len(list(after.folder.clients())) == 6
    with pytest.raises(UserError, match=r"add the setting evaluation\.when=aggregated"):
        evaluate(run, ["evaluation.clients=train"])


# --- the record ---------------------------------------------------------------------------------------------------


def test_an_evaluation_has_a_record_of_its_own_that_is_read_like_a_runs(made, tmp_path):
    done = evaluate(made, ["data.corrupt=fog:2", "data.corrupt_clients=all"], tmp_path / "fog")
    assert bespoke.summarise(tmp_path / "fog") == done.summary == done.folder.read_json("summary.json")
    assert Evaluations(RunFolder(tmp_path / "fog")).rounds("personal") == [2]
    shutil.copytree(made, tmp_path / "clean")
    compared = bespoke.compare(tmp_path).as_dict()
    assert len(compared["rows"]) == 2 and any("fog:2" in json.dumps(row) for row in compared["rows"])
    environment = done.folder.read_json("environment.json")
    assert environment["experiment"] == done.experiment.hash() != reopened(made).experiment.hash()
    assert bespoke.runs.experiment.load(tmp_path / "fog" / "config.toml")[0] == done.experiment


def test_an_evaluation_is_no_run(made, tmp_path):
    evaluate(made, out=tmp_path / "e")
    for call in (reopened, evaluate):
        with pytest.raises(UserError, match="holds an evaluation, which has no models of its own"):
            call(tmp_path / "e")
    spec = reopened(made).experiment
    with pytest.raises(UserError, match="holds an evaluation of a run, which cannot go on"):
        bespoke.run(spec, tmp_path / "e", resume=True)
    with pytest.raises(UserError, match="already holds a run or an evaluation"):
        evaluate(made, out=tmp_path / "e")
    with pytest.raises(UserError, match="already holds a run or an evaluation"):
        evaluate(made, out=made)


def test_an_evaluation_that_fails_leaves_no_record(made, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "client_lines", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(made, out=tmp_path / "e")
    monkeypatch.undo()
    assert not RunFolder(tmp_path / "e").holds_run()


def test_a_run_in_memory_is_evaluated_where_it_is(tmp_path):
    run = federated(algorithm="fedrep", new_clients=1)  # of one's own arrays and model
    done = evaluate(run, ["algorithm.head_epochs=2", "evaluation.clients=new"])
    assert {row["group"] for row in done.folder.clients()} == {"new"}
    with pytest.raises(UserError, match=r"evaluate\(device=\.\.\.\) is for a folder"):
        evaluate(run, device="cpu")


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = content(copy)
    fog = ("--set", "data.corrupt=fog:3", "--set", "data.corrupt_clients=new", "--device", "cpu")
    done = command("evaluate", "run", *fog, "--out", "fog")
    assert done.code == 0 and "evaluating run after round 2, with data.corrupt=fog:3" in done.err
    assert "all 5 clients with test rows: accuracy" in done.out and "all 3 new clients with test rows" in done.out
    assert done.out.splitlines()[0].endswith("; records in fog") and content(copy) == before
    quiet = command("evaluate", "run", *fog, "--quiet", "--json")
    told = json.loads(quiet.out)
    assert quiet.err == "" and told["seed"] == 0 and told["views"]["personal"]["last"]["round"] == 2
    folder = Path(told["folder"])
    assert folder.parent == Path("run/evaluations") and lines(folder) == lines("fog")
    again = command("evaluate", "run", *fog).sentence
    assert again.startswith(f"{folder} already holds a run or an evaluation")
    assert command("evaluate", "run").code == 0 and len(list((copy / "evaluations").iterdir())) == 2
    compared = command("compare", "run/evaluations", "--group", "new")
    assert compared.code == 0 and "fog:3" in compared.out
    assert "fog" not in command("compare", "run").out  # an evaluation does not stand beside its run
    assert reopened(copy).last_round == 2


def test_the_command_tells_corrupted_and_clean_clients_apart(copy, tmp_path):
    """By default a corruption hits the first half of all clients: here four of the five that trained."""
    done = command("evaluate", copy, "--set", "data.corrupt=contrast:5", "--out", tmp_path / "half", "--quiet")
    first, *parts = done.out.splitlines()
    assert "all 5 clients with test rows" in first and "all 3 new clients with test rows" in first
    rows = [row["metrics"]["accuracy"] for row in lines(tmp_path / "half", view="personal", split="test")]
    told = {"contrast, 4 clients": rows[:4], "clean, 1 client": rows[4:5], "clean, 3 new clients": rows[5:]}
    for part, (who, own) in zip(parts, told.items(), strict=True):
        pooled = sum(right for right, _ in own) / sum(weight for _, weight in own)
        assert part.startswith(f"{who}: accuracy {100 * pooled:.2f} % pooled, ")
    everyone = ("--set", "data.corrupt=contrast:5", "--set", "data.corrupt_clients=all")
    assert len(command("evaluate", copy, *everyone, "--quiet").out.splitlines()) == 1


def test_a_command_line_with_a_mistake(tmp_path):
    path = write(tmp_path / "x.toml")
    assert command("run", path, "--out", tmp_path / "run", "--quiet").code == 0
    assert "holds no run" in command("evaluate", tmp_path).sentence
    assert "TABLE.KEY=VALUE" in command("evaluate", tmp_path / "run", "--set", "lr").sentence
    assert "there is no device 'gpu'" in command("evaluate", tmp_path / "run", "--device", "gpu").sentence
    assert not (tmp_path / "run" / "evaluations").exists()


def test_an_evaluation_halves_blocks_only_where_its_run_did(tmp_path, monkeypatch):
    runs = {
        halve: bespoke.run(experiment(), tmp_path / str(halve), backend="batched", halve=halve)
        for halve in (True, False)
    }
    block = BatchedClients._block

    def small(self, call):
        if len(call.clients) > 1:
            raise torch.OutOfMemoryError("not enough")
        return block(self, call)

    monkeypatch.setattr(BatchedClients, "_block", small)
    assert any(note.startswith("memory ran out") for note in evaluate(runs[True], ["data.keep_rows=5"]).notes)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(runs[False], ["data.keep_rows=5"])
