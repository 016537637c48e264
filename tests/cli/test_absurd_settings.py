"""What no machine can hold is refused in one sentence, before anything is allocated or written."""

from pathlib import Path

import pytest
from small_runs import command, experiment, write

import bespoke
from bespoke.core import memory
from bespoke.errors import UserError, shown, visible
from bespoke.files import parse_toml
from bespoke.report.runs import find_runs
from bespoke.runs import api

MLP, PATHOLOGICAL = {"model": {"name": "mlp"}}, {"data": {"partition": "pathological"}}
LSTM = {"model": {"name": "sent140_lstm"}}
COUNT = "at most 2,147,483,647"
ABSURD = [  # changes to the file, --set, words of the sentence
    ({}, "training.rounds=99999999999999999999999", ["[training] rounds", COUNT]),
    ({}, f"training.rounds={5000 * '9'}", ["the setting", "cannot be a setting", "thousands of digits"]),
    ({}, f"training.rounds=0x{5000 * 'f'}", ["the setting", "cannot be a setting", "thousands of digits"]),
    ({}, f"training.lr={2000 * '['}", ["the setting", "nested too deeply"]),
    ({}, f"training.lr={5000 * 'a.'}", ["the setting", "nested too deeply"]),
    ({}, "training.epochs=10000000000000000000", ["[training] epochs", COUNT]),
    ({}, "training.epochs=2000000000", ["[training] epochs = 2000000000 on a client of", "memory", "lower it"]),
    ({}, "training.steps=2000000000", ["[training] steps = 2000000000", "memory"]),
    ({}, f"training.batch=1{30 * '0'}", ["[training] batch", COUNT]),
    ({}, f"training.lr=1{400 * '0'}", ["[training] lr must be greater than 0 and at most 3.4e+38"]),
    ({}, "training.lr=1e300", ["[training] lr must be greater than 0 and at most 3.4e+38, not 1e+300"]),
    ({}, "training.lr=1e-300", ["[training] lr must be at least 1.2e-38 in size"]),
    ({}, "algorithm.finetune_epochs=2000000000", ["[algorithm] finetune_epochs = 2000000000", "memory"]),
    ({}, "evaluation.adapt_rounds=1000000", ["[evaluation] adapt_rounds must be at least 0 and at most 10,000"]),
    ({}, "evaluation.adapt_epochs=2000000000", ["[evaluation] adapt_epochs", "memory"]),
    ({}, "data.rows=1000000000000", ["[data] rows", COUNT]),
    ({}, "data.rows=2000000000", ["[data] rows = 2,000,000,000 of dim = 4 in 3 classes", "at least 128.0 GB", "lower"]),
    ({}, "data.dim=2000000000", ["[data] rows = 160 of dim = 2,000,000,000", "5.2 TB"]),
    ({}, "data.num_classes=2000000000", ["[data] num_classes", "at most 1,000,000"]),
    ({}, "data.clients=1000000000000", ["[data] clients", COUNT]),
    ({}, "data.clients=2000000000", ["2000000000 clients are more than the 160 rows"]),
    ({}, "data.folds=2000000000", ["[data] folds", "at most 1,000"]),
    ({}, "data.min_rows=2000000000", ["need more than the 160 rows"]),
    (
        {"data": {"partition": "degradations"}},
        "data.clients=600000000",
        ["600000000 clients are more than the 160 rows"],
    ),
    (PATHOLOGICAL, "data.classes_per_client=2000000000", ["but the data has 3 classes"]),
    (PATHOLOGICAL, "data.rows_per_class=2000000000", ["its", "clients need", "lower [data] clients"]),
    (MLP, "model.hidden=1000000000", ["[model] hidden", "at most 1,000,000"]),
    (MLP | {"data": {"dim": 10**6, "rows": 10}}, "model.hidden=1000000", ["the model mlp with 1,000,004", "8.0 TB"]),
    (LSTM, "model.vocabulary=2000000000", ["[model] vocabulary = 2,000,000,000 vectors of 300 numbers", "2.4 TB"]),
    ({}, f"seed=1{30 * '0'}", ["must be a whole number below 2^63"]),
]


@pytest.fixture(autouse=True)
def ten_gigabytes(monkeypatch):
    monkeypatch.setattr(memory, "free", lambda: 1e10)


@pytest.mark.parametrize(("changes", "text", "words"), ABSURD, ids=[text[:40] for _, text, _ in ABSURD])
def test_an_absurd_setting_is_refused_before_anything_is_made(changes, text, words, tmp_path):
    path = write(tmp_path / "x.toml", **changes)
    found = command("run", path, "--set", text, "--out", tmp_path / "run").sentence
    for word in words:
        assert word in found
    assert len(found) < len(path) + 500
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--threads", "1000000000"),
        ("--threads", "0"),
        ("--checkpoint-every", f"1{30 * '0'}"),
        ("--seed", f"1{30 * '0'}"),
        ("--seeds", "0", f"1{30 * '0'}"),
        ("--device", "cuda:99999999999999999999"),
    ],
    ids=" ".join,
)
def test_an_absurd_option_is_refused(arguments, tmp_path):
    done = command("run", write(tmp_path / "x.toml"), *arguments, "--out", tmp_path / "run", "--quiet")
    assert arguments[-1] in done.sentence
    assert not (tmp_path / "run").exists()


def test_the_clients_states_must_fit_into_memory(monkeypatch):
    many = experiment("ditto", data={"clients": 40}, model={"name": "mlp"}, rate=1.0, rounds=1)
    monkeypatch.setattr(memory, "free", lambda: 30_000.0)
    with pytest.raises(
        UserError, match=r"the states of 40 clients, 2\.1 kB each, would take at least 82\.4 kB .* on disk"
    ):
        bespoke.run(many, device="cpu")
    bespoke.run(many, device="cpu", states="disk")


def test_memory_that_runs_out_is_told_in_a_sentence(monkeypatch, tmp_path):
    for error in (
        MemoryError("Unable to allocate 9. TiB\x1b[2J"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(api, "execute", fail)
        found = command("run", write(tmp_path / "x.toml"), "--out", tmp_path / "run").sentence
        assert found.startswith(f"the memory is too small: {visible(str(error))}; choose smaller settings")


# --- files that are no experiments ---------------------------------------------------------------------------------

FILES = {
    "deep lists": (f"a = {2000 * '['}{2000 * ']'}", "nested too deeply"),
    "deep tables": (f"a = {2000 * '{a='}1{2000 * '}'}", "nested too deeply"),
    "deep names": (f"[{'.'.join(2000 * 'a')}]", "nested too deeply"),
    "deep names in a table": (f"a = {{{'.'.join(5000 * 'a')} = 1}}", "nested too deeply"),
    "deep names in quotes": (".".join(5000 * ['"a"']) + " = 1", "nested too deeply"),
    "deep names behind a list": (f"a = [\n1, {{'a' = 'b', {' . '.join(5000 * 'a')} = 1}}]", "nested too deeply"),
    "five levels": ("[data]\nname = [[[[1]]]]", "nested too deeply"),
    "a long number": (f"seed = {5000 * '9'}", "thousands of digits"),
    "a long hexadecimal number": (f"seed = 0x{5000 * 'f'}", "thousands of digits"),
    "much text": (f"# {10**6 * 'x'}\n", "more than 262,144 bytes"),
    "no text": (b"\xff\xfe", "is not valid TOML"),
    "a NUL": ('[data]\npath = "\\u0000"\nname = "files"', "path"),
    "a list as the method": ("algorithm = [1]", "algorithm must be a table"),
    "a method without a name": ("[algorithm]\nlr = 1", "needs a name"),
    "a number as the method's name": ("[algorithm]\nname = 3", "there is no method 3"),
    "a list as the method's name": ("[algorithm]\nname = [[1]]", "there is no method [[1]]"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_experiment(name, tmp_path):
    text, words = FILES[name]
    (tmp_path / "x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    found = command("run", tmp_path / "x.toml", "--out", tmp_path / "run").sentence
    assert words in found and len(found) < len(str(tmp_path)) + 1000


@pytest.mark.parametrize(
    "text",
    [
        f"a = [{', '.join(60 * ['0.5'])}]",
        f"a = [\n{60 * '0.5, '}\n{{b.c = 1}}]",
        f"a = '{60 * 'b.'}' # {60 * 'b.'}",
        f'a = "\\"{60 * "b."}"',
        f'a = """\n\'{60 * "b."}"""""\nb.c = 1',
        f"a = '''\n{60 * 'b.'}\n'''",
        f"  # {60 * 'b.'}\r\na = 1",
    ],
)
def test_dots_outside_of_keys_are_no_nesting(text):
    assert "a" in parse_toml(text)


# --- run folders ---------------------------------------------------------------------------------------------------

FEDAVG = '[algorithm]\nname = "fedavg"\n'
OLD = Path(__file__).parents[1] / "report" / "old_run"
CONFIGS = {
    "a text as seed": ('seed = "one"\n' + FEDAVG, "has the seed 'one', which is no whole number"),
    "a fraction as seed": ("seed = 1.5\n" + FEDAVG, "has the seed 1.5"),
    "true as seed": ("seed = true\n" + FEDAVG, "has the seed True"),
    "a number as table": ("evaluation = 3\n" + FEDAVG, "has evaluation = 3 in place of a table"),
    "a list as the method": ("algorithm = [1]\n", "names no [algorithm]"),
    "no method": ("[data]\n", "names no [algorithm]"),
    "a method without a name": ("[algorithm]\nlam = 1\n", "names no [algorithm]"),
    "a list as the method's name": ('[algorithm]\nname = ["fedavg"]\n', "names no [algorithm]"),
    "a list as selection": (FEDAVG + "[evaluation]\nselect = [1]\n", "selects the round [1]"),
    "deep lists": (f"a = {2000 * '['}", "nested too deeply"),
    "deep names": (f"{'.'.join(2000 * 'a')} = 1", "nested too deeply"),
    "a long number": (f"seed = 0x{5000 * 'f'}\n", "thousands of digits"),
    "much text": (f"# {10**6 * 'x'}\n", "more than 262,144 bytes"),
    "nothing": ("", "names no [algorithm]"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_compare_names_the_folder_whose_settings_are_damaged(name, tmp_path):
    text, words = CONFIGS[name]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.toml").write_text(text)
    found = command("compare", OLD, tmp_path / "bad").sentence
    assert str(tmp_path / "bad") in found and words in found


def test_a_chart_without_a_folder_is_refused_before_anything_is_read(tmp_path):
    for option in ("--chart", "--curves"):
        found = command("compare", tmp_path / "no_run", option, tmp_path / "no" / "x.png").sentence
        assert f"there is no folder {tmp_path / 'no'}; create it first" in found
    found = command("data", "show", "no_experiment", "--chart", tmp_path / "no" / "x.png").sentence
    assert "there is no folder" in found


def test_a_comparison_of_nothing():
    for nothing in ([], ()):
        with pytest.raises(UserError, match="no folder was given; give run folders"):
            bespoke.compare(nothing)
    assert len(find_runs(OLD)) == 2


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x y/z", "", "a:b", "../a", "a\nb", ".a", 3, None, "x" * 5000 + "/"], ids=shown)
def test_a_name_is_plain(name):
    with pytest.raises(
        UserError, match=r"a name may have only letters, digits, '_', '-' and '.': choose another"
    ) as caught:
        bespoke.register(name, bespoke.FedAvg)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("thing", [3, None, "fedavg", bespoke.Experiment, [bespoke.FedAvg]])
def test_a_method_is_a_class(thing):
    with pytest.raises(UserError, match=r"register\('xx', \.\.\.\)") as caught:
        bespoke.register("xx", thing)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("FedRep", "fedrep"),
        ("FEDAVG", "fedavg"),
        ("lg-fedavg", "lg_fedavg"),
        ("PerFedAvg", "per_fedavg"),
        ("LGFedAvg", "lg_fedavg"),
    ],
)
def test_a_method_typed_as_in_its_paper_is_suggested(typed, meant, tmp_path):
    assert f"did you mean '{meant}'?" in command("run", write(tmp_path / "x.toml"), "--algorithm", typed).sentence


def test_an_option_that_is_a_setting_is_told_how_to_write_it(tmp_path):
    path = write(tmp_path / "x.toml")
    found = command("run", path, "--lr", "0.1").sentence
    assert found.startswith("there is no option --lr: write --set training.lr=0.1 (see ")
