"""What the tests of whole runs share: a small experiment, the command line in this process, and comparisons."""

import contextlib
import hashlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import bespoke
from bespoke.cli.main import main
from bespoke.clients import StateStore
from bespoke.core import tree
from bespoke.runs.checkpoint import load_newest
from bespoke.runs.experiment import to_toml

RECORDS = ("rounds.jsonl", "clients.jsonl")

TABLES = {
    "seed": 0,
    "data": {"name": "gaussian", "rows": 160, "dim": 4, "num_classes": 3, "clients": 6, "partition": "dirichlet"},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 3, "batch": 8, "lr": 0.1, "rate": 0.5},
}


def tables(**changes):
    """The small experiment with tables changed: ``tables(training={"rounds": 9})``."""
    return {
        key: {**TABLES.get(key, {}), **changes.get(key, {})} if key != "seed" else changes.get(key, 0)
        for key in {**TABLES, **changes}
    }


def write(path: Path, **changes) -> str:
    """The small experiment as a file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(tables(**changes)))
    return str(path)


def experiment(algorithm="fedavg", *, data=None, model=None, evaluation=None, seed=0, **training):
    """The small experiment in Python."""
    return bespoke.Experiment(
        data=bespoke.DataSettings(**(TABLES["data"] | (data or {}))),
        model=bespoke.ModelSettings(**(TABLES["model"] | (model or {}))),
        algorithm=algorithm,
        training=bespoke.Training(**(TABLES["training"] | training)),
        evaluation=bespoke.Evaluation(**(evaluation or {})),
        seed=seed,
    )


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one line of a user's mistake; anything else is an error of the program."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        mistakes = [line for line in lines if line.startswith("bespoke: ")]
        assert len(mistakes) == 1 and lines[-1] == mistakes[0], self.err
        assert "Traceback" not in self.err
        return mistakes[0].removeprefix("bespoke: ")


def command(*arguments) -> Outcome:
    """``bespoke ARGUMENTS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["bespoke", *map(str, arguments)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "argv", argv):
        try:
            main()
        except SystemExit as error:
            code = error.code
    return Outcome(code or 0, out.getvalue(), err.getvalue())


def records(folder):
    """The bytes of the records that must not depend on how a run was interrupted."""
    return {name: (Path(folder) / name).read_bytes() for name in RECORDS}


def last_tensors(folder):
    """All tensors of the newest checkpoint: the server's and every client's."""
    found, damaged = load_newest(Path(folder) / "checkpoints")
    assert not damaged
    states = stored(Path(folder) / "checkpoints", found.states)
    return tree.flatten({"server": found.server, "clients": {str(c): state for c, state in states.items()}})


def stored(folder, files, kind="disk"):
    """The states in files of a checkpoint, by client."""
    store = StateStore(kind, "cpu")
    store.open(folder, files)
    return {c: tree.map(lambda x: x[0], store.get([c])) for c in store.ids()}


def sign(path, **changes):
    """Change entries of a checkpoint's manifest (... removes one) and give it the right checksum again."""
    manifest = json.loads(path.read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if value is not ... and key != "manifest"}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest | {"manifest": digest}))


def same_tensors(a, b):
    """Whether two flat dicts of tensors are equal to the bit."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def assert_same_result(folder, reference):
    """Weights, states and records of two runs are equal to the bit."""
    assert records(folder) == records(reference)
    assert max(p.name for p in Path(folder).glob("checkpoints/*.json")) == max(
        p.name for p in Path(reference).glob("checkpoints/*.json")
    )
    assert same_tensors(last_tensors(folder), last_tensors(reference))


# --- one's own data and model ---

CLASSES, DIM = 3, 5


class Net(nn.Module):
    """A body and a head named ``fc``."""

    def __init__(self, hidden=8):
        super().__init__()
        self.first = nn.Linear(DIM, hidden)
        self.fc = nn.Linear(hidden, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.first(x)))


def arrays(clients=4, rows=30, seed=0):
    """Clients that call the same blobs by other names: a case for models of their own."""
    draw = np.random.default_rng(seed)
    means = 3 * draw.standard_normal((CLASSES, DIM))
    out = []
    for i in range(clients):
        kind = np.arange(rows) % CLASSES
        x = means[kind] + 0.5 * draw.standard_normal((rows, DIM))
        out.append((x.astype(np.float32), (kind + i) % CLASSES))
    return out


def federated(clients=None, model=None, head="fc", algorithm="fedavg", **settings):
    """``bespoke.federate`` with something for everything."""
    model = model or seeded(Net)
    clients = arrays() if clients is None else clients
    return bespoke.federate(clients, model, head, algorithm, **({"rounds": 2, "lr": 0.1} | settings))


def seeded(build, *args):
    """A module with weights that are the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(*args)
