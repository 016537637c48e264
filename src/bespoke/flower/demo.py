"""A whole federation on this machine, as ``bespoke federation demo`` runs it: one server and three clients."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.errors import UserError
from bespoke.files import make_folder, write_atomic
from bespoke.flower import children, keys
from bespoke.report.table import aligned
from bespoke.report.units import written

CLIENTS = 3
EXPERIMENT = Path(__file__).parent / "federation.toml"  # an example for everybody


def prepare(folder: Path) -> None:
    """Write the experiment, each client's rows and key, and the server's certificates."""
    from sklearn.datasets import load_digits

    make_folder(folder)
    write_atomic(folder / "experiment.toml", EXPERIMENT.read_bytes())
    digits = load_digits()
    x, y = digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int64)
    draw = np.random.default_rng(0)
    owner = np.empty(len(y), np.int64)
    for label in range(10):  # each client has much of some classes and little of others
        rows = draw.permutation(np.flatnonzero(y == label))
        ends = (draw.dirichlet([0.5] * CLIENTS).cumsum() * len(rows)).round().astype(int)
        for client, part in enumerate(np.split(rows, ends[:-1])):
            owner[part] = client
    for client in range(CLIENTS):
        place = folder / f"client{client}"
        make_folder(place)
        np.savez(place / "data.npz", x=x[owner == client], y=y[owner == client])
        keys.make_key(place / "node.key")
    lines = [(folder / f"client{client}" / "node.key.pub").read_text() for client in range(CLIENTS)]
    write_atomic(folder / "clients.pub", "".join(lines))
    keys.make_certificates(folder / "server" / "certificates", ["127.0.0.1", "localhost"])


def run(folder: Path) -> dict[str, Any]:
    """Run the federation in an empty folder, and return each client's report."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another folder")
    prepare(folder)
    address = f"127.0.0.1:{children.free_port()}"
    experiment, server = folder / "experiment.toml", folder / "server"
    serve = ("serve", experiment, "--out", server, "--address", address, "--register", folder / "clients.pub")
    join = ("join", address, "--experiment", experiment, "--ca", server / "certificates" / keys.CA)
    joins: list[list[object]] = [
        [*join, "--data", place / "data.npz", "--home", place, "--key", place / "node.key"]
        for place in (folder / f"client{client}" for client in range(CLIENTS))
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes = [children.command(*words) for words in (serve, *joins)]
        while None in (codes := [process.poll() for process in processes]) or any(codes):
            if any(codes):
                raise UserError(f"the server or a client failed: see what it said, and the files in {folder}")
            time.sleep(0.2)
    finally:
        for process in processes:
            children.stop(process)
    return {
        f"client{client}": json.loads((folder / f"client{client}" / "report.json").read_text())
        for client in range(CLIENTS)
    }


def table(reports: dict[str, Any]) -> str:
    """Return each client's score before and after, as text."""
    rows = [["client", "rows", "before", "after"]]
    for name, report in reports.items():
        scores = [written(report["metric"], report[when]) for when in ("before", "after")]
        rows.append([name, str(report["rows"]["train"]), *scores])
    return aligned(rows, range(1, 4))
