"""Ditto: FedAvg for w; for each client v, min F_k(v) + lam/2 |v - w_t|^2 from where v was."""

from golden.common import BOTH, Case, Outcome, mean, mistakes, predictions, train, train_near


def ditto(problem, lam, personal_epochs=0, twist=""):
    out, own, w = Outcome(), {}, problem.start
    steps = personal_epochs or problem.epochs
    strength = 0.0 if twist == "no tie" else lam
    for now, cohort in problem.rounds():
        received, parts = w, []
        for k in cohort:
            model = train(now, k, received, twist=twist)
            v = received if twist == "personal model starts at the received one" else own.get(k, problem.start)
            anchors = {
                "tied to its own old model": lambda p, v=v: v,
                "tied to what it just trained": lambda p, model=model: model,
                "tied to the first model": lambda p: problem.start,
            }
            anchor = anchors.get(twist, lambda p, received=received: received)
            own[k] = train_near(now, k, v, anchor, strength, steps)
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
        out.keep({"model": w}, {k: {"personal": v} for k, v in own.items()}, predictions(problem, personal))
    return out


CASES = {
    "ditto": Case({"lam": 0.8}),
    "ditto/epochs": Case({"lam": 1.3, "personal_epochs": 2}),
}

MISTAKES = [
    *mistakes(
        "ditto",
        "other weighting",
        "no tie",
        "tied to its own old model",
        "tied to what it just trained",
        "tied to the first model",
        "personal model starts at the received one",
        "sends the personal model",
        variants=BOTH,
    ),
    *mistakes("ditto", "unseen unfitted", "unseen starts at the first model", variants=BOTH, late=True),
    *mistakes("ditto/epochs", "no tie", variants=BOTH),
    *mistakes(CASES, "no momentum", "no weight decay", variants=("momentum",)),
]
