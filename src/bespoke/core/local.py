"""One client's desk: everything that a method may do with a client's data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor
from torch.func import grad

from bespoke.core import rng, tree
from bespoke.core.data import Batch
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree

Step = Callable[..., Tree]  # carry = step(carry, batch, *consts), a pure function
Loss = Callable[..., Tensor]  # 0-d = loss(params, batch, *consts), a pure function
Gradient = Callable[..., tuple[Any, ...]]  # (0-d loss, grads like params) = gradient(params, batch, *consts), as pure
Watch = Callable[[Tree, Tree, Batch], Tree]  # seen = watch(seen, params, batch), a pure function
Rate = float | tuple[float, float]
Rates = Rate | dict[str, Rate]


class Features(NamedTuple):
    """Features of a client's train rows, and their labels."""

    z: Tensor  # (width, d)
    y: Tensor  # (width,)
    mask: Tensor  # (width,) 1.0 for a real row


class Length(NamedTuple):
    """How long a loop over minibatches is."""

    epochs: int
    steps: int | None = None  # instead of epochs
    limit: Tensor | None = None  # 0-d: may end a client earlier
    per_step: int = 1  # minibatches per step


def per_pass(n: Any, batch: int, drop: bool) -> Any:
    """Return the number of minibatches of min(batch, n) rows in one pass over n rows, an int or a tensor."""
    size = n.clamp(max=batch) if isinstance(n, Tensor) else min(batch, n)
    return n // size if drop else -(-n // size)


class DescentOptions(TypedDict, total=False):
    """How to descend: the keywords of :meth:`Local.sgd` and :meth:`Local.trace`."""

    epochs: int | None  # passes over the rows; default: the training settings
    steps: int | None  # instead of epochs
    limit: Tensor | None  # 0-d: may end this client earlier
    lr: Rates | None  # replaces the base rate, for all or by top-level name; a pair is the schedule's start and end
    tag: int  # 0 is the main pass, which sees the same batches in every method; further passes take other tags
    gradient: Gradient | None  # gradient(params, batch, *consts) -> (loss 0-d, grads like params), instead of a loss
    plain: bool  # bare steps of the rate, without momentum, Adam, clipping and weight decay
    per_step: int  # k > 1 passes a tuple of k batches


class Descent(NamedTuple):
    """What to minimise, and from where."""

    loss: Loss | None  # to differentiate,
    gradient: Gradient | None  # or the method's own gradient
    training: Training  # the optimiser's settings
    params: Tree
    watch: Watch | None
    seen: Tree
    consts: tuple[Any, ...]
    rates: Tensor | list[Tensor]  # 0-d: one for all leaves, or one per leaf
    moments: Tree  # kept from an earlier call; empty for a fresh start
    length: Length
    tag: int


class Descended(NamedTuple):
    """Where a descent ended."""

    params: Tree
    seen: Tree
    moments: Tree
    loss: Tensor  # 0-d: the mean over the rows seen


class Strategy(Protocol):
    """How a desk reaches its client's train rows and runs its loops: for one client alone, or in lanes of a block.

    Implemented in :mod:`bespoke.engine`; no method sees it.
    """

    @property
    def n(self) -> Tensor:
        """The number of train rows, 0-d int64."""
        ...

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return the labels of all train rows, padding included, and their mask (width,)."""
        ...

    def chunks(self, key: Tensor) -> Iterator[Batch]:
        """Yield all train rows, padding included, in order, without augmentation."""
        ...

    def scan(self, desk: "Local", step: Step, carry: Tree, consts: tuple[Any, ...], length: Length, tag: int) -> Tree:
        """Return the carry after the client's own number of steps."""
        ...

    def descend(self, desk: "Local", descent: Descent) -> Descended:
        """Run the configured optimiser."""
        ...

    def host(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call ``fn`` outside the mapped or recorded computation, with a leading axis of clients."""
        ...


class Collected(NamedTuple):
    """What a desk collected while a method worked at it."""

    moments: Tree  # of the optimiser, by tag
    logged: Tree  # 0-d float64 by name
    breaks: int  # calls to the host


@dataclass
class Local:
    """What a client can do: loop over its TRAIN rows, take gradients, log. The library makes one for each call.

    ``n``, ``round``, ``rounds``, ``lr`` are 0-d tensors: anything that changes between clients or rounds
    is an input of the computation, never a Python number.
    """

    task: Task
    key: Tensor  # (2,)
    round: Tensor
    rounds: Tensor
    lr: Tensor  # with the schedule applied; in `personalize` the base rate
    training: Training
    _strategy: Strategy
    _moments: Tree = field(default_factory=dict)  # kept by the optimiser, by tag
    _logged: Tree = field(default_factory=dict)
    _breaks: int = 0

    @property
    def n(self) -> Tensor:
        """The number of train rows, 0-d int64."""
        return self._strategy.n

    @property
    def epochs(self) -> int:
        """``[training] epochs``."""
        return self.training.epochs

    @property
    def batch(self) -> int:
        """``[training] batch``."""
        return self.training.batch

    def log(self, **scalars: Tensor | float) -> None:
        """Write 0-d values to the client's line of the record; they are not part of the upload."""
        for name, value in scalars.items():
            if not isinstance(value, Tensor):
                value = torch.full((), value, device=self.key.device, dtype=torch.float64)
            if value.ndim:
                raise ValueError(f"local.log({name}=...) takes one number, not a tensor of shape {tuple(value.shape)}")
            self._logged[name] = value.detach().double()  # exact for counts of bytes

    # --- the one loop -------------------------------------------------------------------------------------------

    def scan(
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
        earlier; ``per_step = k`` passes a tuple of k batches. ``tag = 0`` is the main pass, which sees the
        same batches in every method; further passes take other tags.
        """
        length = self._length(epochs, steps, limit, per_step)
        return self._strategy.scan(self, step, carry, consts, length, tag)

    def num_steps(self, epochs: int | None = None, per_step: int = 1) -> Tensor:
        """Return this client's number of steps in ``epochs`` (default: the training settings), 0-d int64."""
        length = self._length(epochs, None)
        if length.steps is not None:
            return torch.full_like(self.n, length.steps)
        return -(-length.epochs * per_pass(self.n, self.batch, self.training.last_batch == "drop") // per_step)

    def _length(self, epochs: int | None, steps: int | None, limit: Tensor | None = None, per_step: int = 1) -> Length:
        if epochs is not None and steps is not None:
            raise ValueError("give epochs or steps, not both")
        if type(per_step) is not int or not 1 <= per_step <= 1000:
            raise ValueError(f"per_step is a number of batches from 1 to 1000, not {per_step!r}")
        if epochs is None and steps is None:
            steps = self.training.steps or None
        return Length(self.epochs if epochs is None else epochs, steps, limit, per_step)

    # --- training -----------------------------------------------------------------------------------------------

    def sgd(self, loss: Loss | None, params: Tree, *consts: Any, **how: Unpack[DescentOptions]) -> Tree:
        """Minimise ``loss(params, batch, *consts) -> 0-d`` over minibatches with the configured optimiser.

        Keywords: :class:`DescentOptions`. With ``loss = None`` the method gives a ``gradient``, the library the update.
        `personalize` is no part of the schedule: whatever the round, it trains at the base rate, or at a pair's first.
        The optimiser starts fresh in each call unless ``keep_optimizer`` is set; then its moments stay on
        the client, by tag. The mean loss over the rows seen is logged.
        """
        return self.trace(loss, params, None, {}, *consts, **how)[0]

    def trace(
        self,
        loss: Loss | None,
        params: Tree,
        watch: Watch | None,
        seen: Tree,
        *consts: Any,
        **how: Unpack[DescentOptions],
    ) -> tuple[Tree, Tree]:
        """Run :meth:`sgd`, and return the last iterate and what ``watch`` made of all iterates.

        After every step ``seen = watch(seen, params, batch)``, a pure function like the loss. A ``gradient`` takes
        part, if anything is seen: ``gradient(params, batch, seen, *consts) -> (loss 0-d, grads, seen)``; then ``watch``
        may be None.
        """
        _refuse_unknown(how.keys())
        gradient, tag = how.get("gradient"), how.get("tag", 0)
        if (loss is None) == (gradient is None):
            raise ValueError("give a loss, or None and a gradient")
        if not params:
            return params, seen
        length = self._length(how.get("epochs"), how.get("steps"), how.get("limit"), how.get("per_step", 1))
        slot, rates = str(tag), self._rates(params, how.get("lr"))
        training = self.training.plain() if how.get("plain") else self.training
        moments = self._moments.get(slot, {})
        descent = Descent(loss, gradient, training, params, watch, seen, consts, rates, moments, length, tag)
        done = self._strategy.descend(self, descent)
        if self.training.keep_optimizer:
            self._moments = {**self._moments, slot: done.moments}
        self.log(**{f"loss_{tag}" if tag else "loss": done.loss})
        return done.params, done.seen

    def _rates(self, params: Tree, lr: Rates | None) -> Tensor | list[Tensor]:
        """Return the learning rate, 0-d: one for all leaves, or one per leaf."""
        if isinstance(lr, dict):
            if lr.keys() != params.keys():
                raise ValueError(f"lr names {sorted(lr)}, but the parameters are {sorted(params)}")
            rates = {name: self._rate(rate) for name, rate in lr.items()}
            return [rates[name] for name in params for _ in tree.leaves({name: params[name]})]
        return self._rate(lr)

    def _rate(self, lr: Rate | None) -> Tensor:
        base = self.training.lr
        if isinstance(lr, tuple) and self.training.schedule == "cosine":
            floor = self.training.lr_final / base
            left = (self.lr / base - floor) / (1.0 - floor) if floor < 1.0 else torch.ones_like(self.lr)
            return lr[1] + (lr[0] - lr[1]) * left
        start = lr[0] if isinstance(lr, tuple) else lr
        return self.lr if start is None else self.lr * (start / base)

    def finetune(
        self, params: Tree, epochs: int | None, part: str = "all", tag: int = 0, lr: Rates | None = None
    ) -> Tree:
        """Train all parameters, or only the head, for ``epochs`` with the task's own loss; ``lr`` is as in `sgd`.

        None means the epochs or steps of ``[training]``.
        """
        if epochs == 0:
            return params
        loss = self.task.loss
        if part == "all":
            return self.sgd(loss, params, epochs=epochs, tag=tag, lr=lr)
        head = self.sgd(
            lambda h, batch, rest: loss(rest | h, batch),
            self.task.head(params),
            params,
            epochs=epochs,
            tag=tag,
            lr=lr,
        )
        return params | head

    # --- statistics ---------------------------------------------------------------------------------------------

    def features(self, params: Tree) -> Features:
        """Return the features of all train rows under the body in ``params``, in the order of the client's list."""
        with torch.no_grad():
            parts = [(self.task.features(params, part.x), part.y, part.mask) for part in self._chunks()]
        z, y, mask = (torch.cat(column) for column in zip(*parts, strict=True))
        return Features(z, y, mask)

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return the labels (width,) of all train rows in the order of the client's list, and their mask (width,)."""
        return self._strategy.labels()

    def gradient(self, loss: Loss, params: Tree, *consts: Any) -> Tree:
        """Return the gradient at ``params`` of ``loss(params, batch, *consts)``, a mean over rows, on all train rows.

        Rows are not augmented, so the result is deterministic.
        """
        total = tree.zeros_like(params)
        for part in self._chunks():
            total = tree.add(total, grad(loss)(params, part, *consts), part.mask.sum() / self.n)
        return total

    def _chunks(self) -> Iterator[Batch]:
        return self._strategy.chunks(rng.fold_in(self.key, rng.ALL_ROWS))

    def folds(self, k: int, tag: int = 0, rows: Features | None = None) -> Tensor:
        """Return k folds of the train rows, stratified by class: bool (k, width), each real row in exactly one fold.

        With ``rows`` those are dealt instead. Rows are shuffled, then dealt class by class; targets that are not
        classes are dealt in shuffled order.
        """
        y, mask = self.labels() if rows is None else (rows.y, rows.mask)
        width, real = len(mask), mask > 0
        order = rng.shuffle(rng.fold_in(rng.fold_in(self.key, tag), rng.FOLDS), width, width)
        label = y if self.task.objective.classes else torch.zeros_like(mask, dtype=torch.int64)
        label = torch.where(real, label, 2**31)  # padding comes last
        by_class = order[label[order].argsort(stable=True)]
        place = by_class.argsort(stable=True)
        fold = torch.where(real, place % k, -1)
        return fold == torch.arange(k, device=self.key.device)[:, None]

    def host(self, fn: Callable[..., Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Leave the captured computation: ``fn`` sees each tensor with a leading axis of clients.

        ``fn(*stacked)`` returns a tuple of tensors with the same leading axis. Use it for what cannot be captured
        (an eigendecomposition); it is not differentiable.
        """
        self._breaks += 1
        return self._strategy.host(fn, tensors)


def _refuse_unknown(keywords: Iterable[str]) -> None:
    known = DescentOptions.__annotations__
    if unknown := set(keywords).difference(known):
        raise TypeError(f"sgd and trace take {', '.join(known)}, not {', '.join(sorted(unknown))}")


def renewed(local: Local, **changes: Any) -> Local:
    """Return another desk of the same client that has collected nothing yet."""
    fresh: dict[str, Any] = {"_moments": {}, "_logged": {}, "_breaks": 0}
    return replace(local, **fresh | changes)


def collected(local: Local) -> Collected:
    """Return what a desk collected."""
    return Collected(local._moments, local._logged, local._breaks)
