"""What a figure needs of a run besides its metrics, as plain values for a result file.

A probe is a function of a finished run. Some also look at the run while it goes on: :func:`callbacks` returns what to
give to ``bespoke.run`` for them, and :func:`take` what they found. A result file stays small: of many rows a sample is
kept, and of long vectors their principal components.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bespoke import analysis
from bespoke.analysis import Embeddings
from bespoke.errors import UserError
from bespoke.files import write_atomic
from bespoke.maths.hierarchy import references
from bespoke.registry import closest
from bespoke.report.planes import principal
from bespoke.runs.recording import Event
from bespoke.runs.results import Run

EVERY = 10  # rounds between two looks at a run
SAMPLE, KEPT = 1000, 30  # rows whose features are kept, and their principal components
MIDDLE = 12  # the layer between the first and the last that FedPCE's Fig. 1 shows
NOTED = "gaussianity.json"


def embeddings(run: Run) -> dict[str, Any]:
    """Return FedPCE's vector of each client that took part, with the condition of the client's images (Fig. 3)."""
    return _told(analysis.embeddings(run))


def norms(run: Run) -> dict[str, Any]:
    """Return each client's scales and shifts of the first, the 12th and the last norm layer (FedPCE, Fig. 1).

    Where there are fewer layers, the middle one stands for the 12th. K vectors are kept as K principal components, in
    which all their distances are as before.
    """
    found = analysis.norms(run)
    names = list(found)
    picked = dict.fromkeys((0, MIDDLE - 1 if len(names) > MIDDLE else len(names) // 2, len(names) - 1))
    layers = []
    for number in picked:
        layer = found[names[number]]
        kept = layer._replace(vectors=principal(layer.vectors, len(layer.clients)))
        layers.append({"layer": number + 1, "name": names[number], **_told(kept)})
    return {"layers": layers, "of": len(names)}


def _told(found: Embeddings) -> dict[str, Any]:
    kinds = {analysis.kind(condition) for condition in found.conditions}
    apart = found.silhouette() if 1 < len(kinds) < len(found.clients) else None
    return {
        "clients": found.clients,
        "conditions": found.conditions,
        "vectors": _plain(found.vectors),
        "silhouette": None if apart is None else _plain(apart),
    }


def features(run: Run) -> dict[str, Any]:
    """Return a sample of the train rows' features, with class and client (pFedVMP, Fig. 2).

    The vectors are the sample's first principal components; ``kept`` is their share of its variance. The two ratios of
    ``scatter`` are over all train rows.
    """
    found = analysis.features(run)
    drawn = np.sort(np.random.default_rng(0).permutation(len(found.classes))[:SAMPLE])
    sample, vectors = found.vectors[drawn], principal(found.vectors[drawn], KEPT)
    whole = float(np.square(sample - sample.mean(axis=0)).sum())
    return {
        "split": "train",
        "rows": len(found.classes),
        "dim": sample.shape[1],
        "vectors": _plain(vectors, digits=3),  # enough for a picture, and the file stays small
        "classes": found.classes[drawn].tolist(),
        "clients": found.clients[drawn].tolist(),
        "kept": _plain(np.square(vectors).sum() / whole) if whole else 1.0,
        "scatter": {name: _plain(value) for name, value in found.scatter().items()},
    }


def gaussianity(run: Run) -> dict[str, Any]:
    """Return the fit of one Gaussian per class to the features, from before the first round on (FedLDA, Fig. 1a).

    Rounds in between are those that :func:`callbacks` noted in the run's folder.
    """
    last = run.summary["rounds"]
    found = {number: fit for number, fit in _noted(run.folder.path).items() if number <= last}
    found |= {0: analysis.gaussianity(run, None), last: analysis.gaussianity(run, run.server)}
    rounds, splits, names = sorted(found), list(found[last]), ("nll", "mahalanobis", "kurtosis")
    told = {split: {n: [_plain(found[r][split][n]) for r in rounds] for n in names} for split in splits}
    return {"round": rounds, **told}


def _watch_gaussianity(folder: Path) -> Callable[[Event], None]:
    """Return a callback that notes the fit every ten rounds, in a file beside the run's records.

    A run that is killed and resumed finds there what was noted before.
    """

    def note(event: Event) -> None:
        if event.round % EVERY == 0:
            found = _noted(folder) | {event.round: analysis.gaussianity(event.federation, event.server)}
            write_atomic(folder / NOTED, json.dumps(found))

    return note


def _noted(folder: Path) -> dict[int, Any]:
    path = folder / NOTED
    return {int(number): fit for number, fit in json.loads(path.read_text()).items()} if path.exists() else {}


def hierarchy(run: Run) -> dict[str, Any]:
    """Return the errors of estimates that know the variances of the two-level Gaussian (Self-FL's synthetic data)."""
    return {name: _plain(error) for name, error in references(run.pool, run.experiment.data.between).items()}


PROBES: dict[str, Callable[[Run], dict[str, Any]]] = {
    probe.__name__: probe for probe in (embeddings, norms, features, gaussianity, hierarchy)
}
_WATCHED = {"gaussianity": _watch_gaussianity}


def callbacks(names: Iterable[str], folder: Path) -> list[Callable[[Event], None]]:
    """Return what to call after every round, for the probes with these names, of the run in a folder."""
    return [_WATCHED[name](folder) for name in dict.fromkeys(names) if name in _WATCHED]


def take(name: str, run: Run) -> dict[str, Any]:
    """Return what a probe finds in a finished run, as plain values."""
    if name not in PROBES:
        raise UserError(f"there is no probe {name!r}{closest(name, PROBES)}; use one of {', '.join(PROBES)}")
    return PROBES[name](run)


def _plain(values: ArrayLike, digits: int = 5) -> Any:
    """Return an array as nested lists of floats with few digits; None for one that is not finite."""
    found = np.asarray(values, dtype=np.float64)
    if found.ndim:
        return [_plain(value, digits) for value in found]
    return float(f"{found:.{digits}g}") if np.isfinite(found) else None
