"""The one loop over minibatches: for one client alone, and for a block of clients in lanes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from bespoke.core import rng, tree
from bespoke.core.data import Batch, fetch
from bespoke.core.tree import Tree
from bespoke.engine import lanes
from bespoke.engine.lanes import Job, choose

if TYPE_CHECKING:
    from bespoke.core.local import Local

Step = Callable[..., Tree]  # out = step(carry, batch, *consts), for one client
# finish(carry, out, consts, active) -> the next carry. Leaves (...) of one client, or (K, ...) of as many as there are
# lanes; ``active`` () or (K,) says for whom the step counts, None for all. If the fold has a ``slope``, ``out`` has the
# gradient of its ``loss`` in that branch of the carry, as ``grads``.
Finish = Callable[[Tree, Tree, tuple[Any, ...], Tensor | None], Tree]

TIMED = 4  # of a lane's inputs there is one for each minibatch: rows, positions, mask, key


def take_over(carry: Tree, out: Tree, _: tuple[Any, ...], active: Tensor | None) -> Tree:
    """A step's result is the next carry."""
    if out.keys() != carry.keys():
        raise ValueError(f"a step was given {sorted(carry)} and must return the same names, not {sorted(out)}")
    if active is None:
        return tree.map(lambda _, new: new, carry, out)  # in the carry's own order
    return tree.map(lambda old, new: choose(active, new, old), carry, out)


@dataclass(frozen=True)
class Fold:
    """What to repeat, and how often."""

    step: Step
    finish: Finish
    consts: tuple[Any, ...]
    epochs: int
    steps: int | None  # instead of epochs
    limit: Tensor | None
    per_step: int
    tag: int
    batch: int
    drop: bool  # a last, partial minibatch
    slope: str | None = None  # the branch of the carry to take the gradient in

    def once(self, call: Callable[..., Tree], carry: Tree, *rest: Any) -> Tree:
        """What ``call(carry, *rest)`` gives, a step of one client or of all lanes, and the gradient if there is one.

        A lane's loss depends on its own part of the carry alone, so the gradient of the sum has every lane's own.
        """
        if self.slope is None:
            return call(carry, *rest)
        branch = tree.map(lambda p: p.detach().requires_grad_(), carry[self.slope])
        with torch.enable_grad():
            out = call(carry | {self.slope: branch}, *rest)
            loss, leaves = out["loss"], list(tree.leaves(branch))
            grads = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True, materialize_grads=True)
        return out | {"loss": loss.detach(), "grads": list(grads)}

    def per_pass(self, n: Any) -> Any:
        """Minibatches of min(batch, n) rows in one pass over n rows, an int or a tensor."""
        return per_pass(n, self.batch, self.drop)

    def calls(self, n: Any) -> Any:
        """Steps of a client with n rows, an int or a tensor."""
        if self.steps is None:
            return -(-self.epochs * self.per_pass(n) // self.per_step)
        return torch.full_like(n, self.steps) if isinstance(n, Tensor) else self.steps

    def passes(self, smallest: int) -> int:
        """Shuffled passes over the rows that its steps may need."""
        if self.steps is None:
            return self.epochs + self.per_step - 1
        return -(-self.steps * self.per_step // int(self.per_pass(smallest)))

    def seen(self, n: int) -> int:
        """Rows that a client with n rows sees in its steps."""
        size, in_pass = min(self.batch, n), int(self.per_pass(n))
        whole, more = divmod(int(self.calls(n)) * self.per_step, in_pass)
        return whole * (in_pass * size if self.drop else n) + more * size


def per_pass(n: Any, batch: int, drop: bool) -> Any:
    """Minibatches of min(batch, n) rows in one pass over n rows, an int or a tensor."""
    size = n.clamp(max=batch) if isinstance(n, Tensor) else min(batch, n)
    return n // size if drop else -(-n // size)


def run(local: "Local", fold: Fold, carry: Tree) -> Tree:
    """The carry after the client's own number of steps."""
    if not fold.calls(local.largest):
        return carry
    return _in_lanes(local, fold, carry) if local.mapped else _alone(local, fold, carry)


def _layout(local: "Local", fold: Fold, n: Any, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``count`` minibatches, pass after pass over the n rows, each pass shuffled by its own key.

    Positions in the client's list (count, B), which of them are real (count, B) bool, and a key for each (count, 2).
    """
    device, width = local.key.device, local.data.width
    in_pass, passes = fold.per_pass(n), fold.passes(local.smallest)
    size = n.clamp(max=fold.batch) if isinstance(n, Tensor) else min(fold.batch, n)
    # Even numbers are shuffles, odd numbers are steps: the two never share a key.
    number = torch.arange(count, device=device)
    counters = torch.cat([2 * torch.arange(passes, device=device), 2 * number + 1])
    shuffles, keys = rng.fold_in(rng.fold_in(local.key, fold.tag), counters).split([passes, count])
    order = rng.shuffle(shuffles, width, n)
    start = (number % in_pass) * size
    slot = start[:, None] + torch.arange(min(fold.batch, width), device=device)
    real = (slot < (start + size)[:, None]) & (slot < n)
    place = (number // in_pass).clamp(max=passes - 1)[:, None] * width + slot.clamp(max=width - 1)
    return order.flatten().gather(0, place.flatten()).reshape(place.shape), real, keys


def _alone(local: "Local", fold: Fold, carry: Tree) -> Tree:
    batches = _batches(local, fold)
    for t in range(fold.calls(local.largest)):
        group = tuple(next(batches) for _ in range(fold.per_step))
        batch = group if fold.per_step > 1 else group[0]
        out = fold.once(fold.step, carry, batch, *fold.consts)
        carry = fold.finish(carry, out, fold.consts, None if fold.limit is None else t < fold.limit)
    return carry


def _batches(local: "Local", fold: Fold) -> Iterator[Batch]:
    """The minibatches of one client alone: a last, partial one is short instead of padded."""
    n, number = local.largest, torch.arange(fold.calls(local.largest), device=local.key.device)
    in_pass, size, count = fold.per_pass(n), min(fold.batch, n), len(number) * fold.per_step
    index, real, keys = _layout(local, fold, n, count)
    mask = real.to(local.task.dtype)
    for t in range(count):
        length = min(size, n - (t % in_pass) * size)
        rows = index[t, :length]
        x, y = local.data.gather(rows, keys[t], train=True)
        yield Batch(x, y, mask[t, :length], rows, number[t // fold.per_step], keys[t])


def _in_lanes(local: "Local", fold: Fold, carry: Tree) -> Tree:
    """Lay out the batches of every lane, and hand them to the runner."""
    count, per_step = fold.calls(local.largest) * fold.per_step, fold.per_step
    index, real, keys = _layout(local, fold, local.n, count)
    own = fold.calls(local.n)
    own = own if fold.limit is None else torch.minimum(own, fold.limit)
    rows, mask = local.data.rows[index], real.to(local.task.dtype)
    start, carry_spec = tree.flatten_any(carry)
    given, spec = tree.flatten_any({"own": own, "extra": local.data.extra, "consts": fold.consts})
    data, limited = local.data, fold.limit is not None
    x, y, transform, dtype = data.x, data.y, data.transform, data.dtype

    def work(lanes_: int, dims: Any, tensors: Any) -> list[Tensor]:
        first = len(start)
        shared = [dim is None for dim in dims[first:]]
        full = [lanes.stacked(lanes_, dim, t) for dim, t in zip(dims[:first], tensors[:first], strict=True)]
        inputs = [t if dim is None else t.movedim(dim, 0) for dim, t in zip(dims[first:], tensors[first:], strict=True)]
        in_dims = [None if same else 0 for same in shared]

        def advance(carry: list[Tensor], inputs: list[Tensor], t: Tensor, idle: bool) -> list[Tensor]:
            places = t[None] if per_step == 1 else t * per_step + torch.arange(per_step, device=t.device)
            now, rest = [b.index_select(1, places) for b in inputs[:TIMED]], inputs[TIMED:]

            def one(carry: Tree, now: list[Tensor], rest: list[Tensor]) -> Tree:
                told, group = tree.unflatten_any(rest, spec), []
                for rows, index, mask, key in zip(*(b.unbind(0) for b in now), strict=True):
                    examples, labels = fetch(x, y, rows, key, told["extra"], transform, dtype, train=True)
                    group.append(Batch(examples, labels, mask, index, t, key))
                batch = tuple(group) if per_step > 1 else group[0]
                return fold.step(carry, batch, *told["consts"])

            whole = tree.unflatten_any(carry, carry_spec)
            out = fold.once(vmap(one, in_dims=(0, 0, in_dims[TIMED:])), whole, now, rest)
            told = tree.unflatten_any(rest, spec)
            active = t < told["own"] if idle or limited else None
            return tree.flatten_any(fold.finish(whole, out, told["consts"], active))[0]

        job = Job(
            advance, full, inputs, shared, fold.calls, fold.seen, mask.shape[-1] * per_step, TIMED, count // per_step
        )
        return local.runner.fold(job)

    return tree.unflatten_any(lanes.step_out(local.runner, work, [*start, rows, index, mask, keys, *given]), carry_spec)
