"""The methods' equations once more, in NumPy and SciPy alone, with gradients derived by hand.

The model is ``logits = W2 tanh(W1 x + b1) + b2`` under mean cross entropy; W1, b1 are the body and
W2, b2 the head. Every local pass uses full batches, so one epoch is one step and no order matters.

A ``twist`` replaces one term of one method by a plausible mistake. The tests use twists to show that
the comparison with the library would notice.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.special import log_softmax, softmax

Params = dict[str, np.ndarray]

BODY = ("body.weight", "body.bias")
HEAD = ("head.weight", "head.bias")


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


@dataclass
class Outcome:
    """After every round: the server, the states of those who took part, and everyone's personal model."""

    server: list[dict]
    states: list[dict]
    personal: list[list[Params]]


# --- the model ------------------------------------------------------------------------------------------------


def logits(p, x):
    return np.tanh(x @ p["body.weight"].T + p["body.bias"]) @ p["head.weight"].T + p["head.bias"]


def loss_sum(p, x, y):
    return -log_softmax(logits(p, x), axis=1)[np.arange(len(y)), y].sum()


def gradient(p, x, y):
    """Of the mean cross entropy, for all four leaves."""
    h = np.tanh(x @ p["body.weight"].T + p["body.bias"])
    error = softmax(h @ p["head.weight"].T + p["head.bias"], axis=1)
    error[np.arange(len(y)), y] -= 1.0
    error /= len(y)
    back = (error @ p["head.weight"]) * (1.0 - h * h)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(axis=0),
        "head.weight": error.T @ h,
        "head.bias": error.sum(axis=0),
    }


# --- the optimiser --------------------------------------------------------------------------------------------


def descend(problem, slope, p, steps, trained=BODY + HEAD, velocity=None, twist=""):
    """``steps`` of SGD: g = slope(p) + decay p; v = momentum v + g; p = p - lr v for the leaves ``trained``.

    ``velocity`` is v before the first step, by default zero, and is updated in place.
    """
    velocity = {} if velocity is None else velocity
    momentum = 0.0 if twist == "no momentum" else problem.momentum
    decay = 0.0 if twist == "no weight decay" else problem.decay
    for _ in range(steps - (twist == "one step less")):
        for name, g in slope(p).items():
            velocity[name] = momentum * velocity.get(name, 0.0) + g + decay * p[name]
        p = p | {name: p[name] - problem.lr * velocity[name] for name in trained}
    return p


def train(problem, client, p, steps=None, trained=BODY + HEAD, velocity=None, twist=""):
    """Local training on a client's own rows."""

    def slope(p):
        return gradient(p, problem.x[client], problem.y[client])

    return descend(problem, slope, p, steps or problem.epochs, trained, velocity, twist)


def train_near(problem, client, p, anchor, strength, steps=None, twist=""):
    """Local training with strength/2 |p - anchor|^2 added to the loss; ``anchor(p)`` gives the anchor."""

    def slope(p):
        g = gradient(p, problem.x[client], problem.y[client])
        return {name: g[name] + strength * (p[name] - anchor(p)[name]) for name in g}

    return descend(problem, slope, p, steps or problem.epochs, twist=twist)


def mean(problem, clients, parts, twist=""):
    """The mean of the clients' parts, weighted by rows or not."""
    by_rows = (problem.weighting == "samples") != (twist == "other weighting")
    n = np.array([float(len(problem.y[c])) if by_rows else 1.0 for c in clients])
    return {name: sum(w * part[name] for w, part in zip(n / n.sum(), parts, strict=True)) for name in parts[0]}


def some(p, names):
    return {name: p[name] for name in names}


# --- the methods ----------------------------------------------------------------------------------------------


def local(problem, twist=""):
    """Every client for itself, in the rounds it is drawn for; one that never was makes one pass first."""
    out, models = Outcome([], [], []), {}
    for cohort in problem.cohorts:
        for k in cohort:
            start = problem.start if twist == "starts afresh each round" else models.get(k, problem.start)
            models[k] = train(problem, k, start, twist=twist)
        personal = []
        for k in range(len(problem.x)):
            if k in models:
                personal.append(models[k])
            else:
                personal.append(problem.start if twist == "unseen untrained" else train(problem, k, problem.start))
        out.server.append({})
        out.states.append({k: {"model": p} for k, p in models.items()})
        out.personal.append(personal)
    return out


def fedavg(problem, finetune_epochs=0, finetune_part="all", finetune_lr=0.0, mu=0.0, twist=""):
    """FedAvg; FedProx with mu > 0; FedAvg-FT with finetune_epochs > 0."""
    out, w = Outcome([], [], []), problem.start
    everyone, seen = range(len(problem.x)), set()
    strength = {"no proximal term": 0.0, "mu instead of mu/2": 2.0 * mu}.get(twist, mu)
    for cohort in problem.cohorts:
        received = w
        anchors = {"anchored to the first model": lambda p: problem.start, "anchored to itself": lambda p: p}
        anchor = anchors.get(twist, lambda p, received=received: received)
        parts = [train_near(problem, k, received, anchor, strength, twist=twist) for k in cohort]
        if twist == "absent clients averaged too":
            absent = [k for k in range(problem.population) if k not in cohort]
            w = mean(problem, cohort + absent, parts + [received] * len(absent))
        else:
            w = mean(problem, cohort, parts, twist)
        trained = HEAD if (finetune_part == "head") != (twist == "fine-tunes the other part") else BODY + HEAD
        epochs = 0 if twist == "no fine-tuning" else finetune_epochs
        slower = finetune_lr and twist != "fine-tunes at the training rate"
        tuned = replace(problem, lr=finetune_lr) if slower else problem
        personal = [train(tuned, k, w, epochs, trained, twist=twist) if epochs else w for k in everyone]
        if twist == "fine-tuned model is sent":
            w = mean(problem, cohort, [personal[k] for k in cohort])
        seen |= set(cohort)
        out.server.append({"model": w})
        out.states.append({k: {} for k in seen})
        out.personal.append(personal)
    return out


def split(problem, phases, fit, kept, shared, twist=""):
    """Methods that keep one part of the model on the client and average the other.

    ``phases(k, p)`` is a round's local work; ``fit(k, p)`` readies a client that never took part.
    """
    out, own, common = Outcome([], [], []), {}, some(problem.start, shared)
    first = some(problem.start, kept)
    for cohort in problem.cohorts:
        parts = []
        for k in cohort:
            mine = first if twist == "own part not kept" else own.get(k, first)
            p = phases(k, common | mine)
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
        out.server.append({name: common})
        out.states.append({k: {kept_as: p} for k, p in own.items()})
        out.personal.append(personal)
    return out


def fedper(problem, new_head_epochs, twist=""):
    """Body and head take every step together; the body is averaged, the head is kept."""

    def phases(k, p):
        return train(problem, k, p, trained=BODY if twist == "head frozen" else BODY + HEAD, twist=twist)

    def fit(k, p):
        both = twist == "unseen keeps all it trained"
        epochs = 5 if twist == "unseen fits for five epochs" else new_head_epochs or None
        return train(problem, k, p, epochs, BODY + HEAD if both else HEAD)

    return split(problem, phases, fit, HEAD, BODY, twist)


def fedrep(problem, head_epochs, body_epochs, twist=""):
    """The head on the received body, then the body under the head just fitted."""

    def phases(k, p):
        if twist == "joint":
            return train(problem, k, p, head_epochs + body_epochs)
        if twist == "body first":
            return train(problem, k, train(problem, k, p, body_epochs, BODY), head_epochs, HEAD)
        velocity = {}
        trained = BODY + HEAD if twist == "head phase trains the body" else HEAD
        fitted = train(problem, k, p, head_epochs, trained, velocity, twist)
        if twist != "momentum leaks":
            velocity = {}
        if twist == "body under the old head":
            return train(problem, k, p, body_epochs, BODY, velocity) | some(fitted, HEAD)
        trained = BODY + HEAD if twist == "body phase trains the head" else BODY
        return train(problem, k, fitted, body_epochs, trained, velocity, twist)

    def fit(k, p):
        return train(problem, k, p, head_epochs, HEAD)

    return split(problem, phases, fit, HEAD, BODY, twist)


def lg_fedavg(problem, twist=""):
    """Body and head take every step together; the head is averaged, the body is kept."""

    def phases(k, p):
        return train(problem, k, p, trained=HEAD if twist == "body frozen" else BODY + HEAD, twist=twist)

    def fit(k, p):
        return train(problem, k, p, trained=HEAD if twist == "body frozen" else BODY + HEAD)

    return split(problem, phases, fit, BODY, HEAD, twist)


def ditto(problem, lam, personal_epochs=0, twist=""):
    """FedAvg for w; for each client v: min F_k(v) + lam/2 |v - w_t|^2 from where v was."""
    out, own, w = Outcome([], [], []), {}, problem.start
    steps = personal_epochs or problem.epochs
    strength = 0.0 if twist == "no tie" else lam
    for cohort in problem.cohorts:
        received, parts = w, []
        for k in cohort:
            model = train(problem, k, received, twist=twist)
            v = received if twist == "personal model starts at the received one" else own.get(k, problem.start)
            anchors = {
                "tied to its own old model": lambda p, v=v: v,
                "tied to what it just trained": lambda p, model=model: model,
                "tied to the first model": lambda p: problem.start,
            }
            anchor = anchors.get(twist, lambda p, received=received: received)
            own[k] = train_near(problem, k, v, anchor, strength, steps)
            parts.append(own[k] if twist == "sends the personal model" else model)
        w = mean(problem, cohort, parts, twist)
        personal = []
        for k in range(len(problem.x)):
            if k in own:
                personal.append(own[k])
            elif twist == "unseen unfitted":
                personal.append(w)
            else:
                start = problem.start if twist == "unseen starts at the first model" else w
                personal.append(train_near(problem, k, start, lambda p, w=w: w, lam, steps))
        out.server.append({"model": w})
        out.states.append({k: {"personal": v} for k, v in own.items()})
        out.personal.append(personal)
    return out
