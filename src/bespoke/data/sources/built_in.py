"""The data sets that are always available: embedded, synthetic, and your own files.

A data set is a function that receives its arguments by name: ``rng`` for random draws, and keys of ``[data]``. The
first line of its docstring describes it.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bespoke.core import memory
from bespoke.core.data import Transform
from bespoke.core.tree import Tree
from bespoke.data.examples import ClientArrays, Examples, join
from bespoke.data.mapped import room
from bespoke.data.sources.archives import Allowance, plausible
from bespoke.data.sources.catalogue import CATALOGUE
from bespoke.data.sources.npz import Npz, read_all
from bespoke.data.sources.own import csv, hf, image_folder, matched, named_by_file, parquet
from bespoke.errors import UserError
from bespoke.registry import closest


def sixteen_levels_to_unit(key: Tensor, x: Tensor, extra: Tree, train: bool) -> Tensor:
    """Scale grey levels 0..16 (uint8, any shape) to [-1, 1]."""
    return x.to(torch.float32) / 8.0 - 1.0


def digits() -> Examples:
    """1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = found.images.astype(np.uint8)[:, None]  # (1797, 1, 8, 8), levels 0..16
    return Examples(images, found.target.astype(np.int64), 10, transform=sixteen_levels_to_unit)


def gaussian(rng: np.random.Generator, rows: int, dim: int, num_classes: int, spread: float) -> Examples:
    """Synthetic: one Gaussian blob per class (rows, dim, num_classes, spread)."""
    classes = num_classes or 10
    what = f"[data] rows = {rows:,} of dim = {dim:,} in {classes:,} classes"
    memory.require(16 * (rows + classes) * dim, what, "lower rows, dim or num_classes")
    y = np.arange(rows) % classes
    means = rng.standard_normal((classes, dim))
    x = means[y] + spread * rng.standard_normal((rows, dim))
    return Examples(x.astype(np.float32), y, classes)


def synthetic_hierarchy(rng: np.random.Generator, clients: int, between: float, pool: str, partition: str) -> Examples:
    """Synthetic: two-level Gaussian of Self-FL, the clients' means spread by a variance (clients, between)."""
    if pool == "train+test" or partition not in ("auto", "natural"):
        raise UserError(
            "the test rows of the two-level Gaussian are its clients' true means, on which nobody may train: leave "
            "[data] pool and partition out"
        )
    return two_level_gaussian(rng, clients or 20, between)


def synthetic_homogeneous(rng: np.random.Generator, clients: int, pool: str, partition: str) -> Examples:
    """Synthetic: the same with clients that hardly differ, between = 0.001 (clients)."""
    return synthetic_hierarchy(rng, clients, 0.001, pool, partition)


def two_level_gaussian(rng: np.random.Generator, clients: int, between: float) -> Examples:
    """Draw, for client m, a mean theta_m ~ N(0, between) and N_m ~ U{20..200} observations y ~ N(theta_m, 1): (N,).

    So the mean of a client's observations is N(theta_m, 1 / N_m), the model's second level. The input x (N, 1) is 0: a
    linear model's output is its bias, an estimate of theta_m. A client's only test row has theta_m itself as its
    target: metrics see the truth, and a method, which never sees a test row's target, does not.
    """
    memory.require(3000 * clients, f"the rows of {clients:,} synthetic clients", "lower [data] clients")
    sizes = rng.integers(20, 201, clients)
    means = np.sqrt(between) * rng.standard_normal(clients)
    owner = np.repeat(np.arange(clients), sizes)
    seen = means[owner] + rng.standard_normal(len(owner))
    return Examples(
        np.zeros((len(owner) + clients, 1), np.float32),
        np.concatenate([seen, means]).astype(np.float32),
        0,
        official_test=np.arange(len(owner) + clients) >= len(owner),
        owner=np.concatenate([owner, np.arange(clients)]),
        owner_names=tuple(str(i) for i in range(clients)),
    )


def files(rng: np.random.Generator, path: str, num_classes: int, test: float) -> Examples:
    """Your own: one .npz per client at path, with x, y and optionally x_test, y_test."""
    paths = matched(path, "the clients' .npz archives")
    named_by_file(paths)
    allowance = Allowance(min(room(), plausible(paths)))
    archives = [Npz(each, allowance) for each in paths]
    for archive in archives:
        missing = [name for name in ("x", "y") if name not in archive.headers]
        if missing:
            raise UserError(f"{archive.path} has no array {missing[0]!r}: save it with numpy.savez(path, x=..., y=...)")
    targets = ("y", "y_test")
    arrays = {each.path: {name: each.read(name) for name in targets if name in each.headers} for each in archives}
    examples = [(archive, name) for archive in archives for name in ("x", "x_test") if name in archive.headers]
    for (archive, name), values in zip(examples, read_all(examples), strict=True):
        arrays[archive.path][name] = values
    clients = [ClientArrays(path.stem, str(path), **own) for path, own in arrays.items()]
    return join(clients, num_classes, test, rng, classes=None)


def contract(
    shape: tuple[int, ...],
    dtype: str,
    class_names: tuple[str, ...],
    num_classes: int,
    targets: int,
    features: tuple[str, ...],
    label: str,
    size: int,
) -> Examples:
    """No rows: the form of the data that the clients of a real federation keep (shape, dtype, class_names, clients)."""
    raise UserError(
        '[data] name = "contract" has no rows, since those stay with the clients: start the federation with bespoke '
        "serve, or name a data set to simulate one"
    )


class _Facts(NamedTuple):
    """What random rows have in common with a data set."""

    shape: tuple[int, ...]
    classes: int  # 0 where the targets are not classes
    dtype: str = "float32"
    levels: int = 256  # of whole numbers: 0, 1, ...
    owners: int | None = None  # its own clients: how many at most, 0 where it is not known, None where there are none
    domains: tuple[str, ...] = ()
    held_out: bool = False  # it has official test rows
    transform: Transform | None = None


_OF_BUILT_IN = {
    "digits": _Facts((1, 8, 8), 10, "uint8", 17, transform=sixteen_levels_to_unit),
    "gaussian": _Facts((20,), 10),
    "synthetic_hierarchy": _Facts((1,), 0, owners=0),
    "synthetic_homogeneous": _Facts((1,), 0, owners=0),
    "files": _Facts((20,), 10, owners=0),
    "csv": _Facts((20,), 10, owners=0),
    "parquet": _Facts((20,), 10, owners=0),
    "hf": _Facts((20,), 10, owners=0),
    "image_folder": _Facts((3, 32, 32), 10, "uint8", owners=0),
}
_FEW_OWNERS = 5  # where the settings name no number of clients
_HELD_OUT = 6  # every so manyth row is an official test row, as in CIFAR


def random(rng: np.random.Generator, like: str, rows: int, clients: int) -> Examples:
    """Random: rows in the shape of another data set, like, with its classes, own clients and domains."""
    if not like:
        raise UserError('[data] name = "random" needs the data set whose shape it takes: set [data] like')
    facts = _facts(like)
    if rows < facts.classes:
        raise UserError(
            f"[data] rows = {rows} are fewer than the {facts.classes} classes of {like}: give at least so many"
        )
    kind, size = np.dtype(facts.dtype), (rows, *facts.shape)
    memory.require(kind.itemsize * math.prod(size), f"[data] rows = {rows:,} like {like}", "lower rows")
    x = rng.standard_normal(size) if kind.kind == "f" else rng.integers(0, facts.levels, size, kind)
    y = rng.permutation(np.arange(rows) % facts.classes) if facts.classes else rng.standard_normal(rows)
    owners = 0 if facts.owners is None else min(clients or _FEW_OWNERS, facts.owners or rows)
    held = np.isin(np.arange(rows), rng.permutation(rows)[: rows // _HELD_OUT])
    return Examples(
        x.astype(kind, copy=False),
        y if facts.classes else y.astype(np.float32),
        facts.classes,
        official_test=held if facts.held_out else None,
        owner=np.arange(rows) % owners if owners else None,
        owner_names=tuple(str(i) for i in range(owners)),
        transform=facts.transform,
        domain=rng.permutation(np.arange(rows) % len(facts.domains)) if facts.domains else None,
        domain_names=facts.domains,
    )


def _facts(like: str) -> _Facts:
    entry = CATALOGUE.get(like)
    if entry is None and like not in _OF_BUILT_IN:
        names = [*_OF_BUILT_IN, *CATALOGUE]
        raise UserError(
            f"[data] like: there is no data set {like!r}{closest(like, names)}; there are {', '.join(names)}"
        )
    if entry is None:
        return _OF_BUILT_IN[like]
    held_out = entry.held_out or any(test for _, test in entry.sizes)
    levels = entry.tokens or 256
    return _Facts(entry.shapes[0], entry.classes, entry.dtype, levels, entry.owners, entry.domains, held_out)


BUILT_IN = (digits, gaussian, synthetic_hierarchy, synthetic_homogeneous, files, csv, parquet, hf, image_folder, random)
