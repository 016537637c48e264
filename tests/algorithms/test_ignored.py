"""What each method ignores of [training] is declared: such a key changes no bit, every other key changes results."""

from dataclasses import replace

import pytest
import toy
from golden_runs import NETS, federation
from torch import nn

import bespoke
from bespoke.algorithms import ALGORITHMS
from bespoke.core import rng
from bespoke.core.settings import Training
from bespoke.core.task import Task

USUAL = Training(rounds=1, epochs=1, batch=2, lr=0.05)
OTHER = {
    "optimizer": "adam",
    "momentum": 0.5,
    "weight_decay": 0.1,
    "clip": 0.01,
    "epochs": 2,
    "weighting": "uniform",
    "robust": "clipped",
    # These are only changed together with all others that a method ignores.
    "steps": 4,
    "lr": 0.3,
    "schedule": "cosine",
    "keep_optimizer": True,
}
CHECKED = list(OTHER)[:7]


def outcome(method, training):
    """The server after a round of two clients, their states, and the personal model of one of them."""
    net = "layer" if method in (ALGORITHMS["fedbn"](), ALGORITHMS["fedpce"]()) else "plain"
    task = Task(NETS[net], "head", toy.CLASSES, dtype=next(iter(toy.start().values())).dtype)
    start = toy.start() if net == "plain" else task.init(rng.key(4))
    fed = federation(method, training, "loop", task=task, start=start, cohorts=[[0, 2]], every=2)
    server = [done.server for done in fed.rounds()][-1]
    personal = fed.clients.personal(1, [0], *fed.down(server, [0]))[0]
    return {
        "server": server,
        "personal": personal,
        "states": {str(c): s["state"] for c, s in fed.clients.states().items()},
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_method_ignores_what_it_declares_and_nothing_else(name):
    method = ALGORITHMS[name]()
    usual, ignored = outcome(method, USUAL), {key: OTHER[key] for key in method.ignores}
    if ignored:
        assert toy.same_bits(outcome(method, replace(USUAL, **ignored)), usual)
    for key in CHECKED:
        if key not in ignored:
            assert not toy.same_bits(outcome(method, replace(USUAL, **{key: OTHER[key]})), usual), key


@pytest.mark.parametrize("name", ["pfedme", "per_fedavg", "pfedbred"])
def test_with_the_optimiser_of_training_nothing_is_ignored(name):
    assert not ALGORITHMS[name](optimizer="training").ignores


def told(name, **settings):
    x, y, _ = toy.arrays()
    clients = [(x[k].astype("float32"), y[k]) for k in range(3)]
    model = nn.Sequential(nn.Linear(toy.INPUTS, 5), nn.Linear(5, toy.CLASSES))
    run = bespoke.federate(clients, model, "1", name, rounds=1, backend="loop", **settings)
    return [note for note in run.notes if "ignores" in note]


def test_a_run_notes_what_was_set_and_is_ignored():
    assert told("pfedme") == told("fedavg", momentum=0.5) == []
    (note,) = told("pfedme", momentum=0.5)
    assert note.startswith("pfedme ignores [training] momentum = 0.5: its published steps are plain")
    assert told(bespoke.PFedMe(optimizer="training"), momentum=0.5) == []
    (note,) = told("fedrep", epochs=3)
    assert note == "fedrep ignores [training] epochs = 3: head_epochs and body_epochs set its phases"
