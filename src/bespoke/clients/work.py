"""What ONE client does with its rows, its state and its message. No pool, no neighbour: a real node runs the same.

:func:`desk` sets up a client that is alone with its rows; :class:`Work` is what it does there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.local import Local, Strategy, collected, renewed
from bespoke.core.settings import Training
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.engine.alone import Alone
from bespoke.engine.rows import ClientRows

OUTPUTS = "outputs"  # in a view's scores: what metrics that do not map are computed from
_PARTS = ("a state", "an upload")  # what client_update returns
HeldOut = Mapping[str, ClientRows]  # by split


def clock(task: Task, training: Training, round: int, adapt_rounds: int | None = None) -> Tree:
    """Return a client's clock as 0-d tensors: the round, the number of rounds, and the round's learning rate.

    With ``adapt_rounds`` the round is one of so many rounds of adaptation, over which the schedule runs anew.
    """
    rounds = training.rounds if adapt_rounds is None else adapt_rounds
    lr = training.lr * training.lr_factor(max(round, 1), adapt_rounds)
    return {
        "round": torch.full((), round, dtype=torch.int64, device=task.device),
        "rounds": torch.full((), rounds, dtype=torch.int64, device=task.device),
        "lr": torch.full((), lr, dtype=task.dtype, device=task.device),
    }


def desk(task: Task, training: Training, strategy: Strategy, key: Tensor, time: Tree, moments: Tree) -> Local:
    """Return a client's desk; ``time`` is from :func:`clock`, ``moments`` are those kept by its optimiser."""
    return Local(task=task, key=key, **time, training=training, _strategy=strategy, _moments=moments)


def desk_alone(
    task: Task, training: Training, rows: ClientRows, n: int, key: Tensor, time: Tree, moments: Tree
) -> Local:
    """Return the desk of a client that is alone with its n rows."""
    return desk(task, training, Alone(rows, n), key, time, moments)


@dataclass(frozen=True)
class Work:
    """The client half of a method, ready to run. Each function returns a tree, so that it can be mapped."""

    algorithm: Algorithm
    task: Task
    adapt_epochs: int = 0  # of a round of adaptation; 0: as in training
    gathered: frozenset[str] = frozenset()  # metrics computed from gathered outputs, because they cannot be mapped

    def first(self, params: Tree, client: Tensor) -> Tree:
        """Return a client's first state, from the common initial parameters and its id (0-d)."""
        return self._tree(self.algorithm.client_init(self.task, params, client), "client_init", "a state")

    def update(self, local: Local, _: HeldOut, state: Tree, down: Tree) -> Tree:
        """Do one round of local work: return state, upload, what was collected, and whether all is finite."""
        new, up = self._answer(self.algorithm.client_update(local, state, down), state)
        moments, logged, _breaks = collected(local)
        finite = {"up": tree.sound(up), "kept": tree.sound({"state": new, "moments": moments})}
        flags = {part: torch.ones_like(local.n, dtype=torch.bool) if ok is None else ok for part, ok in finite.items()}
        return {"state": new, "up": up, "moments": moments, "logged": logged, "sound": flags}

    def adapt(self, local: Local, _: HeldOut, state: Tree, down: Tree) -> Tree:
        """Do one round of adaptation for a client that never took part: return its state and moments.

        The desk has the key of the client's evaluation, the clock of the adaptation, and the moments of the round
        before.
        """
        own = renewed(
            local,
            key=rng.fold_in(rng.fold_in(local.key, rng.ADAPT), local.round - 1),
            training=replace(local.training, epochs=self.adapt_epochs, steps=0)
            if self.adapt_epochs
            else local.training,
            _moments=collected(local).moments,
        )
        adapted = self._tree(self.algorithm.adapt(own, state, down), "adapt", "a state")
        return {"state": adapted, "moments": collected(own).moments}

    def personalize(self, local: Local, _: HeldOut, state: Tree, down: Tree) -> Tree:
        """Return the personal model of a client that took part or has adapted."""
        return self._personal(_personal_desk(local), state, down)

    def evaluate(self, local: Local, held_out: HeldOut, state: Tree, down: Tree) -> Tree:
        """Personalise a client that took part or has adapted, and score it on its held-out rows."""
        own = _personal_desk(local)
        personal = self._personal(own, state, down)
        scores = {split: self._score(local.key, rows, personal) for split, rows in held_out.items()}
        return {"scores": scores, "logged": collected(own).logged}

    def _personal(self, local: Local, state: Tree, down: Tree) -> Tree:
        return self._tree(self.algorithm.personalize(local, state, down), "personalize", "a personal model")

    def _answer(self, answer: Any, state: Tree) -> tuple[Tree, Tree]:
        """Return the state and the upload, after checking their form."""
        method = type(self.algorithm).__name__
        if not isinstance(answer, tuple) or len(answer) != 2:
            got = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else f"a {type(answer).__name__}"
            raise TypeError(f"{method}.client_update must return (state, upload), not {got}")
        new, up = (self._tree(part, "client_update", what) for part, what in zip(answer, _PARTS, strict=True))
        if new.keys() != state.keys():
            swapped = ": it must return (state, upload), in this order" if up.keys() == state.keys() else ""
            raise ValueError(
                f"{method}.client_update returns a state named {sorted(new)}, "
                f"but the state it was given is named {sorted(state)}{swapped}"
            )
        leaked = up.keys() & set(self.algorithm.private)
        if leaked:
            raise ValueError(f"{method} uploads {sorted(leaked)}, which it declares private")
        return new, up

    def _predictions(self, value: Any, rows: int) -> dict[str, Tensor]:
        """Return outputs by view, after a look at whether they can be such."""
        named: dict[str, Any] = value if isinstance(value, dict) else {"personal": value}
        for view, output in named.items():
            if not isinstance(output, Tensor) or output.ndim < 1 or len(output) != rows:
                got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
                raise TypeError(
                    f"{type(self.algorithm).__name__}.predict must return one row of outputs per example, as a tensor "
                    f"or as tensors by view, not {got} ({view}, {rows} examples)"
                )
        return named

    def _tree(self, value: Any, hook: str, what: str) -> Tree:
        """Return the value if it is a tree; refuse anything else by name."""
        where = f"{type(self.algorithm).__name__}.{hook}"
        if not isinstance(value, dict):
            raise TypeError(f"{where} must return {what} as a dict of tensors, not {type(value).__name__}")
        for name, leaf in tree.flatten(value).items():
            if not isinstance(leaf, Tensor):
                raise TypeError(f"{where} returns {what} whose {name!r} is a {type(leaf).__name__}, not a tensor")
        return value

    def _score(self, key: Tensor, rows: ClientRows, personal: Tree) -> Tree:
        """Return by view the sums and weights of the metrics, and the outputs (width, ...) if they are gathered."""
        metrics = self.task.objective.metrics
        parts = {name: metric for name, metric in metrics.items() if metric.additive and name not in self.gathered}
        wholes = {name: metric for name, metric in metrics.items() if not metric.additive and name not in self.gathered}
        views: dict[str, Tree] = {}
        outputs: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for part in rows.chunks(rng.fold_in(key, rng.SCORED)):
                predictions = self._predictions(self.algorithm.predict(self.task, personal, part.x), len(part.mask))
                for view, output in predictions.items():
                    found = {name: _pair(metric.fn(output, part.y, part.mask)) for name, metric in parts.items()}
                    views[view] = tree.add(views[view], found) if view in views else found
                    if len(parts) < len(metrics):
                        outputs.setdefault(view, []).append(output)
            for view, chunks in outputs.items():
                output = torch.cat(chunks)
                whole = {name: _pair(metric.fn(output, *rows.labels())) for name, metric in wholes.items()}
                views[view] = views[view] | whole
                if self.gathered:
                    views[view] = views[view] | {OUTPUTS: output}
        return views


def _personal_desk(local: Local) -> Local:
    """Return the desk of `personalize`: kept moments belong to training, and so does the schedule's decay."""
    return renewed(local, lr=torch.full_like(local.lr, local.training.lr))


def _pair(found: tuple[Tensor, Tensor]) -> Tree:
    return {"sum": found[0], "weight": found[1]}
