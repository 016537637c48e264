"""FedPer: body and head take every step together; the body is averaged, the head is kept."""

from golden.common import ALL, BODY, BOTH, HEAD, Case, mistakes, split, train


def fedper(problem, new_head_epochs, twist=""):
    def phases(now, k, p):
        return train(now, k, p, trained=BODY if twist == "head frozen" else ALL, twist=twist)

    def fit(k, p):
        both = twist == "unseen keeps all it trained"
        epochs = 5 if twist == "unseen fits for five epochs" else new_head_epochs or None
        return train(problem, k, p, epochs, ALL if both else HEAD)

    return split(problem, phases, fit, HEAD, BODY, twist)


CASES = {
    "fedper": Case({"new_head_epochs": 4}),
    "fedper/new": Case({"new_head_epochs": 0}),
}

MISTAKES = [
    *mistakes("fedper", "other weighting", "own part not kept", "own part averaged", "head frozen", variants=BOTH),
    *mistakes(
        "fedper",
        "predicts before averaging",
        "unseen unfitted",
        "unseen keeps all it trained",
        variants=BOTH,
        late=True,
    ),
    *mistakes("fedper/new", "unseen unfitted", "unseen fits for five epochs", variants=BOTH, late=True),
    *mistakes(CASES, "no momentum", "no weight decay", variants=("momentum",)),
]
