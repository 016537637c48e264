"""A round over loopback with real processes: a SuperLink, three nodes, TLS and keys, and 5 s of sleep as local work.

The figure is the time of a round less the slowest client's time in its work, beside a round of the loop backend with
the same method without its sleep. A round is from its first message to the next round's. Its parts are those of the
client that answered last, by the times in the logs of its node and its process:

- waiting: Flower's node looks for a message (every 3 s when idle) and for the answer (every 0.5 s), the client's
  process and the server look for theirs (every 0.2 s);
- transfer: server, SuperLink, node, process, and all the way back;
- checks: the client reads the message, and saves its state; the server checks the uploads, aggregates, writes its
  records and a checkpoint.

Process start and imports are no part of a round, since a client's process stays: they are given once, for the client
that took longest, with the check of its data and the time until its node was connected. Run with ``python
benchmarks/federation_round.py``; it writes ``federation_round.json`` beside itself, and exits with 1 if the median is
above its bar.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import report

CLIENTS, ROUNDS, SLEEP, BAR = 3, 6, 5.0, 12.0
NODE = {"Receiving:": "found", "Received successfully": "received", "Sending:": "sending", "Sent successfully": "sent"}
WORKER = {"took a message": "took", "read it": "read", "worked on it": "worked", "answered": "answered"}
# What a round consists of: the part that ends with each of these times.
PARTS = {
    "pushed": "transfer",
    "found": "waiting",
    "received": "transfer",
    "took": "waiting",
    "read": "transfer",
    "asleep": "checks",
    "awake": "work",
    "worked": "checks",
    "answered": "transfer",
    "sending": "waiting",
    "sent": "transfer",
    "pulling": "waiting",
    "came": "transfer",
    "next": "checks",
}


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
        self.rounds.append({"began": began, "pushed": time.time(), "came": {}})

    def pull(self) -> list[Any]:
        """Return what has come."""
        began = time.time()
        found: list[Any] = self.link.pull()
        self.rounds[-1]["came"] |= {key: {"pulling": began, "came": time.time()} for key, _ in found}
        return found


def logged(log: Path, phrases: dict[str, str]) -> dict[str, list[float]]:
    """Return when a log has which of the phrases, by their short names."""
    found: dict[str, list[float]] = {name: [] for name in phrases.values()}
    for line in log.read_text().splitlines():
        when = re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", line)
        for phrase, name in phrases.items():
            if when and phrase in line:
                found[name].append(datetime.strptime(when[0], "%Y-%m-%d %H:%M:%S,%f").timestamp())
    return found


def steps_of(times: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each step of a round; what was done while something else went on takes none."""
    ordered = accumulate((times[name] for name in ("began", *PARTS)), max)
    return dict(zip(PARTS, (end - start for start, end in pairwise(ordered)), strict=True))


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
    places = [folder / f"client{client}" for client in range(CLIENTS)]
    clients_of = {(place / "node.key.pub").read_text().strip(): place for place in places}
    steps = {place: logged(place / "node.log", NODE) | logged(place / "worker.log", WORKER) for place in places}
    slept = {place: [json.loads(line) for line in (place / "slept").read_text().splitlines()] for place in places}
    rows = []
    for number in range(ROUNDS):
        at = number - ROUNDS - 2  # of all messages: scores and models are asked for afterwards
        push, after = timed.rounds[at], timed.rounds[at + 1]["began"]
        works = {place: slept[place][number - ROUNDS] for place in places}
        key = max(push["came"], key=lambda key: push["came"][key]["came"])
        last = clients_of[key]
        times = {name: found[at] for name, found in steps[last].items()} | push["came"][key]
        times |= {"began": push["began"], "pushed": push["pushed"], "next": after}
        times |= dict(zip(("asleep", "awake"), works[last], strict=True))
        seconds = after - push["began"]
        overhead = seconds - max(end - start for start, end in works.values())
        taken = steps_of(times)
        parts = {part: sum(taken[step] for step in PARTS if PARTS[step] == part) for part in PARTS.values()}
        rows.append({"round": number + 1, "seconds": seconds, "overhead": overhead} | parts | {"steps": taken})
    return {
        "rounds": rows,
        "overhead": statistics.median(row["overhead"] for row in rows),
        "parts": {part: statistics.median(row[part] for row in rows) for part in ("waiting", "transfer", "checks")},
        "start": max((started(place, began) for place in places), key=lambda start: sum(start.values())),
    }


def started(place: Path, began: float) -> dict[str, float]:
    """Return the seconds that a client's start took, by part."""
    names = {"started": "process start", "imported": "imports", "checked the data": "data"}
    found = logged(place / "worker.log", {f"bespoke.node: {word}": name for word, name in names.items()})
    found |= logged(place / "node.log", {"SuperNode ID": "connection"})
    times = [began, *(when[0] for when in found.values())]
    return dict(zip(found, (end - start for start, end in pairwise(times)), strict=True))


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
    print("its parts:", ", ".join(f"{part} {seconds:.2f} s" for part, seconds in found["parts"].items()))
    start = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in found["start"].items())
    print(f"start of a client, once, three at a time: {start}")
    report.store(arguments.out, "cpu", sleep=SLEEP, clients=CLIENTS, bar=BAR, **found)
    sys.exit(found["overhead"] > BAR)


if __name__ == "__main__":
    main()
