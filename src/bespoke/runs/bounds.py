"""Which uploads a server takes: none that is far larger than those of the other clients.

The size of an upload's top-level name is its distance to what the client was sent under the same name, or else its own
norm. It is compared with the median of the round, or with that of recently accepted uploads where a round has few, or,
before there are any, with the norm of what was sent.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from bespoke.clients import Trained
from bespoke.core import tree
from bespoke.core.algorithm import Uploads
from bespoke.core.data import on_device
from bespoke.core.tree import Tree

ENOUGH = 5  # uploads in a round for a median of their own
SOME = 3  # uploads whose median still withstands one bad one, where nothing is known of earlier rounds
RECENT = 50  # accepted sizes to remember

Sizes = dict[str, list[float]]  # by top-level name


class Bound:
    """The bound on uploads, with what it remembers of accepted ones."""

    def __init__(self, factor: float, unbounded: Mapping[str, str]) -> None:
        """Refuse what is ``factor`` times larger than the median; 0 refuses nothing. ``unbounded`` names are exempt."""
        self.factor, self.unbounded = factor, unbounded
        self.recent: Sizes = {}  # of accepted uploads, the newest last; a checkpoint keeps it

    def judge(self, up: Tree, clients: Sequence[int], shared: Tree, own: Tree) -> tuple[dict[int, str], Sizes]:
        """Return why clients are refused, and the sizes of all uploads ``up`` (leaves (K, ...)) of ``clients`` (K).

        Each was sent its rows of ``own`` (leaves (K, ...)) beside ``shared``.
        """
        if not self.factor or not clients:
            return {}, {}
        up = {name: part for name, part in up.items() if name not in self.unbounded}
        found, refused = sizes(up, shared, own), dict[int, str]()
        for name, column in found.items():
            usual = self._usual(name, column)
            if usual is not None and (usual == 0.0 or max(column) <= self.factor * usual):
                continue
            for client, size, sent in zip(clients, column, norms_sent(name, up, shared, own), strict=True):
                # Who moved less than the norm of what was sent did no harm, however little the others moved.
                limit = self.factor * sent if usual is None else max(self.factor * usual, sent)
                if 0.0 < limit < size:
                    much = f"{size / (usual or sent):.3g} times {'the usual' if usual else 'what it was sent'}"
                    why = f"the size of its {name!r} is {much}, beyond [training] bound = {self.factor:g}"
                    refused.setdefault(client, why)
        return refused, found

    def accept(self, accepted: Sequence[bool], found: Sizes) -> None:
        """Remember the sizes of accepted uploads; ``found`` is from :meth:`judge`."""
        for name, column in found.items():
            kept = [size for size, good in zip(column, accepted, strict=True) if good and math.isfinite(size)]
            self.recent[name] = [*self.recent.get(name, []), *kept][-RECENT:]

    def _usual(self, name: str, column: Sequence[float]) -> float | None:
        """Return the median size of a name, in the round or in recent ones; None if too little is known."""
        known = self.recent.get(name, [])
        if len(column) >= ENOUGH or (len(column) >= SOME and not known):
            return statistics.median_low(column)
        return statistics.median_low(known) if known else None


def sizes(up: Tree, shared: Tree, own: Tree) -> Sizes:
    """Return the size of each upload (leaves (K, ...)) by top-level name, as far as the name holds any tensor."""
    parts = {name: {name: part} for name, part in up.items() if any(True for _ in tree.leaves({name: part}))}
    found = {name: tree.norms(part, _sent(name, up, shared, own) or None) for name, part in parts.items()}
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def norms_sent(name: str, up: Tree, shared: Tree, own: Tree) -> list[float]:
    """Return the norm of what each client was sent under a name; 0 if its upload cannot be compared with it."""
    count = len(next(tree.leaves({name: up[name]})))
    sent = _sent(name, up, shared, own)
    return tree.norms(sent).expand(count).tolist() if sent else [0.0] * count


def _sent(name: str, up: Tree, shared: Tree, own: Tree) -> Tree:
    """Return what was sent under an upload's name, leaves (K, ...) or (1, ...); empty if it cannot be compared."""
    part = {name: up[name]}
    if any(not leaf.is_floating_point() for leaf in tree.leaves(part)):
        return {}
    if name in own and tree.fits(part, tree.map(lambda x: x[0], {name: own[name]})):
        return {name: own[name]}
    if name in shared and tree.fits(part, {name: shared[name]}):
        return tree.map(lambda x: x[None], {name: shared[name]})
    return {}


def without(trained: Trained, refused: Mapping[int, str]) -> Trained:
    """Return the answer without the clients that are refused."""
    if not refused:
        return trained
    tree_, weights, ids, *_ = trained.uploads
    places = [i for i, client in enumerate(ids.tolist()) if client not in refused]
    index = on_device(torch.tensor(places, dtype=torch.int64), ids.device)
    uploads = Uploads(tree.take(tree_, index), weights[index], ids[index])
    logged = {name: [values[i] for i in places] for name, values in trained.logged.items()}
    return replace(trained, uploads=uploads, refused={**trained.refused, **refused}, logged=logged)
