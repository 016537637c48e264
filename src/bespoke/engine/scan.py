"""The one loop over minibatches: what to repeat, how often, and which rows each step sees."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bespoke.core import rng, tree
from bespoke.core.local import Length, Local, Step, per_pass
from bespoke.core.tree import Tree

# finish(carry, out, consts, active) -> the next carry. Leaves are (...) for one client, or (K, ...) for K lanes;
# ``active`` () or (K,) says for whom the step counts, None for all. If the scan has a ``slope``, ``out`` holds the
# gradient of its ``loss`` with respect to that branch of the carry, as ``grads``.
Finish = Callable[[Tree, Tree, tuple[Any, ...], Tensor | None], Tree]


def choose(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return ``new`` (K, ...) in the lanes where ``active`` (K,) holds, else ``old``; without lanes it is 0-d.

    A non-finite value in the branch not taken does no harm.
    """
    return torch.where(active.reshape(active.shape + (1,) * (new.ndim - active.ndim)), new, old)


def take_over(carry: Tree, out: Tree, _: tuple[Any, ...], active: Tensor | None) -> Tree:
    """Finish a step whose result is the next carry."""
    if out.keys() != carry.keys():
        raise ValueError(f"a step was given {sorted(carry)} and must return the same names, not {sorted(out)}")
    if active is None:
        return tree.map(lambda _, new: new, carry, out)  # in the carry's own order
    return tree.map(lambda old, new: choose(active, new, old), carry, out)


@dataclass(frozen=True)
class Scan:
    """What to repeat, and how often."""

    step: Step  # out = step(carry, batch, *consts), for one client
    finish: Finish
    consts: tuple[Any, ...]
    length: Length
    tag: int
    batch: int
    drop: bool  # a last, partial minibatch
    slope: str | None = None  # the branch of the carry to differentiate

    @staticmethod
    def of(
        desk: Local,
        step: Step,
        finish: Finish,
        consts: tuple[Any, ...],
        length: Length,
        tag: int,
        slope: str | None = None,
    ) -> "Scan":
        """Return a scan with the batches of a desk's training settings."""
        training = desk.training
        return Scan(step, finish, consts, length, tag, training.batch, training.last_batch == "drop", slope)

    def once(self, call: Callable[..., Tree], carry: Tree, *rest: Any) -> Tree:
        """Return the result of ``call(carry, *rest)``, a step of one client or of all lanes, with the gradient if any.

        A lane's loss depends on its own part of the carry alone, so the gradient of the sum holds every lane's own.
        """
        if self.slope is None:
            return call(carry, *rest)
        branch = tree.map(lambda p: p.detach().requires_grad_(), carry[self.slope])
        with torch.enable_grad():
            out = call(carry | {self.slope: branch}, *rest)
            loss, leaves = out["loss"], list(tree.leaves(branch))
            # Of the sum itself: given a gradient to start from, torch imports sympy, which takes half a second.
            grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True)
        return out | {"loss": loss.detach(), "grads": list(grads)}

    def per_pass(self, n: Any) -> Any:
        """Return the number of minibatches in one pass over n rows, an int or a tensor."""
        return per_pass(n, self.batch, self.drop)

    def num_steps(self, n: Any) -> Any:
        """Return the number of steps of a client with n rows, an int or a tensor."""
        if self.length.steps is None:
            return -(-self.length.epochs * self.per_pass(n) // self.length.per_step)
        return torch.full_like(n, self.length.steps) if isinstance(n, Tensor) else self.length.steps

    def passes(self, smallest: int) -> int:
        """Return the number of shuffled passes that the steps of any client with at least ``smallest`` rows need."""
        if self.length.steps is None:
            return self.length.epochs + self.length.per_step - 1
        return -(-self.length.steps * self.length.per_step // int(self.per_pass(smallest)))

    def rows_seen(self, n: int) -> int:
        """Return the number of rows that a client with n rows sees in its steps."""
        size, in_pass = min(self.batch, n), int(self.per_pass(n))
        whole, more = divmod(int(self.num_steps(n)) * self.length.per_step, in_pass)
        return whole * (in_pass * size if self.drop else n) + more * size


def layout(key: Tensor, scan: Scan, width: int, n: Any, smallest: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out ``count`` minibatches, pass after pass over the n rows, each pass shuffled by its own key.

    Return positions in the client's list (count, B), which of them are real (count, B) bool, and keys (count, 2).
    """
    in_pass, passes = scan.per_pass(n), scan.passes(smallest)
    size = n.clamp(max=scan.batch) if isinstance(n, Tensor) else min(scan.batch, n)
    # Even numbers are shuffles, odd numbers are steps: the two never share a key.
    number = torch.arange(count, device=key.device)
    counters = torch.cat([2 * torch.arange(passes, device=key.device), 2 * number + 1])
    shuffles, keys = rng.fold_in(rng.fold_in(key, scan.tag), counters).split([passes, count])
    order = rng.shuffle(shuffles, width, n)
    start = (number % in_pass) * size
    slot = start[:, None] + torch.arange(min(scan.batch, width), device=key.device)
    real = (slot < (start + size)[:, None]) & (slot < n)
    place = (number // in_pass).clamp(max=passes - 1)[:, None] * width + slot.clamp(max=width - 1)
    return order.flatten().gather(0, place.flatten()).reshape(place.shape), real, keys
