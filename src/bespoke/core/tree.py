"""Nested dicts of tensors: the one kind of value for states, messages and loop carries.

Every function here is pure and works leaf by leaf, so it means the same for one client and under
``torch.func.vmap``. A *stacked* tree has one more leading axis on every leaf: the clients.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = dict[str, Any]


def map(fn: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of trees that have the same names."""
    for other in others:
        if other.keys() != tree.keys():
            raise ValueError(f"trees with different names cannot be combined: {sorted(tree)} and {sorted(other)}")
    return {
        name: map(fn, value, *(o[name] for o in others))
        if isinstance(value, dict)
        else fn(value, *(o[name] for o in others))
        for name, value in tree.items()
    }


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors of a tree in the order of its names."""
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Return one flat dict ``{"a/b": tensor}``; names may not contain a slash."""
    flat: dict[str, Tensor] = {}
    for name, value in tree.items():
        if "/" in name:
            raise ValueError(f"a name in a tree may not contain a slash: {name!r}")
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}/")
            if not value:
                flat[f"{prefix}{name}/"] = torch.empty(0)  # keeps an empty branch through a round trip
        else:
            flat[prefix + name] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    """Undo :func:`flatten`."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        if name:
            branch[name] = value
    return tree


def flatten_any(value: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors in nested dicts, lists and tuples, and what :func:`unflatten_any` needs besides."""
    leaves, spec = pytree.tree_flatten(value)
    others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (spec, others)


def unflatten_any(tensors: Sequence[Tensor], spec: Any) -> Any:
    """Undo :func:`flatten_any`."""
    structure, others = spec
    left = iter(tensors)
    return pytree.tree_unflatten([next(left) if other is None else other[0] for other in others], structure)


def add(a: Tree, b: Tree, scale: float | Tensor = 1.0) -> Tree:
    """Return ``a + scale * b``."""
    return map(lambda x, y: x + scale * y, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Return ``a - b``."""
    return map(torch.sub, a, b)


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    """Return ``a`` if the 0-d condition holds, else ``b``; a non-finite value in the branch not taken does no harm."""
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def zeros_like(tree: Tree) -> Tree:
    """Return a tree of zeros with the same names and shapes."""
    return map(torch.zeros_like, tree)


def detach(tree: Tree) -> Tree:
    """Return the same values, detached from any autograd graph."""
    return map(torch.Tensor.detach, tree)


def to(tree: Tree, *args: Any, **kwargs: Any) -> Tree:
    """Apply ``Tensor.to`` to every leaf."""
    return map(lambda t: t.to(*args, **kwargs), tree)


def sq_dist(a: Tree, b: Tree) -> Tensor:
    """Return the squared Euclidean distance between two trees, a 0-d tensor."""
    return torch.stack([x.sum() for x in leaves(map(lambda x, y: (x - y).square(), a, b))]).sum()


def sq_norm(a: Tree) -> Tensor:
    """Return the squared Euclidean norm of a tree, a 0-d tensor."""
    return torch.stack([x.square().sum() for x in leaves(a)]).sum()


def dot(a: Tree, b: Tree) -> Tensor:
    """Return the inner product of two trees, a 0-d tensor."""
    return torch.stack([x.sum() for x in leaves(map(torch.mul, a, b))]).sum()


def mean(stacked: Tree, weights: Tensor) -> Tree:
    """Return the weighted mean over the leading axis of a stacked tree; ``weights`` [K] need not sum to one.

    Sums are in float64, so that the result does not depend on the number of clients; each leaf keeps
    its type. Integer leaves have no mean and are an error.
    """
    share = weights.double() / weights.double().sum()

    def leaf(x: Tensor) -> Tensor:
        refuse_integers(x)
        return torch.tensordot(share, x.double(), dims=1).to(x.dtype)

    return map(leaf, stacked)


def refuse_integers(x: Tensor) -> None:
    """Refuse a leaf that has no mean."""
    if not x.is_floating_point():
        raise TypeError(
            "an upload with integer leaves has no mean: aggregate those names in the method's own `aggregate`"
        )


def norms(stacked: Tree, centre: Tree | None = None) -> Tensor:
    """Return the Euclidean norm of each row of a stacked tree, float64 (K,), or its distance to ``centre``.

    The centre has leaves (K, ...), or (1, ...) for all rows.
    """
    beside = {} if centre is None else flatten(centre)
    away = (x - beside[n] if n in beside else x for n, x in flatten(stacked).items() if not n.endswith("/"))
    floating = (x if x.is_floating_point() else x.double() for x in away)
    each = [torch.linalg.vector_norm(x[..., None].flatten(1), dim=1, dtype=torch.float64) for x in floating]
    return torch.linalg.vector_norm(torch.stack(each), dim=0)


def fits(stacked: Tree, one: Tree) -> bool:
    """Return whether each row of a stacked tree has the names and shapes of ``one``."""
    rows, own = flatten(stacked), flatten(one)
    return rows.keys() == own.keys() and all(rows[name].shape[1:] == own[name].shape for name in rows)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` (K,) in a shape that multiplies the rows of ``like`` (K, ...)."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def stack(trees: Sequence[Tree]) -> Tree:
    """Return one tree with a leading axis [K] from the trees of K clients."""
    try:
        return map(lambda *xs: torch.stack(xs), *trees)
    except RuntimeError:
        leaves_ = [flatten(tree) for tree in trees]
        for name in leaves_[0]:
            shapes = sorted({tuple(flat[name].shape) for flat in leaves_})
            if len(shapes) > 1:
                raise ValueError(
                    f"{name!r} has the shapes {shapes} on different clients: make it one for all"
                ) from None
        raise


def unstack(stacked: Tree, count: int) -> list[Tree]:
    """Undo :func:`stack`: return ``count`` trees that own their memory."""
    return [map(lambda x, i=i: x[i].clone(), stacked) for i in range(count)]


def take(stacked: Tree, index: Tensor) -> Tree:
    """Select the rows ``index`` [K] of the leading axis of every leaf."""
    return map(lambda x: x.index_select(0, index.to(x.device)), stacked)


def concat(parts: Sequence[Tree]) -> Tree:
    """Concatenate stacked trees along the leading axis."""
    return map(lambda *xs: torch.cat(xs), *parts)


def merge(parts: Sequence[Tree], places: Sequence[Sequence[int]]) -> Tree:
    """Merge stacked trees: row i of part p becomes row ``places[p][i]``. All places together are 0..K-1."""
    order = [place for part in places for place in part]
    whole = parts[0] if len(parts) == 1 else concat(parts)
    if order == sorted(order):
        return whole
    like = next(leaves(whole), torch.empty(0))
    return take(whole, torch.tensor(order).argsort().to(like.device, non_blocking=True))


def sound(tree: Tree) -> Tensor | None:
    """Return whether all floating leaves are finite, a 0-d bool; None if there are none."""
    checks = [torch.isfinite(x).all() for x in leaves(tree) if x.is_floating_point()]
    return torch.stack(checks).all() if checks else None


def finite(tree: Tree) -> bool:
    """Return whether all floating leaves are finite, with few launches; this waits for the device."""
    ends = [end for x in leaves(tree) if x.is_floating_point() and x.numel() for end in torch.aminmax(x)]  # keep a NaN
    return not ends or bool(torch.stack(ends).isfinite().all())


def nbytes(tree: Tree, stacked: bool = False) -> int:
    """Return the bytes on the wire: four per floating number in any precision, an integer's own size.

    For a stacked tree, count the bytes of one client.
    """
    return sum(
        math.prod(x.shape[1:] if stacked else x.shape) * (4 if x.is_floating_point() else x.element_size())
        for x in leaves(tree)
    )
