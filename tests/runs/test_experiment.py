"""Experiments: TOML and dataclasses, presets and overrides, hashes, and the sentence for every mistake."""

import dataclasses
import tomllib
import typing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import TABLES, command, experiment, tables, write

import bespoke
from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.data import federate_data
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError
from bespoke.models.settings import ModelSettings
from bespoke.records import RunFolder
from bespoke.runs.experiment import describe, experiments_folder, find, from_tables, load, name_of, shipped, to_toml
from bespoke.runs.federation import Evaluation

KINDS = {"data": DataSettings, "model": ModelSettings, "training": bespoke.Training, "evaluation": Evaluation}


def other_value(field, value):
    """Another value that the field allows."""
    rules = field.metadata
    if "choices" in rules:
        return next(c for c in rules["choices"] if c != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    return (*value, 1 if "low" in rules else "x") if isinstance(value, tuple) else value + "x"


def settings_of(kind, method=None):
    return [(f, getattr(method, f.name) if method else f.default) for f in dataclasses.fields(kind)]


# --- to TOML and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_method_survives_the_round_trip_with_its_defaults(name):
    one = experiment(name)
    two = from_tables(tomllib.loads(one.toml()), "copy")
    assert two == one
    assert two.algorithm_name == name
    assert two.toml() == one.toml()
    assert two.hash() == one.hash()


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_method_survives_the_round_trip_with_other_settings(name):
    kind = method_class(name)
    changed = {f.name: other_value(f, value) for f, value in settings_of(kind, ALGORITHMS[name]())}
    table = {"name": name, **changed}
    one = from_tables(tables(algorithm=table), "here")
    assert dataclasses.asdict(one.method) == changed
    assert from_tables(tomllib.loads(one.toml()), "copy") == one


@pytest.mark.parametrize("table", KINDS)
def test_every_setting_survives_the_round_trip(table):
    changed = {f.name: other_value(f, value) for f, value in settings_of(KINDS[table])}
    others = {"data": {"validation": 0.1}, "evaluation": {"every": 2}}
    one = from_tables({**others, table: {**others.get(table, {}), **changed}}, "here")
    assert dataclasses.asdict(getattr(one, table)) == changed
    assert from_tables(tomllib.loads(one.toml()), "copy") == one


@given(
    st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False, allow_infinity=False), st.integers()
)
def test_any_plain_value_survives_toml(text, number, count):
    values = {"seed": count, "t": {"text": text, "number": number, "flag": True, "list": [text, text]}}
    assert tomllib.loads(to_toml(values)) == values


def test_equal_numbers_of_other_types_are_the_same_experiment():
    one = experiment(bespoke.Ditto(lam=1.0), lr=1.0, rounds=3)
    two = experiment(bespoke.Ditto(lam=1), lr=1, rounds=np.int64(3))
    three = experiment(bespoke.Ditto(lam=np.float64(1.0)), lr=np.float32(1.0))
    assert one == two == three
    assert one.hash() == two.hash() == three.hash()
    assert one.toml() == two.toml() == three.toml()
    assert type(two.training.rounds) is int and type(two.training.lr) is float and type(two.method.lam) is float


def test_a_method_is_listed_under_the_nearest_name():
    assert experiment(bespoke.FedAvg()).algorithm_name == "fedavg"
    assert experiment(bespoke.FedAvg(finetune_epochs=5)).algorithm_name == "fedavg_ft"
    assert name_of(bespoke.FedAvg(finetune_epochs=5, finetune_part="head")) == "fedavg_ft"
    assert experiment(bespoke.LGFedAvg()).algorithm_name == "lg_fedavg"


def test_every_setting_is_described_with_its_allowed_values():
    for kind in (*KINDS.values(), *(method_class(name) for name in ALGORITHMS)):
        for key, default, text in describe(kind):
            assert text.strip(), f"{kind.__name__}.{key} says nothing"
            assert default is not dataclasses.MISSING
    described = {key: text for key, _, text in describe(bespoke.Training)}
    assert described["lr"].endswith("(greater than 0)")
    assert described["rate"].endswith("(greater than 0 and at most 1)")
    assert described["optimizer"].endswith("(one of 'sgd', 'adam', 'adamw')")


# --- mistakes in a file -------------------------------------------------------------------------------------------

MISTAKES = {
    "table": (
        {"trainig": {}},
        ["trainig", "'training'", "allowed are seed, data, model, objective, training, evaluation"],
    ),
    "top-level key": ({"sed": 3}, ["'sed'", "'seed'"]),
    "key": ({"training": {"round": 3}}, ["[training]", "'round'", "did you mean 'rounds'", "epochs"]),
    "key of a method": ({"algorithm": {"name": "ditto", "lamda": 1.0}}, ["[algorithm]", "'lamda'", "'lam'"]),
    "key of a method without any": ({"algorithm": {"name": "local", "lam": 1.0}}, ["'lam'", "no settings"]),
    "text for a number": ({"training": {"lr": "fast"}}, ["[training] lr", "a number", "'fast'"]),
    "fraction for a whole number": ({"training": {"rounds": 2.5}}, ["[training] rounds", "a whole number", "2.5"]),
    "bool for a whole number": ({"training": {"rounds": True}}, ["rounds", "a whole number", "True"]),
    "bool for a number": ({"training": {"lr": True}}, ["lr", "a number", "True"]),
    "number for a bool": ({"training": {"full_last": 1}}, ["full_last", "true or false", "1"]),
    "number for a text": ({"data": {"name": 3}}, ["[data] name", "a string in quotes", "3"]),
    "list for a number": ({"training": {"lr": [0.1]}}, ["lr", "a number", "[0.1]"]),
    "out of range": ({"training": {"lr": -0.1}}, ["[training] lr", "greater than 0", "-0.1"]),
    "beyond the range": ({"training": {"rate": 1.5}}, ["[training] rate", "at most 1", "1.5"]),
    "not finite": ({"training": {"lr": float("nan")}}, ["[training] lr", "greater than 0", "nan"]),
    "infinite": ({"data": {"spread": float("inf")}}, ["[data] spread", "inf"]),
    "none of the choices": ({"training": {"optimizer": "sdg"}}, ["optimizer", "'sgd', 'adam', 'adamw'", "'sdg'"]),
    "out of a method's range": ({"algorithm": {"name": "ditto", "lam": -1.0}}, ["[algorithm] lam", "at least 0", "-1"]),
    "unknown method": ({"algorithm": {"name": "fedrap"}}, ["'fedrap'", "did you mean 'fedrep'", "lg_fedavg"]),
    "method that is no text": ({"algorithm": {"name": ["fedavg"]}}, ["no method ['fedavg']", "fedavg_ft"]),
    "method without a name": ({"algorithm": {"lam": 1.0}}, ["needs a name", "fedavg"]),
    "alpha of zero": ({"data": {"alpha": 0}}, ["[data] alpha", "greater than 0", "0"]),
    "negative seed": ({"seed": -1}, ["seed", "at least 0", "-1"]),
    "seed that is no number": ({"seed": "one"}, ["seed", "a whole number", "'one'"]),
    "patience without validation": ({"evaluation": {"patience": 2, "every": 1}}, ["patience", "[data] validation"]),
    "best_val without validation": ({"evaluation": {"select": "best_val"}}, ["best_val", "[data] validation"]),
}


def is_one_sentence(text):
    return "\n" not in text and "Traceback" not in text and text.strip() == text and len(text) < 500


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_file_is_told_in_one_sentence(mistake, tmp_path):
    values, words = MISTAKES[mistake]
    path = tmp_path / "mine.toml"
    if mistake == "method without a name":
        path.write_text("[algorithm]\nlam = 1.0\n")
    else:
        path.write_text(to_toml(values))
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert is_one_sentence(str(caught.value))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("table", [*KINDS, "algorithm"])
@pytest.mark.parametrize("algorithm", [None, "ditto"])
def test_a_table_that_is_none_is_told(table, algorithm, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'{table} = "digits"\n')
    with pytest.raises(UserError, match=rf"mine.toml: {table} must be a table, written \[{table}\]"):
        load(path, algorithm, ["training.lr=0.1", "data.alpha=1"])


@pytest.mark.parametrize("text", ["[training\nrounds = 3\n", "rounds = = 3\n", "[data]\n[data]\n"])
def test_text_that_is_not_toml_is_told(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine.toml: is not valid TOML: .*line") as caught:
        load(path)
    assert is_one_sentence(str(caught.value))


def test_bytes_that_are_not_text_are_told(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"mine.toml: is not valid TOML"):
        load(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bespoke.Experiment(data={"name": "digits"}), ["[data]", "DataSettings"]),
        (lambda: bespoke.Experiment(algorithm=bespoke.FedAvg), ["not the class FedAvg: add (), as in FedAvg()"]),
        (lambda: bespoke.Experiment(algorithm=3), ["takes a method or its name, not 3"]),
        (lambda: bespoke.Experiment(algorithm="FedRep"), ["did you mean 'fedrep'"]),
        (lambda: bespoke.Experiment(algorithm="fedavk"), ["did you mean 'fedavg'"]),
        (lambda: bespoke.Experiment(training=bespoke.Training(rounds=0)), ["[training] rounds", "at least 1"]),
        (lambda: bespoke.Experiment(training=bespoke.Training(lr="0.1")), ["[training] lr", "a number", "'0.1'"]),
        (lambda: bespoke.Experiment(algorithm=bespoke.Ditto(lam="1")), ["[algorithm] lam", "a number", "'1'"]),
        (lambda: bespoke.Experiment(seed=1.5), ["seed", "1.5"]),
        (lambda: bespoke.Experiment(seed=True), ["seed", "True"]),
    ],
)
def test_a_mistake_in_python_is_told_in_one_sentence(make, words):
    with pytest.raises(UserError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_a_method_of_ones_own_has_plain_settings_only():
    @dataclasses.dataclass(frozen=True)
    class Odd(bespoke.Algorithm):
        limit: typing.Any = None

    with pytest.raises(UserError, match=r"\[algorithm\] limit is declared as .*: a setting is an int, float, str"):
        bespoke.Experiment(algorithm=Odd())


# --- names and paths ----------------------------------------------------------------------------------------------


def test_an_experiment_is_found_by_path_and_by_name(tmp_path, monkeypatch):
    path = write(tmp_path / "mine.toml")
    assert find(path) == tmp_path / "mine.toml"
    assert find("demo") == experiments_folder() / "demo.toml"
    monkeypatch.chdir(tmp_path)
    assert load("mine.toml")[0] == load(path)[0]


def test_a_name_that_is_none_shows_the_closest():
    with pytest.raises(UserError, match=r"no experiment file 'dmeo' .*did you mean 'demo'\?\); bespoke list exp"):
        find("dmeo")


def test_a_folder_is_no_experiment(tmp_path):
    with pytest.raises(UserError, match="there is no experiment file"):
        find(str(tmp_path))


# --- paths in a file ----------------------------------------------------------------------------------------------


def save_client(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "anna.npz", x=np.eye(rows), y=np.arange(rows) % 2)


def clients_of(path, *overrides):
    loaded, _ = load(path, None, overrides)
    return federate_data(loaded.located()[0], 0).x.shape[0]


def test_a_path_starts_at_the_folder_of_the_file(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    save_client(tmp_path / "study" / "clients", 8)
    file = tmp_path / "study" / "x.toml"
    file.write_text(
        '[data]\nname = "files"\npath = "clients/*.npz"\n[model]\nname = "linear"\n[training]\nrounds = 1\n'
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert clients_of(file) == 8
    assert load(file)[0].data.path == "clients/*.npz"  # as it was written: the hash does not know where the file lies
    in_python = bespoke.Experiment(
        data=DataSettings(name="files", path="clients/*.npz"),
        model=ModelSettings("linear"),
        training=bespoke.Training(rounds=1),
    )
    assert load(file)[0].hash() == in_python.hash()
    with pytest.raises(UserError, match="no file matches"):
        federate_data(in_python.located()[0], 0)  # which knows of no file, and starts here
    assert command("run", file, "--out", "run").code == 0
    assert command("run", file, "--out", "run", "--resume", "--set", "training.rounds=2").code == 0
    save_client(tmp_path / "elsewhere" / "clients", 6)
    assert clients_of(file) == 8
    assert clients_of(file, "data.path=clients/a*.npz") == 6  # what is typed starts where it was typed
    assert clients_of("run/config.toml") == 6  # where nothing lies beside the file, the working directory counts
    assert clients_of(file, f"data.path={tmp_path}/study/clients/*.npz") == 8


def test_word_vectors_lie_beside_the_file_too(tmp_path, monkeypatch):
    (tmp_path / "study").mkdir()
    np.save(tmp_path / "study" / "words.npy", np.zeros((3, 300), np.float32))
    (tmp_path / "study" / "x.toml").write_text('[model]\nname = "sent140_lstm"\nvectors = "words.npy"\n')
    monkeypatch.chdir(tmp_path)
    assert load("study/x.toml")[0].located()[1].vectors == "study/words.npy"
    assert load("study/x.toml", None, ["model.vectors=words.npy"])[0].located()[1].vectors == "words.npy"


# --- presets and overrides ----------------------------------------------------------------------------------------


@pytest.fixture
def beside(tmp_path):
    """The small experiment with a preset for ditto beside it."""
    path = write(tmp_path / "mine.toml", algorithm={"name": "fedprox", "mu": 0.5})
    preset = tmp_path / "algorithms" / "ditto.toml"
    preset.parent.mkdir()
    preset.write_text("[algorithm]\nlam = 0.25\n[training]\nlr = 0.7\n")
    return path, preset


def test_without_another_method_the_file_counts(beside):
    path, _ = beside
    for algorithm in (None, "fedprox"):
        loaded, source = load(path, algorithm)
        assert loaded.method == bespoke.FedProx(mu=0.5)
        assert source == path


def test_another_method_takes_its_preset(beside):
    path, preset = beside
    loaded, source = load(path, "ditto")
    assert loaded.method == bespoke.Ditto(lam=0.25)
    assert loaded.training == bespoke.Training(**(TABLES["training"] | {"lr": 0.7}))
    assert source == str(preset)


def test_another_method_without_a_preset_takes_its_defaults(beside):
    loaded, source = load(beside[0], "fedavg_ft")
    assert loaded.method == bespoke.FedAvg(finetune_epochs=5)
    assert loaded.training.lr == 0.1
    assert source == "the method's defaults"


def test_a_preset_counts_for_the_files_own_method_too(beside):
    path, preset = beside
    own = preset.with_name("fedprox.toml")
    own.write_text("[algorithm]\nmu = 2\n")
    assert load(path)[0].method == bespoke.FedProx(mu=0.5)
    loaded, source = load(path, "fedprox")
    assert loaded.method == bespoke.FedProx(mu=2.0)
    assert source == str(own)


def test_overrides_win_over_preset_and_file(beside):
    sets = ["algorithm.lam=9", "training.lr=0.01", "data.alpha=2"]
    loaded, _ = load(beside[0], "ditto", sets, seed=7)
    assert loaded.method == bespoke.Ditto(lam=9.0)
    assert (loaded.training.lr, loaded.data.alpha, loaded.seed) == (0.01, 2.0, 7)
    assert load(beside[0], None, ["algorithm.mu=3"])[0].method == bespoke.FedProx(mu=3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[algorithm]\nlamda = 1.0\n", ["[algorithm] has no key 'lamda'", "'lam'"]),
        ("[training]\nlr = -1\n", ["[training] lr", "greater than 0"]),
        ("[data]\nalpha = 1.0\n", ["'data'", "allowed are algorithm, training"]),
        ("seed = 3\n", ["'seed'", "allowed are algorithm, training"]),
        ('algorithm = "ditto"\n', ["algorithm must be a table"]),
        ('[algorithm]\nname = "fedavg"\n', ["name must be that of the file, 'ditto', not 'fedavg'"]),
        ("[algorithm\n", ["is not valid TOML"]),
    ],
)
def test_a_mistake_in_a_preset_names_the_preset(beside, text, words):
    path, preset = beside
    preset.write_text(text)
    with pytest.raises(UserError) as caught:
        load(path, "ditto")
    assert str(caught.value).startswith(f"{preset}: ")
    for word in words:
        assert word in str(caught.value)


def test_an_unknown_method_on_the_command_line_is_told(beside):
    with pytest.raises(UserError, match=r"^--algorithm: there is no method 'dito' \(did you mean 'ditto'\?\)"):
        load(beside[0], "dito")


@pytest.mark.parametrize(
    ("text", "table", "key", "value"),
    [
        ("training.lr=0.5", "training", "lr", 0.5),
        ("training.lr = 1e-3", "training", "lr", 1e-3),
        ("training.lr=1", "training", "lr", 1.0),
        ("training.lr=.5", "training", "lr", 0.5),
        ("training.lr=2.", "training", "lr", 2.0),
        ("training.rounds=1_000", "training", "rounds", 1000),
        ("training.full_last=true", "training", "full_last", True),
        ("training.optimizer=adam", "training", "optimizer", "adam"),
        ('training.optimizer="adam"', "training", "optimizer", "adam"),
        ("data.path=clients/*.npz", "data", "path", "clients/*.npz"),
        ("data.path=a=b", "data", "path", "a=b"),
        ("data.path=2024", "data", "path", "2024"),
        ("data.path=true", "data", "path", "true"),
        ("data.path='2024'", "data", "path", "2024"),
        ("data.path=two words", "data", "path", "two words"),
    ],
)
def test_the_forms_of_an_override(tmp_path, text, table, key, value):
    loaded, _ = load(write(tmp_path / "mine.toml"), None, [text])
    found = getattr(getattr(loaded, table), key)
    assert found == value and type(found) is type(value)


def test_an_override_of_the_seed_and_of_a_method_that_the_file_does_not_name(tmp_path):
    path = tmp_path / "empty.toml"
    path.write_text("")
    loaded, _ = load(path, None, ["seed=4", "algorithm.finetune_epochs=2"])
    assert (loaded.seed, loaded.method) == (4, bespoke.FedAvg(finetune_epochs=2))


def test_the_last_override_of_a_key_counts(tmp_path):
    path = write(tmp_path / "mine.toml")
    assert load(path, None, ["training.lr=0.5", "training.lr=0.25"])[0].training.lr == 0.25


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training.lr", ["write TABLE.KEY=VALUE"]),
        ("training.lr=", ["write TABLE.KEY=VALUE"]),
        ("=3", ["name the table"]),
        ("lr=0.1", ["did you mean training.lr?"]),
        ("training=0.1", ["name the table"]),
        ("a.b.c=1", ["write TABLE.KEY=VALUE"]),
        ("trainig.lr=1", ["'trainig'", "did you mean 'training'?"]),
        ("training.lrr=1", ["[training] has no key 'lrr'", "'lr'"]),
        ("training.lr=fast", ["[training] lr must be a number, not 'fast'"]),
        ("training.lr=-1", ["[training] lr must be greater than 0"]),
        ("training.rounds=2.5", ["a whole number"]),
        ("training.full_last=yes", ["true or false, not 'yes'"]),
        ("algorithm.lam=1", ["[algorithm] has no key 'lam'", "mu"]),
        ("algorithm.name=ditto", ["--algorithm ditto"]),
        ("seed=x", ["a whole number of at least 0, not 'x'"]),
        ("seed=-1", ["at least 0"]),
    ],
)
def test_a_mistake_in_an_override_names_the_override(beside, text, words):
    with pytest.raises(UserError) as caught:
        load(beside[0], None, [text])
    assert str(caught.value).startswith(f"the setting {text!r}")
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_only_an_override_completes_is_fine(tmp_path):
    path = write(tmp_path / "mine.toml", evaluation={"patience": 2, "every": 1})
    assert load(path, None, ["data.validation=0.2"])[0].evaluation.patience == 2


def test_the_record_says_where_the_settings_came_from(beside, tmp_path):
    path, preset = beside
    seen = {}
    for name in ("fedprox", "ditto", "fedavg"):
        done = command("run", path, "--algorithm", name, "--set", "training.rounds=1", "--out", tmp_path / name)
        assert done.code == 0, done.err
        seen[name] = RunFolder(tmp_path / name).read_json("environment.json")["settings_from"]
    assert seen == {"fedprox": path, "ditto": str(preset), "fedavg": "the method's defaults"}


# --- the hash -----------------------------------------------------------------------------------------------------

ALL_SETTINGS = [(table, f.name) for table, kind in KINDS.items() for f in dataclasses.fields(kind)]
FREE = {("training", "rounds")} | {pair for pair in ALL_SETTINGS if pair[0] == "evaluation"}


@pytest.mark.parametrize(("table", "key"), ALL_SETTINGS, ids=map(".".join, ALL_SETTINGS))
def test_the_hash_covers_what_decides_the_result(table, key):
    before = from_tables({"data": {"validation": 0.1}, "evaluation": {"every": 1}}, "here")
    field = next(f for f in dataclasses.fields(KINDS[table]) if f.name == key)
    value = other_value(field, getattr(getattr(before, table), key))
    after = dataclasses.replace(before, **{table: dataclasses.replace(getattr(before, table), **{key: value})})
    assert after != before
    assert (after.hash() == before.hash()) == ((table, key) in FREE)


def test_runs_that_lack_the_newest_settings_keep_their_hash():
    """As computed by earlier versions."""
    assert bespoke.Experiment().hash() == "ae4e993b98cac303"
    settings = ["data.alpha=0.3", 'model.norm=""', "training.rounds=12", "training.lr=0.1", "evaluation.every=4"]
    assert load("demo", None, settings)[0].hash() == "fbe1ea24b494c29b"
    assert bespoke.Experiment(data=bespoke.DataSettings(classes=())).hash() == "ae4e993b98cac303"


def test_the_hash_covers_seed_and_method():
    hashes = [experiment(name).hash() for name in ALGORITHMS] + [experiment(seed=1).hash()]
    hashes += [experiment(bespoke.Ditto(lam=0.5)).hash(), experiment(bespoke.Ditto(personal_epochs=2)).hash()]
    assert len(set(hashes)) == len(hashes)


def test_the_hash_does_not_depend_on_the_order_of_the_keys_nor_on_written_defaults():
    values = tables(training={"momentum": 0.0})
    turned = {t: dict(reversed(v.items())) if isinstance(v, dict) else v for t, v in reversed(values.items())}
    assert from_tables(turned, "here").hash() == from_tables(values, "here").hash() == experiment().hash()


@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_a_schedule_over_all_rounds_fixes_their_number(schedule):
    def hashed(rounds, length=0, schedule=schedule):
        return experiment(rounds=rounds, schedule=schedule, schedule_rounds=length).hash()

    assert hashed(10) != hashed(20)
    assert hashed(10, 30) == hashed(20, 30)
    assert hashed(10) == hashed(20, 10)  # the schedule is the same
    assert hashed(10, schedule="constant") == hashed(20, schedule="constant")


# --- what is shipped ----------------------------------------------------------------------------------------------


def test_there_are_shipped_experiments():
    assert "demo" in shipped()
    assert all(path.is_file() for path in shipped().values())
    assert not [name for name in shipped() if name.startswith("algorithms/")]
