"""Local training."""

from golden.common import BOTH, Case, Outcome, mistakes, predictions, train


def local(problem, twist=""):
    """Every client for itself, in the rounds it is drawn for; one that never was makes one pass first."""
    out, models = Outcome(), {}
    for now, cohort in problem.rounds():
        for k in cohort:
            start = problem.start if twist == "starts afresh each round" else models.get(k, problem.start)
            models[k] = train(now, k, start, twist=twist)
        personal = []
        for k in range(len(problem.x)):
            if k in models:
                personal.append(models[k])
            else:
                personal.append(problem.start if twist == "unseen untrained" else train(problem, k, problem.start))
        out.keep({}, {k: {"model": p} for k, p in models.items()}, predictions(problem, personal))
    return out


CASES = {"local": Case()}

MISTAKES = [
    *mistakes("local", "one step less", "starts afresh each round", variants=BOTH),
    *mistakes("local", "unseen untrained", variants=BOTH, late=True),
    *mistakes("local", "no momentum", "no weight decay", variants=("momentum",)),
]
