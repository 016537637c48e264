"""Gradient descent as a scan: the step computes the loss and a gradient, the finish applies the optimiser."""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.core import tree
from bespoke.core.local import Descended, Descent, Local
from bespoke.core.tree import Tree
from bespoke.engine import optim
from bespoke.engine.purity import refuse_tensors
from bespoke.engine.scan import Scan, choose


def descend(
    desk: Local,
    descent: Descent,
    run: Callable[[Local, Scan, Tree], Tree],
    *,
    lanes: bool = False,
    in_place: bool = False,
    number: Callable[[Tensor], Any] = lambda rate: rate,
) -> Descended:
    """Minimise a desk's loss with ``run(desk, scan, carry)``, which repeats the steps.

    With ``lanes``, the finish sees leaves (K, ...) of K clients; ``in_place`` allows it to overwrite the carry;
    ``number`` converts a 0-d learning rate for the optimiser.
    """
    training, loss, gradient, watch = descent.training, descent.loss, descent.gradient, descent.watch
    for what, fn in (("loss", loss), ("gradient", gradient), ("watch", watch)):
        if fn is not None:
            refuse_tensors(fn, Local, what)
    moments = optim.init(training, descent.params)
    if descent.moments:  # by name: a tree read from a file may be in another order
        moments = tree.map(lambda _, value: value, moments, descent.moments)
    rates = descent.rates
    given = [number(rate) for rate in rates] if isinstance(rates, list) else number(rates)

    def step(carry: Tree, batch: Any, rates: Any, *consts: Any) -> Tree:
        params, seen = carry["params"], carry["seen"]
        group = batch if descent.length.per_step > 1 else (batch,)
        out: Tree = {"rows": reduce(torch.add, [part.mask.sum() for part in group])}
        if loss is not None:
            out["loss"] = loss(params, batch, *consts)
        elif gradient is not None:
            found = gradient(params, batch, *([seen] if seen else []), *consts)
            out |= _answer(found, params, seen)
        return out if watch is None else out | {"batch": batch}

    def finish(carry: Tree, out: Tree, consts: tuple[Any, ...], active: Tensor | None) -> Tree:
        leaves = list(tree.leaves(carry["params"]))
        moments = {k: list(tree.leaves({k: v})) for k, v in carry["moments"].items()}
        grads, rates = out["grads"], consts[0]
        summed = torch.addcmul(carry["loss"], out["loss"], out["rows"])
        done: Tree = {"loss": summed, "rows": carry["rows"] + out["rows"]}
        if "seen" in out:  # the update in place may not reach what was seen of the parameters
            done["seen"] = tree.map(torch.clone, out["seen"]) if in_place else out["seen"]
        if in_place and optim.update_in_place(training, leaves, grads, moments, rates, active):
            params = carry["params"]
        else:
            new, kept = optim.update(training, leaves, grads, moments, rates, lanes)
            params = done["params"] = _refill(carry["params"], iter(new))
            done["moments"] = _refill(carry["moments"], iter([t for name in moments for t in kept[name]]))
        if watch is not None:
            seen = done["seen"] if "seen" in done else carry["seen"]
            done["seen"] = (vmap(watch) if lanes else watch)(seen, params, out["batch"])
        if active is not None:
            done = tree.map(lambda x, old: choose(active, x, old), done, {name: carry[name] for name in done})
        return carry | done

    zero = desk.key.new_zeros((), dtype=desk.task.dtype)
    carry: Tree = {"params": descent.params, "moments": moments, "loss": zero, "rows": zero, "seen": descent.seen}
    slope = None if loss is None else "params"
    scan = Scan.of(desk, step, finish, (given, *descent.consts), descent.length, descent.tag, slope)
    carry = run(desk, scan, carry)
    mean = carry["loss"] / carry["rows"].clamp(min=1.0)
    return Descended(carry["params"], carry["seen"], carry["moments"], mean)


def _answer(found: Any, params: Tree, seen: Tree) -> Tree:
    """Return what a method's gradient gave, by name, after a look at its form."""
    parts = ("loss", "grads", "seen") if seen else ("loss", "grads")
    if not isinstance(found, tuple) or len(found) != len(parts):
        raise TypeError(f"a gradient must return ({', '.join(parts)})")
    out: Tree = dict(zip(parts, found, strict=True))
    out["grads"] = list(tree.leaves(tree.map(lambda _, grad: grad, params, out["grads"])))  # in the parameters' order
    return out | ({"seen": tree.map(lambda _, new: new, seen, out["seen"])} if seen else {})


def _refill(like: Tree, values: Iterator[Tensor]) -> Tree:
    return {k: _refill(v, values) if isinstance(v, dict) else next(values) for k, v in like.items()}
