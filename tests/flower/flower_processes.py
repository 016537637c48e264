"""A federation of real processes on this machine: a server and its clients, with TLS and keys."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
from sklearn.datasets import load_digits

import bespoke
from bespoke.clients import SequentialClients
from bespoke.core import tree
from bespoke.flower import children, keys
from bespoke.runs.bounds import without
from bespoke.runs.checkpoint import load_newest
from bespoke.runs.experiment import load

TOML = """
[data]
name = "contract"
shape = [1, 8, 8]
dtype = "uint8"
class_names = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
clients = {clients}
transform = ["normalise(mean=[0.03137255], deviation=[0.03137255])"]
[model]
name = "mlp"
hidden = 8
[algorithm]
name = "{algorithm}"
{options}
[training]
rounds = {rounds}
batch = 32
[evaluation]
every = {every}
[federation]
quorum = {quorum}
round_timeout = {timeout}
"""
PATIENCE = 300  # seconds for anything


class Machines:
    """Folders of a server and its clients, and the processes in them; client i is the server's client i."""

    def __init__(self, folder, clients=2, **settings):
        self.folder, self.processes = folder, []
        common = {"algorithm": "pfedfda", "rounds": 2, "options": "", "every": 0, "timeout": 200, "quorum": clients}
        self.experiment = folder / "experiment.toml"
        self.experiment.write_text(TOML.format(**common | settings, clients=clients))
        self.certificates, self.out = folder / "certificates", folder / "server"
        keys.make_certificates(self.certificates, ["127.0.0.1", "localhost"])
        self.address = f"127.0.0.1:{children.free_port()}"
        self.homes = [folder / f"client{client}" for client in range(clients)]
        (folder / "data").mkdir()
        digits = load_digits()
        x, y = digits.images.astype(np.uint8)[:, None], digits.target
        shares = np.array_split(np.arange(400), clients)
        made = sorted((keys.make_key(folder / f"key{place}"), place) for place in range(clients))
        for client, (_, place) in enumerate(made):
            home, rows, cut = self.homes[client], shares[client], len(shares[client]) * 4 // 5
            home.mkdir()
            parts = {"x": x[rows[:cut]], "y": y[rows[:cut]], "x_test": x[rows[cut:]], "y_test": y[rows[cut:]]}
            np.savez(folder / "data" / f"{client}.npz", **parts)
            for end in ("", ".pub"):
                (folder / f"key{place}{end}").rename(home / f"node.key{end}")
        self.public = folder / "clients.pub"
        self.public.write_text("".join(f"{line}\n" for line, _ in made))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            children.stop(process)

    def start(self, log, *words):
        """Start a command that writes to a file in the folder."""
        self.processes.append(children.command(*words, log=self.folder / log))
        return self.processes[-1]

    def serve(self, *more):
        safety = ("--register", self.public, "--certificates", self.certificates)
        safety = () if "--insecure" in more else safety
        return self.start(
            "server.txt", "serve", self.experiment, "--out", self.out, "--address", self.address, *safety, *more
        )

    def join(self, client, *more, log=None, **changes):
        home = self.homes[client]
        given = {
            "experiment": self.experiment,
            "data": self.folder / "data" / f"{client}.npz",
            "home": home,
            "key": home / "node.key",
            "ca": self.certificates / keys.CA,
        } | changes
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
        return self.start(log or f"client{client}.txt", "join", self.address, *words, *more)

    def text(self, log):
        return (self.folder / log).read_text()

    def rounds(self):
        """The lines of the rounds so far."""
        path = self.out / "run" / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition, what, patience=PATIENCE):
        """Wait for something; return the seconds that it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() > began + patience:
                raise AssertionError(f"{what} did not come: {[self.text(path.name) for path in self.logs()]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def logs(self):
        return sorted(self.folder.glob("*.txt"))

    def ended(self, process, code=0, patience=PATIENCE):
        """Wait for a process to end in this way."""
        self.until(lambda: process.poll() is not None, f"the end of {process.args[3:5]}", patience)
        assert process.returncode == code, [self.text(path.name) for path in self.logs()]

    def child(self, process, module):
        """The number of the process that a command has started for this module."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_text().split("\0")
                if f"bespoke.flower.{module}" in words and str(process.pid) in words:
                    return int(path.parent.name)
        return None

    def kill(self, process, module=""):
        """Kill a command, or the process that it has started for a module, as a machine's failure would."""
        number = self.child(process, module) if module else process.pid
        os.kill(number, signal.SIGKILL)

    def in_work(self, client, since=1):
        """Wait until a client works on a message of a round after this many rounds."""
        log = self.homes[client] / "node.log"

        def working():
            text = log.read_text() if log.exists() else ""
            return len(self.rounds()) >= since and text.count("Received successfully") > text.count("Sent successfully")

        self.until(working, f"work of client {client}")


def simulated(machines, out):
    """The run of one client after another with the same rows, and with the same absences."""
    absent = {row["round"]: [int(client) for client in row.get("missing", {})] for row in machines.rounds()}
    loaded, _ = load(str(machines.experiment))
    data = bespoke.DataSettings(
        name="files", path=str(machines.folder / "data" / "*.npz"), num_classes=10, transform=loaded.data.transform
    )
    tables = {name: getattr(loaded, name) for name in ("model", "training", "evaluation", "seed")}
    same = bespoke.Experiment(data=data, algorithm=loaded.method, **tables)
    plain = SequentialClients.train

    def train(clients, round, cohort, shared, own):
        return without(plain(clients, round, cohort, shared, own), dict.fromkeys(absent.get(round, ()), "gone"))

    with mock.patch.object(SequentialClients, "train", train):
        return bespoke.run(same, out, backend="loop", device="cpu", progress=False)


def check_equal(machines, out):
    """The server's last state and every personal model are the simulation's."""
    there = simulated(machines, out)
    last = [load_newest(folder / "checkpoints")[0].server for folder in (machines.out / "run", out)]
    one, two = map(tree.flatten, last)
    assert one.keys() == two.keys() and all(float((one[n] - two[n]).abs().max()) <= 1e-6 for n in one)
    for client, model in enumerate(there.models.values()):
        mine = bespoke.load_model(machines.homes[client] / "model.safetensors")
        x = np.load(machines.folder / "data" / f"{client}.npz")["x_test"]
        assert float((mine.logits(x) - model.logits(x)).abs().max()) <= 1e-5
