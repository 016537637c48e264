"""The server's side of a real federation: enrol the members, run the experiment, let every member finish."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bespoke.core.data import FederatedData, Rows
from bespoke.errors import UserError
from bespoke.network.clients import NetworkClients
from bespoke.network.ledger import Ledger, Member
from bespoke.network.roster import Link
from bespoke.network.terms import dry_run
from bespoke.records import FEDERATION, RunFolder
from bespoke.runs.agreement import agreement
from bespoke.runs.api import DEFAULTS, ignored
from bespoke.runs.execution import Options, execute
from bespoke.runs.experiment import Experiment
from bespoke.runs.federation import Federation
from bespoke.runs.folder import check_free
from bespoke.runs.identity import SIZES
from bespoke.runs.progress import shown
from bespoke.runs.results import Run


def serve(
    experiment: Experiment,
    link: Link,
    out: str | Path,
    *,
    resume: bool = False,
    wait: float = 600.0,
    progress: bool = True,
    told: Callable[[str], None] = print,
    device: str = "cpu",
) -> Run:
    """Enrol the members that the link shows, run the experiment over it and let every member finish; return the run.

    It begins when all clients of ``[data] clients`` are there, or a quorum after ``wait`` seconds. Every round is a
    checkpoint in the folder ``out``; with ``resume`` the run there goes on, with the members that it began with.
    ``told`` is called with lines on who is there.
    """
    agreed, evaluation = agreement(experiment, device), experiment.evaluation
    folder = RunFolder(Path(out))
    if folder.path.exists():
        check_free(folder, resume)  # before anybody is waited for
    clients = NetworkClients(
        agreed.terms,
        dry_run(agreed.terms, agreed.rows),
        Ledger([Member() for _ in range(agreed.pool.num_clients)]),
        link,
        adapt_rounds=evaluation.adapt_rounds,
        adapt_epochs=evaluation.adapt_epochs,
        settings=experiment.federation,
        wait=wait,
        told=told,
    )
    clients.notes += ignored(experiment)
    if resume and (folder.path / FEDERATION).exists():
        pool, described = _recorded(agreed.pool, folder)
        for client, key in enumerate(described["roster"]):  # who are waited for once the checkpoint is read
            clients.roster.declared[key] = {split: getattr(pool, split).sizes[client] for split in SIZES}
    else:
        clients.roster.gather(wait)
        pool, described = _declared(agreed.pool, clients)
    parts = experiment.method, agreed.terms.task, agreed.terms.params, clients
    sizes = pool.num_clients, pool.total_clients
    federation = Federation(*parts, *sizes, experiment.training, evaluation, experiment.seed)
    chosen: Options = DEFAULTS | {"resume": resume, "checkpoint_every": 1}
    with shown(experiment, progress) as callback:
        run = execute(experiment, federation, pool, described, out, chosen | {"callbacks": [callback]})
    run.notes += _finish(run, clients, told)
    return run


def _declared(pool: FederatedData, clients: NetworkClients) -> tuple[FederatedData, dict[str, Any]]:
    """Return the federation with the numbers of rows that its members declared, and who they are."""
    roster = [member.key for member in clients.store.members]
    rows = [clients.roster.declared.get(key, {}) for key in roster]
    return _sized(pool, {split: [own.get(split, 0) for own in rows] for split in SIZES}), {"roster": roster}


def _recorded(pool: FederatedData, folder: RunFolder) -> tuple[FederatedData, dict[str, Any]]:
    """Return the federation as the run in a folder began."""
    told = folder.federation() or {}
    if len(told["names"]) != pool.num_clients:
        raise UserError(
            f"{folder.path} holds the run of {len(told['names'])} clients, and [data] clients is "
            f"{pool.num_clients}: give the experiment that the run began with"
        )
    return _sized(pool, told), {"roster": told.get("roster", [])}


def _sized(pool: FederatedData, sizes: Mapping[str, Sequence[int]]) -> FederatedData:
    none = torch.empty(0, dtype=torch.int64)
    train, val, test = (Rows(none, tuple(sizes[split])) for split in SIZES)
    return replace(pool, train=train, val=val, test=test)


def _finish(run: Run, clients: NetworkClients, told: Callable[[str], None]) -> list[str]:
    """Let members, then guests, make their models, and wait for those who are away; return notes on who has none."""
    roster = range(len(clients.store.members))
    why = _without_model(run, clients, roster)
    guests = clients.roster.welcome()
    why |= _without_model(run, clients, guests)
    everyone = len(roster) + len(guests)
    told(f"{everyone - len(why)} of {everyone} clients have their models")
    notes = [f"client {client} has made no personal model: {reason}" for client, reason in sorted(why.items())]
    for note in notes:
        told(note)
    environment = run.folder.read_json("environment.json")
    run.folder.write_json("environment.json", environment | {"notes": [*environment["notes"], *notes]})
    return notes


def _without_model(run: Run, clients: NetworkClients, left: Sequence[int]) -> dict[int, str]:
    """Let clients make their models, until all have, or the time of a round is over; return who has none, and why."""
    end, why = time.monotonic() + clients.settings.round_timeout, dict[int, str]()
    while left:
        missing, refused = clients.finish(run.last_round, left, *run.federation.down(run.server, left))
        why = {client: reason for client, reason in why.items() if client not in left} | missing | refused
        left = [client for client in missing if clients.roster.may_come(client)]
        if not left or time.monotonic() >= end:
            break
        time.sleep(clients.settings.interval)
    return why
