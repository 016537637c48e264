"""MOON: features drawn to those of the received model and away from those of the client's last one."""

import numpy as np

from golden.common import ALL, LATE_CLASS, Case, Outcome, finetuned, mean, mistakes
from golden.complex_step import classify, cross_entropy, features, fit, unit


def moon(problem, mu, tau, finetune_epochs=0, finetune_part="all", twist=""):
    out, w, previous = Outcome(), problem.start, {}
    for now, cohort in problem.rounds():
        parts = []
        for k in cohort:
            x, y, received = problem.x[k], problem.y[k], w
            last = previous.get(k)
            if twist == "random model before the first":
                last = last or {n: np.cos(7.0 * v + 1.0) for n, v in problem.start.items()}
            last = problem.start if twist == "negative is the first model" and last else last

            def loss(p, t, x=x, y=y, received=received, last=last):
                z = features(p, x)
                plain = cross_entropy(classify(p, z), y)
                if last is None or twist == "no contrast":
                    return plain
                near = np.sum(unit(z) * unit(features(received, x)), axis=-1) / tau
                far = np.sum(unit(z) * unit(features(last, x)), axis=-1) / tau
                near, far = (far, near) if twist == "attracted to the past" else (near, far)
                both = np.exp(near) + np.exp(far) + (1.0 if twist == "one pair more" else 0.0)
                return plain - mu * np.mean(np.log(np.exp(near) / both), axis=-1)

            parts.append(fit(now, loss, w, ALL, problem.epochs, twist))
        if twist != "keeps its first model":
            previous |= dict(zip(cohort, parts, strict=True))
        else:
            previous |= {k: p for k, p in zip(cohort, parts, strict=True) if k not in previous}
        w = mean(problem, cohort, parts, twist)
        if twist == "keeps the average":
            previous |= dict.fromkeys(cohort, w)
        states = {k: {"previous": p, "seen": np.ones(())} for k, p in previous.items()}
        out.keep({"model": w}, states, finetuned(problem, w, finetune_epochs, finetune_part, twist))
    return out


CASES = {
    "moon": Case({"mu": 2.0, "tau": 0.5}, seed=LATE_CLASS),
    "moon/ft": Case({"mu": 0.7, "tau": 1.3, "finetune_epochs": 2, "finetune_part": "head"}, seed=LATE_CLASS),
}

MISTAKES = [
    *mistakes(
        "moon",
        "other weighting",
        "no contrast",
        "attracted to the past",
        "one pair more",
        "random model before the first",
        "negative is the first model",
        "keeps its first model",
        "keeps the average",
    ),
    *mistakes("moon/ft", "no fine-tuning", late=True),
    *mistakes("moon", "no momentum", "no weight decay", variants=("momentum",)),
]
