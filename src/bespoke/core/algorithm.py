"""The protocol of a method: a frozen dataclass of hyper-parameters with at most nine pure hooks.

The client half is written for ONE client and never sees the others; the server half sees a leading
axis of clients, because a real server does. Two hooks are required: ``client_update`` and
``personalize``. A toy that shares the model and keeps nothing is the whole of FedAvg::

    @final
    @dataclass(frozen=True)
    class FedAvg(Algorithm):
        def client_update(self, local, state, down):
            return state, {"model": local.sgd(local.task.loss, down["model"])}

        def personalize(self, local, state, down):
            return down["model"]
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bespoke.core import robust, tree
from bespoke.core.local import Local, Rates
from bespoke.core.settings import check
from bespoke.core.task import Task
from bespoke.core.tree import Tree

# Trees that look alike and are not the same thing.
State = Tree  # what a client keeps between rounds; it never leaves the client
Down = Tree  # what a client receives: what was broadcast, and what was tailored for it
Up = Tree  # what a client sends
Personal = Tree  # a client's own model, or several by name: what predict takes


class Uploads(NamedTuple):
    """What the clients of a round sent, as far as it was finite and within the bound."""

    tree: Tree  # leaves (K, ...)
    weights: Tensor  # (K,) number of train rows, or 1, by [training] weighting
    clients: Tensor  # (K,) int64 ids
    sent: Tree = {}  # what every client was sent  # noqa: RUF012
    robust: str = "mean"  # [training] robust
    trim: float = 0.0  # [training] trim

    def mean(self, name: str, weights: Tensor | None = None) -> Tree:
        """Return the clients' mean of a top-level name by ``[training] robust``; ``weights`` (K,) replace the usual.

        A clipped mean shortens distances to what was sent under that name, or else to 0.
        """
        stacked, sent = {name: self.tree[name]}, {name: self.sent.get(name, {})}
        if not tree.fits(stacked, sent):
            sent = tree.map(lambda x: torch.zeros_like(x[0]), stacked)
        weights = self.weights if weights is None else weights
        mean: Tree = robust.mean(self.robust, stacked, weights, sent, self.trim)[name]
        return mean


@dataclass(frozen=True)
class Algorithm:
    """A method. Subclasses are ``@final`` frozen dataclasses; their fields are the hyper-parameters."""

    # Top-level names of the client's state that may never occur in an upload.
    private: ClassVar[tuple[str, ...]] = ()
    # Whether targets must be class numbers: such a method is refused for other objectives.
    needs_classes: ClassVar[bool] = False
    # What of clients' rows, beside weights, its personal model holds, in words: said when that is saved.
    holds: ClassVar[str] = ""
    # What the numbers of an upload's top-level name must be, for a server that cannot trust its clients: "spd" (packed
    # triangles of positive semi-definite matrices), "rows" (from 0 to the client's rows), "share" (from 0 to 1) or
    # "positive" (not negative).
    claims: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __post_init__(self) -> None:
        """Refuse a hyper-parameter that is out of its range."""
        check(self, type(self).__name__)

    @property
    def ignores(self) -> dict[str, str]:
        """Keys of ``[training]`` that change nothing as the fields are set, and why; a run that sets one notes it."""
        return {}

    @property
    def unbounded(self) -> dict[str, str]:
        """Top-level names of an upload that ``[training] bound`` does not hold for, and why."""
        return {}

    # --- on the server ------------------------------------------------------------------------------------------

    def server_init(self, task: Task, params: Tree, num_clients: int, key: Tensor) -> Tree:
        """Return the server's first state from the common initial ``params``; ``num_clients`` are those that train."""
        return {"model": params}

    def broadcast(self, server: Tree) -> Down:
        """Return what every client receives."""
        return {"model": server["model"]}

    def tailor(self, server: Tree, clients: Tensor) -> Down:
        """Return what each of ``clients`` (K,) receives in addition: leaves (K, ...); id -1 is an unknown client."""
        return {}

    def aggregate(self, task: Task, server: Tree, uploads: Uploads, key: Tensor) -> Tree:
        """Return the server's next state: by default the weighted mean of each uploaded name."""
        unknown = uploads.tree.keys() - server.keys()
        if unknown:
            raise KeyError(
                f"{type(self).__name__} uploads {sorted(unknown)}, which the server does not hold: "
                "aggregate them in the method's own `aggregate`"
            )
        held = {name: server[name] for name in uploads.tree}
        mean = {name: uploads.mean(name) for name in uploads.tree}
        return server | tree.map(lambda _, new: new, held, mean)  # a part of a name's leaves would lose the rest

    # --- on one client ------------------------------------------------------------------------------------------

    def client_init(self, task: Task, params: Tree, client: Tensor) -> State:
        """Return a client's first state; ``client`` is its id (0-d), or -1 outside the training population."""
        return {}

    def client_update(self, local: Local, state: State, down: Down) -> tuple[State, Up]:
        """Do one round of local work and return the new state and the upload."""
        raise NotImplementedError(f"{type(self).__name__} needs client_update(local, state, down)")

    def adapt(self, local: Local, state: State, down: Down) -> State:
        """Return the state of a client that never took part, ready to personalise. Train personal parts only."""
        return state

    def personalize(self, local: Local, state: State, down: Down) -> Personal:
        """Return the client's own model, which :meth:`predict` takes. This may train, but changes no state."""
        raise NotImplementedError(f"{type(self).__name__} needs personalize(local, state, down)")

    def predict(self, task: Task, personal: Personal, x: Tensor) -> Any:
        """Return the personal model's outputs (B, O) for x (B, ...), or several by name; the first is the headline.

        Unless a method says otherwise, a tree that holds models by name predicts with each of them.
        """
        if personal and all(isinstance(model, dict) for model in personal.values()):
            return {view: task.logits(model, x) for view, model in personal.items()}
        return task.logits(personal, x)


def finetuned(local: Local, model: Tree, epochs: int, part: str = "all", lr: Rates | None = None) -> Personal:
    """Return two views of a model: "personal", fine-tuned as by `Local.finetune`, and "global", as it is.

    Without epochs there is nothing to tell apart, and the model is the only view.
    """
    if not epochs:
        return model
    return {"personal": local.finetune(model, epochs, part, lr=lr), "global": model}
