"""The fourth way to reach clients: each on its own machine, behind a link that may be slow, broken or hostile."""

import math
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bespoke.clients.protocol import Evaluated, Trained
from bespoke.core import tree
from bespoke.core.algorithm import Uploads
from bespoke.core.tree import Tree
from bespoke.errors import shown, visible
from bespoke.network.checks import check_claims, check_upload
from bespoke.network.ledger import STRIKES, Ledger
from bespoke.network.messages import (
    Message,
    MessageError,
    Reply,
    Request,
    check_layout,
    decode,
    encode,
    read_head,
    write_head,
)
from bespoke.network.roster import Link, Roster, unexpected, why_absent
from bespoke.network.settings import FederationSettings
from bespoke.network.terms import Answers, Terms
from bespoke.network.versions import NAME

_MOST_VIEWS, _LONGEST_NAME, _MOST_BYTES = 64, 100, 2.0**53
_SHARES = ("accuracy", "subset_accuracy", "hamming")  # metrics whose sum is never beyond its weight
_MEMBERS_OF_METRIC = 10_000  # numbers of a metric whose parts are lists


@dataclass
class _Asked:
    """The answers to a round of messages."""

    replies: dict[int, tuple[Reply, Message]] = field(default_factory=dict)  # by client
    refused: dict[int, str] = field(default_factory=dict)  # answers that cannot be read
    missing: dict[int, str] = field(default_factory=dict)


class NetworkClients:
    """Clients that live elsewhere. Whatever comes from them is checked before anything is done with it."""

    name = "network"

    def __init__(
        self,
        terms: Terms,
        answers: Answers,
        ledger: Ledger,
        link: Link,
        *,
        adapt_rounds: int = 1,
        adapt_epochs: int = 0,
        settings: FederationSettings = FederationSettings(),  # noqa: B008 - it is frozen
        wait: float | None = None,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take the form of the ``answers``, of :func:`bespoke.network.terms.dry_run`, and the ``ledger`` of clients.

        ``wait`` and ``told`` are as for :class:`Roster`.
        """
        method = type(terms.algorithm).__name__
        check_layout(terms.down, f"what {method} sends to its clients")
        check_layout(answers.up, f"the upload of {method}")
        check_claims(terms.algorithm, answers.up)
        self.terms, self.answers, self.store = terms, answers, ledger
        self.adapt_rounds, self.adapt_epochs, self.settings = adapt_rounds, adapt_epochs, settings
        self.roster = Roster(terms.experiment, ledger, link, settings, wait, told)
        self.notes: list[str] = []
        self.absent: dict[int, str] = {}  # who did not answer the last evaluation,
        self._evaluated = 0  # and its round
        self._proposed: tuple[int, dict[int, str]] = 0, {}  # the round, and versions by client

    # --- the protocol -------------------------------------------------------------------------------------------

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Let the clients that are there work, until all have answered or the time is over, and judge the answers."""
        for note in self.roster.ready(round):
            self._note(note)
        asked = self._ask("train", round, clients, shared, own)
        found: dict[int, tuple[Reply, Tree]] = {}
        for client, (reply, message) in asked.replies.items():
            try:
                found[client] = reply, self._upload(client, reply, message)
            except MessageError as error:
                asked.refused[client] = str(error)
        for client in asked.refused:
            asked.refused[client] += self._strike(client, round)
        quorum = min(self.settings.quorum, len(clients))
        if len(found) < quorum:
            few = f"only {len(found)} sound uploads came, and the quorum is {quorum}"
            asked.refused |= dict.fromkeys(found, few)
            found = {}
        answered = [client for client in clients if client in found]
        self._proposed = round, {client: found[client][0].version for client in answered}
        return Trained(
            self._uploads(answered, [found[client][1] for client in answered]),
            {client: asked.refused[client] for client in clients if client in asked.refused},
            {name: [found[c][0].logged[name] for c in answered] for name in sorted(self.answers.logged)},
            host_breaks=sum(found[client][0].breaks for client in answered),
            missing={client: asked.missing[client] for client in clients if client in asked.missing},
        )

    def accept(self, clients: Sequence[int], refused: Collection[int] = ()) -> None:
        """Note the states that these clients proposed, of which the next message tells each; blame the ``refused``."""
        (round, proposed), self._proposed = self._proposed, (0, {})
        if absent := [client for client in clients if client not in proposed]:
            raise ValueError(f"clients {absent} cannot be accepted: they did not answer the last call to train")
        for client in clients:
            member = self.store.members[client]
            member.accepted, member.version, member.strikes = round, proposed[client], 0
        for client in refused:  # others that are not accepted: the server's step has failed, and nobody knows by whom
            self._strike(client, round)

    def evaluate(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> list[Evaluated]:
        """Let the clients that are there personalise and score; those that do not answer have no scores."""
        asked = self._ask("evaluate", round, clients, shared, own)
        found: list[Evaluated] = []
        for client in clients:
            if client in asked.replies:
                try:
                    found += self._scores(client, asked.replies[client][0])
                except MessageError as error:
                    asked.refused[client] = str(error)
        for client, why in asked.refused.items():
            self._note(f"scores of client {client} were refused: {why}")
        before, self._evaluated = self.absent if self._evaluated == round else {}, round  # large federations ask twice
        self.absent = before | asked.missing | asked.refused
        return found

    def finish(
        self, round: int, clients: Sequence[int], shared: Tree, own: Tree
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Let the clients make their personal models, which stay with them; return who is missing, who failed, why."""
        asked = self._ask("finish", round, clients, shared, own)
        for client, (reply, _) in asked.replies.items():
            if reply.kind != "finished":
                asked.refused[client] = unexpected(reply)
        return asked.missing, asked.refused

    def took_part(self, client: int) -> bool:
        """Return whether an upload of this client was ever accepted."""
        return self.store.members[client].accepted > 0

    def sample(self) -> Tree:
        """Return what the ledger's files hold for one client."""
        return self.store.sample()

    def timings(self) -> dict[str, float]:
        """Return nothing: the clients' devices are their own."""
        return {}

    # --- asking -------------------------------------------------------------------------------------------------

    def _ask(self, kind: str, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> _Asked:
        """Send each client that is there what is asked of it, and collect the answers until the time is over."""
        asked, online = _Asked(), self.roster.online()
        requests, messages = dict[str, Request](), dict[str, Message]()
        known = {name.partition("/")[0] for name in self.terms.down}
        common = encode({name: part for name, part in shared.items() if name in known and name not in own})
        for place, client in enumerate(clients):
            member = self.roster.member(client)
            if member.quarantined:
                asked.missing[client] = f"it is in quarantine, since {STRIKES} uploads in a row were refused"
            elif member.key not in online:
                asked.missing[client] = why_absent(member)
            else:
                key = online[member.key]
                request = requests[key] = self._request(kind, round, client)
                mine = {name: tree.map(lambda x, i=place: x[i], {"": own[name]})[""] for name in own if name in known}
                messages[key] = Message(write_head(request), [*common, *encode(mine)])
        heard, seconds = (lambda key, answer: self._heard(requests[key], answer, asked)), self.settings.round_timeout
        owing = self.roster.exchange(messages, heard, seconds)
        asked.missing |= {requests[key].client: why for key, why in owing.items()}
        return asked

    def _request(self, kind: str, round: int, client: int) -> Request:
        terms, member = self.terms, self.roster.member(client)
        return Request(
            kind=kind,
            id=secrets.token_hex(8),
            experiment=terms.experiment,
            federation=self.store.federation,
            client=client,
            new=client >= terms.num_clients,
            round=round,
            accepted=member.accepted,
            version=member.version,
            oldest=self.store.oldest(client) if client < len(self.store.members) else 0,
            rounds=terms.training.rounds,
            adapt_rounds=self.adapt_rounds,
            adapt_epochs=self.adapt_epochs,
        )

    def _heard(self, request: Request, answer: Message | str, asked: _Asked) -> bool:
        """Note an answer; return whether it ends the waiting for this client."""
        client = request.client
        if isinstance(answer, str):
            asked.missing[client] = visible(answer[:200])
            return True
        try:
            reply = read_head(answer.head, Reply)
        except MessageError as error:
            asked.refused[client] = str(error)
            return True
        if reply.id != request.id:
            return False  # the answer to an earlier message, which came late or once more
        if reply.kind == "lost" and request.accepted:
            member = self.roster.member(client)
            asked.missing[client] = f"its state of round {member.accepted} is lost, so that it begins anew"
            self._note(f"client {client} has lost its state of round {member.accepted} and begins anew")
            member.accepted, member.version = 0, ""
        elif (reply.experiment, reply.federation) != (request.experiment, request.federation):
            asked.refused[client] = "its answer is of another experiment or run"
        elif (reply.client, reply.round) != (client, request.round):
            asked.refused[client] = "its answer is of another client or round"
        else:
            asked.replies[client] = reply, answer
        return True

    # --- judging ------------------------------------------------------------------------------------------------

    def _upload(self, client: int, reply: Reply, message: Message) -> Tree:
        """Return the upload of an answer; refuse whatever breaks a rule."""
        if reply.kind == "unsound" and reply.why in ("upload", "state"):
            raise MessageError(f"its {reply.why} holds NaN or inf")
        if reply.kind != "trained":
            raise MessageError(unexpected(reply))
        if not NAME.fullmatch(reply.version):
            raise MessageError("its answer names no state")
        if reply.logged.keys() != self.answers.logged.keys() or not _are_numbers(reply.logged):
            raise MessageError("it logs other values than its method does")
        for name in ("bytes_up", "bytes_down"):
            if not 0 <= reply.logged.get(name, 0) <= _MOST_BYTES:
                raise MessageError(f"it logs {shown(reply.logged[name])} as {name!r}")
        declared = self.roster.member(client).rows
        if reply.rows.get("train") != declared:
            raise MessageError(f"it has {shown(reply.rows.get('train'))} train rows, and declared {declared:,}")
        up = decode(message.leaves, self.answers.up, self.terms.task.device)
        check_upload(self.terms.algorithm, up, declared)
        return up

    def _uploads(self, answered: list[int], ups: list[Tree]) -> Uploads:
        device, rows = self.terms.task.device, [self.store.members[client].rows for client in answered]
        nothing = {
            name: torch.empty((0, *leaf.shape), dtype=leaf.dtype, device=device)
            for name, leaf in self.answers.up.items()
        }
        weights = [float(n) if self.terms.training.weighting == "samples" else 1.0 for n in rows]
        return Uploads(
            tree.stack(ups) if ups else tree.unflatten(nothing),
            torch.tensor(weights, dtype=torch.float64, device=device),
            torch.tensor(answered, dtype=torch.int64, device=device),
        )

    def _strike(self, client: int, round: int) -> str:
        """Count a refused upload; return what to add to its reason."""
        member = self.store.members[client]
        member.strikes += 1
        if member.strikes != STRIKES:
            return ""
        self._note(f"client {client} is in quarantine after round {round}: {STRIKES} uploads in a row were refused")
        return f"; after {STRIKES} such uploads in a row it is in quarantine"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _scores(self, client: int, reply: Reply) -> list[Evaluated]:
        """Return the scores of an answer."""
        if reply.kind != "evaluated":
            raise MessageError(unexpected(reply))
        if len(reply.scores) > _MOST_VIEWS or not all(map(self._is_score, reply.scores)):
            raise MessageError("its scores are none of its method and objective")
        member = self.roster.member(client)
        declared = {"test": member.test, "val": member.val}
        for split, _, rows, *_ in reply.scores:
            if rows != declared[split]:
                raise MessageError(f"it scores {rows} {split} rows, and declared {declared[split]:,}")
        return [Evaluated(client, *score) for score in reply.scores]

    def _is_score(self, value: Any) -> bool:
        """Return whether a value is [split, view, rows, metrics, logged]."""
        if not isinstance(value, list) or len(value) != 5:
            return False
        split, view, rows, metrics, logged = value
        named = split in ("test", "val") and isinstance(view, str) and view.isprintable() and len(view) <= _LONGEST_NAME
        counted = type(rows) is int and 0 <= rows < _MOST_BYTES
        scored = isinstance(metrics, dict) and list(metrics) == list(self.terms.task.objective.metrics)
        told = isinstance(logged, dict) and len(logged) <= _MOST_VIEWS and _are_numbers(logged)
        return named and counted and scored and told and all(self._is_metric(n, v, rows) for n, v in metrics.items())

    def _is_metric(self, name: str, value: Any, rows: int) -> bool:
        """Return whether a value can be a metric of so many rows, as far as the metric tells."""
        if not _is_ratio(value):
            return False
        sums, weights = (part if isinstance(part, list) else [part] for part in value)
        most = rows * max(1, self.terms.task.num_outputs)
        if self.terms.task.objective.metrics[name].additive and max(weights, default=0) > most:
            return False
        return name not in _SHARES or all(0 <= sum <= weight for sum, weight in zip(sums, weights, strict=True))


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST_BYTES)


def _are_numbers(values: dict[str, Any]) -> bool:
    return all(len(name) <= _LONGEST_NAME and _is_number(value) for name, value in values.items())


def _is_ratio(value: Any) -> bool:
    """Return whether a value is [sum, weight]: two numbers or two lists of equal length, with weights of 0 or more."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    sums, weights = (part if isinstance(part, list) else [part] for part in value)
    if (
        len(sums) != len(weights)
        or len(sums) > _MEMBERS_OF_METRIC
        or isinstance(value[0], list) != isinstance(value[1], list)
    ):
        return False
    return all(map(_is_number, [*sums, *weights])) and all(math.isfinite(weight) and weight >= 0 for weight in weights)
