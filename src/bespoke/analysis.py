"""What the papers show besides accuracy: features and their Gaussianity, betas, message sizes, client embeddings.

For simulations: :func:`features`, :func:`gaussianity`, :func:`norms` and :func:`embeddings` inspect clients, which no
method and no server may do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import silhouette_score
from torch import Tensor

from bespoke.clients import processes
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.maths import gaussian
from bespoke.records import FEDERATION, RunFolder
from bespoke.report import probes
from bespoke.report.charts import COLOURS, INK, new_axes, save
from bespoke.report.groups import kind
from bespoke.report.planes import plane
from bespoke.runs.federation import Federation

if TYPE_CHECKING:
    from bespoke.runs.results import Run


def gaussianity(run: Run | Federation, server: Tree | None) -> dict[str, dict[str, float]]:
    """Measure how well one Gaussian per class, with a shared covariance, fits the features (FedLDA, Fig. 1a).

    ``server`` is the state to examine: ``run.server``, a checkpoint's or a callback's; None is before the first round.
    Features come from the body that everyone receives or, if a method sends none, from each client's personal model.
    Means and covariance are those of the train rows of the whole training population: the numbers of ``train`` are in
    sample, those of ``test`` (left out if there are none) are of held-out rows, read from the pool and by no method;
    rows of a class that nobody trains on do not count. By split: ``nll``, the mean over clients of their average
    negative log likelihood, which depends on the features' scale; over all ``rows`` ``mahalanobis``, mean squared
    distance over d; ``kurtosis``, Mardia's excess.
    """
    federation = run if isinstance(run, Federation) else run.federation
    task, parts = federation.task, {"train": list[tuple[Tensor, Tensor]](), "test": list[tuple[Tensor, Tensor]]()}
    for client, body in _bodies(federation, server):
        for split, own in parts.items():
            if found := _features(federation, body, client, split):
                own.append(found)
    z, y = (torch.cat(column) for column in zip(*parts["train"], strict=True))
    member, d = gaussian.one_hot(y, torch.ones_like(z[:, 0]), task.num_classes), z.shape[1]
    mean, seen = gaussian.class_means(z, member, z.new_zeros(task.num_classes, d)), member.sum(dim=0) > 0
    rest = z - mean[y]
    cov = rest.T @ rest / len(z)  # over n, so that the mean squared distance of these rows is d but for the jitter
    level = (1e-4 * cov.trace() / d).clamp(min=1e-30)
    factor = torch.linalg.cholesky(cov + level * torch.eye(d, dtype=cov.dtype, device=cov.device))
    constant = 2 * factor.diagonal().log().sum().item() + d * math.log(2 * math.pi)

    def fit(part: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
        kept = [(z - mean[y])[seen[y]] for z, y in part if seen[y].any()]
        own = [torch.linalg.solve_triangular(factor, r.T, upper=False).square().sum(dim=0) for r in kept]
        rows = torch.cat(own)  # squared distances
        return {
            "nll": 0.5 * (sum(r.mean().item() for r in own) / len(own) + constant),
            "mahalanobis": rows.mean().item() / d,
            "kurtosis": (rows.square().mean() / rows.mean().square().clamp(min=1e-30)).item() * d / (d + 2) - 1.0,
            "rows": len(rows),
        }

    return {split: fit(part) for split, part in parts.items() if any(seen[y].any() for _, y in part)}


def _bodies(
    federation: Federation, server: Tree | None, clients: Sequence[int] | None = None
) -> Iterator[tuple[int, Tree]]:
    """Yield clients, by default the training population, with their body: everyone's, or else the personal model's.

    Without a server's state it is the body before the first round, when all models are the same.
    """
    start = server is None
    state, names = federation.start() if server is None else server, federation.task.body_names
    shared = _part(federation.algorithm.broadcast(state), names) or (_part(federation.params, names) if start else None)
    for client in range(federation.num_clients) if clients is None else clients:
        yield client, shared or _personal(federation, client, state, names)


def _features(federation: Federation, body: Tree, client: int, split: str) -> tuple[Tensor, Tensor] | None:
    """Return features (n, d) in float64 and labels (n,) of a client's rows, or None if it has none."""
    with torch.no_grad():
        read = [(federation.task.features(body, x), y) for x, y in federation.inspect().examples(client, split)]
    return (torch.cat([z for z, _ in read]).double(), torch.cat([y for _, y in read])) if read else None


def _personal(federation: Federation, client: int, server: Tree, names: Sequence[str]) -> Tree:
    """Return the parameters with these names in the client's personal model."""
    down, rounds = federation.down(server, [client]), federation.training.rounds
    found = _part(federation.inspect().personal(rounds, [client], *down)[0], names)
    if found is None:
        raise UserError(f"{type(federation.algorithm).__name__} has no personal model of the task's own parameters")
    return found


def _part(found: Tree, names: Sequence[str]) -> Tree | None:
    """Return the tree itself or a branch of it, whichever holds all these names."""
    branches = (found, *(found.get(name) for name in ("model", "body", "personal")))
    return next((branch for branch in branches if isinstance(branch, dict) and set(names) <= branch.keys()), None)


class Features(NamedTuple):
    """Features of rows of all clients of the training population."""

    vectors: NDArray[np.float64]  # (N, d)
    classes: NDArray[np.int64]  # (N,)
    clients: NDArray[np.int64]  # (N,)

    def scatter(self) -> dict[str, float]:
        """Return how the rows spread about their classes' means: between classes, and between clients in a class.

        Both are sums of squared distances over that of the rows to their class's mean: ``between_classes`` of the class
        means to the mean of all rows, ``between_clients`` of the means of a client's rows of a class to the class's.
        """
        mean = self._means(self.classes)
        own = self._means(self.classes * (int(self.clients.max()) + 1) + self.clients)
        within = float(np.square(self.vectors - mean).sum()) or float("nan")
        classes, clients = np.square(mean - self.vectors.mean(axis=0)).sum(), np.square(own - mean).sum()
        return {"between_classes": float(classes) / within, "between_clients": float(clients) / within}

    def _means(self, groups: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the mean of each row's group: (N, d)."""
        _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
        sums = np.zeros((len(counts), self.vectors.shape[1]))
        np.add.at(sums, place, self.vectors)
        return (sums / counts[:, None])[place]


def features(run: Run, split: str = "train") -> Features:
    """Return the features of all rows of a split (pFedVMP, Fig. 2), from the bodies that :func:`gaussianity` reads."""
    found = {c: _features(run.federation, body, c, split) for c, body in _bodies(run.federation, run.server)}
    own = {client: (z.cpu().numpy(), y.cpu().numpy()) for client, (z, y) in ((c, f) for c, f in found.items() if f)}
    if not own:
        raise UserError(f"no client has {split} rows, so there are no features: use another split")
    vectors, classes = (np.concatenate(column) for column in zip(*own.values(), strict=True))
    return Features(vectors, classes, np.repeat(list(own), [len(y) for _, y in own.values()]))


def probe(run: Run) -> Path:
    """Write features of a sample of train rows, and FedPCE's embeddings, into a run's folder for `bespoke report`.

    Some rows of every client of the training population, drawn by its number, through the bodies that
    :func:`gaussianity` reads; no test row. Returns the file's path, in every process.
    """
    federation, sizes = run.federation, run.pool.train.sizes
    there = [client for client in range(federation.num_clients) if sizes[client]]
    if not there:
        raise UserError("no client has train rows, so there are no features")
    width = _sampled(run, there[0], next(_bodies(federation, run.server, there[:1]))[1], 1)[0].shape[1]
    taken = probes.shares([sizes[client] for client in range(federation.num_clients)], width)
    rows = {c: _sampled(run, c, body, taken[c]) for c, body in _bodies(federation, run.server, list(taken))}
    known = _states_with(federation, "embedding")
    vectors = [state["embedding"].reshape(-1).float().cpu().numpy() for state in known.values()]
    found = probes.Probe(
        rows="train",
        round=run.last_round,
        vectors=np.concatenate([z for z, _ in rows.values()]),
        classes=np.concatenate([y for _, y in rows.values()]),
        clients=np.repeat(list(rows), [len(z) for z, _ in rows.values()]),
        embeddings=np.stack(vectors) if vectors else np.zeros((0, 1), np.float32),
        members=np.array(list(known), dtype=np.int64),
    )
    return probes.write(run.folder.path, found) if processes.first() else run.folder.path / probes.NAME


def _sampled(run: Run, client: int, body: Tree, most: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features (n, d) of some train rows of a client and their classes (n,), or (0,) where there are none."""
    task, first, parts, labels = run.federation.task, 0, [], [torch.zeros(0, dtype=torch.int64)]
    drawn = torch.from_numpy(np.sort(np.random.default_rng(client).permutation(run.pool.train.sizes[client])[:most]))
    for x, y in run.federation.inspect().examples(client, "train"):
        own = (drawn[(drawn >= first) & (drawn < first + len(x))] - first).to(x.device)
        first += len(x)
        if len(own):
            with torch.no_grad():
                parts.append(task.features(body, x[own]).flatten(1).float().cpu())
            labels += [y[own].cpu()] if task.objective.classes else []
    return torch.cat(parts).nan_to_num().numpy(), torch.cat(labels).numpy()


def _states_with(federation: Federation, name: str) -> dict[int, Tree]:
    """Return the states of clients that took part, by client, if the method keeps a value of this name in them."""
    if name not in federation.clients.sample():
        return {}
    found = {client: held["state"] for client, held in federation.inspect().states().items()}
    most = probes.NUMBERS // max(1, max(state[name].numel() for state in found.values())) if found else 0
    return dict(list(found.items())[:most])


def betas(run: Run | RunFolder) -> list[dict[str, Any]]:
    """Return one row per client of the last evaluated round: client, group, condition, kind, beta_mean, beta_cov.

    As in pFedFDA's Fig. 2. ``condition`` is the corruption of the client's images ("contrast:3"), ``kind`` its first
    part.
    """
    folder = run if isinstance(run, RunFolder) else run.folder
    last, lines = 0, dict[int, dict[str, Any]]()
    for line in folder.clients():
        if line["round"] > last:
            last, lines = line["round"], {}
        if "beta_mean" in line["logged"]:
            lines[line["client"]] = line
    if not lines:
        raise UserError(f"{folder.path} holds no betas: evaluate a run of pFedFDA")
    conditions = _conditions(folder)
    return [
        {"client": client, "group": line["group"], "condition": conditions[client], "kind": kind(conditions[client])}
        | {name: line["logged"][name] for name in ("beta_mean", "beta_cov")}
        for client, line in sorted(lines.items())
    ]


def by_kind(rows: Sequence[dict[str, Any]], value: str = "beta_mean") -> dict[str, dict[str, float]]:
    """Return the number of clients, mean and standard deviation (over n) of a value by kind of condition."""
    groups = {name: [row[value] for row in rows if row["kind"] == name] for name in sorted({r["kind"] for r in rows})}
    return {n: {"clients": len(v), "mean": float(np.mean(v)), "std": float(np.std(v))} for n, v in groups.items()}


def _conditions(folder: RunFolder) -> list[str]:
    """Return the condition of each client's images; "clean" if the records name none."""
    told = folder.federation()
    if told is None:
        raise UserError(f"{folder.path / FEDERATION} is missing; restore it or run the experiment again")
    return told.get("conditions") or ["clean"] * len(told["names"])


def parameter_counts(task: Task, with_head: Sequence[str] = ()) -> dict[str, float]:
    """Count the numbers a client sends: body, linear or Gaussian head, and the latter's overhead in percent.

    As in pFedFDA's Table 8. A Gaussian head has C d + d(d+1)/2. ``with_head`` names modules of the body to count with
    the linear head, as the paper counts MobileNet's hidden layer, though a Gaussian head on the same features needs
    it too.
    """
    sizes = {name: shape.numel() for name, shape in task.shapes.items()}
    moved = [name for name in task.body_names if name.rpartition(".")[0] in with_head]
    linear, total, d = sum(sizes[name] for name in (*task.head_names, *moved)), sum(sizes.values()), task.feature_dim
    gaussians = task.num_classes * d + d * (d + 1) // 2
    sent = {"body": total - linear, "linear": linear, "gaussian": gaussians}
    return sent | {"overhead_percent": 100 * (gaussians - linear) / total}


class Embeddings(NamedTuple):
    """One vector per client, and the condition of the client's images."""

    clients: list[int]
    vectors: NDArray[np.float64]  # (K, E)
    conditions: list[str]

    def plane(self) -> NDArray[np.float64]:
        """Return the first two principal components: (K, 2)."""
        return plane(self.vectors)

    def silhouette(self) -> float:
        """Return how well the kinds of condition separate the vectors: from -1 to 1; 0 means not at all."""
        return float(silhouette_score(self.vectors, [kind(condition) for condition in self.conditions]))


def embeddings(run: Run) -> Embeddings:
    """Return the embeddings (FedPCE, Fig. 3) of clients that took part, or their models' scales and shifts."""
    states = run.federation.inspect().states()
    taken = list(states)
    if taken and "embedding" in states[taken[0]]["state"]:
        vectors = torch.stack([states[client]["state"]["embedding"] for client in taken]).double().cpu().numpy()
    else:
        vectors = np.concatenate([layer.vectors for layer in norms(run).values()], axis=1)
    return Embeddings(taken, vectors, _conditions_of(run, taken))


def norms(run: Run) -> dict[str, Embeddings]:
    """Return scales and shifts of each norm layer (FedPCE, Fig. 1), by the layer's name, first to last.

    They are those of the personal models of the clients that took part: one vector per client.
    """
    federation, taken = run.federation, list(run.federation.inspect().states())
    names = tuple(federation.task.norm(federation.params))  # refuses a model without any
    models = [_personal(federation, client, run.server, names) for client in taken]
    found, conditions = dict[str, Embeddings](), _conditions_of(run, taken)
    for layer in dict.fromkeys(name.rpartition(".")[0] for name in names):
        own = [name for name in names if name.rpartition(".")[0] == layer]
        vectors = torch.stack([torch.cat([model[name].reshape(-1) for name in own]) for model in models])
        found[layer] = Embeddings(taken, vectors.double().cpu().numpy(), conditions)
    return found


def _conditions_of(run: Run, clients: Sequence[int]) -> list[str]:
    conditions = _conditions(run.folder)
    return [conditions[client] for client in clients]


def embedding_chart(found: Embeddings, path: str | Path) -> Path:
    """Draw the first two principal components, one dot per client coloured by kind of condition; return `path`."""
    points, kinds = found.plane(), np.array([kind(condition) for condition in found.conditions])
    subtitle = "First two principal components; one dot per client."
    figure, axes = new_axes(6.4, 4.0, "Clients by their embeddings", subtitle)
    for i, name in enumerate(sorted(set(kinds))):
        own, colour = points[kinds == name], COLOURS[i % len(COLOURS)]
        axes.scatter(own[:, 0], own[:, 1], s=26, color=colour, linewidths=0, label=name)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return save(figure, path)
