"""Runs of two processes: the same numbers as one, one voice, one writer, and an end for all when one fails.

Run as a program, this file is the driver: it imports torch once, and every process of a case is a fork of it.
``python test_sharded.py FOLDER`` leaves the runs in the folder and prints one line of JSON for each case.
``python test_sharded.py command ARGUMENTS`` is the command line with the methods of this file.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from small_runs import arrays, assert_same_result, experiment, federated, last_tensors, records, write
from torch._C._functorch import is_batchedtensor

import bespoke
from bespoke.cli import main
from bespoke.clients import processes
from bespoke.clients.sharded import homes
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.errors import UserError
from bespoke.runs import api, results

pytestmark = pytest.mark.xdist_group("sharded")  # they share the driver's runs

PATIENCE = 60.0  # seconds after which a case counts as hanging
DATA = {"validation": 0.2, "clients": 9, "new_clients": 2, "rows": 300}
MLP = {"name": "mlp", "hidden": 6}


@final
@dataclass(frozen=True)
class Busy(Algorithm):
    """Uses all that crosses between client and server, in several types, and its own aggregation.

    The server keeps a vote of its own for each client, and the newest votes win by their order.
    """

    spoiled: tuple[int, ...] = ()  # clients whose uploads hold NaN from round 2 on
    broken: tuple[int, ...] = ()  # clients whose training raises an error, if run one after another
    deadly: tuple[int, ...] = ()  # clients whose training kills the process
    unmapped: bool = False  # asks for a number of Python's, which cannot be mapped

    def server_init(self, task, params, num_clients, key):
        return {"model": params, "votes": torch.zeros(num_clients, dtype=task.dtype), "newest": torch.zeros(3).long()}

    def tailor(self, server, clients):
        return {"vote": server["votes"][clients]}  # -1, a client never met, is given the last one's

    def client_init(self, task, params, client):
        return {"id": client, "rounds": torch.zeros((), dtype=task.dtype)}

    def client_update(self, local, state, down):
        who = state["id"]
        if not is_batchedtensor(who) and int(who) in self.broken:
            raise ArithmeticError(f"client {int(who)} cannot count")
        if not is_batchedtensor(who) and int(who) in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.unmapped:
            who.item()
        model = local.sgd(local.task.loss, down["model"])
        bad = torch.stack([who == c for c in (*self.spoiled, -2)]).any() & (local.round > 1)
        vote = down["vote"] + state["rounds"] + who.to(local.task.dtype)
        local.log(bytes_up=100 + who, twice=2 * who)
        up = {"model": model, "vote": torch.where(bad, torch.nan, vote), "who": who, "odd": who % 2 == 1, "none": {}}
        return state | {"rounds": state["rounds"] + 1}, up

    def aggregate(self, task, server, uploads, key):
        order = uploads.clients.flip(0)[:3]  # the order in which uploads come matters here
        return {
            "model": tree.mean(uploads.tree["model"], uploads.weights + uploads.tree["odd"]),
            "votes": server["votes"].index_put((uploads.tree["who"],), uploads.tree["vote"].cumsum(0)),
            "newest": torch.cat([order, server["newest"]])[:3],
        }

    def personalize(self, local, state, down):
        return tree.map(lambda w: w + 0.01 * down["vote"] + 0.01 * state["rounds"], down["model"])


# The small experiment has clients of unequal size; client 3 is at home in the second process.
OWN = {"busy": Busy} | {kind: functools.partial(Busy, **{kind: (3,)}) for kind in ("broken", "deadly")}


COMMON = {"data": DATA, "model": MLP, "evaluation": {"every": 2}, "rounds": 4, "rate": 0.6}
REP = bespoke.FedRep(head_epochs=1)
CASES = {
    "fedavg": experiment("fedavg", **COMMON),
    "fedrep": experiment(REP, momentum=0.5, keep_optimizer=True, full_last=True, **COMMON),
    "busy": experiment(Busy(), **COMMON),
    "alone": experiment(REP, **(COMMON | {"rate": 0.01})),  # a cohort of one: the other process has nothing to do
    "refused": experiment(Busy(spoiled=(1, 3)), **COMMON),
    "all refused": experiment(Busy(spoiled=tuple(range(9))), **COMMON),
    "local": experiment("fedavg", **(COMMON | {"evaluation": {"every": 2, "when": "local"}})),
    "on disk": experiment(Busy(), **COMMON),  # with next to no room in memory for states
    "patience": experiment("fedavg", **(COMMON | {"rounds": 30, "evaluation": {"every": 1, "patience": 2}})),
    "fedrep batched": experiment(REP, optimizer="adam", lr=0.01, keep_optimizer=True, **COMMON),
    "busy batched": experiment(Busy(spoiled=(3,)), **COMMON),
    "unmapped batched": experiment(Busy(unmapped=True), **COMMON),
}
EXACT = [name for name in CASES if "batched" not in name]


# --- the driver ---------------------------------------------------------------------------------------------------


def fork(work: Callable[[], Any], voice: Path, **environment: str) -> int:
    """Run ``work()`` in a child whose words go to a file; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        spoken = os.open(voice, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(spoken, 1)
        os.dup2(spoken, 2)
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pids: list[int]) -> list[int]:
    """The exit codes of children; one that outlasts all patience is killed, and says -9."""
    codes: dict[int, int] = {}
    end = time.monotonic() + PATIENCE
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def solo(root: Path, work: Callable[[], Any]) -> list[int]:
    return ended([fork(work, root / "solo.txt")])


def pair(root: Path, name: str, work: Callable[[], Any]) -> None:
    """``work()`` in two processes that share a store kept by this one, as torchrun does; prints how it went."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a free port
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    voices = [root / f"{name}.{rank}.txt" for rank in range(2)]
    start = time.monotonic()
    pids = [fork(work, voices[rank], RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    codes, seconds = ended(pids), time.monotonic() - start
    said = [voice.read_text() for voice in voices]
    print(json.dumps({"name": name, "codes": codes, "said": said, "seconds": seconds}), flush=True)


def run(name: str, folder: Path, **options: Any) -> results.Run:
    options |= {"backend": "batched" if "batched" in name else "loop", "states": "disk" if "disk" in name else "device"}
    with mock.patch("bespoke.clients.states.SPILL", 1):
        return bespoke.run(CASES[name], folder, device="cpu", checkpoint_every=2, **options)


def bespoke_command(*arguments: Any) -> None:
    with mock.patch.object(sys, "argv", ["bespoke", *map(str, arguments)]):
        main.main()


def stop_after(rounds: int, rank: int | None = None) -> Callable[[], bool]:
    """A wish to stop after so many rounds, in one process alone or in all."""
    calls: list[int] = []
    return lambda: (calls.append(0) or len(calls) >= rounds) and rank in (None, processes.rank())


def leaves_of_all_kinds() -> tree.Tree:
    rank = processes.rank()
    return {
        "a": {"odd": torch.arange(3 + rank, dtype=torch.uint8), "half": torch.full((2, 1 + rank), 0.1).bfloat16()},
        "double": torch.tensor([torch.nan, -0.0, 1 / 3 + rank], dtype=torch.float64).flip(0),
        "yes": torch.tensor(rank == 1),
        "nothing": torch.empty(0, 4),
        "whole": torch.tensor([[1, 2], [3, 2**40 + rank]]).T,
        "empty": {},
    }


def gathered() -> None:
    """Trees of all kinds arrive as they were sent, from a process with something and from one without."""
    processes.join()
    rank = processes.rank()
    got = processes.gather({"rank": rank, "x": [torch.nan, 0.1]}, leaves_of_all_kinds())
    assert len(got) == 2
    for sender, (value, found) in enumerate(got):
        with mock.patch.object(processes, "rank", return_value=sender):
            sent = leaves_of_all_kinds()
        assert value["rank"] == sender and value["x"][0] != value["x"][0] and value["x"][1] == 0.1
        assert list(found) == list(sent) and found["empty"] == {}
        for a, b in zip(tree.leaves(found), tree.leaves(sent), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    only = processes.gather(None, {"x": torch.ones(5)} if rank == 1 else {})
    assert only[0] == (None, {}) and torch.equal(only[1][1]["x"], torch.ones(5))
    assert processes.gather([], {}) == [([], {}), ([], {})]
    assert processes.any_of(rank == 1) and not processes.any_of(False)
    assert processes.from_first(rank) == 0
    with processes.one_first():
        if rank == 0:
            time.sleep(0.2)
            Path(os.environ["MARK"]).touch()
        assert Path(os.environ["MARK"]).exists()
    with pytest.raises(UserError, match="process 0 has 0, process 1 1"):
        processes.same(str(rank))
    print("all well")


def writes(folder: Path) -> list[str]:
    """From now on, the files under a folder that this process opens for writing, renames or makes."""
    seen: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writing or event in ("os.rename", "os.mkdir", "os.remove", "os.truncate"):
            path = str(args[0])
            if path.startswith(str(folder)):
                seen.append(f"{event} {path}")

    sys.addaudithook(hook)
    return seen


def watched_run(folder: Path) -> None:
    """A whole run with models, and who wrote and who was called back in it."""
    seen, called = writes(folder), []
    done = run("fedrep", folder, callbacks=[called.append])
    done.save_models()
    files = [line for line in seen if "/checkpoints/" in line and "states-" in line]
    told = {"writes": len(seen), "of states": len(files), "called": len(called)}
    told |= {"accuracy": done.accuracy, "summary": done.summary}
    print(json.dumps(told | {"models": sorted(done.models), "world": processes.world()}))


def own_data() -> None:
    """One's own data, without a folder: every process knows all results."""
    clients = arrays(clients=5)
    clients[0] = tuple(part[:9] for part in clients[0])
    done = federated(clients, algorithm="fedrep", rounds=3, device="cpu")
    weights = [float(sum(t.double().sum() for t in tree.leaves(m.personal))) for m in done.models.values()]
    took_part = [done.federation.clients.took_part(c) for c in range(5)]
    print(json.dumps({"accuracy": done.accuracy, "weights": weights, "took_part": took_part}))


def drive(root: Path) -> None:
    os.environ["MARK"] = str(root / "mark")
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        for name in ("fedrep", "busy batched"):  # what torch loads when it is first used is loaded once
            run(name, root / "first" / name)
    pair(root, "gathered", gathered)
    for name in CASES:
        assert solo(root, lambda name=name: run(name, root / "one" / name)) == [0], (root / "solo.txt").read_text()
        pair(root, name, lambda name=name: run(name, root / "two" / name))
    # cut off and taken up: by as many processes, by fewer, by more
    pair(root, "stopped", lambda: run("busy", root / "two" / "resumed", stop=stop_after(3, rank=1)))
    assert len(records_of(root / "two" / "resumed")) == 3
    pair(root, "resumed", lambda: run("busy", root / "two" / "resumed", resume=True))
    pair(root, "begun on disk", lambda: run("on disk", root / "two" / "disk", stop=stop_after(2)))
    assert solo(root, lambda: run("on disk", root / "two" / "disk", resume=True, stop=stop_after(1))) == [0]
    pair(root, "disk", lambda: run("on disk", root / "two" / "disk", resume=True))
    pair(root, "begun by two", lambda: run("fedrep", root / "two" / "fewer", stop=stop_after(3)))
    assert solo(root, lambda: run("fedrep", root / "two" / "fewer", resume=True)) == [0]
    assert solo(root, lambda: run("fedrep", root / "two" / "more", stop=stop_after(3))) == [0]
    pair(root, "more", lambda: run("fedrep", root / "two" / "more", resume=True))
    stopping = stop_after(4)
    assert solo(root, lambda: run("patience", root / "two" / "patience resumed", stop=stopping)) == [0]
    pair(root, "patience resumed", lambda: run("patience", root / "two" / "patience resumed", resume=True))
    # who writes, and what each process knows afterwards
    assert solo(root, lambda: watched_run(root / "one" / "watched")) == [0]
    pair(root, "watched", lambda: watched_run(root / "two" / "watched"))
    assert solo(root, own_data) == [0]
    (root / "own data.txt").write_text((root / "solo.txt").read_text())
    pair(root, "own data", own_data)
    # the command line, and what goes wrong in it
    small = write(root / "small.toml", training={"rate": 1.0})
    for name, *arguments in (
        ("command", "run", small, "--out", root / "command"),
        ("again", "run", small, "--out", root / "command"),
        ("usage", "run", small, "--ot", root / "command"),
        ("demo", "demo"),
        ("broken", "run", small, "--algorithm", "broken", "--out", root / "broken", "--backend", "loop"),
        ("deadly", "run", small, "--algorithm", "deadly", "--out", root / "deadly", "--backend", "loop"),
    ):
        pair(root, name, lambda arguments=arguments: bespoke_command(*arguments, "--quiet"))
    rows = ("--data", root / "rows.csv", "-o", root / "new.safetensors")
    pair(root, "personalize", lambda: bespoke_command("personalize", root / "command", *rows))
    pair(root, "evaluate", lambda: bespoke_command("evaluate", root / "command"))

    def each_its_own() -> None:
        bespoke_command("run", small, "--seed", os.environ["RANK"], "--out", root / "each")

    def no_room() -> None:
        full = mock.patch("bespoke.runs.execution.save", side_effect=UserError("cannot write: no room"))
        with full if os.environ["RANK"] == "0" else contextlib.nullcontext():
            bespoke_command("run", small, "--out", root / "full", "--checkpoint-every", 1)

    def signalled() -> None:
        def press(event: Any) -> None:
            if event.round == 2:  # twice, as torchrun and a terminal do together; the other process is told nothing
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

        with mock.patch("bespoke.runs.progress._plain_lines", lambda *_: press):
            bespoke_command("run", small, "--out", root / "signalled", "--set", "training.rounds=50")

    def left_behind() -> None:
        meet = dist.init_process_group

        def meeting(*arguments: Any) -> None:  # the other process has met this one, and ends, while this one still does
            meet(*arguments)
            processes._marks().wait(["told"], processes.PATIENCE)
            dist.destroy_process_group()
            raise RuntimeError("Connection closed by peer")

        late = mock.patch.object(dist, "init_process_group", meeting)
        with late if os.environ["RANK"] == "0" else contextlib.nullcontext():  # the one that tells mistakes of its own
            bespoke_command("evaluate", root / "command")

    pair(root, "left behind", left_behind)
    pair(root, "each its own", each_its_own)
    pair(root, "no room", no_room)
    pair(root, "signalled", signalled)


def records_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


# --- what the driver found ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How two processes ended: exit codes, what each said, and the time it took."""

    name: str
    codes: list[int]
    said: list[str]
    seconds: float


@pytest.fixture(scope="module")
def driven(tmp_path_factory):
    """The driver's folder, and its cases by name. One thread and no GPU, so that forks of the process can work."""
    root = tmp_path_factory.mktemp("sharded")
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, __file__, str(root)], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return root, {case["name"]: Ended(**case) for case in map(json.loads, done.stdout.splitlines())}


def well(driven, *names):
    """The driver's folder, if these cases went well."""
    root, cases = driven
    for name in names:
        assert cases[name].codes == [0, 0], cases[name]
    return root


def test_trees_of_all_kinds_arrive(driven):
    well(driven, "gathered")
    assert [said.strip() for said in driven[1]["gathered"].said] == ["all well"] * 2


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_give_the_same_bits_as_one(name, driven):
    """One after another each client is computed alone, wherever its home is."""
    root = well(driven, name)
    assert_same_result(root / "two" / name, root / "one" / name)


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(EXACT)))
def test_two_processes_give_the_same_numbers_as_one_in_blocks(name, driven):
    """The blocks differ, so the last bits may; counts, cohorts and who was refused may not."""
    root = well(driven, name)
    two, one = root / "two" / name, root / "one" / name
    for file in ("rounds.jsonl", "clients.jsonl"):
        lines = [[json.loads(line) for line in (folder / file).read_text().splitlines()] for folder in (two, one)]
        for a, b in zip(*lines, strict=True):
            assert 0.0 <= a.pop("padding_waste", 0.0) < 1.0  # how much is padded depends on who shares a block
            b.pop("padding_waste", None)
            assert close(a, b), (a, b)
    notes = [json.loads((folder / "environment.json").read_text())["notes"] for folder in (two, one)]
    assert notes[0] == notes[1] and len(notes[0]) == name.startswith(("unmapped", "busy"))
    mine, theirs = last_tensors(two), last_tensors(one)
    assert mine.keys() == theirs.keys() and len(mine) > 4
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype
        torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-6)


def close(a, b):
    """Equal, but floats to 1e-6 of themselves."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, rel=1e-6, abs=1e-6) if isinstance(a, float) else a == b


def test_the_cases_are_what_they_are_meant_to_be(driven):
    """Both processes have clients of unequal size to train, uploads are refused on one and on both, a cohort is one."""
    root = well(driven, *CASES)
    rounds = {name: records_of(root / "two" / name) for name in CASES}
    sizes = json.loads((root / "two" / "busy" / "federation.json").read_text())["train"]
    assert len(sizes) == 9 and len(set(sizes)) > 6
    home = homes(sizes, 7, 2)
    cohorts = [[home[c] for c in row["cohort"]] for row in rounds["busy"]]
    assert any(cohort != sorted(cohort) for cohort in cohorts)  # so that the order of the answers is not the cohort's
    assert all(len(row["cohort"]) == 1 for row in rounds["alone"])
    assert {home[c] for row in rounds["alone"] for c in row["cohort"]} == {0, 1}
    refused = [set(row["refused"]) for row in rounds["refused"]]
    assert {"3"} in refused or {"1"} in refused
    last = rounds["all refused"][-1]
    assert "no upload was accepted" in last["note"] and last["bytes_up"] > 0
    assert len(rounds["patience"]) < 30
    assert {case.count("\n") for case in driven[1]["busy"].said} == {0}


@pytest.mark.parametrize(
    ("name", "whole"), [("resumed", "busy"), ("fewer", "fedrep"), ("more", "fedrep"), ("disk", "busy")]
)
def test_a_run_is_taken_up_by_any_number_of_processes(name, whole, driven):
    root = well(driven, *({name} & driven[1].keys()), "stopped", "begun by two", "begun on disk")
    assert_same_result(root / "two" / name, root / "one" / whole)


def test_the_curve_that_stops_a_run_goes_on_in_every_process(driven):
    root = well(driven, "patience resumed")
    assert records(root / "two" / "patience resumed") == records(root / "one" / "patience")


def test_the_first_process_writes_all_but_the_others_states_and_every_one_knows_the_results(driven):
    root = well(driven, "watched")
    first, second = (json.loads(said) for said in driven[1]["watched"].said)
    assert first.pop("writes") - first.pop("of states") > 20
    assert second.pop("writes") == second.pop("of states") > 0  # each process writes the states of its own clients
    assert first.pop("called") == 4 and second.pop("called") == 0
    assert first == second and first["world"] == 2 and len(first["models"]) == 9
    for folder in (root / "one" / "watched", root / "two" / "watched"):
        told = json.loads((folder / "environment.json").read_text())
        assert told["world_size"] == (2 if folder.parent.name == "two" else 1) and told["backend"] == "loop"
    models = sorted((root / "one" / "watched" / "models").iterdir())
    assert len(models) == 9
    for path in models:
        mine = safetensors.torch.load_file(root / "two" / "watched" / "models" / path.name)
        alone = safetensors.torch.load_file(path)
        assert mine.keys() == alone.keys() and all(torch.equal(mine[k], alone[k]) for k in alone)


def test_ones_own_data_without_a_folder(driven):
    root = well(driven, "own data")
    alone = json.loads((root / "own data.txt").read_text())
    first, second = (json.loads(said) for said in driven[1]["own data"].said)
    assert first == second == alone and all(alone["took_part"])


# --- one voice, and an end for all ---


def test_the_result_is_printed_once(driven):
    well(driven, "command")
    said = driven[1]["command"].said
    assert said[1] == "" and said[0].startswith("fedavg, seed 0, last round (3)") and said[0].count("\n") == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("again", "command already holds a run: add --resume"),
        ("usage", "No such option"),
        ("demo", "the demonstration runs in one process: start it without torchrun"),
        ("personalize", "one process opens a run's folder: start without torchrun"),
        ("evaluate", "one process opens a run's folder: start without torchrun"),
        ("left behind", "one process opens a run's folder: start without torchrun"),
        ("each its own", "all processes must run the same: process 0 has experiment"),
        ("no room", "cannot write: no room"),
    ],
)
def test_a_mistake_is_told_once_and_ends_both(name, sentence, driven):
    case = driven[1][name]
    assert case.codes == [2, 2]
    told = [line for said in case.said for line in said.splitlines() if line.startswith("bespoke: ")]
    assert len(told) == 1 and sentence in told[0], case
    assert "Traceback" not in "".join(case.said)
    assert case.seconds < 30


def test_processes_that_do_not_know_where_to_meet_end_with_a_sentence(tmp_path):
    """RANK and WORLD_SIZE alone, as a leftover of another launcher may be."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")} | {"RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "bespoke", "evaluate", str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("bespoke: process 1 cannot meet the others: ") and done.stderr.count("\n") == 1
    assert "MASTER_ADDR" in done.stderr


def test_an_error_in_one_process_is_told_by_it_and_ends_both(driven):
    case = driven[1]["broken"]
    assert case.codes == [2, 1] and case.seconds < 30
    assert case.said[0] == "", case
    where = "This happened in Busy, client 3 (3), round 1."
    assert case.said[1].count("Traceback") == 1
    assert case.said[1].endswith(f"ArithmeticError: client 3 cannot count\n{where}\n")


def test_a_process_that_is_killed_is_missed_and_the_rest_ends(driven):
    case = driven[1]["deadly"]
    assert case.codes == [2, -signal.SIGKILL] and case.seconds < 30
    told = r"bespoke: process 0 lost another process of this run, .* with --resume \(resume=True in Python\)\n"
    assert re.fullmatch(told, case.said[0])


def test_a_signal_to_one_process_stops_both_after_the_same_round(driven):
    root, cases = driven
    assert cases["signalled"].codes == [143, 143]
    assert cases["signalled"].said[1] == ""
    assert "stopped after round 3 of 50, all saved" in cases["signalled"].said[0]
    assert len(records_of(root / "signalled")) == 3
    assert (root / "signalled" / "checkpoints" / "000003.json").exists()


# --- torchrun itself ---


def torchrun(*arguments):
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "default"}
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*call, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=120)


def test_torchrun_runs_the_module(driven, tmp_path):
    root = well(driven, "command")
    done = torchrun("-m", "bespoke", "run", root / "small.toml", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert_same_result(tmp_path / "run", root / "command")
    assert done.stdout.count("accuracy") == 1
    assert sum(line.startswith("fedavg: round 3/3") for line in done.stderr.splitlines()) == 1, done.stderr
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["world_size"] == 2


def test_torchrun_ends_when_one_process_fails(driven, tmp_path):
    root, _ = driven
    arguments = ("run", root / "small.toml", "--algorithm", "broken", "--out", tmp_path / "run", "--backend", "loop")
    done = torchrun(__file__, "command", *arguments)
    assert done.returncode == 1
    assert done.stderr.count("ArithmeticError: client 3 cannot count") == 1
    assert "lost another process" not in done.stderr


# --- parts that need no second process ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_homes_share_the_rows(world):
    sizes = [int(n) for n in rng.bits(rng.key(world), torch.arange(40)) % 500]
    home = homes(sizes, 30, world)
    assert home == homes(sizes, 30, world) and set(home) == set(range(world))
    assert home[:30] == homes(sizes[:30], 30, world)  # the new clients do not matter to those who train
    for population in (30, 40):
        load = [sum(n for n, h in zip(sizes[:population], home, strict=False) if h == r) for r in range(world)]
        assert max(load) - min(load) <= max(sizes)  # a client goes to whoever has least
    assert homes([4, 5, 9, 5, 4], 5, 2) == [0, 1, 0, 1, 1]
    assert sorted(homes([0, 0, 0, 0], 4, 2)) == [0, 0, 1, 1]


def test_one_process_meets_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    processes.join()
    monkeypatch.setenv("WORLD_SIZE", "1")
    processes.join()
    assert not dist.is_initialized() and (processes.world(), processes.rank(), processes.first()) == (1, 0, True)
    part = {"x": torch.ones(2)}
    assert processes.gather("a", part) == [("a", part)] and processes.any_of(True) and not processes.any_of(False)


def test_each_process_takes_the_gpu_of_its_number(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert api.pick_device("auto") == torch.device("cuda")  # in a run of one process as ever
    monkeypatch.setattr(processes, "world", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert api.pick_device("auto") == api.pick_device("cuda") == torch.device("cuda:1")
    assert taken == [torch.device("cuda:1")] * 2
    assert api.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="each of 3 processes takes its own GPU: use cuda instead of cuda:0"):
        api.pick_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 on this machine has no GPU, since torch sees only 2"):
        api.pick_device("auto")


if __name__ == "__main__":
    for name, factory in OWN.items():  # not for the tests of other files
        bespoke.register(name, factory)
    if sys.argv[1] == "command":
        del sys.argv[1]
        main.main()
    else:
        drive(Path(sys.argv[1]))
