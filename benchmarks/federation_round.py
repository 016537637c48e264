"""A round over loopback with real processes: a SuperLink, three nodes, TLS and keys, and 5 s of sleep as local work.

The figure is the time of a round less the slowest client's time in its work, beside a round of the loop backend with
the same method without its sleep. Its parts, of the client that answered last:

- send: the server pushes all messages to the SuperLink;
- until work: the node looks for a message (Flower: every 3 s when idle), downloads it, and its process takes it;
- until here: the answer goes to the node, which looks for it every 0.5 s, to the SuperLink and to the server;
- server: checks, aggregation, records and a checkpoint, until the next round's first message.

Starting a client's process and importing torch is no part of a round, since the process stays: it is given once, from
the command to the end of the data's check. Run with ``python benchmarks/federation_round.py``; it writes
``federation_round.json`` beside itself, and exits with 1 if the median is above its bar.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

CLIENTS, ROUNDS, SLEEP, BAR = 3, 6, 5.0, 12.0


class Timed:
    """A link that notes when messages leave and answers come."""

    def __init__(self, link: Any) -> None:
        """Wrap a link."""
        self.link, self.rounds = link, []

    def online(self) -> set[str]:
        """Return who is there."""
        found: set[str] = self.link.online()
        return found

    def push(self, messages: Any) -> None:
        """Send, and begin a round."""
        began = time.time()
        self.link.push(messages)
        self.rounds.append({"began": began, "sent": time.time(), "came": []})

    def pull(self) -> list[Any]:
        """Return what has come."""
        found: list[Any] = self.link.pull()
        self.rounds[-1]["came"] += [time.time()] * len(found)
        return found


def measure(folder: Path) -> dict[str, Any]:
    """Run the federation in a folder and return its figures."""
    from bespoke.flower import children, demo, keys, server
    from bespoke.runs.experiment import load
    from bespoke.runs.serving import serve

    demo.prepare(folder)
    experiment = folder / "experiment.toml"
    text = (
        experiment.read_text().replace('"pfedfda"', '"sleeping:Sleeping"').replace("rounds = 5", f"rounds = {ROUNDS}")
    )
    experiment.write_text(text)
    port = children.free_port()
    superlink = server.SuperLink(folder / "server", "127.0.0.1", port, folder / "server" / "certificates")
    clients: list[subprocess.Popen[bytes]] = []
    began = time.time()
    try:
        for place in (folder / f"client{client}" for client in range(CLIENTS)):
            words = ("join", f"127.0.0.1:{port}", "--experiment", experiment, "--data", place / "data.npz")
            more = ("--home", place, "--key", place / "node.key", "--ca", folder / "server" / "certificates" / keys.CA)
            sleep = {"SLEEP": str(SLEEP), "SLEEP_LOG": str(place / "slept")}
            clients.append(children.command(*words, *more, **sleep))
        superlink.start()
        superlink.register(keys.read_lines([folder / "clients.pub"]))
        with superlink.run(3600.0) as link:
            timed = Timed(link)
            serve(load(str(experiment))[0], timed, folder / "server" / "run", told=lambda text: None, progress=False)
    finally:
        superlink.stop()
        for client in clients:
            children.stop(client)
    slept = [
        [json.loads(line) for line in (folder / f"client{c}" / "slept").read_text().splitlines()] for c in range(3)
    ]
    ready = [(folder / f"client{c}" / "ready").stat().st_mtime - began for c in range(CLIENTS)]
    trained = [each for each in timed.rounds if len(each["came"]) == CLIENTS][-ROUNDS - 2 : -2]  # then scores, models
    rows = []
    for number, each in enumerate(trained):
        works = [own[len(own) - ROUNDS + number] for own in slept]
        slowest = max(end - start for start, end in works)
        last, after = max(each["came"]), timed.rounds[timed.rounds.index(each) + 1]["began"]
        start, end = max(works, key=lambda work: work[1])
        rows.append(
            {
                "round": number + 1,
                "seconds": last - each["began"],
                "overhead": last - each["began"] - slowest,
                "send": each["sent"] - each["began"],
                "until work": start - each["sent"],
                "until here": last - end,
                "server": after - last,
            }
        )
    return {"rounds": rows, "overhead": statistics.median(row["overhead"] for row in rows), "start": max(ready)}


def loop(folder: Path) -> float:
    """Return the median seconds of a round of the loop backend, without any sleep."""
    import bespoke
    from bespoke.runs.experiment import load

    loaded, _ = load(str(folder / "experiment.toml"))
    (folder / "rows").mkdir()
    for client in range(CLIENTS):
        shutil.copy(folder / f"client{client}" / "data.npz", folder / "rows" / f"{client}.npz")
    data = bespoke.DataSettings(
        name="files", path=str(folder / "rows" / "*.npz"), num_classes=10, transform=loaded.data.transform
    )
    same = bespoke.Experiment(data=data, model=loaded.model, algorithm=loaded.method, training=loaded.training)
    bespoke.run(same, folder / "loop", backend="loop", device="cpu", progress=False)
    lines = (folder / "loop" / "timing.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["train"] for line in lines)


def main() -> None:
    """Measure, print and store."""
    arguments = report.parser(__doc__, __file__).parse_args()
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "federation"
        found = measure(folder)
        found["loop"] = loop(folder)
    print(report.table(found["rounds"]))
    print(
        f"a round less its work: {found['overhead']:.2f} s (bar {BAR:g} s); a round of the loop: {found['loop']:.3f} s"
    )
    print(f"start of a client, once: {found['start']:.1f} s, three at a time")
    report.store(arguments.out, "cpu", sleep=SLEEP, clients=CLIENTS, bar=BAR, **found)
    sys.exit(found["overhead"] > BAR)


if __name__ == "__main__":
    main()
