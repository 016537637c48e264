"""Every method on Fashion-MNIST: the table file's rows, the work that the page says they do, and the page itself."""

import dataclasses
import importlib
import itertools
import sys
from functools import cache
from pathlib import Path

import paper_tables
import pytest
import torch
import toy
from torch import nn

from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.clients import SequentialClients
from bespoke.core import rng
from bespoke.core.task import Task
from bespoke.data.sources import store
from bespoke.engine.alone import Alone
from bespoke.engine.scan import Scan
from bespoke.runs.api import built
from bespoke.runs.federation import Federation
from bespoke.tables import plan, spec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
comparison = importlib.import_module("fmnist_all")

TABLE = spec.read(comparison.TABLE)
ENTRIES = {entry.id: entry for entry in TABLE.entries}
BATCH, IN_A_PASS, CLIENTS = 4, 5, 2


@cache
def experiment(id):
    return plan.experiment_of(ENTRIES[id], 0)[0]


@cache
def federation_data():
    """Two clients with five full batches each: a share of a pass is a whole number of steps."""
    train, test = BATCH * IN_A_PASS, 3
    ends = [i * (train + test) for i in range(CLIENTS + 1)]
    x = rng.uniform(rng.key(5), (ends[-1], toy.INPUTS), torch.float64)
    y = torch.arange(ends[-1]) % toy.CLASSES
    lists = [torch.arange(a, b) for a, b in itertools.pairwise(ends)]
    return toy.data_of(x, y, [rows[:train] for rows in lists], [rows[train:] for rows in lists])


def small(id, rounds):
    """A row's method with its settings on two small clients."""
    whole = experiment(id)
    task = Task(lambda: toy.Net(norm=nn.LayerNorm), "head", toy.CLASSES, dtype=torch.float64)
    training = dataclasses.replace(whole.training, batch=BATCH, rounds=rounds)
    parts = whole.method, task, task.init(rng.key(1)), federation_data(), training
    return Federation.simulated(SequentialClients(*parts, seed=0), 0, whole.evaluation)


def test_every_method_is_a_row_and_differs_from_its_defaults_only_where_steps_are_made_equal():
    assert {row.id for row in TABLE.rows} == {*ALGORITHMS, "fedavg_local"}
    for entry in TABLE.entries:
        name = "fedavg" if entry.row.id == "fedavg_local" else entry.row.id
        assert method_class(entry.algorithm) is method_class(name)
        if entry.algorithm != name:  # before it is fine-tuned it is this row's
            assert entry.algorithm == f"{name}_ft" and entry.view == "global"
    allowed = {"training.lr", "training.momentum", "training.epochs", "training.rounds", "evaluation.every"}
    allowed |= {"evaluation.when", "algorithm.step"}
    allowed |= {f"algorithm.{key}" for key in ("body_epochs", "head_epochs", "default_steps")}
    assert {setting.partition("=")[0] for row in TABLE.rows for setting in row.set} <= allowed


@pytest.mark.parametrize("id", ENTRIES)
def test_plain_steps_go_as_far_as_those_with_momentum(id):
    training, method = experiment(id).training, experiment(id).method
    usual = experiment("cnn/fedavg").training
    far = usual.lr / (1.0 - usual.momentum)
    plain = "momentum" in method.ignores
    assert training.lr == pytest.approx(far if plain else usual.lr)
    assert training.momentum == (0.0 if plain else usual.momentum)
    assert getattr(method, "step", far) == pytest.approx(far)  # of QLSD's chain


@pytest.fixture
def loops(monkeypatch):
    """The loops that clients have run: of each step the number of its minibatches."""
    found, run, once = [], Alone._run, Scan.once
    monkeypatch.setattr(Alone, "_run", lambda *given: found.append([]) or run(*given))
    monkeypatch.setattr(Scan, "once", lambda scan, *given: found[-1].append(scan.length.per_step) or once(scan, *given))
    return found


@pytest.mark.parametrize("id", ENTRIES)
def test_the_steps_that_the_page_tells_are_those_that_are_taken(id, loops):
    row, work = ENTRIES[id].row.id, comparison.WORK.get(ENTRIES[id].row.id, comparison.USUAL)
    federation = small(id, rounds=3)
    numbers, read = [], []
    for done in federation.rounds():
        last = done
        numbers.append([len(loop) for loop in loops])
        read.append(sum(map(sum, loops)))
        loops.clear()
    if row == "self_fl":
        assert numbers[0] == numbers[1] == [work.fixed] * CLIENTS
        assert all(1 <= count <= experiment(id).method.max_steps == 40 for count in numbers[2])
    elif work.fixed:
        assert experiment(id).training.rounds == work.fixed * comparison.ROUNDS[-1]
        assert numbers[2] == [1] * CLIENTS and read[2] == CLIENTS
    else:
        apart = [n for whose, n in work.besides if whose not in comparison.SAME_BATCHES]
        expected = [IN_A_PASS * n for n in (work.passes / work.per_step, *apart)]
        assert sorted(numbers[2]) == sorted(expected * CLIENTS)
        assert read[2] == pytest.approx(CLIENTS * IN_A_PASS * work.batches / comparison.PASS)
    federation.evaluate(last)
    tuned = comparison.WORK[f"{row}_ft"].before if ENTRIES[id].view == "global" else work.before  # of a shared training
    assert sum(map(len, loops)) == CLIENTS * IN_A_PASS * tuned


@pytest.mark.parametrize(("row", "gradients"), [("per_fedavg", 2), ("pfedme", 5), ("pfedbred", 7)])
def test_the_gradients_of_a_step_that_takes_several(row, gradients, monkeypatch):
    called, loss = [], Task.loss
    monkeypatch.setattr(Task, "loss", lambda *given: called.append(1) or loss(*given))
    next(small(f"cnn/{row}", rounds=1).rounds())
    work = comparison.WORK[row]
    steps = CLIENTS * IN_A_PASS * work.passes / work.per_step
    assert len(called) == gradients * steps
    inner, meta = (dict(work.besides).get(whose, 0.0) / 2.0 for whose in comparison.SAME_BATCHES)
    assert gradients == (2 if row == "per_fedavg" else inner + 2 * meta)  # a meta step takes two, one on trial


@pytest.mark.skipif(not store.holds("fashion_mnist"), reason="bespoke data fetch fashion_mnist")
def test_the_minibatches_of_a_pass_are_counted():
    counts = []
    for seed in range(comparison.SEEDS):
        pool = built(plan.experiment_of(ENTRIES["cnn/fedavg"], seed)[0], "cpu", "fp32").pool
        counts += [-(-size // 50) for size in pool.train.sizes]
    assert len(counts) == 60 and (min(counts), max(counts)) == (2, 36)
    assert sum(counts) / len(counts) == pytest.approx(comparison.PASS, abs=0.05)


@pytest.mark.parametrize("id", ENTRIES)
def test_a_longer_training_passes_through_what_a_shorter_one_ends_with(id):
    states, seen = [], []
    for rounds in (2, 4):
        federation = small(id, rounds)
        found = federation.rounds()
        next(found)
        second = next(found)
        states.append(second.server)
        seen.append(federation.evaluate(second))
    assert toy.same_bits(*states) and seen[0] == seen[1] and seen[0]


# --- the page ---------------------------------------------------------------------------------------------------------


def put(root, id, seed, *accuracies):
    """Write a result whose clients have these mean accuracies after 30 and 300 rounds, in percent."""
    share = experiment(id).training.rounds // comparison.ROUNDS[-1]
    means = [value / 100 for value in accuracies]
    curve = {"round": [share * number for number in comparison.ROUNDS], "pooled": means, "mean": means}
    paper_tables.put(root, TABLE, id, seed, accuracies[-1], curve=curve)


def rows_of(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_tells_both_numbers_and_marks_what_is_not_above_fedavg(tmp_path):
    for seed, plain in enumerate((70.0, 60.0)):
        put(tmp_path, "cnn/fedavg", seed, plain, plain + 10)
        put(tmp_path, "cnn/ditto", seed, 90.0 - seed, 95.0)
        put(tmp_path, "cnn/apfl", seed, 80.0, 60.0)
        put(tmp_path, "cnn/qlsd", seed, 50.0, 52.0)
    put(tmp_path, "group/fedbn", 0, 81.0, 82.0)
    text = comparison.page(tmp_path)
    rows = {row[0]: row[1:] for row in rows_of(text)}
    assert rows["FedAvg, one model for all"][3:] == ["", "", "", ""]  # the last one: with GroupNorm
    first = next(row for row in rows_of(text) if row[0] == "FedAvg, one model for all")
    assert first == ["FedAvg, one model for all", "29", "29", "", "65.00 ± 7.07", "", "75.00 ± 7.07", ""]
    own = ["29", "58", "own model 29", "89.50 ± 0.71", "+24.50 (2 of 2)", "95.00 ± 0.00", "+20.00 (2 of 2)"]
    assert rows["Ditto"] == own
    assert rows["**APFL**"][3:] == ["80.00 ± 0.00", "+15.00 (2 of 2)", "60.00 ± 0.00", "**-15.00 (0 of 2)**"]
    assert rows["QLSD, one model for all"][3:] == ["50.00 ± 0.00", "-15.00 (0 of 2)", "52.00 ± 0.00", "-23.00 (0 of 2)"]
    assert rows["FedBN"][3:] == ["81.00", "", "82.00", ""]
    assert f"Of {3 * len(ENTRIES)} results, one for each row and seed, {3 * len(ENTRIES) - 9} are missing." in text


def test_notes_and_refused_uploads_are_told_but_no_interruption(tmp_path):
    curve = {"round": list(comparison.ROUNDS), "pooled": [0.5, 0.6], "mean": [0.5, 0.6]}
    notes = [
        "momentum is ignored",
        "7 of 40 uploads of 3 were refused: its upload holds NaN or inf",
        "runs/a holds no intact checkpoint: started again from round 1",
    ]
    told = {"curve": curve, "notes": notes, "totals": {"refused": 7, "participations": 300}}
    paper_tables.put(tmp_path, TABLE, "cnn/local", 2, 60.0, **told)
    lines = [line for line in comparison.page(tmp_path).splitlines() if line.startswith("- ")]
    assert lines == ["- Local: momentum is ignored", "- Local: 7 of 300 uploads were refused with seed 2"]


def test_a_method_whose_uploads_were_refused_is_told_to_have_broken(tmp_path):
    curve = {"round": list(comparison.ROUNDS), "pooled": [0.2, 0.2], "mean": [0.2, 0.2]}
    for refused, broke in ((150, False), (151, True)):
        told = {"curve": curve, "totals": {"refused": refused, "participations": 300}}
        paper_tables.put(tmp_path, TABLE, "cnn/local", 0, 20.0, **told)
        text = comparison.page(tmp_path)
        assert ("| Local (broke, see the notes) |" in text) == ("so its model is hardly trained" in text) == broke


def test_the_committed_page_is_what_the_results_give():
    assert comparison.page(ROOT / "results") == (ROOT / "results" / "fmnist_all.md").read_text(encoding="utf-8")
