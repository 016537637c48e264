"""SCAFFOLD: steps along g(y) - c_i + c; c_i becomes the mean of the round's gradients, or the gradient at x."""

import numpy as np

from golden.common import ALL, BOTH, CROSSED, Case, Outcome, combine, finetuned, mistakes
from golden.minibatch import gradient, sgd


def corrected_pass(problem, k, lists, x, c, own, control, twist):
    """A client's last iterate and its new control."""
    y, speed, seen = x, {}, []
    correction = combine(np.subtract, c, own)
    if twist == "correction reversed":
        correction = combine(np.negative, correction)
    if twist == "no correction":
        correction = combine(np.zeros_like, correction)
    if twist == "own control alone":
        correction = combine(np.negative, own)
    for rows in lists:
        g = gradient(y, problem.x[k][rows], problem.y[k][rows])
        seen.append(combine(np.add, g, correction) if twist == "controls of corrected gradients" else g)
        y = sgd(problem, y, combine(np.add, g, correction), speed)
    if twist == "steps are not counted":
        new = {name: sum(g[name] for g in seen) for name in ALL}
    elif twist == "option two as printed, momentum or not":
        new = combine(lambda o, c, x, y: o - c + (x - y) / (len(lists) * problem.lr), own, c, x, y)
    elif (control == "start") != (twist == "the other option"):
        new = gradient(x, problem.x[k], problem.y[k])
    else:
        new = {name: sum(g[name] for g in seen) / len(lists) for name in ALL}
    return y, new


def scaffold(problem, batches, control="steps", server_lr=1.0, finetune_epochs=0, twist=""):
    out, x, own = Outcome(), problem.start, {}
    zero = combine(np.zeros_like, x)
    c, everyone = zero, problem.population
    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        models, changes = [], []
        for k in cohort:
            old = zero if twist == "controls forgotten" else own.get(k, zero)
            y, own[k] = corrected_pass(now, k, batches(round, k, 1), x, c, old, control, twist)
            models.append(y)
            changes.append(combine(np.subtract, own[k], old))
        n = np.array([len(problem.y[k]) if twist == "weighted by rows" else 1.0 for k in cohort])
        rate = 1.0 if twist == "no server rate" else server_lr
        over = len(cohort) if twist == "the control moves all the way" else everyone
        x = {a: x[a] + rate * sum(w * (y[a] - x[a]) for w, y in zip(n / n.sum(), models, strict=True)) for a in ALL}
        c = {a: c[a] + sum(change[a] for change in changes) / over for a in ALL}
        uploads = {k: {"model": y, "change": d} for k, y, d in zip(cohort, models, changes, strict=True)}
        views = finetuned(problem, x, finetune_epochs, twist=twist)
        server = {"model": x, "control": c, "clients": np.array(float(everyone))}
        out.keep(server, {k: {"own": v} for k, v in own.items()}, views, uploads)
    return out


CASES = {
    "scaffold": Case(),
    "scaffold/start": Case({"control": "start", "server_lr": 0.7}, CROSSED),
    "scaffold/ft": Case({"finetune_epochs": 2}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "scaffold",
        "no correction",
        "correction reversed",
        "own control alone",
        "controls of corrected gradients",
        "steps are not counted",
        "the other option",
        "controls forgotten",
        "weighted by rows",
        "the control moves all the way",
        variants=BOTH,
    ),
    *mistakes("scaffold", "option two as printed, momentum or not", variants=("momentum",)),
    *mistakes("scaffold/start", "the other option", "no server rate"),
    *mistakes("scaffold/ft", "no fine-tuning", variants=("momentum",), late=True),
]
