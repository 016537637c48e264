"""LG-FedAvg: body and head take every step together; the head is averaged, the body is kept."""

from golden.common import ALL, BODY, BOTH, HEAD, Case, mistakes, split, train


def lg_fedavg(problem, twist=""):
    def phases(now, k, p):
        return train(now, k, p, trained=HEAD if twist == "body frozen" else ALL, twist=twist)

    def fit(k, p):
        return train(problem, k, p, trained=HEAD if twist == "body frozen" else ALL)

    return split(problem, phases, fit, BODY, HEAD, twist)


CASES = {"lg_fedavg": Case()}

MISTAKES = [
    *mistakes("lg_fedavg", "other weighting", "own part not kept", "own part averaged", "body frozen", variants=BOTH),
    *mistakes(
        "lg_fedavg",
        "predicts before averaging",
        "unseen unfitted",
        "unseen keeps all it trained",
        variants=BOTH,
        late=True,
    ),
    *mistakes("lg_fedavg", "no momentum", "no weight decay", variants=("momentum",)),
]
