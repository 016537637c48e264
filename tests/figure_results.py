"""Figures' files and plausible results for them, made up: for tests of the drawing alone."""

import json
from pathlib import Path

import numpy as np
import paper_tables

from bespoke.tables import results, spec

RUN = """
[data]
name = "digits"
clients = 12
partition = "dirichlet"
alpha = 0.3
min_rows = 5
[model]
name = "linear"
[training]
rounds = 3
"""


def figure(folder: Path, text: str, name: str = "f1") -> spec.Table:
    """Return a figure of the paper "paper" from its file's text, which needs no head."""
    path = folder / "paper" / "tables" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parents[1] / "small.toml").write_text(RUN)
    head = 'paper = "Paper"\nsource = "Figure 1"\ntitle = "What it shows"\nkind = "figure"\n'
    path.write_text(head + text)
    return spec.read(path)


def content(accuracies, rows=20, **more):
    """Return what a result says of clients with these accuracies."""
    number = len(accuracies)
    told = {
        "clients": {
            "client": list(range(number)),
            "group": ["train"] * number,
            "condition": None,
            "rows": [rows] * number,
            "metrics": {
                "accuracy": {"sum": [rows * value for value in accuracies], "weight": [rows] * number},
                "loss": {"sum": [rows * (1 - value) for value in accuracies], "weight": [rows] * number},
            },
            "logged": {},
        },
    }
    return told | more


def put(root: Path, table: spec.Table, entry: str, seed: int = 0, **told) -> Path:
    """Write a result of an entry, with the settings that the figure asks for."""
    own = table.entry(entry)
    return results.write(root, own, paper_tables.content(own, seed, [], **told))


def rising(rounds, top, seed=0, noise=0.01, speed=40.0):
    """Return a curve that rises to `top`."""
    draw = np.random.default_rng(seed)
    at = np.asarray(rounds, dtype=float)
    values = np.clip(top - (top - 0.1) * np.exp(-at / speed) + noise * draw.standard_normal(len(at)), 0, 1).tolist()
    loss = [2.5 * (1 - value) + 0.05 for value in values]
    return {"round": list(rounds), "pooled": values, "mean": values, "loss": loss, "train_loss": [v / 2 for v in loss]}


def vectors(kinds, each, dim, apart, seed=0):
    """Return vectors [len(kinds) * each, dim] in clusters `apart` from each other, and their conditions."""
    draw = np.random.default_rng(seed)
    centres = apart * draw.standard_normal((len(kinds), dim))
    found = np.concatenate([centre + draw.standard_normal((each, dim)) for centre in centres])
    conditions = [name for kind in kinds for name in DEGRADED[kind](each)]
    return found, conditions


DEGRADED = {
    "noise": lambda each: [f"noise of variance {value:.4g}" for value in np.linspace(0.005, 1, each)],
    "jitter": lambda each: [f"jitter by {0.5 + i / each:.3g}, 1, 1.2, -0.{i}" for i in range(each)],
    "imbalance": lambda each: [f"imbalance by {value:.3g}" for value in np.repeat(np.geomspace(0.1, 10, each // 2), 2)],
}


def told(found, conditions, silhouette=0.4):
    """Return vectors as the probes of clients' vectors tell them."""
    clients = list(range(len(conditions)))
    return {
        "clients": clients,
        "conditions": conditions,
        "vectors": np.round(found, 4).tolist(),
        "silhouette": silhouette,
    }


def read(path: Path):
    """Return a result file's content."""
    return json.loads(path.read_text())
