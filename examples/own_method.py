"""A method of one's own, in one file: written, checked, and run beside FedAvg on handwritten digits.

python examples/own_method.py
"""

from dataclasses import dataclass

import bespoke


@dataclass(frozen=True)
class Blend(bespoke.Algorithm):
    """Each client keeps a model of its own and predicts with a blend of it and the global one.

    The global model is FedAvg's. The own model goes on from where it was: it never sees the others' rows.
    """

    share: float = bespoke.knob(0.5, "share of the client's own model in the blend", low=0, high=1)
    private = ("own",)  # what never leaves a client

    def client_init(self, task, params, client):
        """Start the own model at the common first weights."""
        return {"own": params}

    def client_update(self, local, state, down):
        """Train both models on the client's rows; keep one and send the other."""
        own = local.sgd(local.task.loss, state["own"], tag=1)  # a tag gives a pass batches of its own
        return {"own": own}, {"model": local.sgd(local.task.loss, down["model"])}

    def adapt(self, local, state, down):
        """Give a client that never took part an own model."""
        return {"own": local.sgd(local.task.loss, down["model"], tag=1)}

    def personalize(self, local, state, down):
        """Return the blend."""
        return bespoke.tree.map(lambda a, b: self.share * a + (1 - self.share) * b, state["own"], down["model"])


def main() -> None:
    """Check the method, and compare it with FedAvg: same clients, same first weights, same cohorts."""
    passed = bespoke.check_method(Blend())
    print(f"checked: {', '.join(passed)}")
    for method in (bespoke.FedAvg(), Blend()):
        experiment = bespoke.Experiment(
            data=bespoke.DataSettings(name="digits", clients=10, alpha=0.2),
            model=bespoke.ModelSettings(name="mlp"),
            algorithm=method,
            training=bespoke.Training(rounds=5, lr=0.1),
        )
        run = bespoke.run(experiment)
        print(
            f"{type(method).__name__:8} accuracy {run.accuracy:.3f}, worst tenth {run.metric(statistic='worst10'):.3f}"
        )


if __name__ == "__main__":
    main()
