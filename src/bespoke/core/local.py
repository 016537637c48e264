"""One client's desk: all that a method may do with a client's data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from bespoke.core import rng, tree
from bespoke.core.data import Batch, Data
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.engine import optim
from bespoke.engine.lanes import Eager, Runner, choose, stacked, step_out
from bespoke.engine.purity import refuse_tensors
from bespoke.engine.scan import Finish, Fold, Step, per_pass, run, take_over

FEATURE_CHUNK = 256

Loss = Callable[..., Tensor]
Rate = float | tuple[float, float]
Rates = Rate | dict[str, Rate]
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
    smallest: int  # no client that runs together with this one has fewer rows,
    largest: int  # nor more
    mapped: bool = False  # inside vmap, where the loops are the runner's
    runner: Runner = field(default_factory=Eager)
    moments: Tree = field(default_factory=dict)  # kept optimiser moments, by tag
    logged: Tree = field(default_factory=dict)
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
            if not isinstance(value, Tensor):
                value = torch.full((), value, device=self.key.device, dtype=torch.float64)
            self.logged[name] = value.detach().double()  # exact for counts of bytes

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
        earlier; ``per_step = k`` hands a tuple of k batches. ``tag = 0`` is the main pass, which sees the
        same batches in every method; further passes take other tags.
        """
        refuse_tensors(step, Local, "step")
        return self._fold(step, take_over, carry, consts, epochs, steps, limit, per_step, tag)

    def _fold(
        self,
        step: Step,
        finish: Finish,
        carry: Tree,
        consts: tuple[Any, ...],
        epochs: int | None,
        steps: int | None,
        limit: Tensor | None,
        per_step: int,
        tag: int,
        slope: str | None = None,
    ) -> Tree:
        epochs, steps = self._length(epochs, steps)
        drop = self.training.last_batch == "drop"
        fold = Fold(step, finish, consts, epochs, steps, limit, per_step, tag, self.batch, drop, slope)
        return run(self, fold, carry)

    def num_steps(self, epochs: int | None = None, per_step: int = 1) -> Tensor:
        """This client's own number of steps in so many epochs (default: the training settings'), 0-d int64."""
        epochs, steps = self._length(epochs, None)
        if steps is not None:
            return torch.full_like(self.n, steps)
        return -(-epochs * per_pass(self.n, self.batch, self.training.last_batch == "drop") // per_step)

    def _length(self, epochs: int | None, steps: int | None) -> tuple[int, int | None]:
        if epochs is not None and steps is not None:
            raise ValueError("give epochs or steps, not both")
        if epochs is None and steps is None:
            steps = self.training.steps or None
        return self.epochs if epochs is None else epochs, steps

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
        owned = mapped and self.runner.owns_carry
        slot = str(tag)
        moments = optim.init(training, params)
        if kept := self.moments.get(slot):  # by name: a tree read from a file may be in another order
            moments = tree.map(lambda _, value: value, moments, kept)
        rates = self._rates(params, lr)

        def step(carry: Tree, batch: Batch, rates: Any, *consts: Any) -> Tree:
            out = {"loss": loss(carry["params"], batch, *consts), "rows": batch.mask.sum()}
            return out if watch is None else out | {"batch": batch}

        def finish(carry: Tree, out: Tree, consts: tuple[Any, ...], active: Tensor | None) -> Tree:
            leaves = list(tree.leaves(carry["params"]))
            moments = {k: list(tree.leaves({k: v})) for k, v in carry["moments"].items()}
            grads, rates = out["grads"], consts[0]
            summed = torch.addcmul(carry["loss"], out["loss"], out["rows"])
            done = {"loss": summed, "rows": carry["rows"] + out["rows"]}
            if owned and optim.update_in_place(training, leaves, grads, moments, rates, active):
                params = carry["params"]
            else:
                new, kept = optim.update(training, leaves, grads, moments, rates, mapped)
                params = done["params"] = _refill(carry["params"], iter(new))
                done["moments"] = _refill(carry["moments"], iter([t for name in moments for t in kept[name]]))
            if watch is not None:
                done["seen"] = (vmap(watch) if mapped else watch)(carry["seen"], params, out["batch"])
            if active is not None:
                done = tree.map(lambda x, old: choose(active, x, old), done, {name: carry[name] for name in done})
            return carry | done

        zero = self.key.new_zeros((), dtype=self.task.dtype)
        carry: Tree = {"params": params, "moments": moments, "loss": zero, "rows": zero, "seen": seen}
        carry = self._fold(step, finish, carry, (rates, *consts), epochs, steps, limit, 1, tag, slope="params")
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

    def finetune(
        self, params: Tree, epochs: int | None, part: str = "all", tag: int = 0, lr: Rates | None = None
    ) -> Tree:
        """Train all parameters, or the head alone, for so many epochs with the task's own loss; ``lr`` as in `sgd`.

        None stands for the epochs or steps of ``[training]``.
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
        """Features of all train rows with the body's parameters, in the order of the client's list."""
        with torch.no_grad():
            parts = [(self.task.features(params, part.x), part.y) for part in self._chunks()]
        return Features(torch.cat([z for z, _ in parts]), torch.cat([y for _, y in parts]), self.data.mask())

    def labels(self) -> tuple[Tensor, Tensor]:
        """Labels (width,) of all train rows in the order of the client's list, and 1.0 for each real row (width,)."""
        return self.data.y[self.data.rows], self.data.mask()

    def gradient(self, loss: Loss, params: Tree, *consts: Any) -> Tree:
        """The gradient at ``params`` of ``loss(params, batch, *consts)``, a mean over rows, for all train rows at once.

        Without augmentation, and so without chance.
        """
        total = tree.zeros_like(params)
        for part in self._chunks():
            total = tree.add(total, grad(loss)(params, part, *consts), part.mask.sum() / self.n)
        return total

    def _chunks(self) -> Iterator[Batch]:
        """All train rows, padding included, in the order of the client's list."""
        mask = self.data.mask()
        for i, rows in enumerate(torch.arange(self.data.width, device=self.key.device).split(FEATURE_CHUNK)):
            key = rng.fold_in(rng.fold_in(self.key, -2), i)  # tags are not negative
            x, y = self.data.gather(rows, key, train=False)
            yield Batch(x, y, mask[rows], rows, torch.full_like(self.n, i), key)

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

        def work(count: int, dims: Any, tensors: Any) -> list[Tensor]:
            return list(fn(*(stacked(count, dim, t) for dim, t in zip(dims, tensors, strict=True))))

        return step_out(self.runner, work, tensors)


def _refill(like: Tree, values: Iterator[Tensor]) -> Tree:
    return {k: _refill(v, values) if isinstance(v, dict) else next(values) for k, v in like.items()}
