"""Whether committed results come out again: some cells drawn at random, run by their printed commands, and compared.

``python benchmarks/repeated.py --seed 1`` draws five cells from the results in ``results/`` that were made on this kind
of device, of some data sets, and of methods whose source has not changed since; trainings of more than 400 seconds are
left out. Each is run by the command that its table's page prints, and read as the table reads it.
``results/repeated.json`` holds every draw: both numbers of each cell, and whether all clients' sums and the whole curve
are equal too. A draw that was cut off goes on with the same seed. ``--dry`` only says what would be run; ``--jobs 5``
runs so many side by side.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from bespoke.files import write_atomic
from bespoke.records import RunFolder
from bespoke.runs.results import Run
from bespoke.tables import mps, plan, reading, results, spec
from bespoke.tables.beside import Number
from bespoke.tables.results import Result
from bespoke.tables.sections import commands
from bespoke.tables.spec import Entry

ROOT = Path(__file__).parents[1] / "results"
CELLS, LONGEST = 5, 400.0  # how many are drawn, of trainings of at most so many seconds


def drawn(root: Path, device: str, data: Collection[str], seed: int) -> dict[str, Any]:
    """Return a draw of cells by a seed, none of which has been run again yet."""
    pool, known = [], spec.listed()
    for result in sorted(results.everything(root), key=lambda each: str(each.path)):
        told = result.content
        if not result.done or told.get("adopted_from") or told["environment"].get("device") != device:
            continue
        if told["table"] not in known:  # of no paper
            continue
        entry = next((each for each in spec.find(told["table"]).entries if each.id == told["cell"]), None)
        if entry is None or not entry.runs or not result.path.stem.isdigit() or not result.same_source:
            continue
        if told["seconds"] > LONGEST or told["settings"]["data"]["name"] not in data:
            continue
        if plan.answers(result, plan.job_of(entry, result.seed), entry):
            pool.append(f"{entry.table}/{entry.id}/{result.seed}")
    return {
        "random_seed": seed,
        "device": device,
        "drawn_of": len(pool),
        "data": data,
        "longest_seconds": LONGEST,
        "drawn": random.Random(seed).sample(pool, min(CELLS, len(pool))),
        "cells": [],
    }


def left(draw: dict[str, Any], root: Path) -> list[tuple[Entry, Result]]:
    """Return what of a draw has not been run again."""
    done, found = {f"{cell['cell']}/{cell['seed']}" for cell in draw["cells"]}, []
    for name in (each for each in draw["drawn"] if each not in done):
        paper, table, rest = name.split("/", 2)
        id, _, seed = rest.rpartition("/")
        entry = spec.find(f"{paper}/{table}").entry(id)
        found.append((entry, results.read(results.place(root, entry) / f"{seed}.json")))
    return found


def again(entry: Entry, before: Result, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a cell by its printed command in some environment; return how both compare."""
    lines = commands(Number(entry, {before.seed: 0.0}))[1:]
    with tempfile.TemporaryDirectory() as scratch:
        for line in lines:
            print(line, flush=True)
            words = shlex.split(line)
            subprocess.run([sys.executable, "-m", "bespoke", *words[1:]], cwd=scratch, check=True, env=environment)
        if words[1] == "sweep":
            now = results.read(results.place(Path(scratch, "results"), entry) / f"{before.seed}.json")
        else:
            now = _read(entry, before.seed, Path(scratch, shlex.split(lines[0])[-1]))
    old, new = before.content, now.content
    sums, sums_now = ({name: pair["sum"] for name, pair in each["clients"]["metrics"].items()} for each in (old, new))
    return {
        "cell": f"{entry.table}/{entry.id}",
        "seed": before.seed,
        "commands": lines,
        "settings": new["settings"],
        "evaluate": new["evaluate"],
        "before": _told(entry, before),
        "again": _told(entry, now),
        "same_settings": plan.same_settings(old["settings"], plan.job_of(entry, before.seed).experiment),
        "same_number": before.value(entry) == now.value(entry),
        "same_round": old["round"] == new["round"],
        "same_clients": old["clients"]["metrics"] == new["clients"]["metrics"],
        "same_curve": old["curve"] == new["curve"],
        "largest_difference": {
            "of_a_client": {name: _apart(sums[name], sums_now[name]) for name in sums},
            "of_the_curve": {name: _apart(old["curve"][name], new["curve"][name]) for name in old["curve"]},
        },
    }


def _apart(old: list[Any], new: list[Any]) -> float:
    """Return the largest difference of two lists of numbers; a number that only one of them has is far away."""
    if len(old) != len(new):
        return math.inf
    return max((abs(a - b) for a, b in zip(old, new, strict=True) if a is not None and b is not None), default=0.0)


def _read(entry: Entry, seed: int, out: Path) -> Result:
    """Read the folder of a run, or its only evaluation, as the table does."""
    run = cast(Run, SimpleNamespace(folder=RunFolder(out), notes=()))
    (where,) = (out / "evaluations").iterdir() if entry.cell.evaluate else (out,)
    evaluated = cast(Run, SimpleNamespace(folder=RunFolder(where), notes=()))
    seconds = run.folder.read_json("summary.json")["seconds"]
    told = reading.result(plan.job_of(entry, seed), entry, run, evaluated, seconds)
    return Result(out, results.rounded(told))


def _told(entry: Entry, result: Result) -> dict[str, Any]:
    """Return a result's number, in percent if it is an accuracy, and where it comes from."""
    told, value = result.content, result.value(entry)
    keys = ("device", "precision", "torch", "side_by_side")
    return {
        "value": None if value is None else value * (100 if told["metric"] == "accuracy" else 1),
        "round": told["round"],
        "commit": told["source"]["commit"],
        "method": told["source"]["method"],
        "seconds": told["seconds"],
        **{key: told["environment"].get(key) for key in keys},
    }


def main() -> None:
    """Run what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the draw")
    parser.add_argument("--out", type=Path, default=ROOT / "repeated.json")
    parser.add_argument("--results", type=Path, default=ROOT)
    parser.add_argument("--device", default=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", nargs="*", default=["cifar10", "cifar100"])
    parser.add_argument("--jobs", type=int, default=1, help="how many to run side by side")
    parser.add_argument("--dry", action="store_true", help="only say what would be run")
    args = parser.parse_args()
    told = json.loads(args.out.read_text()) if args.out.exists() else {"draws": []}
    draw = next((each for each in told["draws"] if each["random_seed"] == args.seed), None)
    if draw is None:
        draw = drawn(args.results, args.device, args.data, args.seed)
        told["draws"].append(draw)
    if draw["device"] != args.device:
        raise SystemExit(
            f"the draw of seed {args.seed} is of results made on {draw['device']}, and this is {args.device}"
        )
    cells = left(draw, args.results)
    if args.dry:
        for _, before in cells:
            print(f"{before.path}: {before.content['seconds']:.0f} s")
        return
    if not cells:
        raise SystemExit(f"all of the draw of seed {args.seed} has been run again: give another seed")
    write_atomic(args.out, json.dumps(told, indent=1) + "\n")  # so that a draw that is cut off is known
    with contextlib.ExitStack() as held:
        own = held.enter_context(mps.service()).environment if args.jobs > 1 else {}
        workers = held.enter_context(ThreadPoolExecutor(args.jobs))
        failed = []
        for done in as_completed([workers.submit(again, *cell, os.environ | own) for cell in cells]):
            if error := done.exception():
                failed.append(str(error))
                continue
            draw["cells"].append(done.result())
            print(json.dumps({k: v for k, v in draw["cells"][-1].items() if k != "settings"}, indent=1), flush=True)
            write_atomic(args.out, json.dumps(told, indent=1) + "\n")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
