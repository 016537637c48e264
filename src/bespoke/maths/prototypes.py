"""Class prototypes: the mean feature of each class, on one client and over clients that may lack some classes.

They travel as a tree of ``prototype`` (C, d) and ``rows`` (C,), the number of rows behind each; a class without rows
has no prototype, and the values in its place are not used.
"""

import torch
from torch import Tensor

from bespoke.core.data import Batch
from bespoke.core.local import Features
from bespoke.core.objective import masked_mean
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.maths import gaussian


def none(task: Task) -> Tree:
    """Return the prototypes before any client has sent one: zeros, with no rows."""
    zeros = torch.zeros(task.num_classes, task.feature_dim, dtype=task.dtype, device=task.device)
    return {"prototype": zeros, "rows": zeros[:, 0]}


def own(features: Features, classes: int) -> Tree:
    """Return a client's own prototypes, from the features of all its rows."""
    member = gaussian.one_hot(features.y, features.mask, classes)
    zeros = features.z.new_zeros(classes, features.z.shape[1])
    return {"prototype": gaussian.class_means(features.z, member, zeros), "rows": member.sum(dim=0)}


def first_moment(features: Features, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean over rows of z in the slot of its class, (C, d), and the variance of that mean, 0-d.

    A class's slot holds its share of the rows times its mean.
    """
    z, y, mask = features
    n = mask.sum().clamp(min=1.0)
    moment = gaussian.one_hot(y, mask, classes).T @ z / n
    squares = (z.square().sum(dim=1) * mask).sum() / n
    return moment, ((squares - moment.square().sum()) / n).clamp(min=0.0)  # rounding may go below


def pull(z: Tensor, batch: Batch, prototype: Tensor, known: Tensor) -> Tensor:
    """Return the mean squared distance of z (B, d) to their class's prototype, over real rows and features: 0-d.

    A row whose class is not ``known`` (C,) adds nothing but is still counted.
    """
    distance = (z - prototype[batch.y]).square().mean(dim=1)
    return masked_mean(distance * (known[batch.y] > 0), batch.mask)


def pull_means(z: Tensor, batch: Batch, prototype: Tensor, known: Tensor) -> Tensor:
    """Return the distance of the batch's class means to their prototypes, summed over classes: 0-d.

    A class that is not ``known`` (C,) or has no real row in the batch adds nothing. Distances are rounded off below
    1e-4: where a prototype has a single owner, the two points coincide at first, and the slope of a bare distance there
    would be rounding errors scaled up to length one.
    """
    member = gaussian.one_hot(batch.y, batch.mask, len(known))
    away = gaussian.class_means(z, member, prototype) - prototype
    return ((away.square().sum(dim=1) + 1e-8).sqrt() * (known > 0) * (member.sum(dim=0) > 0)).sum()


def combine(sent: Tree, weights: Tensor, before: Tree) -> Tree:
    """Average the prototypes of K clients, sent as (K, C, d) and (K, C), by their owners' ``weights`` (K, C).

    A class that no client has keeps what it had ``before``.
    """
    share = weights.double() * (sent["rows"] > 0)
    total, rows = share.sum(dim=0)[:, None], sent["rows"].sum(dim=0)
    mean = (share[..., None] * sent["prototype"].double()).sum(dim=0) / torch.where(total > 0, total, 1.0)
    return {
        "prototype": torch.where(total > 0, mean.to(before["prototype"].dtype), before["prototype"]),
        "rows": torch.where(rows > 0, rows, before["rows"]),
    }


def nearest(z: Tensor, prototype: Tensor, known: Tensor) -> Tensor:
    """Return minus the squared distance of z (B, d) to each prototype as logits (B, C); -1e30 where not ``known``."""
    near = -(z[:, None, :] - prototype).square().sum(dim=-1)
    return torch.where(known > 0, near, torch.full_like(near, -1e30))


def nbytes(rows: Tensor, d: int, vectors: int = 1) -> Tensor:
    """Count the bytes of ``vectors`` vectors of d numbers per class present in ``rows`` (C,), and of the rows: 0-d."""
    return 4.0 * ((rows > 0).double().sum() * vectors * d + len(rows))
