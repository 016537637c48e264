"""Whether two commits give the same results: all methods, three rounds, every tensor and every number.

``python benchmarks/same_results.py make FOLDER`` runs every method on both backends of the CPU, or with ``--device
cuda`` a cohort at once, recorded; ``python benchmarks/same_results.py compare OLD NEW`` compares two such folders to
the bit. It uses only the public API and the files of a run's folder, so the same script serves both commits.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import bespoke

COUNTS = ("correct", "total", "loss_sum")


def experiment(name: str) -> Any:
    """Return a small federation of unequal clients, including a new one, with a model of every kind of layer."""
    return bespoke.Experiment(
        data=bespoke.DataSettings(name="digits", partition="dirichlet", alpha=0.5, clients=9, new_clients=1),
        model=bespoke.ModelSettings(name="cnn", norm="group", width=8, hidden=16),
        algorithm=name,
        training=bespoke.Training(rounds=3, epochs=2, batch=16, lr=0.02, momentum=0.5, rate=0.5),
        evaluation=bespoke.Evaluation(every=1),
    )


def make(folder: Path, device: str, names: list[str]) -> None:
    """Run every method, each into its own folder."""
    torch.set_num_threads(1)
    for backend in ("loop", "batched") if device == "cpu" else ("batched",):
        for name in names or list(bespoke.ALGORITHMS):
            out = folder / device / backend / name
            if not (out / "summary.json").exists():
                run = bespoke.run(experiment(name), out, backend=backend, device=device)
                print(device, backend, name, f"{run.accuracy:.3f}", *run.notes, flush=True)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the server and the states of the last checkpoint, for each client the newest state."""
    manifest = json.loads(sorted((folder / "checkpoints").glob("0*.json"))[-1].read_text())
    found = safetensors.torch.load_file(folder / "checkpoints" / f"{manifest['round']:06d}.safetensors")
    for entry in manifest["states"]:
        states = safetensors.torch.load_file(folder / "checkpoints" / entry["file"])
        for row, client in enumerate(states.pop("ids").tolist()):
            found |= {f"{name}/{client}": leaf[row] for name, leaf in states.items()}
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the records of each round and each client, in one form for both ways to write an evaluation."""
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for row in rounds:
        row.pop("evaluated", None)
    evaluations = []
    for line in (folder / "clients.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "metrics" in row:
            metrics = row.pop("metrics")
            row |= {"correct": round(metrics["accuracy"][0]), "loss_sum": metrics["loss"][0]}
        evaluations.append(dict(sorted(row.items())))
    return rounds + evaluations


def compare(old: Path, new: Path) -> int:
    """Print every difference; return the number of runs that differ or are missing on one side."""
    runs = {path.parent.relative_to(old) for path in old.rglob("summary.json")}
    runs |= {path.parent.relative_to(new) for path in new.rglob("summary.json")}
    worse = 0
    for run in sorted(runs):
        try:
            a, b = tensors(old / run), tensors(new / run)
            told = [name for name in a.keys() | b.keys() if name not in a or name not in b]
            told += [name for name in a.keys() & b.keys() if not torch.equal(a[name], b[name])]
            first, second = lines(old / run), lines(new / run)
            told += [f"line {i}" for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y]
            told += ["number of lines"] if len(first) != len(second) else []
        except (OSError, IndexError) as error:
            told = [str(error)]
        if told:
            worse += 1
            print(f"{run}: {len(told)} differ, first {sorted(told)[0]}")
    print(f"{len(runs) - worse} of {len(runs)} runs are equal: server, client states, counts, losses, logged values")
    return worse


def main() -> int:
    """Make a folder of runs, or compare two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("make", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", default="")
    chosen = parser.parse_args()
    if chosen.what == "compare":
        return int(compare(*chosen.folders) > 0)
    make(chosen.folders[0], chosen.device, chosen.methods.split(",") if chosen.methods else [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
