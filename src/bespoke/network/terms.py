"""What the server and its clients have in common before the first message, and the layouts that follow from it."""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bespoke.clients.work import Work, clock, desk_alone
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import Transform
from bespoke.core.inputs import InputContract
from bespoke.core.settings import Training
from bespoke.core.task import Task, arithmetic
from bespoke.core.tree import Tree
from bespoke.engine.rows import ClientRows
from bespoke.network.messages import Layout, layout_of

ROWS = 4  # of a made-up client, each of another class where there are so many


@dataclass(frozen=True)
class Terms:
    """An experiment as server and clients both have it."""

    experiment: str  # its hash
    algorithm: Algorithm
    task: Task
    params: Tree  # the common initial parameters
    training: Training
    seed: int
    num_clients: int  # the training population

    @functools.cached_property
    def root(self) -> Tensor:
        """The root key (2,)."""
        return rng.key(self.seed, self.task.device)

    @functools.cached_property
    def first_down(self) -> Tree:
        """What the first client receives before the first round."""
        return self.sent_first(0)

    def sent_first(self, client: int) -> Tree:
        """Return what a client receives before the first round; -1 is a new one."""
        key, ids = rng.stream(self.root, rng.SERVER), torch.tensor([client], device=self.task.device)
        server = self.algorithm.server_init(self.task, self.params, self.num_clients, key)
        own = self.algorithm.tailor(server, ids)
        return self.algorithm.broadcast(server) | tree.map(lambda leaf: leaf[0], own)

    @functools.cached_property
    def down(self) -> Layout:
        """The layout of what a client receives."""
        return layout_of(self.first_down)


@dataclass(frozen=True)
class Answers:
    """What every upload of a method looks like."""

    up: Layout
    logged: dict[str, float]  # what is logged beside it, and the made-up client's values


def rows_of(
    task: Task, x: Tensor, y: Tensor, extra: Tree | None = None, transform: Transform | None = None
) -> ClientRows:
    """Return the rows of a client that holds x (n, ...) and y (n,) or (n, T) itself, as its task takes them."""
    x, y = (t.to(task.device, task.dtype if t.is_floating_point() else t.dtype) for t in (x, y))
    rows, n = torch.arange(len(x), device=task.device), torch.tensor(len(x), device=task.device)
    return ClientRows(x, y, rows, n, tree.to(extra or {}, task.device), transform, task.dtype)


def made_up(
    task: Task, contract: InputContract, extra: Tree | None = None, transform: Transform | None = None
) -> ClientRows:
    """Return a few rows in the form of the clients' data, for a dry run: noise, or zeros where x is tokens."""
    shape, dtype = (ROWS, *contract.shape), getattr(torch, contract.dtype)
    x = torch.zeros(shape, dtype=dtype)
    if dtype != torch.int64:
        noise = rng.normal(rng.key(0), shape)
        x = (noise * 64 + 128).clamp(0, 255).to(dtype) if dtype == torch.uint8 else noise.to(dtype)
    if task.objective.classes:
        y = torch.arange(ROWS) % task.num_outputs
    else:
        y = torch.zeros((ROWS, task.num_outputs) if task.num_outputs > 1 else (ROWS,))
    return rows_of(task, x, y, extra, transform)


def dry_run(terms: Terms, rows: ClientRows) -> Answers:
    """Return the form of a client's answers: that of a made-up client's, which does a short round with these rows."""
    task, training = terms.task, terms.training
    work, short = Work(terms.algorithm, task), replace(training, epochs=1, steps=min(training.steps, 1))
    key, time = rng.stream(terms.root, rng.TRAIN), clock(task, training, 1)
    with torch.no_grad(), arithmetic(task.precision):
        state = work.first(terms.params, torch.zeros((), dtype=torch.int64, device=task.device))
        local = desk_alone(task, short, rows, len(rows.rows), key, time, {})
        out = work.update(local, {}, state, terms.first_down)
    return Answers(layout_of(out["up"]), {name: float(value) for name, value in out["logged"].items()})
