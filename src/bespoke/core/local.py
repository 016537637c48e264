"""One client's desk: all that a method may do with a client's data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from bespoke.core import optim, rng, tree
from bespoke.core.closures import refuse_tensors
from bespoke.core.data import Batch, Data
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree

FEATURE_CHUNK = 256

Loss = Callable[..., Tensor]
Rate = float | tuple[float, float]
Rates = Rate | dict[str, Rate]
Step = Callable[..., Tree]
Watch = Callable[[Tree, Tree, Batch], Tree]


class Features(NamedTuple):
    """The features of all train rows of a client."""

    z: Tensor  # (width, d)
    y: Tensor  # (width,)
    mask: Tensor  # (width,) 1.0 for a real row


@dataclass
class Local:
    """What a client can do: loop over its TRAIN rows, take gradients, log. Made by the library for each call.

    ``n``, ``round``, ``rounds``, ``lr`` are 0-d tensors: whatever changes between clients or rounds
    is an input of the computation, never a Python number.
    """

    task: Task
    data: Data
    key: Tensor  # (2,)
    round: Tensor
    rounds: Tensor
    lr: Tensor  # the schedule is applied
    training: Training
    smallest: int  # fewest and most rows among the clients that run together: how far shapes are known
    largest: int
    mapped: bool = False  # inside vmap
    moments: Tree = field(default_factory=dict)  # kept optimiser moments, by tag
    logged: Tree = field(default_factory=dict)
    slots: int = 0  # rows computed with padding, and
    used: Tensor | float = 0.0  # without it: the padding waste
    breaks: int = 0

    @property
    def n(self) -> Tensor:
        """The number of train rows, 0-d int64."""
        return self.data.n

    @property
    def epochs(self) -> int:
        """``[training] epochs``."""
        return self.training.epochs

    @property
    def batch(self) -> int:
        """``[training] batch``."""
        return self.training.batch

    def log(self, **scalars: Tensor | float) -> None:
        """Put 0-d values on the client's row of the record; they are not part of the upload."""
        for name, value in scalars.items():
            value = torch.as_tensor(value, dtype=torch.float64, device=self.key.device)  # exact for counts of bytes
            self.logged[name] = value.detach()

    # --- the one loop -------------------------------------------------------------------------------------------

    def fold(
        self,
        step: Step,
        carry: Tree,
        *consts: Any,
        epochs: int | None = None,
        steps: int | None = None,
        limit: Tensor | None = None,
        per_step: int = 1,
        tag: int = 0,
    ) -> Tree:
        """Run ``carry = step(carry, batch, *consts)`` over shuffled minibatches and return the last carry.

        ``step`` is a pure function: every tensor it reads is in ``carry``, ``batch`` or ``consts``.
        ``epochs`` or ``steps`` default to the training settings; ``limit`` (0-d) may end this client
        earlier; ``per_step = k`` hands a tuple of k batches. ``tag = 0`` is the main pass, which sees the
        same batches in every method; further passes take other tags.
        """
        refuse_tensors(step, Local, "step")
        return self._fold(step, carry, consts, epochs, steps, limit, per_step, tag)

    def _fold(
        self,
        step: Step,
        carry: Tree,
        consts: tuple[Any, ...],
        epochs: int | None,
        steps: int | None,
        limit: Tensor | None,
        per_step: int,
        tag: int,
    ) -> Tree:
        epochs, steps = self._length(epochs, steps)
        shortest = self._per_epoch(self.smallest)
        own: int | Tensor  # this client's number of calls, and passes over its rows that they may need
        if steps is None:
            calls = -(-epochs * self._per_epoch(self.largest) // per_step)
            own, passes = self.num_steps(epochs, per_step), epochs + per_step - 1
        else:
            calls = own = steps
            passes = -(-calls * per_step // shortest)
        idle = steps is None and self.smallest != self.largest  # some client may finish before others
        batches = self._batches(calls, own, passes, per_step, tag)
        for t in range(calls):
            group = tuple(next(batches) for _ in range(per_step))
            new = step(carry, group if per_step > 1 else group[0], *consts)
            if new.keys() != carry.keys():
                raise ValueError(f"a step was given {sorted(carry)} and must return the same names, not {sorted(new)}")
            active = torch.as_tensor(t < own, device=self.key.device) if idle else None
            if limit is not None:
                active = t < limit if active is None else active & (t < limit)
            carry = new if active is None else tree.where(active, new, carry)
        return carry

    def num_steps(self, epochs: int | None = None, per_step: int = 1) -> Tensor:
        """This client's own number of steps in so many epochs (default: the training settings'), 0-d int64."""
        epochs, steps = self._length(epochs, None)
        if steps is not None:
            return torch.full_like(self.n, steps)
        return -(-epochs * self._per_epoch(self.n) // per_step)

    def _length(self, epochs: int | None, steps: int | None) -> tuple[int, int | None]:
        if epochs is not None and steps is not None:
            raise ValueError("give epochs or steps, not both")
        if epochs is None and steps is None:
            steps = self.training.steps or None
        return self.epochs if epochs is None else epochs, steps

    def _per_epoch(self, n: Any) -> Any:
        """Minibatches of min(batch, n) rows in one pass, for an int or a tensor."""
        size = n.clamp(max=self.batch) if isinstance(n, Tensor) else min(self.batch, n)
        return n // size if self.training.last_batch == "drop" else -(-n // size)

    def _batches(self, calls: int, own: int | Tensor, passes: int, per_step: int, tag: int) -> Iterator[Batch]:
        """``calls * per_step`` minibatches: pass after pass over the rows, each shuffled by its own key."""
        device, width, count = self.key.device, self.data.width, calls * per_step
        exact = self.smallest == self.largest == width  # no padding: row counts are Python numbers
        n: Any = width if exact else self.n
        size: Any = min(self.batch, width) if exact else self.n.clamp(max=self.batch)
        per_pass = self._per_epoch(n)
        key = rng.fold_in(self.key, tag)
        # Even numbers are shuffles, odd numbers are steps: the two never share a key.
        number = torch.arange(count, device=device)
        counters = torch.cat([2 * torch.arange(passes, device=device), 2 * number + 1])
        shuffles, keys = rng.fold_in(key, counters).split([passes, count])
        order = rng.shuffle(shuffles, width, n)
        start = (number % per_pass) * size
        slot = start[:, None] + torch.arange(min(self.batch, width), device=device)
        real = (slot < (start + size)[:, None]) & (slot < n)
        place = (number // per_pass).clamp(max=passes - 1)[:, None] * width + slot.clamp(max=width - 1)
        index = order.flatten().gather(0, place.flatten()).reshape(place.shape)
        mask = real.to(self.task.dtype)
        self.slots += real.numel()
        self.used = self.used + (real.numel() if exact else (real & (number < own * per_step)[:, None]).sum())
        for t in range(count):
            rows, weight = index[t], mask[t]
            if exact:  # a last, partial batch is short instead of padded
                length = min(size, width - (t % per_pass) * size)
                rows, weight = rows[:length], weight[:length]
            x, y = self.data.gather(rows, keys[t], train=True)
            yield Batch(x, y, weight, rows, number[t // per_step], keys[t])

    # --- training -----------------------------------------------------------------------------------------------

    def sgd(
        self,
        loss: Loss,
        params: Tree,
        *consts: Any,
        epochs: int | None = None,
        steps: int | None = None,
        lr: Rates | None = None,
        limit: Tensor | None = None,
        tag: int = 0,
    ) -> Tree:
        """Minimise ``loss(params, batch, *consts) -> 0-d`` over minibatches with the configured optimiser.

        ``lr`` replaces the base learning rate, for all or by top-level name; the schedule still applies, and a pair
        is the rate at the schedule's start and end. ``limit`` (0-d) may end this client earlier.
        The optimiser starts fresh at each call unless ``keep_optimizer`` is set; then its moments stay on
        the client, by tag. Logs the mean loss over the rows seen.
        """
        return self.trace(loss, params, None, {}, *consts, epochs=epochs, steps=steps, lr=lr, limit=limit, tag=tag)[0]

    def trace(
        self,
        loss: Loss,
        params: Tree,
        watch: Watch | None,
        seen: Tree,
        *consts: Any,
        epochs: int | None = None,
        steps: int | None = None,
        lr: Rates | None = None,
        limit: Tensor | None = None,
        tag: int = 0,
    ) -> tuple[Tree, Tree]:
        """:meth:`sgd` for methods that use the iterates: the last one, and what ``watch`` made of all.

        After each step ``seen = watch(seen, params, batch)``, a pure function like the loss.
        """
        refuse_tensors(loss, Local, "loss")
        if watch is not None:
            refuse_tensors(watch, Local, "watch")
        if not params:
            return params, seen
        training, mapped = self.training, self.mapped
        slot = str(tag)
        moments = optim.init(training, params)
        if kept := self.moments.get(slot):  # by name: a tree read from a file may be in another order
            moments = tree.map(lambda _, value: value, moments, kept)
        take_step = _mapped_step if mapped else _eager_step
        rates = self._rates(params, lr)

        def step(carry: Tree, batch: Batch, rates: Any, *consts: Any) -> Tree:
            new, moments, value = take_step(loss, carry["params"], carry["moments"], training, batch, rates, consts)
            rows = batch.mask.sum()
            return {
                "params": new,
                "moments": moments,
                "loss": carry["loss"] + value * rows,
                "rows": carry["rows"] + rows,
                "seen": carry["seen"] if watch is None else watch(carry["seen"], new, batch),
            }

        zero = self.key.new_zeros((), dtype=self.task.dtype)
        carry: Tree = {"params": params, "moments": moments, "loss": zero, "rows": zero, "seen": seen}
        carry = self._fold(step, carry, (rates, *consts), epochs, steps, limit, 1, tag)
        if training.keep_optimizer:
            self.moments = {**self.moments, slot: carry["moments"]}
        self.log(**{f"loss_{tag}" if tag else "loss": carry["loss"] / carry["rows"].clamp(min=1.0)})
        return carry["params"], carry["seen"]

    def _rates(self, params: Tree, lr: Rates | None) -> Any:
        """The learning rate, one for all leaves or one for each: numbers outside vmap, 0-d tensors inside."""
        base = self.training.lr
        if isinstance(lr, dict):
            if lr.keys() != params.keys():
                raise ValueError(f"lr names {sorted(lr)}, but the parameters are {sorted(params)}")
            wanted = [lr[name] for name in params for _ in tree.leaves({name: params[name]})]
            return [self._rates({}, r) for r in wanted]
        if isinstance(lr, tuple) and self.training.schedule == "cosine":
            floor = self.training.lr_final / base
            left = (self.lr / base - floor) / (1.0 - floor) if floor < 1.0 else torch.ones_like(self.lr)
            rate = lr[1] + (lr[0] - lr[1]) * left
        else:
            start = lr[0] if isinstance(lr, tuple) else lr
            rate = self.lr if start is None else self.lr * (start / base)
        return rate if self.mapped else rate.item()

    def finetune(self, params: Tree, epochs: int, part: str = "all", tag: int = 0) -> Tree:
        """Train all parameters, or the head alone, for so many epochs with the task's own loss."""
        if epochs == 0:
            return params
        loss = self.task.loss
        if part == "all":
            return self.sgd(loss, params, epochs=epochs, tag=tag)
        head = self.sgd(
            lambda h, batch, rest: loss(rest | h, batch),
            self.task.head(params),
            params,
            epochs=epochs,
            tag=tag,
        )
        return params | head

    # --- statistics ---------------------------------------------------------------------------------------------

    def features(self, params: Tree) -> Features:
        """Features of all train rows with the body's parameters, in the order of the client's list."""
        index = torch.arange(self.data.width, device=self.key.device)
        parts = []
        with torch.no_grad():
            for i, rows in enumerate(index.split(FEATURE_CHUNK)):
                key = rng.fold_in(rng.fold_in(self.key, -2), i)  # tags are not negative
                x, y = self.data.gather(rows, key, train=False)
                parts.append((self.task.features(params, x), y))
        return Features(torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts]), self.data.mask())

    def folds(self, k: int, tag: int = 0) -> Tensor:
        """k stratified folds of the train rows: bool (k, width), each real row in exactly one fold.

        Rows are shuffled, then dealt out class by class.
        """
        width, device = self.data.width, self.key.device
        order = rng.shuffle(rng.fold_in(rng.fold_in(self.key, tag), -1), width, self.n)  # no epoch's or step's number
        label = torch.where(torch.arange(width, device=device) < self.n, self.data.y[self.data.rows], 2**31)
        by_class = order[label[order].argsort(stable=True)]
        place = by_class.argsort(stable=True)
        fold = torch.where(torch.arange(width, device=device) < self.n, place % k, -1)
        return fold == torch.arange(k, device=device)[:, None]

    def host(self, fn: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Leave the captured computation: ``fn`` sees each tensor with a leading axis of clients.

        ``fn(*stacked)`` returns a tuple of tensors with the same leading axis. For what cannot be captured
        (an eigendecomposition); not differentiable.
        """
        self.breaks += 1
        return tuple(_Host.apply(fn, *tensors))


def _lists(moments: Tree) -> dict[str, list[Tensor]]:
    return {k: list(tree.leaves({k: v})) for k, v in moments.items()}


def _refill(like: Tree, values: Iterator[Tensor]) -> Tree:
    return {k: _refill(v, values) if isinstance(v, dict) else next(values) for k, v in like.items()}


def _apply(
    training: Training, params: Tree, grads: list[Tensor], moments: Tree, rates: Any, mapped: bool
) -> tuple[Tree, Tree]:
    leaves = list(tree.leaves(params))
    new, kept = optim.update(training, leaves, grads, _lists(moments), rates, mapped)
    return _refill(params, iter(new)), _refill(moments, iter([t for name in moments for t in kept[name]]))


def _mapped_step(
    loss: Loss, params: Tree, moments: Tree, training: Training, batch: Batch, rates: Any, consts: Any
) -> tuple[Tree, Tree, Tensor]:
    grads, value = grad_and_value(loss)(params, batch, *consts)
    return *_apply(training, params, list(tree.leaves(grads)), moments, rates, True), value


def _eager_step(
    loss: Loss, params: Tree, moments: Tree, training: Training, batch: Batch, rates: Any, consts: Any
) -> tuple[Tree, Tree, Tensor]:
    params = tree.map(lambda p: p.detach().requires_grad_(), params)
    with torch.enable_grad():
        value = loss(params, batch, *consts)
        grads = torch.autograd.grad(value, list(tree.leaves(params)), allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        return *_apply(training, params, list(grads), moments, rates, False), value.detach()


class _Host(torch.autograd.Function):
    """Steps out of vmap: its own vmap rule sees the stacked tensors."""

    @staticmethod
    def forward(fn: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(out[0] for out in fn(*(t[None] for t in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, fn: Callable[..., Any], *tensors: Tensor) -> tuple[Any, Any]:
        stacked = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        out = tuple(fn(*stacked))
        return out, (0,) * len(out)
