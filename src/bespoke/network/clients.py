"""The fourth way to reach clients: each on its own machine, behind a link that may be slow, broken or hostile."""

import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from bespoke.clients.protocol import Evaluated, Trained
from bespoke.core import tree
from bespoke.core.algorithm import Uploads
from bespoke.core.tree import Tree
from bespoke.errors import UserError, shown, visible
from bespoke.network.checks import check_claims, check_upload
from bespoke.network.ledger import STRIKES, Ledger, Member, fingerprint
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
from bespoke.network.settings import FederationSettings
from bespoke.network.terms import Answers, Terms
from bespoke.network.versions import NAME

_MOST_VIEWS, _LONGEST_NAME, _MOST_BYTES = 64, 100, 2.0**53
_LOOK = 2.0  # seconds between two looks at who is connected, while answers are awaited
_TRIES = 3  # to enrol a client that stays connected
_MEMBERS_OF_METRIC = 10_000  # numbers of a metric whose parts are lists


class Link(Protocol):
    """What carries messages to clients and back. A client is known by its public key, which the link has verified."""

    def online(self) -> set[str]:
        """Return the keys of the clients that are connected now."""
        ...

    def push(self, messages: Mapping[str, Message]) -> None:
        """Send each client its message; do not wait for any answer."""
        ...

    def pull(self) -> list[tuple[str, Message | str]]:
        """Return the answers that have come since the last call, by key.

        A text in place of an answer says why there will be none to the last message pushed to this client.
        """
        ...


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
        settings: FederationSettings | None = None,
        wait: float | None = None,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Take the form of the ``answers``, of :func:`bespoke.network.terms.dry_run`, and the ``ledger`` of clients.

        The first round waits so many seconds for the roster, and each for a quorum of it; None: for nobody. ``told`` is
        called with lines on who is there.
        """
        method = type(terms.algorithm).__name__
        check_layout(terms.down, f"what {method} sends to its clients")
        check_layout(answers.up, f"the upload of {method}")
        check_claims(terms.algorithm, answers.up)
        self.terms, self.answers, self.store, self.link = terms, answers, ledger, link
        self.wait, self.told = wait, told
        self.adapt_rounds, self.adapt_epochs, self.settings = (
            adapt_rounds,
            adapt_epochs,
            settings or FederationSettings(),
        )
        self.notes: list[str] = []
        self._gathered = False
        self.guests: list[Member] = []  # joined after the roster was full: new clients, behind all others
        self.declared: dict[str, dict[str, int]] = {}  # rows by split, of those who enrolled, by fingerprint
        self.absent: dict[int, str] = {}  # who did not answer the last evaluation,
        self._evaluated = 0  # and its round
        self._tries: dict[str, int] = {}  # to enrol those who are connected, by key
        self._proposed: tuple[int, dict[int, str]] = 0, {}  # the round, and versions by client

    # --- who is there -------------------------------------------------------------------------------------------

    def gather(self, wait: float) -> None:
        """Wait until every place of the roster is taken and its member is there, or for the quorum if it takes long.

        Free places go to those who are there then, in the order of their public keys.
        """
        end, roster, self._gathered = time.monotonic() + wait, self.store.members, True
        here, lacking = dict[str, str](), -1
        while True:
            here = self._online()
            free, known = sum(not member.key for member in roster), {member.key for member in roster}
            if free:
                self._enrol(here)
            enrolled = [name for name in here if name not in known and name in self.declared]
            there = sum(member.key in here for member in roster) + min(free, len(enrolled))
            if there == len(roster):
                break
            if lacking != len(roster) - there:
                lacking = len(roster) - there
                self.told(f"waiting for {lacking} of {len(roster)} clients")
            if time.monotonic() >= end:
                if there < self.settings.quorum:
                    raise UserError(
                        f"{there} of {len(roster)} clients came within {wait:g} s, and the quorum is "
                        f"{self.settings.quorum}: start them, wait longer, or lower [federation] quorum"
                    )
                break
            time.sleep(self.settings.interval)
        self._seat(here)
        for client, member in enumerate(roster):
            rows = f", {member.key[:16]}, with {member.rows:,} train rows" if member.key else ""
            self.told(f"client {client}{rows}: {'here' if member.key in here else self._why_not(member)}")

    def _await_quorum(self, round: int) -> None:
        """Wait until a quorum of the roster is there; end the run, which can be resumed, if it takes too long."""
        quorum, wait = self.settings.quorum, self.wait or 0.0
        end, said = time.monotonic() + wait, False
        while True:
            here = self._online()
            there = sum(member.key in here and not member.quarantined for member in self.store.members)
            if there >= quorum:
                return
            if time.monotonic() >= end:
                raise UserError(
                    f"round {round} cannot begin: {there} of {len(self.store.members)} clients are there after "
                    f"{wait:g} s, and the quorum is {quorum}; all before it is saved: start the clients and resume"
                )
            if not said:
                self.told(f"round {round} waits for a quorum of {quorum} clients: {there} are there")
            said = True
            time.sleep(self.settings.interval)

    def _online(self) -> dict[str, str]:
        """Return the keys of those who are connected, by fingerprint, in the order of the keys."""
        keys = sorted(self.link.online())
        self._tries = {key: self._tries.get(key, 0) for key in keys}
        return {fingerprint(key): key for key in keys}

    def _enrol(self, here: dict[str, str]) -> None:
        """Ask strangers for their rows."""
        known = {member.key for member in (*self.store.members, *self.guests)} | self.declared.keys()
        strangers = {name: key for name, key in here.items() if name not in known and self._tries[key] < _TRIES}
        asked = replace(self._request("enrol", 1, 0), accepted=0, version="", oldest=0)  # nothing of anybody's
        requests = {key: replace(asked, id=secrets.token_hex(8)) for key in strangers.values()}

        def heard(key: str, answer: Message | str) -> bool:
            name = fingerprint(key)
            if isinstance(answer, str):
                self.told(f"client {name[:16]} gave no answer: {visible(answer[:200])}")
                return True
            try:
                rows = self._declaration(requests[key], answer)
            except MessageError as error:
                self._tries[key] = _TRIES  # what is wrong with its data will be so next time
                self.told(f"client {name[:16]} is refused: {error}")
                return True
            if rows is not None:
                self.declared[name] = rows
            return rows is not None

        for key in requests:
            self._tries[key] += 1
        messages = {key: Message(write_head(request)) for key, request in requests.items()}
        for key, why in self._collect(messages, heard).items():
            self.told(f"client {fingerprint(key)[:16]} cannot enrol: {why}")

    def _declaration(self, request: Request, answer: Message) -> dict[str, int] | None:
        """Return the rows that a client declares, by split; None for a late answer to something else."""
        reply = read_head(answer.head, Reply)
        if reply.id != request.id:
            return None
        if reply.kind != "enrolled":
            raise MessageError(_unexpected(reply))
        if reply.experiment != request.experiment:
            raise MessageError("its answer is of another experiment")
        most = self.settings.most_rows
        sound = reply.rows.keys() <= {"train", "test", "val"} and all(type(n) is int for n in reply.rows.values())
        if not sound or not all(0 <= n <= most for n in reply.rows.values()):
            raise MessageError(f"it declares {shown(reply.rows)} rows, and [federation] most_rows is {most:,}")
        if reply.rows.get("train", 0) < 1:
            raise MessageError("it declares no train rows")
        return reply.rows

    def _seat(self, here: dict[str, str]) -> None:
        """Give the free places of the roster to those who have enrolled, and make the others guests."""
        known = {member.key for member in (*self.store.members, *self.guests)}
        waiting = [name for name in here if name not in known and name in self.declared]
        free = [member for member in self.store.members if not member.key]
        for name, member in zip(waiting, free, strict=False):
            member.key, member.rows = name, self.declared[name]["train"]
        self.guests += [Member(name, self.declared[name]["train"]) for name in waiting[len(free) :]]

    def _admit(self) -> None:
        """Give free places to those who have come since."""
        free = [client for client, member in enumerate(self.store.members) if not member.key]
        here = self._online() if free else {}
        if free:
            self._enrol(here)
            self._seat(here)
        for client in free:
            if name := self.store.members[client].key:
                self._note(f"client {client}, {name[:16]}, joined late")
                self.told(self.notes[-1])

    def welcome(self) -> range:
        """Let everybody enrol who is there; return the places of the guests, behind the roster."""
        here = self._online()
        self._enrol(here)
        self._seat(here)
        first = len(self.store.members)
        return range(first, first + len(self.guests))

    def may_come(self, client: int) -> bool:
        """Return whether a member that is not there is worth waiting for."""
        member = self._member(client)
        return bool(member.key) and not member.quarantined

    def _member(self, client: int) -> Member:
        roster = self.store.members
        return roster[client] if client < len(roster) else self.guests[client - len(roster)]

    def _why_not(self, member: Member) -> str:
        """Return why a member that is not connected cannot be asked."""
        return "it was offline" if member.key else "it has not joined yet"

    # --- the protocol -------------------------------------------------------------------------------------------

    def train(self, round: int, clients: Sequence[int], shared: Tree, own: Tree) -> Trained:
        """Let the clients that are there work, until all have answered or the time is over, and judge the answers."""
        if self._gathered:
            self._admit()
            self._await_quorum(round)
        elif self.wait is not None:
            self.gather(self.wait)
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
                asked.refused[client] = _unexpected(reply)
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
        asked, online = _Asked(), self._online()
        requests, messages = dict[str, Request](), dict[str, Message]()
        known = {name.partition("/")[0] for name in self.terms.down}
        common = encode({name: part for name, part in shared.items() if name in known and name not in own})
        for place, client in enumerate(clients):
            member = self._member(client)
            if member.quarantined:
                asked.missing[client] = f"it is in quarantine, since {STRIKES} uploads in a row were refused"
            elif member.key not in online:
                asked.missing[client] = self._why_not(member)
            else:
                key = online[member.key]
                request = requests[key] = self._request(kind, round, client)
                mine = {name: tree.map(lambda x, i=place: x[i], {"": own[name]})[""] for name in own if name in known}
                messages[key] = Message(write_head(request), [*common, *encode(mine)])
        owing = self._collect(messages, lambda key, answer: self._heard(requests[key], answer, asked))
        asked.missing |= {requests[key].client: why for key, why in owing.items()}
        return asked

    def _collect(self, messages: Mapping[str, Message], heard: Callable[[str, Message | str], bool]) -> dict[str, str]:
        """Send messages by key, and wait for answers until the time is over; return who owes one, and why.

        ``heard(key, answer)`` says whether an answer ends the waiting for a client. Who has left is not waited for: one
        that is offline at two looks in a row, since its answer may come just before it leaves.
        """
        if messages:
            self.link.push(messages)
        waiting, owing, left = set(messages), dict[str, str](), set[str]()
        end = time.monotonic() + self.settings.round_timeout
        look = time.monotonic() + _LOOK
        while waiting:
            answers = self.link.pull()
            for key, answer in answers:
                if key in waiting and heard(key, answer):
                    waiting.remove(key)
            now = time.monotonic()
            if waiting and now >= look:
                gone, look = waiting - self.link.online(), now + _LOOK
                owing |= dict.fromkeys(gone & left, "it went offline before it answered")
                waiting, left = waiting - owing.keys(), gone
            if now >= end:
                break
            if waiting and not answers:
                time.sleep(self.settings.interval)
        late = f"it did not answer within {self.settings.round_timeout:g} s"
        return owing | dict.fromkeys(waiting, late)

    def _request(self, kind: str, round: int, client: int) -> Request:
        terms, member = self.terms, self._member(client)
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
            member = self._member(client)
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
            raise MessageError(_unexpected(reply))
        if not NAME.fullmatch(reply.version):
            raise MessageError("its answer names no state")
        if reply.logged.keys() != self.answers.logged or not _are_numbers(reply.logged):
            raise MessageError("it logs other values than its method does")
        for name in ("bytes_up", "bytes_down"):
            if not 0 <= reply.logged.get(name, 0) <= _MOST_BYTES:
                raise MessageError(f"it logs {shown(reply.logged[name])} as {name!r}")
        declared = self._member(client).rows
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
            raise MessageError(_unexpected(reply))
        if len(reply.scores) > _MOST_VIEWS or not all(map(self._is_score, reply.scores)):
            raise MessageError("its scores are none of its method and objective")
        declared = self.declared.get(self._member(client).key)  # not known of all after a resume
        for split, _, rows, *_ in reply.scores:
            if declared is not None and rows != declared.get(split, 0):
                raise MessageError(f"it scores {rows} {split} rows, and declared {declared.get(split, 0):,}")
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
        return named and counted and scored and told and all(map(_is_metric, metrics.values()))


def _unexpected(reply: Reply) -> str:
    """Return what to say of an answer that is not the one asked for."""
    told = visible(reply.why[:200]) or f"it answered {shown(reply.kind)}"
    return told if reply.kind == "failed" else f"it did not do what it was asked for: {told}"


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MOST_BYTES)


def _are_numbers(values: dict[str, Any]) -> bool:
    return all(len(name) <= _LONGEST_NAME and _is_number(value) for name, value in values.items())


def _is_metric(value: Any) -> bool:
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
