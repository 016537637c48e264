"""FedRep: the head on the received body, then the body under the head just fitted."""

from golden.common import ALL, BODY, BOTH, CROSSED, HEAD, Case, mistakes, some, split, train


def fedrep(problem, head_epochs, body_epochs, refit_epochs=0, twist=""):
    def phases(now, k, p):
        if twist == "joint":
            return train(now, k, p, head_epochs + body_epochs)
        if twist == "body first":
            return train(now, k, train(now, k, p, body_epochs, BODY), head_epochs, HEAD)
        velocity = {}
        trained = ALL if twist == "head phase trains the body" else HEAD
        fitted = train(now, k, p, head_epochs, trained, velocity, twist)
        if twist != "momentum leaks":
            velocity = {}
        if twist == "body under the old head":
            return train(now, k, p, body_epochs, BODY, velocity) | some(fitted, HEAD)
        trained = ALL if twist == "body phase trains the head" else BODY
        return train(now, k, fitted, body_epochs, trained, velocity, twist)

    def fit(k, p):
        return train(problem, k, p, head_epochs, HEAD)

    def refit(k, p):
        trained = ALL if twist == "the body is refitted too" else HEAD
        return train(problem, k, p, refit_epochs, trained) if refit_epochs and twist != "no refit" else p

    return split(problem, phases, fit, HEAD, BODY, twist, refit)


CASES = {
    "fedrep": Case({"head_epochs": 4, "body_epochs": 2}),
    "fedrep/refit": Case({"head_epochs": 4, "body_epochs": 2, "refit_epochs": 3}, CROSSED),
}

MISTAKES = [
    *mistakes(
        "fedrep",
        "other weighting",
        "own part not kept",
        "own part averaged",
        "joint",
        "body first",
        "body under the old head",
        "head phase trains the body",
        "body phase trains the head",
        variants=BOTH,
    ),
    *mistakes("fedrep", "predicts before averaging", "unseen unfitted", variants=BOTH, late=True),
    *mistakes("fedrep/refit", "no refit", "the body is refitted too", variants=BOTH, late=True),
    *mistakes("fedrep", "momentum leaks", "no momentum", "no weight decay", variants=("momentum",)),
]
