"""Who takes part: the server's members, how it waits for them, and how clients that it does not know enrol."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from bespoke.errors import UserError, shown, visible
from bespoke.network.ledger import Ledger, Member, fingerprint
from bespoke.network.messages import Message, MessageError, Reply, Request, read_head, write_head
from bespoke.network.settings import FederationSettings

_LOOK = 2.0  # seconds between two looks at who is connected, while answers are awaited
_TRIES, _ENROL = 3, 60.0  # to enrol a client that stays connected; seconds for its answer


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


class Roster:
    """The members of a federation, by place, behind a link; those who come when it is full are guests."""

    def __init__(
        self,
        experiment: str,
        ledger: Ledger,
        link: Link,
        settings: FederationSettings,
        wait: float | None = None,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Begin with the members in the ``ledger``; ``experiment`` is what messages call it.

        The first round waits so many seconds for all members, and each for a quorum of them; None: for nobody. ``told``
        is called with lines on who is there.
        """
        self.experiment, self.ledger, self.link, self.settings = experiment, ledger, link, settings
        self.wait, self.told = wait, told
        self.guests: list[Member] = []  # new clients, behind all others
        self.declared: dict[str, dict[str, int]] = {}  # rows by split, of those who enrolled, by fingerprint
        self._gathered = False
        self._tries: dict[str, int] = {}  # to enrol those who are connected, by key

    def ready(self, round: int) -> list[str]:
        """Wait for whoever a round needs; return notes on who has joined."""
        if self._gathered:
            found = self._admit()
            self._await_quorum(round)
            return found
        if self.wait is not None:
            self.gather(self.wait)
        return []

    def gather(self, wait: float) -> None:
        """Wait until every place of the roster is taken and its member is there, or for the quorum if it takes long.

        Free places go to those who are there then, in the order of their public keys.
        """
        end, roster, self._gathered = time.monotonic() + wait, self.ledger.members, True
        here, lacking = dict[str, str](), -1
        while True:
            here = self.online()
            free, known = sum(not member.key for member in roster), self._known()
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
            self.told(f"client {client}{rows}: {'here' if member.key in here else why_absent(member)}")

    def _await_quorum(self, round: int) -> None:
        """Wait until a quorum of the roster is there; end the run, which can be resumed, if it takes too long."""
        quorum, wait = self.settings.quorum, self.wait or 0.0
        end, said = time.monotonic() + wait, False
        while True:
            here = self.online()
            there = sum(member.key in here and not member.quarantined for member in self.ledger.members)
            if there >= quorum:
                return
            if time.monotonic() >= end:
                raise UserError(
                    f"round {round} cannot begin: {there} of {len(self.ledger.members)} clients are there after "
                    f"{wait:g} s, and the quorum is {quorum}; all before it is saved: start the clients and resume"
                )
            if not said:
                self.told(f"round {round} waits for a quorum of {quorum} clients: {there} are there")
            said = True
            time.sleep(self.settings.interval)

    def online(self) -> dict[str, str]:
        """Return the keys of those who are connected, by fingerprint, in the order of the keys."""
        keys = sorted(self.link.online())
        self._tries = {key: self._tries.get(key, 0) for key in keys}
        return {fingerprint(key): key for key in keys}

    def _enrol(self, here: dict[str, str]) -> None:
        """Ask strangers for their rows; one that is silent holds the others up for a minute at most, three times."""
        known = self._known() | self.declared.keys()
        strangers = {name: key for name, key in here.items() if name not in known and self._tries[key] < _TRIES}
        about = self.experiment, self.ledger.federation
        requests = {key: Request("enrol", secrets.token_hex(8), *about) for key in strangers.values()}
        failed = dict[str, str]()

        def heard(key: str, answer: Message | str) -> bool:
            name = fingerprint(key)
            if isinstance(answer, str):
                failed[key] = visible(answer[:200])
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
        failed |= self.exchange(messages, heard, min(_ENROL, self.settings.round_timeout))
        for key, why in failed.items():
            self.told(f"client {fingerprint(key)[:16]} could not enrol: {why} (try {self._tries[key]} of {_TRIES})")

    def _declaration(self, request: Request, answer: Message) -> dict[str, int] | None:
        """Return the rows that a client declares, by split; None for a late answer to something else."""
        reply = read_head(answer.head, Reply)
        if reply.id != request.id:
            return None
        if reply.kind != "enrolled":
            raise MessageError(unexpected(reply))
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
        known = self._known()
        waiting = [name for name in here if name not in known and name in self.declared]
        free = [member for member in self.ledger.members if not member.key]
        guests = [Member() for _ in waiting[len(free) :]]
        self.guests += guests
        for name, member in zip(waiting, [*free, *guests], strict=False):
            rows = self.declared[name]
            member.key, member.rows = name, rows["train"]
            member.test, member.val = rows.get("test", 0), rows.get("val", 0)

    def _known(self) -> set[str]:
        """Return the fingerprints of members and guests."""
        return {member.key for member in (*self.ledger.members, *self.guests)}

    def _admit(self) -> list[str]:
        """Give free places to those who have come since; return notes on them."""
        free = [client for client, member in enumerate(self.ledger.members) if not member.key]
        if free:
            self.welcome()
        came = {client: self.ledger.members[client].key for client in free if self.ledger.members[client].key}
        notes = [f"client {client}, {name[:16]}, joined late" for client, name in came.items()]
        for note in notes:
            self.told(note)
        return notes

    def welcome(self) -> range:
        """Let everybody enrol who is there; return the places of the guests, behind the roster."""
        here = self.online()
        self._enrol(here)
        self._seat(here)
        first = len(self.ledger.members)
        return range(first, first + len(self.guests))

    def may_come(self, client: int) -> bool:
        """Return whether a member that is not there is worth waiting for."""
        member = self.member(client)
        return bool(member.key) and not member.quarantined

    def member(self, client: int) -> Member:
        """Return the member at a place, or the guest behind all places."""
        roster = self.ledger.members
        return roster[client] if client < len(roster) else self.guests[client - len(roster)]

    def exchange(
        self, messages: Mapping[str, Message], heard: Callable[[str, Message | str], bool], seconds: float
    ) -> dict[str, str]:
        """Send messages by key, and wait so many seconds for answers; return who owes one, and why.

        ``heard(key, answer)`` says whether an answer ends the waiting for a client. Who has left is not waited for: one
        that is offline at two looks in a row, since its answer may come just before it leaves.
        """
        if messages:
            self.link.push(messages)
        waiting, owing, left = set(messages), dict[str, str](), set[str]()
        end = time.monotonic() + seconds
        look = time.monotonic() + _LOOK
        while waiting:
            answers = self.link.pull()
            for key, answer in answers:
                if key in waiting and heard(key, answer):
                    waiting.remove(key)
            now = time.monotonic()
            if waiting and now >= look:
                gone, look = waiting - self.link.online(), now + _LOOK
                owing |= dict.fromkeys(gone & left, "it went offline during its work")
                waiting, left = waiting - owing.keys(), gone
            if now >= end:
                break
            if waiting and not answers:
                time.sleep(self.settings.interval)
        return owing | dict.fromkeys(waiting, f"it did not answer within {seconds:g} s")


def why_absent(member: Member) -> str:
    """Return why a member that is not connected cannot be asked."""
    return "it was offline" if member.key else "it has not joined yet"


def unexpected(reply: Reply) -> str:
    """Return what to say of an answer that is not the one asked for."""
    told = visible(reply.why[:200]) or f"it answered {shown(reply.kind)}"
    return told if reply.kind == "failed" else f"it did not do what it was asked for: {told}"
