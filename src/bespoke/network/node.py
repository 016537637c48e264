"""The client's side: one client's work from one message, with its own rows and its states on its own disk.

A node keeps nothing in memory between messages, so that a new process may answer each of them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bespoke.clients.work import Work, clock, desk_alone
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.local import Local, collected
from bespoke.core.settings import Training
from bespoke.core.task import arithmetic
from bespoke.core.tree import Tree
from bespoke.engine.rows import ClientRows
from bespoke.network.messages import Message, MessageError, Reply, Request, decode, encode, read_head, write_head
from bespoke.network.terms import Terms
from bespoke.network.versions import NAME, Versions, forget_others

_log = logging.getLogger("bespoke.node")
_MOST_ADAPTING = 10_000  # rounds or epochs of adaptation: beyond, a server wants a client to work without end


@dataclass(frozen=True)
class Node:
    """One client of a federation, on its own machine."""

    terms: Terms
    rows: Mapping[str, ClientRows]  # by split: train, and test and val where it has any
    folder: Path  # where it keeps its states
    # Takes the personal model at the end, and the one that the client would have had without any round.
    finish: Callable[[Request, Tree, Tree], None] = lambda request, personal, before: None

    def answer(self, message: Message) -> Message:
        """Do what a message asks for, and return the answer; a message that cannot be read is refused.

        An error of the method's is told to the server by its kind alone, since its text may hold what is private.
        """
        request = read_head(message.head, Request)
        try:
            self._check(request)
            if request.kind == "enrol":
                return self._reply(request, "enrolled")
            down = decode(message.leaves, self.terms.down, self.terms.task.device)
            with torch.no_grad(), arithmetic(self.terms.task.precision):
                return self._worked(request, down)
        except MessageError as error:
            return self._reply(request, "failed", why=str(error))
        except Exception as error:
            _log.exception("client %d, round %d: the work failed", request.client, request.round)
            return self._reply(request, "failed", why=f"its work failed with {type(error).__name__}")

    def _check(self, request: Request) -> None:
        """Refuse a request that is none of this experiment's, or that no server of ours sends."""
        if request.experiment != self.terms.experiment:
            raise MessageError(
                f"the message is of another experiment, {request.experiment[:16]!r}, and this client is of "
                f"{self.terms.experiment!r}: settings, or the weights in a file that they name, differ"
            )
        if request.kind == "enrol":
            return
        named = NAME.fullmatch(request.federation) and (not request.accepted or NAME.fullmatch(request.version))
        if not named or request.kind not in _KINDS or request.round < 1:
            raise MessageError("the message's head makes no sense")
        if max(request.adapt_rounds, request.adapt_epochs) > _MOST_ADAPTING:
            raise MessageError("the message asks for more adaptation than any experiment")
        if request.new != (request.client >= self.terms.num_clients):
            raise MessageError(f"client {request.client} is not where the message says")

    def _worked(self, request: Request, down: Tree) -> Message:
        """Return the answer to a sound request."""
        terms = self.terms
        versions = Versions(self.folder / request.federation / str(request.client))
        work = Work(terms.algorithm, terms.task, request.adapt_epochs)
        if request.accepted:
            kept = versions.load(request.accepted, request.version, terms.task.device)
            if kept is None:
                return self._reply(request, "lost", why=f"its state of round {request.accepted} is lost")
        else:
            client = torch.tensor(-1 if request.new else request.client, device=terms.task.device)
            kept = {"state": work.first(terms.params, client), "moments": {}}
        return _KINDS[request.kind](self, request, work, versions, kept, down)

    def _trained(self, request: Request, work: Work, versions: Versions, kept: Tree, down: Tree) -> Message:
        """Do a round of local work and propose the new state."""
        local = self._desk(request, rng.TRAIN, kept["moments"])
        out = tree.detach(work.update(local, {}, kept["state"], down))
        if wrong := [part for part in ("up", "kept") if not out["sound"][part]]:
            return self._reply(request, "unsound", why="upload" if wrong[0] == "up" else "state")
        version = versions.save(request.round, {"state": out["state"], "moments": out["moments"]})
        versions.forget(request.oldest)
        logged = {name: float(value) for name, value in out["logged"].items()}
        told = {"version": version, "breaks": collected(local).breaks, "logged": logged}
        return self._reply(request, "trained", out["up"], **told)

    def _evaluated(self, request: Request, work: Work, _: Versions, kept: Tree, down: Tree) -> Message:
        """Personalise, after adaptation if this client never took part, and score on held-out rows."""
        state = kept["state"] if request.accepted else self._adapted(request, work, kept, down)
        held_out = {split: rows for split, rows in self.rows.items() if split != "train"}
        out = work.evaluate(self._desk(request, rng.EVAL, {}), held_out, state, down)
        logged = {name: float(value) for name, value in out["logged"].items()}
        scores = [
            [split, view, len(held_out[split].rows), _pairs(found, self.terms), logged]
            for split, views in out["scores"].items()
            for view, found in views.items()
        ]
        return self._reply(request, "evaluated", scores=scores)

    def _finished(self, request: Request, work: Work, _: Versions, kept: Tree, down: Tree) -> Message:
        """Hand over the personal model, which stays here, and forget the states of other federations."""
        state = kept["state"] if request.accepted else self._adapted(request, work, kept, down)
        personal = work.personalize(self._desk(request, rng.EVAL, {}), {}, state, down)
        self.finish(request, tree.detach(personal), self._before(request, work))
        forget_others(self.folder, request.federation)
        return self._reply(request, "finished")

    def _before(self, request: Request, work: Work) -> Tree:
        """Return the personal model before the first round: of a new client, from what the server has at its start."""
        client, begun = -1 if request.new else request.client, replace(request, round=0)
        down = self.terms.sent_first(client)
        first = work.first(self.terms.params, torch.tensor(client, device=self.terms.task.device))
        state = self._adapted(begun, work, {"state": first, "moments": {}}, down)
        return tree.detach(work.personalize(self._desk(begun, rng.EVAL, {}), {}, state, down))

    def _adapted(self, request: Request, work: Work, kept: Tree, down: Tree) -> Tree:
        """Return the state of a client that never took part, after all rounds of adaptation."""
        adapts = type(self.terms.algorithm).adapt is not Algorithm.adapt
        for number in range(1, request.adapt_rounds + 1) if adapts else ():
            time = clock(self.terms.task, self._training(request), number, request.adapt_rounds)
            kept = tree.detach(
                work.adapt(self._desk(request, rng.EVAL, kept["moments"], time), {}, kept["state"], down)
            )
        state: Tree = kept["state"]
        return state

    def _desk(self, request: Request, purpose: int, moments: Tree, time: Tree | None = None) -> Local:
        terms, training, rows = self.terms, self._training(request), self.rows["train"]
        key: Tensor = rng.stream(terms.root, purpose, request.round, request.client)
        time = clock(terms.task, training, request.round) if time is None else time
        return desk_alone(terms.task, training, rows, len(rows.rows), key, time, moments)

    def _training(self, request: Request) -> Training:
        return replace(self.terms.training, rounds=request.rounds)  # a run may be lengthened

    def _reply(self, request: Request, kind: str, up: Tree | None = None, **told: Any) -> Message:
        experiment, place = self.terms.experiment, (request.client, request.round)
        rows = {split: len(own.rows) for split, own in self.rows.items()}
        head = Reply(kind, request.id, experiment, request.federation, *place, rows=rows, **told)
        return Message(write_head(head), encode(up or {}))


_KINDS: dict[str, Callable[[Node, Request, Work, Versions, Tree, Tree], Message]] = {
    "train": Node._trained,
    "evaluate": Node._evaluated,
    "finish": Node._finished,
}


def _pairs(found: Tree, terms: Terms) -> dict[str, list[Any]]:
    """Return [sum, weight] of each metric, as numbers, headline first."""
    names = terms.task.objective.metrics
    return {name: [found[name]["sum"].tolist(), found[name]["weight"].tolist()] for name in names}
