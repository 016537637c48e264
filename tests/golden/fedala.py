"""FedALA: the head starts at own + W (received - own), with W in [0, 1] learnt by gradient steps on own rows."""

import numpy as np

from golden.common import (
    ALL,
    BOTH,
    CROSSED,
    HEAD,
    Case,
    Outcome,
    combine,
    gradient,
    mean,
    mistakes,
    predictions,
    some,
    train,
)


def mixture(own, received, mix):
    """The received model with own + W (received - own) where there are mixing weights."""
    return received | {name: own[name] + (received[name] - own[name]) * mix[name] for name in mix}


def aggregated(problem, k, state, received, mix_lr, first_passes, twist):
    """A client's mixture, its weights, and whether they were ever learnt."""
    own, mix, learnt = state["own"], state["mix"], state["learnt"]
    if all(np.array_equal(own[name], received[name]) for name in mix):
        learnt_now = learnt if twist != "learnt while nothing differs" else np.ones(())
        return mixture(own, received, mix), mix, learnt_now
    passes = 1 if learnt or twist == "one pass from the start" else first_passes
    if twist == "the first length in every round":
        passes = first_passes
    if twist == "never learnt":
        passes = 0
    for _ in range(passes):
        g = gradient(mixture(own, received, mix), problem.x[k], problem.y[k])
        away = {name: received[name] - own[name] for name in mix}
        if twist == "no difference in the slope":
            away = combine(np.ones_like, away)
        low, high = (-np.inf, np.inf) if twist == "not clipped" else (0.0, 1.0)
        mix = {name: np.clip(mix[name] - mix_lr * g[name] * away[name], low, high) for name in mix}
    return mixture(own, received, mix), mix, np.ones(())


def fedala(problem, part="head", mix_lr=1.0, first_passes=10, twist=""):
    out, w, kept = Outcome(), problem.start, {}
    names = ALL if part == "all" else HEAD
    ones = combine(np.ones_like, some(problem.start, names))
    first = {"own": problem.start, "mix": ones, "learnt": np.zeros(())}

    def settle(now, k, state, received):
        return aggregated(now, k, state, received, mix_lr, first_passes, twist)

    for now, cohort in problem.rounds():
        parts = []
        for k in cohort:
            state = kept.get(k, first)
            if twist == "mixing weights start anew":
                state = state | {"mix": ones}
            start, mix, learnt = settle(now, k, state, w)
            start = w if twist == "trains the received model" else start
            model = train(now, k, start, twist=twist)
            own = {"the mixture is kept": start, "the received model is kept": w}.get(twist, model)
            kept[k] = {"own": own, "mix": mix, "learnt": learnt}
            parts.append(model)
        w = mean(problem, cohort, parts, twist)
        personal = []
        for k in range(len(problem.x)):
            state = kept.get(k)
            if state is None:
                model = w if twist == "unseen unfitted" else train(problem, k, w)
                state = first | {"own": model}
            if twist == "predicts with its own model":
                personal.append(state["own"])
            elif twist == "predicts with the old weights":
                personal.append(mixture(state["own"], w, state["mix"]))
            else:
                personal.append(settle(problem, k, state, w)[0])
        out.keep({"model": w}, kept, predictions(problem, personal))
    return out


FIELDS = {"mix_lr": 1.5, "first_passes": 4}
CASES = {
    "fedala": Case(FIELDS),
    "fedala/all": Case(FIELDS | {"part": "all"}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "fedala",
        "one step less",
        "other weighting",
        "one pass from the start",
        "the first length in every round",
        "never learnt",
        "learnt while nothing differs",
        "no difference in the slope",
        "not clipped",
        "mixing weights start anew",
        "trains the received model",
        "the mixture is kept",
        "the received model is kept",
        variants=BOTH,
    ),
    *mistakes(
        "fedala",
        "unseen unfitted",
        "predicts with its own model",
        "predicts with the old weights",
        variants=BOTH,
        late=True,
    ),
    *mistakes("fedala/all", "never learnt", "not clipped"),
    *mistakes(CASES, "no momentum", "no weight decay", variants=("momentum",)),
]
