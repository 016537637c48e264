"""What the methods' equations share, in NumPy and SciPy alone, with gradients derived by hand.

The model is ``logits = W2 tanh(W1 x + b1) + b2`` under mean cross entropy; W1, b1 are the body and W2, b2 the head.
Local passes use full batches unless a method asks for its minibatches, so one epoch is one step and no order matters.

The file of a method, named as its file in ``bespoke/algorithms``, holds

* a function of the same name, ``method(problem, ..., twist="") -> Outcome``. Its arguments are the method's own fields,
  and what the equations cannot know: the server's first state, random draws, minibatches (``golden_runs.GIVEN`` lists
  the names);
* ``CASES``, by name: the settings with which the library is compared;
* ``MISTAKES``: a ``twist`` replaces one term by a plausible mistake, and the comparison must notice.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy.special import log_softmax, softmax

Params = dict[str, np.ndarray]

BODY = ("body.weight", "body.bias")
HEAD = ("head.weight", "head.bias")
ALL = BODY + HEAD
NORM = ("norm.weight", "norm.bias")


# --- what is compared -----------------------------------------------------------------------------------------

# Runs are (variant, backend): which settings of the optimiser, and how the library runs its clients.
PLAIN = (("plain", "loop"), ("plain", "batched"))
MOMENTUM = (("momentum", "loop"), ("momentum", "batched"))
CROSSED = (("plain", "loop"), ("momentum", "batched"))

BOTH = ("plain", "momentum")

COHORTS = [[0, 1, 2], [1], [2, 0]]  # client 3 never takes part, and client 4 is new

# A seed that draws the cohorts [2, 3], [1, 3] and [1, 2, 3]: the first lack a class that client 1 brings, client 0
# never comes, and client 4 is new.
LATE_CLASS = 1055


@dataclass(frozen=True)
class Case:
    """The method's fields, and where its runs differ from those of other cases."""

    fields: dict = field(default_factory=dict)
    runs: tuple = PLAIN + MOMENTUM
    epochs: int = 3
    lr: float | None = None  # None: the variant's
    training: dict = field(default_factory=dict)  # further settings
    adapt_rounds: int = 1
    net: str = "plain"  # or with a norm layer: "group", "layer"
    seed: int = 31
    cohorts: list | None = None  # None: drawn
    tolerance: float = 1e-10
    noticed: float = 1e-4  # a mistake makes a larger difference


class Mistake(NamedTuple):
    """A twist of a case's equations, to be noticed in one run."""

    case: str
    twist: str
    variant: str
    batches: str  # "full" or "small"
    late: bool  # in prediction alone: whatever is trained stays right


def mistakes(cases, *twists, variants=("plain",), batches="full", late=False):
    """One mistake for each case (or a single one), variant and twist."""
    cases = [cases] if isinstance(cases, str) else cases
    return [Mistake(c, twist, variant, batches, late) for c in cases for variant in variants for twist in twists]


@dataclass(frozen=True)
class Problem:
    """All that a run depends on; clients from ``population`` on are met in evaluation only."""

    x: list[np.ndarray]
    y: list[np.ndarray]
    x_test: list[np.ndarray]
    y_test: list[np.ndarray]
    start: Params
    population: int
    cohorts: list[list[int]]
    epochs: int
    lr: float
    momentum: float = 0.0
    decay: float = 0.0
    weighting: str = "samples"
    adam: tuple[float, float] | None = None  # its two rates, instead of momentum
    lr_final: float | None = None  # of a cosine over the rounds

    def rounds(self):
        """Each round's problem, at its own learning rate, and its cohort; all but training runs at the first rate."""
        for done, cohort in enumerate(self.cohorts):
            last = self.lr if self.lr_final is None else self.lr_final
            cosine = np.cos(np.pi * done / len(self.cohorts))
            yield replace(self, lr=last + (self.lr - last) * (1.0 + cosine) / 2.0), cohort


@dataclass
class Outcome:
    """By round: the server; by client, uploads, states and logged numbers, and logits of its test rows by view."""

    server: list = field(default_factory=list)
    states: list = field(default_factory=list)
    views: list = field(default_factory=list)
    uploads: list = field(default_factory=list)  # these two where a method's equations say
    logged: list = field(default_factory=list)

    def keep(self, server, states, views, uploads=None, logged=None):
        """Note a round."""
        self.server.append(server)
        self.states.append(dict(states))
        self.views.append(views)
        self.uploads.append(uploads)
        self.logged.append(logged)


# --- the model ------------------------------------------------------------------------------------------------


def features(p, x):
    return np.tanh(x @ p["body.weight"].T + p["body.bias"])


def logits(p, x):
    return features(p, x) @ p["head.weight"].T + p["head.bias"]


def loss_sum(scores, y):
    """The summed cross entropy of logits."""
    return -log_softmax(scores, axis=1)[np.arange(len(y)), y].sum()


def error(scores, y):
    """Gradient of the mean cross entropy with respect to logits."""
    e = softmax(scores, axis=1)
    e[np.arange(len(y)), y] -= 1.0
    return e / len(y)


def body_gradient(p, x, dz):
    """From the gradient with respect to the features to that of the body."""
    back = dz * (1.0 - features(p, x) ** 2)
    return {"body.weight": back.T @ x, "body.bias": back.sum(axis=0)}


def gradient(p, x, y):
    """Of the mean cross entropy, for all four leaves."""
    z, e = features(p, x), error(logits(p, x), y)
    return body_gradient(p, x, e @ p["head.weight"]) | {"head.weight": e.T @ z, "head.bias": e.sum(axis=0)}


def predictions(problem, models, common=None):
    """Everyone's view, from everyone's model, and a second one if all have a common model."""
    found = [{"personal": logits(p, x)} for p, x in zip(models, problem.x_test, strict=True)]
    if common is None:
        return found
    return [view | {"global": logits(common, x)} for view, x in zip(found, problem.x_test, strict=True)]


# --- trees ----------------------------------------------------------------------------------------------------


def some(p, names):
    return {name: p[name] for name in names}


def combine(fn, *trees):
    """Leaf by leaf."""
    return {name: fn(*(t[name] for t in trees)) for name in trees[0]}


def vector(p):
    return np.concatenate([p[name].ravel() for name in ALL])


# --- the optimiser --------------------------------------------------------------------------------------------


def descend(problem, slope, p, steps, trained=ALL, velocity=None, twist=""):
    """``steps`` of the optimiser along slope(p), for the leaves ``trained``.

    ``velocity`` is what it remembers before the first step, by default nothing, and is updated in place.
    """
    velocity = {} if velocity is None else velocity
    problem = replace(problem, momentum=0.0) if twist == "no momentum" else problem
    problem = replace(problem, decay=0.0) if twist == "no weight decay" else problem
    for _ in range(steps - (twist == "one step less")):
        along = directions(problem, p, slope(p), velocity)
        p = p | {name: p[name] - problem.lr * along[name] for name in trained}
    return p


def directions(problem, p, g, velocity):
    """What a step of SGD or Adam subtracts, over lr; ``velocity`` is updated in place.

    With g = slope + decay p, SGD: v = momentum v + g. Adam: m = b1 m + (1 - b1) g, s = b2 s + (1 - b2) g^2, each over
    1 - b^t in step t, and m / (sqrt(s) + 1e-8).
    """
    along = {}
    for name, slope in g.items():
        slope = slope + problem.decay * p[name]
        if problem.adam:
            (b1, b2), (t, m, s) = problem.adam, velocity.get(name, (0, 0.0, 0.0))
            t, m, s = velocity[name] = t + 1, b1 * m + (1.0 - b1) * slope, b2 * s + (1.0 - b2) * slope**2
            along[name] = m / (1.0 - b1**t) / (np.sqrt(s / (1.0 - b2**t)) + 1e-8)
        else:
            along[name] = velocity[name] = problem.momentum * velocity.get(name, 0.0) + slope
    return along


def own_slope(problem, client):
    """The gradient of a client's mean loss, as a function of the parameters."""
    return lambda p: gradient(p, problem.x[client], problem.y[client])


def train(problem, client, p, steps=None, trained=ALL, velocity=None, twist=""):
    """Local training on a client's own rows."""
    return descend(problem, own_slope(problem, client), p, steps or problem.epochs, trained, velocity, twist)


def train_near(problem, client, p, anchor, strength, steps=None, twist=""):
    """Local training with strength/2 |p - anchor|^2 added to the loss; ``anchor(p)`` gives the anchor."""

    def slope(p):
        g = gradient(p, problem.x[client], problem.y[client])
        return {name: g[name] + strength * (p[name] - anchor(p)[name]) for name in g}

    return descend(problem, slope, p, steps or problem.epochs, twist=twist)


def path(problem, slope, p):
    """The iterates of a local pass, one after each step; momentum runs on."""
    velocity, iterates = {}, []
    for _ in range(problem.epochs):
        p = descend(problem, slope, p, 1, velocity=velocity)
        iterates.append(p)
    return iterates


def finetuned(problem, w, epochs, part="all", twist=""):
    """Everyone's views after so many epochs on its own rows and before them; one without any."""
    trained, everyone = HEAD if part == "head" else ALL, range(len(problem.x))
    steps = 0 if twist == "no fine-tuning" else epochs
    models = [train(problem, k, w, steps, trained) if steps else w for k in everyone]
    return predictions(problem, models, w if epochs else None)


def mean(problem, clients, parts, twist=""):
    """The mean of the clients' parts, weighted by rows or not."""
    by_rows = (problem.weighting == "samples") != (twist == "other weighting")
    n = np.array([float(len(problem.y[c])) if by_rows else 1.0 for c in clients])
    return {name: sum(w * part[name] for w, part in zip(n / n.sum(), parts, strict=True)) for name in parts[0]}


# --- methods that keep one part of the model on the client ----------------------------------------------------


def split(problem, phases, fit, kept, shared, twist="", refit=lambda k, p: p):
    """Keep one part of the model on the client and average the other.

    ``phases(problem, k, p)`` is a round's local work; ``fit(k, p)`` readies a client that never took part, and
    ``refit(k, p)`` anyone for prediction.
    """
    out, own, common = Outcome(), {}, some(problem.start, shared)
    first = some(problem.start, kept)
    for now, cohort in problem.rounds():
        parts = []
        for k in cohort:
            mine = first if twist == "own part not kept" else own.get(k, first)
            p = phases(now, k, common | mine)
            own[k] = some(p, kept)
            parts.append(some(p, shared))
        common = mean(problem, cohort, parts, twist)
        if twist == "own part averaged":
            blend = mean(problem, cohort, [own[k] for k in cohort])
            own |= {k: blend for k in cohort}
        personal = []
        for k in range(len(problem.x)):
            if k in own:
                p = common | own[k]
            else:
                p = common | first if twist == "unseen unfitted" else fit(k, common | first)
                if twist != "unseen keeps all it trained":
                    p = common | some(p, kept)
            personal.append(p)
        if twist == "predicts before averaging":
            for k, part in zip(cohort, parts, strict=True):
                personal[k] = part | own[k]
        name, kept_as = ("body", "head") if shared == BODY else ("head", "body")
        personal = [refit(k, p) for k, p in enumerate(personal)]
        out.keep({name: common}, {k: {kept_as: p} for k, p in own.items()}, predictions(problem, personal))
    return out
