"""Run folders written by hand, for the tests of report pages: any names, any size, no training."""

import json
import shutil
from pathlib import Path

import numpy as np

from bespoke.records import CLIENTS, ROUNDS, TIMING, RunFolder

HOSTILE = (
    "<script>document.title='broken'</script>",
    "\"quoted' & <b>bold</b> `${x}` %{customdata}",
    "</script><img src=x onerror=document.title='broken'>",
    "n" * 10_000,
    "שלום \u202eright to left",
    "$\\alpha$ <a href='https://example.org'>link</a>",
)


def written(
    folder: Path,
    method: str = "fedavg",
    names: tuple[str, ...] = ("ann", "bob", "cyd", "dan", "eve", "fay"),
    *,
    seed: int = 0,
    rounds: int = 4,
    every: int = 1,
    shift: float = 0.0,
    before: bool = False,
    logged: dict | None = None,
    refused: dict | None = None,
    note: str = "",
    new: int = 0,
    **federation,
) -> RunFolder:
    """A run of a classification with ten test rows for each client, evaluated every so many rounds.

    Clients get better from one evaluation to the next. The last `new` of them do not train.
    """
    folder.mkdir(parents=True)
    name = json.dumps(method, ensure_ascii=False)
    text = f'seed = {seed}\n[algorithm]\nname = {name}\n[data]\nname = "made"\n[training]\nrounds = {rounds}\n'
    (folder / "config.toml").write_text(text, encoding="utf-8")
    run, everyone, training = RunFolder(folder), list(range(len(names))), len(names) - new
    sizes = {"train": [40 + 5 * i for i in everyone], "val": [0] * len(names), "test": [10] * len(names)}
    run.write_json("federation.json", {"clients": training, "names": list(names), **sizes, **federation})
    run.write_json("environment.json", {"python": "3.11", "device": "cpu", "notes": [note] if note else []})
    higher = {"accuracy": True}
    lines, rows = [], []
    for number in range(1, rounds + 1):
        row = {"round": number, "cohort": everyone[:training], "refused": refused or {}, "train_loss": 1 / number}
        row |= {"bytes_down": 1000 * len(names), "bytes_up": 1000 * len(names), "padding_waste": 0.0, "host_breaks": 0}
        row |= {"logged": logged or {}}
        rows.append(row)
        if number % every:
            continue
        row["evaluated"] = {"view": "personal", "metric": "accuracy", "higher": higher}
        for client in everyone:
            for view, less in (("personal", 0), *([("global", client - 2)] if before else [])):
                right = float(np.clip(2 + min(number // every, 10) + client % 5 - less + shift, 0, 10))
                line = {
                    "round": number,
                    "client": client,
                    "group": "train" if client < training else "new",
                    "split": "test",
                    "view": view,
                }
                lines.append(line | {"total": 10, "metrics": {"accuracy": [right, 10]}, "logged": {}})
    run.append(ROUNDS, rows)
    run.append(CLIENTS, lines)
    phases = {"train": 0.5, "aggregate": 0.25, "evaluate": 1.0, "checkpoint": 0.0}
    run.append(TIMING, [{"round": number, **phases} for number in range(1, rounds + 1)])
    return run


def begun(source: RunFolder, folder: Path) -> RunFolder:
    """A run with the settings and clients of another one that has done no round yet."""
    folder.mkdir(parents=True)
    for name in ("config.toml", "federation.json", "environment.json"):
        shutil.copy(source.path / name, folder)
    return RunFolder(folder)


def step(source: RunFolder, run: RunFolder, number: int) -> None:
    """Let a run do the round of another one."""
    for name, rows in ((ROUNDS, source.rounds()), (CLIENTS, source.clients()), (TIMING, source.timing())):
        run.append(name, [row for row in rows if row["round"] == number])
