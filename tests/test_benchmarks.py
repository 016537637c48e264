"""The scripts of benchmarks/: their tables and files; what goes over all methods knows each and counts what it says."""

import contextlib
import importlib
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toy

import bespoke
from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.core import rng
from bespoke.core.data import FederatedData, Rows
from bespoke.models import ModelSettings, build_task, layers
from bespoke.runs.experiment import load
from bespoke.runs.recording import round_line

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


sys.path.insert(0, str(FOLDER))  # as for a script that is started there

methods, readme, report, paper_run, cohort_step, readings, peers, peer_runs = map(
    importlib.import_module,
    ("methods", "methods_table", "report", "paper_run", "cohort_step", "readings", "peers", "peer_runs"),
)
kernels, side_by_side, data, repeated, most_frequent = map(
    importlib.import_module, ("kernels", "side_by_side", "data", "repeated", "most_frequent")
)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_script_loads_on_a_machine_without_a_gpu(name):
    if name in ("fast_layers", "convolutions"):
        pytest.importorskip("triton")
    importlib.import_module(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    "name",
    [
        "adaptation",
        "cohort_step",
        "cross_device",
        "deep_nets",
        "deep_runs",
        "kernels",
        "packing",
        "paper_run",
        "side_by_side",
        "small_batches",
        "table_time",
    ],
)
def test_a_script_that_needs_a_gpu_says_so_in_one_sentence(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match="needs a CUDA device, and torch sees none here"):
        importlib.import_module(name).main()


def test_naming_the_most_frequent_class():
    y = torch.tensor([3, 3, 1, 3, 1, 0, 0, 2, 2, 0, 2, 2])
    train, test = Rows.of([[0, 1, 2], [5, 6, 7]]), Rows.of([[3, 4], [8, 9, 10, 11]])  # 3 and 0 are named
    pool = FederatedData(torch.ones(12, 1), y, train, test, Rows.of([[], []]), 4, 2, ("a", "b"))
    assert most_frequent.percent(pool, pooled=False) == 100 * (1 / 2 + 1 / 4) / 2
    assert most_frequent.percent(pool, pooled=True) == 100 * 2 / 6


def test_images_are_corrupted_in_a_folder_of_their_own(tmp_path, monkeypatch):
    seen, small = [], bespoke.data.Examples(np.zeros((2, 3, 1, 1), np.uint8), np.arange(2), 2)
    monkeypatch.setenv("BESPOKE_DATA", str(tmp_path))
    monkeypatch.setattr(data, "random_images", lambda: small)
    monkeypatch.setattr(data, "corrupted", lambda x, lists, pairs: seen.append(bespoke.data.home.root()) or x)
    monkeypatch.setattr(data, "partitioned", lambda settings, seed: (None, SimpleNamespace(tries=1)))
    data.measure(str(tmp_path / "data.json"))
    assert len(seen) == 2 and tmp_path not in seen and bespoke.data.home.root() == tmp_path
    assert "from the cache" in (tmp_path / "data.json").read_text()


def test_a_table_has_a_column_for_every_plain_figure():
    rows = [{"case": "small", "s": 1.23456, "parts": {"a": 1}}, {"case": "a large one", "s": 2.0, "bar": 25}]
    assert report.table(rows).splitlines() == [
        "case             s  bar",
        "small        1.235",
        "a large one      2   25",
    ]


def test_a_file_of_figures_names_its_machine_and_rounds_alike(tmp_path):
    report.store(str(tmp_path / "x.json"), "cpu", cases=[{"s": 1 / 3, "n": 7, "by": {"4": 1e5 / 3}}], ratio=1.0)
    stored = json.loads((tmp_path / "x.json").read_text())
    assert stored["machine"].endswith("-core CPU") and stored["torch"] == torch.__version__
    assert stored["cases"] == [{"s": 0.33333, "n": 7, "by": {"4": 33333.0}}] and stored["ratio"] == 1.0


def test_a_step_is_held_to_its_bar():
    cases = json.loads((FOLDER / "cohort_step.json").read_text())["cases"]
    assert [case["model"] for case in cases] == list(cohort_step.CASES)
    assert not any(cohort_step.slow(case) for case in cases)
    assert cohort_step.slow(cases[0] | {"bf16_ms": 1.3}) and cohort_step.slow(
        cases[2] | {"loop_ms": cases[2]["bf16_ms"]}
    )


def test_trainings_side_by_side_are_counted_while_all_are_at_it():
    first, second = [0.0, 1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, 4.0, 9.0]  # the last rounds are left out
    assert side_by_side.steady([first]) == pytest.approx(1.0)
    assert side_by_side.steady([first, second]) == pytest.approx(2.0)
    assert side_by_side.steady([[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]]) == 0.0
    base = {"trainings_per_s": 0.1, "rounds_per_s": 20.0}
    assert side_by_side.against({"trainings_per_s": 0.2, "rounds_per_s": 0.0}, base)["gain"] == pytest.approx(2.0)
    assert side_by_side.against({"error": "no"}, base) == {"error": "no"}
    assert side_by_side.against({"trainings_per_s": 0.2, "rounds_per_s": 30.0}, base)["steady_gain"] == 1.5


def test_one_process_alone_comes_first_and_a_service_only_where_it_runs(monkeypatch):
    service = side_by_side.mps.Service("with it", {"CUDA_MPS_PIPE_DIRECTORY": "here"})
    monkeypatch.setattr(side_by_side.mps, "service", lambda: contextlib.nullcontext(service))
    ways = [*side_by_side.ways(["mps", "threads"], [1, 2], [4])]
    assert ways == [("processes", 1, {}), ("threads", 4, {}), *(("mps", n, service.environment) for n in (1, 2))]
    service = service._replace(environment={})
    monkeypatch.setattr(side_by_side.mps, "service", lambda: contextlib.nullcontext(service))
    assert [*side_by_side.ways(["mps"], [1, 2], [4])] == [("processes", 1, {})]


# --- what each kernel gains -----------------------------------------------------------------------------------------


def test_every_kernel_can_be_replaced_and_returns():
    assert {name for workload in kernels.WORKLOADS.values() for name in workload.kernels} == set(kernels.OFF)
    for name, replaced in kernels.OFF.items():
        before = [getattr(where, attribute) for where, attribute, _ in replaced]
        with kernels.off(name):
            assert [getattr(where, attribute) for where, attribute, _ in replaced] == [new for *_, new in replaced]
        assert [getattr(where, attribute) for where, attribute, _ in replaced] == before


def test_what_replaces_a_kernel_computes_the_same():
    x = rng.normal(rng.key(1), (2, 4, 5, 5), torch.float32)
    conv, norm = layers.conv2d(4, 6, 3, 2, 1), layers.norm2d("group", 4, 2, relu=True)
    near = {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(kernels.plain_conv(conv, x).float(), conv(x), **near)
    torch.testing.assert_close(kernels.plain_norm(norm, x, x).float(), norm(x, x), **near)


def test_a_kernel_that_gains_little_everywhere_is_named():
    gains = [("norm", 4.0, 30.0), ("norm", 3.0, None), ("conv2d", 40.0, 2.0), ("threefry", 1.0, None)]
    rows = [{"kernel": k, "gain": g} | ({"run_gain": r} if r else {}) for k, g, r in gains]
    rows += [{"kernel": "conv2d and norm", "gain": 0.0}, {"kernel": "sgd_update", "error": "no"}]
    assert kernels.idle(rows) == ["conv2d", "threefry"]


def test_the_phases_of_the_papers_run_add_up_to_what_is_stored():
    runs = json.loads((FOLDER / "paper_run.json").read_text())["runs"]
    for run in runs:
        seconds = run["seconds"]
        parts = sum(value for phase, value in seconds.items() if phase != "total")
        outside = 0.001 * run["rounds"]  # between two rounds, and the benchmark's own callback
        assert parts == pytest.approx(seconds["total"], abs=0.1 + outside)
    phases = {row["seconds"]: row for row in paper_run.by_phase(runs)}
    assert phases["whole run"]["pfedfda bf16 0"] == f"{runs[1]['seconds']['total']:.1f}"
    assert float(phases["more in a first run, which compiles"]["fedavg bf16 0"]) > 0


def test_the_cost_of_a_method_is_measured_without_a_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "methods.json"
    words = ["--device", "cpu", "--rounds", "1", "--clients", "2", "--rows", "4", "8", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["methods.py", "--methods", "fedper,nobody,local", *words])
    assert methods.main() == 1  # nobody's method fails, and the others are measured all the same
    fedper, nobody, local = json.loads(out.read_text())["methods"]
    assert fedper["name"] == "fedper" and fedper["seconds"] > 0 and fedper["ratio"] > 0
    convolutions = (3 * 25 + 1) * 32 + 2 * 32 + (32 * 25 + 1) * 64 + 2 * 64  # with the norm layers' scales and shifts
    body = convolutions + (64 * 5 * 5 + 1) * 512
    assert fedper["bytes_up"] == fedper["bytes_down"] == 4 * body and local["bytes_up"] == local["bytes_down"] == 0
    assert "nobody" in nobody["error"]
    assert "failed" in capsys.readouterr().out


def test_lines_of_code_are_neither_comments_nor_docstrings_nor_blank(tmp_path, monkeypatch):
    path = tmp_path / "method.py"
    path.write_text(
        '"""A file.\n\nIn two parts.\n"""\n\nimport os\n\n# why\nclass M:\n    """M."""\n    x = "text"  # kept\n'
    )
    monkeypatch.setattr(methods.inspect, "getfile", lambda kind: str(path))
    assert methods.code_lines("fedavg") == 3


# --- the README's table -------------------------------------------------------------------------------------------


def table():
    """The cells of the README's table of methods, by the names of its first column."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text[text.index(readme.HEADER) :].split("\n\n")[0].splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {tuple(name.strip("` ") for name in row[0].split(",")): row for row in rows}


def test_the_readme_lists_every_method_once():
    assert sorted(name for names in table() for name in names) == sorted(ALGORITHMS)
    for names in table():  # one line for one file
        assert len({method_class(name) for name in names}) == 1


def test_cost_and_lines_in_the_readme_are_those_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    measured = json.loads(readme.MEASURED.read_text())["methods"] if readme.MEASURED.exists() else []
    assert readme.filled(text, measured) == text, "run python benchmarks/methods_table.py"


def test_a_measured_cost_enters_the_table():
    header, rule = "| name | paper | venue | up | cost | lines |", "|---|---|---|---|---|---|"
    text = "\n".join([header, rule, "| `fedpa`, `fedpa_ft` | A |  | M | 9 | 9 |", "", "| `x` | y |", ""])
    plain = {"name": "fedpa", "seconds": 0.3, "ratio": 1.5, "evaluate_seconds": 0.01, "code_lines": 34}
    fedavg = plain | {"name": "fedavg", "seconds": 0.2, "ratio": 1.0, "evaluate_seconds": 0.1}
    lines = readme.filled(text, [fedavg, plain, plain | {"name": "fedpa_ft", "evaluate_seconds": 0.6}]).splitlines()
    assert lines[2] == "| `fedpa`, `fedpa_ft` | A |  | M | 1.5; 1.5 + 2.5 | 34 |"
    assert lines[4] == "| `x` | y |"  # another table
    assert readme.filled(text, [{"name": "fedpa", "error": "no"}]).splitlines()[2].endswith("| M |  |  |")
    assert readme.filled(text, []).splitlines()[2].endswith("| M |  |  |")  # not measured yet


CLASSES, DIM, WIDTH, OWN = 3, 5, 16, 10  # OWN rows of each class


@pytest.fixture(scope="module")
def tiny():
    """Two clients with ten rows of each class, and a net with a norm layer."""
    rows = CLASSES * OWN
    y = torch.arange(4 * rows) % CLASSES
    x = rng.normal(rng.key(0), (len(y), DIM)) + y[:, None]
    parts = torch.arange(len(y)).split(rows)
    pool = toy.data_of(x, y, parts[:2], parts[2:], classes=CLASSES)
    task = build_task(ModelSettings(name="mlp", norm="layer", hidden=WIDTH), (DIM,), CLASSES)
    return task, task.init(rng.key(0)), pool


def sent(cell, task, params):
    """Bytes that a cell of the table stands for."""
    size = {
        "M": sum(p.numel() for p in params.values()),
        "B": sum(p.numel() for p in task.body(params).values()),
        "H": sum(p.numel() for p in task.head(params).values()),
        "N": sum(p.numel() for p in task.norm(params).values()),
        "C": CLASSES,
        "d": WIDTH,
    }
    precision = min(WIDTH * (WIDTH + 1) // 2, (OWN - 1) * (WIDTH + 1))
    words = {
        "nothing": 0,
        "B, a mean and a precision per class": 4 * (size["B"] + CLASSES * (WIDTH + precision)),
        "M - N, nets that make norms": 4 * (size["M"] - size["N"] + 2 * 64 * 33 + size["N"] * 65),
        "M at 10 bits per number": -(-(10 * size["M"] + 32 * len(params)) // 8) + 4,
    }
    if cell in words:
        return words[cell]
    product = re.sub(r"(?<=[\dMBHNCd]) ?(?=[MBHNCd(])", "*", cell)
    return 4 * eval(product, {"__builtins__": {}}, size)


@pytest.mark.parametrize("names", table(), ids=lambda names: names[0])
def test_the_readme_counts_what_crosses_the_wire(names, tiny):
    up, down = table()[names][4:6]
    for name in names:
        runs = methods.Runs(name, *tiny)
        runs.round()
        row = round_line(runs.last)
        assert not row["refused"]
        assert (row["bytes_up"], row["bytes_down"]) == (2 * sent(up, *tiny[:2]), 2 * sent(down, *tiny[:2])), name


# --- readings of a paper's baselines --------------------------------------------------------------------------------

KEPT = {method: readings.stored(ROOT / "results" / "readings", method) for method in readings.READINGS}


@pytest.mark.parametrize("method", readings.PUBLISHED)
def test_a_page_shows_every_try_and_which_reading_was_chosen(method):
    page = (ROOT / "docs" / "methods" / f"{method}.md").read_text(encoding="utf-8")
    assert readings.table(method, KEPT[method]) in page
    assert f"| **{readings.chosen(method, KEPT[method])}** |" in page


@pytest.mark.parametrize("method", readings.PUBLISHED)
def test_the_preset_is_the_chosen_reading(method):
    """Where a reading is a matter of evaluation or of a view, there is a setting of the method for it."""
    name = readings.chosen(method, KEPT[method])
    reading, preset = readings.READINGS[method][name], load(readings.columns(method)[0], method)[0].method
    given = dict(text.removeprefix("algorithm.").split("=") for text in reading.trained + reading.tested)
    if (given.pop("evaluation.when", ""), reading.view) == ("local", "global"):
        given["personal"] = "w"
    assert {name: str(getattr(preset, name)) for name in given} == given


def test_every_try_loads_and_says_what_it_is():
    for method, tries in KEPT.items():
        for tried in tries:
            loaded = load(tried["column"], method, tried["overrides"])[0]
            assert loaded.training.rounds == tried["round"] == 200 and loaded.seed == tried["seed"] == 0
            assert tried["clients"] == 100 and tried["device"] == "NVIDIA H200" and tried["precision"] == "bf16"


def test_the_closest_reading_is_chosen_and_a_tie_goes_to_the_first():
    def tried(reading, pooled, column=readings.CHOOSING):
        ablation = readings.READINGS["fedrep"][reading].ablation
        return {"reading": reading, "pooled": pooled, "column": column, "ablation": ablation}

    first, second, third, beside = readings.READINGS["fedrep"]
    assert readings.chosen("fedrep", [tried(first, 64.0), tried(second, 66.0), tried(third, 67.1)]) == third
    assert readings.chosen("fedrep", [tried(first, 66.6), tried(second, 66.8)]) == first
    assert readings.chosen("fedrep", [tried(first, 60.0), tried(beside, 66.8)]) == first
    assert readings.chosen("fedrep", [tried(first, 60.0), tried(second, 66.8, readings.OTHER)]) == first
    assert readings.chosen("fedrep", [tried(beside, 66.8)]) is None


def test_readings_of_one_training_are_those_of_their_own_runs(tmp_path):
    small = {"data.name": "digits", "data.pool": "auto", "data.clients": 3, "data.replay": 0, "data.min_rows": 20}
    small |= {"data.subsample": 0.3, "model.name": "mlp", "training.rounds": 2, "algorithm.head_epochs": 1}
    overrides = tuple(f"{name}={value}" for name, value in small.items())
    (training, _) = readings.trainings("fedrep", readings.CHOOSING)
    tries = readings.carry_out(training, overrides, "cpu", time.time() + 1000)
    assert [tried["reading"] for tried in tries] == list(training.readings)
    for tried in tries:
        run = bespoke.run(load(tried["column"], "fedrep", tried["overrides"])[0], device="cpu")
        last = run.summary["views"][tried["view"]]["last"]["all"]
        assert (tried["pooled"], tried["mean"]) == (round(100 * last["pooled"], 2), round(100 * last["mean"], 2))
    assert len({tried["pooled"] for tried in tries}) == 3
    assert readings.carry_out(training, overrides, "cpu", time.time() - 1) == []
    readings.store(tmp_path, "fedrep", tries)
    assert readings.stored(tmp_path, "fedrep") == json.loads(json.dumps(tries))
    assert readings.stored(tmp_path, "fedpac") == []


# --- other libraries ------------------------------------------------------------------------------------------------

SMALL = {"clients": 3, "cohort": 2, "rounds": 3, "every": 2}
PARAMETERS = {"pfl": 1_626_442, "pfllib": 878_538}  # of the peers' own nets for CIFAR-10
# Takes PFLlib's options, reads its files, and prints what it prints; its accuracy is the share of class 0.
STAND_IN = """
import argparse

import numpy as np

parser = argparse.ArgumentParser()
for name in ("dataset", "model", "algorithm", "device", "device_id"):
    parser.add_argument(f"--{name}")
for name in ("num_classes", "num_clients", "global_rounds", "eval_gap", "local_epochs", "batch_size"):
    parser.add_argument(f"--{name}", type=int)
for name in ("join_ratio", "local_learning_rate"):
    parser.add_argument(f"--{name}", type=float)
args = parser.parse_args()
assert (args.algorithm, args.model, int(args.num_clients * args.join_ratio)) == ("FedAvg", "cnn", 2)
print("Using device: cpu")  # there is no CUDA
print("(0): Conv2d(3, 32, kernel_size=(5, 5), stride=(1, 1))", "(0): Conv2d(32, 64, kernel_size=(5, 5), stride=(1, 1))")
print("(0): Linear(in_features=1600, out_features=512, bias=True)", "(fc): Linear(in_features=512, out_features=10)")
seen = {}
for part in ("train", "test"):
    for client in range(args.num_clients):
        with open(f"../dataset/{args.dataset}/{part}/{client}.npz", "rb") as file:
            rows = np.load(file, allow_pickle=True)["data"].tolist()
        assert rows["x"].shape == (len(rows["y"]), 3, 32, 32) and -1 <= rows["x"].min() < rows["x"].max() <= 1
        seen.setdefault(part, []).extend(rows["y"])
for i in range(args.global_rounds + 1):
    if i % args.eval_gap == 0:
        print(f"-------------Round number: {i}-------------")
        print(f"Averaged Test Accuracy: {np.mean(np.array(seen['test']) == 0):.4f}")
    print("-" * 25, "time cost", "-" * 25, 100.0 if i == 0 else i)
"""


def written(peer, folder, monkeypatch, **settings):
    """A small workload of random rows."""
    monkeypatch.setattr(peers, "ROWS", 60)
    work = peers.WORKS[peer]
    work = work._replace(data=work.data | ({"min_rows": 12} if peer == "pfllib" else {}), **SMALL | settings)
    peers.write_rows(work, folder, 1.0, real=False)
    return work, peer_runs.read_rows(folder)


@pytest.mark.parametrize("peer", PARAMETERS)
def test_a_peers_net_is_rebuilt_from_our_layers(peer, tmp_path, monkeypatch):
    _, rows = written(peer, tmp_path, monkeypatch)
    theirs, ours = (peer_runs.net(peer, ours).eval() for ours in (False, True))
    assert peer_runs.load_start(theirs, tmp_path) == peer_runs.load_start(ours, tmp_path) == PARAMETERS[peer]
    torch.testing.assert_close(theirs(rows.x[:5]), ours(rows.x[:5]))


@pytest.mark.parametrize("peer", PARAMETERS)
def test_our_run_beside_a_peer_starts_from_its_weights_and_is_judged_on_its_rows(peer, tmp_path, monkeypatch):
    _, rows = written(peer, tmp_path, monkeypatch, lr=1e-30)  # nothing moves
    found = peer_runs.ours(tmp_path, "cpu", "fp32")
    start, held = peer_runs.net(peer, ours=False).eval(), torch.cat(rows.test)
    peer_runs.load_start(start, tmp_path)
    right = (start(rows.x[held]).argmax(1) == rows.y[held]).double().mean().item()
    assert found["accuracy"] == pytest.approx(right) and found["parameters"] == PARAMETERS[peer]
    assert found["cohorts"] == [2] and found["round_s"] > 0


def test_pfllib_reads_our_split_and_is_read(tmp_path, monkeypatch):
    work, rows = written("pfllib", tmp_path, monkeypatch)
    main = tmp_path / "main.py"
    main.write_text(STAND_IN)
    where = peers.write_for_pfllib(rows, tmp_path)
    found = peers.pfllib(work, main, where, sys.executable, "cpu", {"OMP_NUM_THREADS": "1"})
    share = np.mean(rows.y[torch.cat(rows.test)].numpy() == 0)
    assert found["accuracy"] == pytest.approx(share, abs=1e-4) and found["parameters"] == PARAMETERS["pfllib"]
    assert found["round_s"] == np.mean([1, 2, 3]) and found["seconds"] > 0
    with pytest.raises(peers.Failed, match="it printed device \\['cpu'\\]"):  # it fell back to that
        peers.pfllib(work, main, where, sys.executable, "cuda", {})
    main.write_text("import nowhere_at_all")
    with pytest.raises(peers.Failed, match="No module named 'nowhere_at_all'"):
        peers.pfllib(work, main, where, sys.executable, "cpu", {})


def test_accuracies_are_compared_after_the_same_round():
    assert [work.judged for work in peers.WORKS.values()] == [1491, 20]
    assert [work.trained for work in peers.WORKS.values()] == [1500, 21]


def test_a_peer_that_is_not_there_is_named_and_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "peers.json"
    for folder, why in (("", "--pfllib FOLDER"), (str(tmp_path), "there is no system/main.py in")):
        monkeypatch.setattr(sys, "argv", ["peers.py", "--device", "cpu", "--pfllib", folder, "--out", str(out)])
        assert peers.main() == 0
        said = capsys.readouterr().out
        assert "pfl: skipped: it is not installed" in said and f"pfllib: skipped: {why}"[:17] in said and why in said
        assert "nothing was measured" in said and not out.exists()


def test_a_peer_with_another_net_is_not_compared():
    ours = {"who": "bespoke fp32", "again_s": 2.0, "round_s": 0.1, "parameters": 10}
    rows = [ours, ours | {"again_s": 8.0, "round_s": 0.3}, ours | {"parameters": 11}, {"who": "x", "error": "broke"}]
    same, slow, other, broken = peers.compared([dict(row) for row in rows])
    assert (same["times_ours"], slow["times_ours"], slow["round_times_ours"]) == (1, 4, pytest.approx(3))
    assert "11 parameters" in other["error"] and "times_ours" not in other and broken == rows[3]


def run_repeated(monkeypatch, out, **options):
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    monkeypatch.setattr("sys.argv", ["repeated.py", "--out", str(out), *words])
    repeated.main()


def test_a_draw_of_cells_that_was_cut_off_goes_on(monkeypatch, tmp_path):
    """The same cells, whatever the results are by then; on another kind of device, or finished, it does not."""
    asked, working, out = [], True, tmp_path / "repeated.json"

    def again(entry, before, environment):
        asked.append(f"{entry.table}/{entry.id}/{before.seed}")
        if len(asked) > 3 and not working:
            raise RuntimeError("the machine is gone")
        return {"cell": f"{entry.table}/{entry.id}", "seed": before.seed, "same_number": True}

    monkeypatch.setattr(repeated, "again", again)
    working = False
    with pytest.raises(SystemExit, match="the machine is gone\nthe machine is gone"):
        run_repeated(monkeypatch, out, seed=7, device="NVIDIA H200")
    (draw,) = json.loads(out.read_text())["draws"]
    assert asked == draw["drawn"] and len(set(asked)) == 5 and len(draw["cells"]) == 3
    monkeypatch.setattr(repeated, "drawn", None)  # nothing is drawn anew
    with pytest.raises(SystemExit, match="made on NVIDIA H200, and this is cpu"):
        run_repeated(monkeypatch, out, seed=7, device="cpu")
    working = True
    run_repeated(monkeypatch, out, seed=7, device="NVIDIA H200")
    (draw,) = json.loads(out.read_text())["draws"]
    assert asked[5:] == draw["drawn"][3:] and len(draw["cells"]) == 5
    with pytest.raises(SystemExit, match="all of the draw of seed 7 has been run again"):
        run_repeated(monkeypatch, out, seed=7, device="NVIDIA H200")
