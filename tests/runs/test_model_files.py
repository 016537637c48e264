"""A personal model is a file: what a fresh process needs to predict, and nobody's rows."""

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from personal_models import CLASSES, DIM, NEW, ROWS, Net, federated, hospitals, shipped
from small_runs import experiment
from torch import nn

import bespoke
from bespoke import UserError, load_model
from bespoke.core.algorithm import Algorithm
from bespoke.core.inputs import Column, InputContract
from bespoke.data import DATASETS, Examples
from bespoke.data.transforms import Steps
from bespoke.models import MODELS
from bespoke.runs import model_files
from bespoke.runs.personal import _made_up

OWN_NET = """
from pathlib import Path
import torch
from torch import nn

Path("imported").touch()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.fc = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.norm(self.inner(x))))
"""

LOADING = """
import json
from pathlib import Path
import numpy as np
import torch
import bespoke

torch.manual_seed(1)
rows, found = json.loads(Path("new.json").read_text()), {}
for path in sorted(Path("models").rglob("*.safetensors")):
    model = bespoke.load_model(path, trust_code=True)
    found[f"{path.parent.name}/{path.stem}"] = torch.cat([model.logits(rows), model.predict_proba(rows)], dim=1).numpy()
np.savez("found.npz", **found)
"""

PATIENTS = {"age": [30.5, 41.25, 77.0], "sex": ["M", "X", "F"], "dose": [0.1, -2.0, 0.7], "bmi": [21.5, 30.0, 18.75]}


def saved(run, path, client="h1"):
    run.models[client].save(path)
    return run.models[client]


def same(model, other, x=NEW):
    return torch.equal(model.logits(x), other.logits(x))


# --- another process ----------------------------------------------------------------------------------------------


def tables(folder):
    """Write five hospitals as CSV files of four columns, which become six features, and return them as clients."""
    draw = np.random.default_rng(0)
    for i in range(5):
        numbers = draw.normal(size=(ROWS, 3)).astype(np.float32)
        rows = [
            f"{age},{'FMX'[j % 3]},{dose},{bmi},{['ill', 'unsure', 'well'][j % 2 + j % 3 // 2]}"
            for j, (age, dose, bmi) in enumerate(numbers)
        ]
        (folder / f"h{i}.csv").write_text("\n".join(["age,sex,dose,bmi,outcome", *rows]) + "\n")
    return bespoke.data.from_csv(folder / "*.csv", label="outcome")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """By method: the models of five hospitals; their files; what a process with these alone predicts; all rows."""
    folder, home = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("home")
    (folder / "own_net.py").write_text(OWN_NET)
    (folder / "load.py").write_text(LOADING)
    (folder / "new.json").write_text(json.dumps(PATIENTS))
    clients, models = tables(home), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        import own_net

        for name in bespoke.ALGORITHMS.shipped:
            run = federated(name, own_net.Net, clients)
            run.save_models(folder / "models" / name)
            models[name] = run.models
    shutil.rmtree(home)
    env = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "load.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [row.tobytes() for x, _ in clients.values() for row in x]
    return models, folder / "models", dict(np.load(folder / "found.npz")), rows


@pytest.mark.xdist_group("elsewhere")
@pytest.mark.parametrize("name", sorted(bespoke.ALGORITHMS.shipped))
def test_another_process_predicts_the_same_bits_without_anybodys_rows(name, elsewhere):
    """Words and numbers in, equal bits out; pFedGP's file holds features of its rows, and not these."""
    models, folder, found, rows = elsewhere
    assert len(rows) == 5 * ROWS
    for client, model in models[name].items():
        wanted = torch.cat([model.logits(PATIENTS), model.predict_proba(PATIENTS)], dim=1)
        assert np.array_equal(found[f"{name}/{client}"], wanted.numpy())
        data = (folder / name / f"{client}.safetensors").read_bytes()
        assert not any(row in data for row in rows)
        assert model.contract.features == ("age", "sex=F", "sex=M", "sex=X", "dose", "bmi")


def test_a_row_in_a_file_would_be_found():
    x = hospitals()["h0"][0]
    assert x[3].tobytes() in safetensors.torch.save({"x": torch.from_numpy(x)})


def reachable(thing):
    """All objects to which a thing leads, but through modules, classes and the globals of functions."""
    left, seen = [thing], {}
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, types.ModuleType | type):
            continue
        seen[id(each)] = each
        if isinstance(each, types.FunctionType):
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            left += gc.get_referents(each)
    return seen.values()


@pytest.mark.parametrize("name", ["fedavg", "pfedgp"])
def test_no_model_of_a_run_leads_to_the_rows(name):
    run = federated(name)
    rows = {id(run.pool), run.pool.x.untyped_storage().data_ptr(), id(run.federation.clients)}
    held = [each for each in reachable(run.models["h0"]) if isinstance(each, torch.Tensor)]
    assert len(held) > 5 and not rows & {leaf.untyped_storage().data_ptr() for leaf in held}
    assert not rows & {id(each) for each in reachable(run.models["h0"])}
    assert rows & {id(each) for each in reachable(run)}  # the search finds them where they are


# --- what a file says ---------------------------------------------------------------------------------------------


def test_a_file_says_where_the_model_comes_from(tmp_path):
    run = federated("pfedfda", seed=3, test=0.25)
    model = saved(run, tmp_path / "a.safetensors", "h2")
    loaded = load_model(tmp_path / "a.safetensors", model=Net())
    assert loaded.about == model.about
    about = loaded.about
    assert (about["client"], about["rows"], about["round"], about["seed"]) == ("h2", 9, 1, 3)
    assert about["experiment"] == run.experiment.hash() and about["versions"]["bespoke"] == bespoke.__version__
    rows = run.pool.test.client(2)
    x, y = run.pool.x[rows], run.pool.y[rows]
    assert about["score"] == {
        "metric": "accuracy",
        "value": loaded.score(x, y),
        "of": "the client's own test rows",
        "rows": 3,
        "view": "personal",
        "round": 1,
    }
    assert loaded.evaluate(x, y).keys() == {"accuracy", "loss"} and loaded.algorithm == run.experiment.algorithm
    assert "client 'h2' by pfedfda: 6 float32 -> 3 classes" in repr(loaded)


def test_the_headline_view_stays_the_first(tmp_path):
    model = saved(federated("fedavg_ft"), tmp_path / "a.safetensors")
    assert list(load_model(tmp_path / "a.safetensors", model=Net()).personal) == list(model.personal)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("pfedgp", "features of the client's own train rows"),
        ("fedproto", "class means of all clients' features"),
        ("pfedvmp", "class means of all clients' features"),
    ],
)
def test_saving_says_what_a_file_keeps_of_rows(name, held, tmp_path, capsys):
    saved(federated(name), tmp_path / "a.safetensors")
    said = capsys.readouterr().err
    assert f"a.safetensors holds {held}" in said
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert json.loads(file.metadata()["bespoke"])["holds"].startswith(held)
    saved(federated("fedavg"), tmp_path / "b.safetensors")
    assert capsys.readouterr().err == ""


# --- models and inputs by name ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {
            "data": {"name": "digits", "clients": 4, "subsample": 0.1},
            "model": {"name": "cnn", "norm": "group", "width": 4, "hidden": 8},
        },
        {
            "data": {"name": "random", "like": "cifar10", "rows": 60, "normalise": "cifar", "clients": 4},
            "model": {"name": "cnn", "width": 4, "hidden": 8},
        },
        {
            "data": {
                "name": "random",
                "like": "cifar10",
                "rows": 90,
                "degrade": "fedpce",
                "noise_scale": "image",
                "partition": "degradations",
                "clients": 6,
            },
            "model": {"name": "linear"},
        },
        {
            "data": {"name": "random", "like": "mnist", "rows": 60, "clients": 4},
            "model": {"name": "mlp", "hidden": 8},
        },
        {
            "data": {"name": "random", "like": "sent140", "rows": 40, "clients": 4, "partition": "iid"},
            "model": {"name": "sent140_lstm", "vocabulary": 10000},
        },
    ],
    ids=["digits", "moments", "degraded", "bytes", "tokens"],
)
def test_shipped_models_and_scalings_need_their_names_alone(changes, tmp_path):
    run = shipped("fedper", **changes)
    client = next(iter(run.models))
    model, x = saved(run, tmp_path / "a.safetensors", client), run.pool.x[:5]
    loaded = load_model(tmp_path / "a.safetensors")
    assert same(model, loaded, x)
    assert loaded.contract.dtype == str(x.dtype).removeprefix("torch.") and loaded.contract.shape == tuple(x.shape[1:])


def test_constants_come_from_the_file_and_freezing_too(tmp_path):
    net = Net()
    net.inner.requires_grad_(False)
    model = saved(federated("fedper", net), tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", model=Net())  # of other weights, none of them frozen
    assert same(model, loaded) and loaded.task.shapes.keys() == model.task.shapes.keys()


@pytest.mark.parametrize("objective", ["regression", "multilabel"])
def test_other_objectives(objective, tmp_path):
    draw = np.random.default_rng(1)
    targets = (draw.normal(size=(ROWS, CLASSES)) > 0).astype(np.float32)
    clients = [(x, targets) for x, _ in hospitals().values()]
    run = bespoke.federate(clients, Net(), "fc", rounds=1, objective=objective, device="cpu")
    model = saved(run, tmp_path / "a.safetensors", "0")
    loaded = load_model(tmp_path / "a.safetensors", model=Net())
    assert same(model, loaded) and model.evaluate(NEW, targets[:9]) == loaded.evaluate(NEW, targets[:9])
    if objective == "regression":
        with pytest.raises(UserError, match=r"'regression' has no probabilities: use predict"):
            loaded.predict_proba(NEW)
    else:
        assert torch.equal(loaded.predict_proba(NEW) > 0.5, loaded.predict(NEW) > 0)
    with pytest.raises(UserError, match="y has 2 numbers per row, but this model has 3"):
        loaded.score(NEW, targets[:9, :2])


# --- somebody's own ---------------------------------------------------------------------------------------------------


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of a user's own in the working folder, not imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    method = """
import bespoke
from dataclasses import dataclass


@dataclass(frozen=True)
class Own(bespoke.Algorithm):
    rate: float = 0.5

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        return down["model"]

    def predict(self, task, personal, x):
        return self.rate * task.logits(personal, x)
"""
    (tmp_path / "mine.py").write_text(OWN_NET + method)
    yield lambda: __import__("mine")
    sys.modules.pop("mine", None)
    bespoke.ALGORITHMS.pop("mine:Own", None)


def test_code_is_imported_only_where_it_is_trusted(own_module):
    mine = own_module()
    model = saved(federated(mine.Own(rate=0.25), mine.Net), "a.safetensors")
    Path("imported").unlink()
    del sys.modules["mine"]
    with pytest.raises(
        UserError, match=r"its method is code .*'mine:Own'.*trust_code=True .--trust-code., or give algorithm="
    ):
        load_model("a.safetensors")
    with pytest.raises(
        UserError, match=r"its model is code .*'mine:Net'.*trust_code=True .--trust-code., or give model="
    ):
        load_model("a.safetensors", algorithm=mine.Own(rate=0.25))
    assert not Path("imported").exists()
    loaded = load_model("a.safetensors", trust_code=True)
    assert Path("imported").exists() and same(model, loaded) and loaded.algorithm.rate == 0.25
    assert same(model, load_model("a.safetensors", model=mine.Net, algorithm=mine.Own(rate=0.25)))


def test_an_installed_package_is_imported_only_where_it_is_trusted(sound, tmp_path, monkeypatch):
    _, card, tensors = sound
    path = written(tmp_path / "b", card | {"model": {"name": "theirs", "settings": {"hidden": 5}}}, tensors)
    loaded = []

    def load():
        loaded.append("theirs")
        return lambda input_shape, num_classes, hidden: MODELS["mlp"].build(
            bespoke.ModelSettings("mlp", "none", hidden), input_shape, num_classes
        )

    monkeypatch.setattr(MODELS, "offered", lambda: {"theirs": types.SimpleNamespace(load=load)})
    with pytest.raises(UserError, match=r"its model 'theirs' is of an installed package, .*trust_code=True"):
        load_model(path)
    assert not loaded
    load_model(path, trust_code=True)
    assert loaded == ["theirs"]
    del MODELS["theirs"]


def test_a_registered_model_is_known_by_its_name(sound, tmp_path):
    _, card, tensors = sound
    path = written(tmp_path / "b", card | {"model": {"name": "registered", "settings": {}}}, tensors)
    with pytest.raises(UserError, match="there is no model 'registered'"):
        load_model(path)


def test_the_seed_covers_the_weights_of_a_factory():
    one, two, other = (federated("local", Net, seed=seed, lr=1e-30) for seed in (0, 0, 1))
    assert same(one.models["h0"], two.models["h0"]) and not same(one.models["h0"], other.models["h0"])
    assert one.experiment.hash() != other.experiment.hash()


def test_objects_are_given_again(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Local(Algorithm):
        def client_update(self, local, state, down):
            return state, {"model": down["model"]}

        def personalize(self, local, state, down):
            return down["model"]

    path = tmp_path / "a.safetensors"
    model = saved(federated(Local()), path)
    with pytest.raises(UserError, match=r"its method was an object of a program, 'Local', .*algorithm=\.\.\."):
        load_model(path)
    with pytest.raises(UserError, match=r"its model was an object of a program, 'Net', .*model=\.\.\."):
        load_model(path, algorithm=Local())
    assert same(model, load_model(path, algorithm=Local(), model=Net()))
    for wrong, why in [
        (Net(9), r"of another model than this one: 'inner.weight' has the shape \[8, 6\] there and \[9, 6\] here"),
        (nn.Linear(DIM, CLASSES), "it has 'inner.weight', which this one has not"),
        (3, "takes a torch module, or a function that makes one, not 3"),
        (lambda: 3, "its model is a torch module, not 3"),
    ]:
        with pytest.raises(UserError, match=why):
            load_model(path, algorithm=Local(), model=wrong)


PLAIN = {"name": "none"}


def net(between, eps=1e-5):
    return nn.Sequential(nn.Linear(DIM, 4), between, nn.LayerNorm(4, eps=eps), nn.Linear(4, CLASSES))


def test_a_given_model_has_the_layers_of_the_saved_one(tmp_path):
    path = tmp_path / "a.safetensors"
    run = bespoke.federate(hospitals(), net(nn.ReLU()), "3", rounds=1, device="cpu", out=tmp_path / "run")
    model = saved(run, path)
    assert same(model, load_model(path, model=net(nn.ReLU())))
    for other, why in [(net(nn.Tanh()), r"\(1\): ReLU\(\).*Tanh"), (net(nn.ReLU(), 0.5), r"LayerNorm.*eps=0\.5")]:
        for given in (other, lambda other=other: other):
            with pytest.raises(UserError, match=f"a.safetensors is of another model than this one: .*{why}"):
                load_model(path, model=given)
        with pytest.raises(UserError, match=f"start.safetensors is of another model than this one: .*{why}"):
            bespoke.open_run(tmp_path / "run", model=other)


def test_trusted_code_has_the_layers_of_the_saved_one(own_module):
    saved(federated("fedavg", own_module().Net), "a.safetensors")
    del sys.modules["mine"]
    Path("mine.py").write_text(Path("mine.py").read_text().replace("nn.LayerNorm(8)", "nn.LayerNorm(8, eps=0.5)"))
    with pytest.raises(UserError, match=r"of another model than this one: .*eps=0\.5"):
        load_model("a.safetensors", trust_code=True)


class Attending(nn.Module):
    """Its repr and its parameters tell neither the number of heads nor the power."""

    def __init__(self, heads=2, power=1):
        super().__init__()
        self.mix, self.fc, self.power = nn.MultiheadAttention(4, heads, batch_first=True), nn.Linear(4, CLASSES), power

    def forward(self, x):
        return self.fc(self.mix(x, x, x, need_weights=False)[0].mean(dim=1) ** self.power)


def test_a_given_model_computes_what_the_saved_one_does(tmp_path):
    draw, path = np.random.default_rng(0), tmp_path / "a.safetensors"
    clients = [(draw.normal(size=(9, 3, 4)).astype(np.float32), np.arange(9) % CLASSES) for _ in range(2)]
    run = bespoke.federate(clients, Attending(), "fc", rounds=1, device="cpu", out=tmp_path / "run")
    model = saved(run, path, "0")
    assert same(model, load_model(path, model=Attending()), clients[0][0])
    for other in (Attending(4), Attending(power=2)):
        with pytest.raises(UserError, match=r"a\.safetensors is of another model than this one: the code of"):
            load_model(path, model=other)
        with pytest.raises(UserError, match=r"start\.safetensors is of another model than this one: the code of"):
            bespoke.open_run(tmp_path / "run", model=other)


def test_code_that_takes_no_made_up_examples_is_saved_and_loaded(tmp_path):
    made_up = _made_up(InputContract((DIM,), "float32"))

    def careful(key, x, train):
        if torch.equal(x, made_up):
            raise ValueError("no such rows")
        return x

    path = tmp_path / "a.safetensors"
    model = saved(federated(transform=careful), path)
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["bespoke"])["probe"] == []
    assert same(model, load_model(path, model=Net(), transform=careful))


def test_long_structures_are_compared_by_a_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "_MOST_STRUCTURE", 10)
    path = tmp_path / "a.safetensors"
    model = saved(bespoke.federate(hospitals(), net(nn.ReLU()), "3", rounds=1, device="cpu"), path)
    assert model.card["structure"].startswith("sha256:") and same(model, load_model(path, model=net(nn.ReLU())))
    with pytest.raises(UserError, match="of another model than this one: 'sha256:"):
        load_model(path, model=net(nn.Tanh()))


def halved(key, x, extra, train):
    return x.to(torch.float32) / 2


def tripled(key, x, train):
    return 3 * x


def test_an_own_transform_is_named_or_given_again(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    path = tmp_path / "a.safetensors"
    for transform, why in [
        (halved, rf"its transform is code .*'{halved.__module__}:halved'.*trust_code=True"),
        (lambda *args: halved(*args), r"its transform was an object of a program, .*transform=\.\.\."),
    ]:
        monkeypatch.setitem(
            DATASETS.data, "mine", DATASETS.read(lambda t=transform: Examples(x, y, 3, transform=t), "")
        )
        model = saved(shipped("fedavg", {"name": "mine", "clients": 3}, {"name": "linear"}), path, "0")
        with pytest.raises(UserError, match=why):
            load_model(path)
        assert same(model, load_model(path, transform=transform), x[:5])
        with pytest.raises(
            UserError, match=r"of another model than this one: the code of .* the transform computes other"
        ):
            load_model(path, transform=lambda key, x, extra, train: x)


def test_the_transform_of_federate_is_named_or_given_again(tmp_path):
    """Bespoke's own steps are in the file, and a module's function by its path; others are given again, as before."""
    path, scaled = tmp_path / "a.safetensors", bespoke.data.Normalise([0.5] * DIM, [2.0] * DIM)
    model = saved(federated("fedavg_ft", transform=scaled), path)
    assert same(model, load_model(path, model=Net()))
    doubled = [scaled, lambda key, x, train: 2 * x]
    model = saved(federated("fedavg_ft", transform=doubled), path)
    with pytest.raises(UserError, match=r"its transform was an object of a program, .*transform=\.\.\."):
        load_model(path, model=Net())
    assert same(model, load_model(path, model=Net(), transform=doubled))
    for other in (scaled, [scaled, lambda key, x, train: 2.5 * x], [bespoke.data.Normalise([0.5], [1.0]), doubled[1]]):
        with pytest.raises(UserError, match=r"a\.safetensors is of another transform than this one"):
            load_model(path, model=Net(), transform=other)
    assert same(model, load_model(path, model=Net(), transform=[scaled, lambda key, x, train: 2 * x]))
    model = saved(federated("fedavg_ft", transform=[tripled, scaled]), path)
    with pytest.raises(UserError, match=rf"its transform is code .*'{tripled.__module__}:tripled'.*trust_code=True"):
        load_model(path, model=Net())
    assert same(model, load_model(path, model=Net(), trust_code=True))


def test_the_scaling_of_a_data_set_stays_behind_steps_that_are_given_again(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    data = {"name": "mine", "clients": 3, "transform": ("normalise(mean=[0.5], deviation=[2.0])",)}
    path, steps = tmp_path / "a.safetensors", [bespoke.data.Normalise([0.5], [2.0])]
    for last in (halved, lambda *args: halved(*args)):
        monkeypatch.setitem(DATASETS.data, "mine", DATASETS.read(lambda t=last: Examples(x, y, 3, transform=t), ""))
        model = saved(shipped("fedavg", data, {"name": "linear"}), path, "0")
        if last is halved:
            assert same(model, load_model(path, trust_code=True), x[:5])
            assert same(model, load_model(path, transform=steps, trust_code=True), x[:5])
        else:
            with pytest.raises(UserError, match=r"its transform was an object of a program, .*transform=\.\.\."):
                load_model(path, trust_code=True)
            assert same(model, load_model(path, transform=Steps(tuple(steps), last)), x[:5])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"steps": [3], "last": PLAIN}, "a is damaged: the steps of its transform cannot be"),
        ({"steps": "flip", "last": PLAIN}, "a is damaged: the steps"),
        ({"steps": ["flip"]}, "a is damaged: the steps"),
        ({"steps": ["flip"], "last": PLAIN, "code": 3}, "a is damaged: the hash of its transform cannot be 3"),
        ({"steps": ["flip"], "last": {"name": "steps", "settings": {"steps": []}}}, "a: there is no transform 'steps'"),
        ({}, "a: there is no transform 'steps'"),
        ({"steps": ["turn"], "last": PLAIN}, "a: there is no transform 'turn'"),
        ({"steps": ["flip(p='x')"], "last": PLAIN}, r"a: Flip\(p='x'\) cannot mirror"),
        ({"steps": ["flip(q=1)"], "last": PLAIN}, "a: flip cannot be made with"),
        ({"steps": ["flip("], "last": PLAIN}, r"a: 'flip\(' cannot be read"),
        ({"steps": ["os:getcwd()"], "last": PLAIN}, "a: its transform is code of somebody's own, 'os:getcwd'"),
        ({"steps": ["flip"], "last": {"path": "os:getcwd"}}, "a: its transform is code of somebody's own"),
    ],
)
def test_damaged_steps_of_a_transform(settings, why):
    card = {"transform": {"name": "steps", "settings": settings}}
    with pytest.raises(UserError, match=why):
        model_files.rebuilt_transform(card, None, False, "a")


def test_an_own_objective_is_given_again(tmp_path):
    own = dataclasses.replace(bespoke.OBJECTIVES["classification"], name="mine", row_losses=lambda o, y: o.sum(-1))
    model = saved(federated(objective=own), tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"its objective was an object of a program, 'mine'"):
        load_model(tmp_path / "a.safetensors", model=Net())
    for given in (own, "classification"):
        assert same(model, load_model(tmp_path / "a.safetensors", model=Net(), objective=given))


# --- inputs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return federated().models["h1"]


def test_inputs_are_compared_with_the_contract(model):
    with pytest.raises(UserError, match=r"x has the shape \(9, 5\), but this model takes float32"):
        model.predict(NEW[:, :5])


def test_whole_numbers_lists_and_many_rows_are_inputs_too(model):
    whole = np.arange(12).reshape(2, DIM)
    assert torch.equal(model.logits(whole), model.logits(whole.astype(np.float32)))
    assert torch.equal(model.logits(whole.tolist()), model.logits(whole.astype(np.float32)))
    many = np.tile(NEW, (100, 1))
    assert model.logits(many).shape == (900, CLASSES)
    assert torch.allclose(model.logits(many)[:9], model.logits(NEW), atol=1e-6)
    assert model.predict(NEW[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("y", "why"),
    [
        (np.zeros(8, int), "there are 9 rows in x and 8 in y"),
        (np.full(9, 3), r"y has the label 3, outside 0\.\.2"),
        (np.zeros(9), "holds float64 values: give class numbers"),
        (np.array(["a"] * 9), "give class numbers"),
    ],
)
def test_targets_are_compared_with_the_objective(model, y, why):
    with pytest.raises(UserError, match=why):
        model.score(NEW, y)


def test_no_rows_have_no_score(model):
    with pytest.raises(UserError, match="there are no rows to evaluate"):
        model.score(NEW[:0], np.zeros(0, int))


NAMED = InputContract(
    (DIM,), "float32", (Column("a"), Column("b", ("x", "y")), *map(Column, "cde")), ("ill", "well", "unsure"), "outcome"
)


def test_names_of_features_and_classes(model, tmp_path):
    card = model.card | {"inputs": dataclasses.asdict(NAMED)}
    dataclasses.replace(model, card=card).save(tmp_path / "a.safetensors")
    loaded = load_model(tmp_path / "a.safetensors", model=Net())
    assert loaded.contract == NAMED and loaded.class_names == ("ill", "well", "unsure")
    y = loaded.predict(NEW)
    assert loaded.score(NEW, [loaded.class_names[i] for i in y.tolist()]) == 1.0 == loaded.score(NEW, y)
    with pytest.raises(UserError, match="holds 'dead' in row 0, an unknown class"):
        loaded.score(NEW, ["dead"] * 9)
    frame = {name: NEW[:, i] for i, name in zip((5, 4, 3, 0), "edca", strict=True)} | {"b": ["x", "y", "y"] * 3}
    numbers = NEW.copy()
    numbers[:, 1:3] = [[1, 0], [0, 1], [0, 1]] * 3
    assert torch.equal(loaded.logits(frame), model.logits(numbers))


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A file of a shipped model, its description and its tensors."""
    path = tmp_path_factory.mktemp("sound") / "a.safetensors"
    run = bespoke.run(experiment("pfedfda", rounds=1, model={"name": "mlp", "hidden": 5}), device="cpu")
    run.models["0"].save(path)
    with safetensors.safe_open(path, "pt") as file:
        card = json.loads(file.metadata()["bespoke"])
    return path, card, safetensors.torch.load_file(path)


def written(path, card, tensors):
    told = card if isinstance(card, str) else json.dumps(card)
    path.write_bytes(safetensors.torch.save(tensors, {"bespoke": told}))
    return path


INPUTS = json.loads(InputContract((1, 8, 8), "uint8").to_json())


def test_the_sound_file_loads(sound, tmp_path):
    _, card, tensors = sound
    load_model(written(tmp_path / "b", card, tensors))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": 2}, "is a model file of format 2, and this bespoke reads format 1"),
        ({"model": None}, "its description has no 'model'"),
        ({"method": {"name": "fedavgg", "settings": {}}}, "there is no method 'fedavgg'"),
        ({"method": {"name": "fedavg", "path": "os:abort"}}, "'method' in its description cannot be"),
        ({"method": {"name": "pfedfda", "settings": {"ridge": "x"}}}, "ridge must be a number, not 'x'"),
        ({"model": {"name": "mlp", "settings": {"hidden": 6}}}, "of another model than this one: '.*' has the shape"),
        ({"model": {"name": "mlp", "settings": {"hidden": 10**6}}}, "of another model|names a model of"),
        (
            {"model": {"name": "resnet18", "settings": {"width": 10**5}}, "inputs": INPUTS | {"shape": [3, 32, 32]}},
            "names a model of",
        ),
        ({"model": {"name": "sent140_lstm", "settings": {"vocabulary": 10**9}}}, "cannot hold 1,000,000,000 word vect"),
        ({"inputs": {"shape": [10**6, 10**6]}}, "is damaged: a contract of inputs is damaged"),
        (
            {"inputs": INPUTS | {"shape": [2**13, 2**12]}},
            "is damaged: a contract of inputs has more than 16,777,216 numb",
        ),
        (
            {"transform": {"name": "steps", "settings": {"steps": 3}}},
            "is damaged: the steps of its transform cannot be",
        ),
        ({"structure": 3}, "'structure' in its description cannot be 3"),
        ({"probe": [1]}, r"'probe' in its description cannot be \[1\]"),
        ({"probe": [[1.0], ["x"]]}, "'probe' in its description cannot be"),
        ({"probe": [[1.0], [1.0, 2.0]]}, "'probe' in its description cannot be"),
        ({"probe": [[1.0]] * 9}, "is of another model than this one"),
        ({"probe": [[0.0, 0.0, 1e9]] * 3}, "is of another model than this one"),
        ({"inputs": INPUTS | {"columns": [{"name": "a", "categories": []}]}}, "is damaged: a contract's columns have"),
        ({"inputs": INPUTS | {"dtype": "pickle"}}, "is damaged: a contract of inputs is damaged"),
        ({"inputs": []}, "'inputs' in its description cannot be"),
        ({"inputs": INPUTS | {"shape": [7]}}, "of another model than this one"),
        ({"outputs": 10**9}, "of another model|names a model of"),
        ({"transform": {"name": "rot13"}}, "there is no transform 'rot13'"),
        ({"objective": {"name": "regression", "settings": {"metrics": ["x"]}}}, "there is no metric 'x'"),
        ({"dtype": []}, "'dtype' in its description cannot be"),
        ({"head": "nothing"}, "no module named 'nothing'"),
        ({"head": "x" * 10**5}, r"no module named 'x+\.\.\."),
        ({"tensors": ["x" * 10**5]}, r"is damaged: it (has no tensor 'x+\.\.\.$|does not tell of)"),
        ({"tensors": ["weight"]}, "is damaged: it does not tell of its tensor"),
    ],
)
def test_a_damaged_description_is_refused_in_one_sentence(change, why, sound, tmp_path):
    _, card, tensors = sound
    changed = {key: value for key, value in (card | change).items() if value is not None}
    with pytest.raises(UserError, match=why) as error:
        load_model(written(tmp_path / "b", changed, tensors))
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("{", "its description is not JSON"),
        ("[]", "has no format number"),
        ('{"format": 1, "about": {"seed": NaN}}', "is not JSON .NaN is no number of JSON"),
        ("[" * 10**5, "is not JSON"),
        (" " * 2**23, "more than 4,194,304 bytes"),
    ],
    ids=["cut", "list", "nan", "deep", "long"],
)
def test_a_description_that_is_none(told, why, sound, tmp_path):
    with pytest.raises(UserError, match=why):
        load_model(written(tmp_path / "b", told, sound[2]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weight": None}, "it has no tensor 'weight'"),
        ({"weight": torch.zeros(10, 7)}, "its tensors do not fit its model and method"),
        ({"weight": torch.full((10, 5), torch.nan)}, "'weight' holds NaN or infinity"),
        ({"weight": torch.full((10, 5), torch.nan, dtype=torch.complex64)}, "'weight' holds NaN or infinity"),
        ({"weight": torch.zeros(10, 5, dtype=torch.float8_e5m2)}, "its tensor 'weight' cannot be of the type F8_E5M2"),
        ({"more": torch.zeros(1)}, "it does not tell of its tensor 'more'"),
        ({"constants/more": torch.zeros(1)}, "it has 'more', which this one has not"),
    ],
)
def test_damaged_tensors_are_refused_in_one_sentence(change, why, sound, tmp_path):
    _, card, tensors = sound
    changed = {name: leaf for name, leaf in (tensors | change).items() if leaf is not None}
    with pytest.raises(UserError, match=why) as error:
        load_model(written(tmp_path / "b", card, changed))
    assert "\n" not in str(error.value)


def test_a_pipe_is_no_model(model, tmp_path):
    """Reading one would wait for ever."""
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors cannot be read: it is no regular file"):
        load_model(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors is there and is no model"):
        model.save(tmp_path / "a.safetensors")


def test_a_weight_of_another_shape_is_named(sound, tmp_path):
    _, card, tensors = sound
    name = next(name for name in tensors if name.startswith("body/"))
    with pytest.raises(UserError, match=rf"'{name}' has the shape \[2, 2\], and the model's is"):
        load_model(written(tmp_path / "b", card, tensors | {name: torch.zeros(2, 2)}))


def test_files_that_are_no_models(sound, tmp_path):
    other, cut, start = (tmp_path / name for name in ("other", "cut", "start.safetensors"))
    other.write_bytes(b"\x80\x04not a model")
    cut.write_bytes(sound[0].read_bytes()[:-40])
    safetensors.torch.save_file({"x": torch.zeros(1)}, start)
    for path, why in [
        (other, "is not a sound .safetensors file"),
        (cut, "is not a sound .safetensors file"),
        (start, "is no personal model"),
        (tmp_path / "gone", "cannot be read: No such file"),
        (tmp_path, "cannot be read|is not a sound"),
    ]:
        with pytest.raises(UserError, match=why):
            load_model(path)


# --- saving -----------------------------------------------------------------------------------------------------------


def test_a_run_without_a_folder_asks_where_its_models_go(tmp_path):
    run = federated()
    with pytest.raises(UserError, match=r"this run has no folder to keep its models in: give one, as in save_models"):
        run.save_models()
    assert sorted(p.stem for p in run.save_models(tmp_path / "here").iterdir()) == [f"h{i}" for i in range(5)]
    run.save_models(tmp_path / "here")  # again
    kept = federated(out=tmp_path / "run")
    assert kept.save_models() == tmp_path / "run" / "models"


def test_saving_overwrites_models_alone(model, tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("mine")
    with pytest.raises(UserError, match="notes is there and is no model: choose another name"):
        model.save(notes)
    assert notes.read_text() == "mine"
    model.save(tmp_path / "a")
    model.save(tmp_path / "a")
    with pytest.raises(UserError, match="cannot write"):
        model.save(tmp_path / "no" / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "notes"]


def test_a_saved_model_of_all_weights_is_a_start(tmp_path):
    first = experiment("fedavg", rounds=1)
    run = bespoke.run(first, device="cpu")
    run.models["0"].save(tmp_path / "a.safetensors")
    settings = dataclasses.replace(first.model, start=str(tmp_path / "a.safetensors"))
    started = bespoke.run(dataclasses.replace(first, model=settings), device="cpu")
    name = next(iter(run.models["0"].personal))
    assert torch.equal(started.federation.params[name], run.models["0"].personal[name])
