"""One training, several views: a fine-tuned method's second view is the method without fine-tuning, to the bit."""

import pytest
from small_runs import experiment

import bespoke
from bespoke.algorithms import ALGORITHMS

TUNED = {
    "fedavg": ALGORITHMS["fedavg_ft"](),
    "fedpa": ALGORITHMS["fedpa_ft"](),
    "fedep": ALGORITHMS["fedep_ft"](),
    "qlsd": ALGORITHMS["qlsd_ft"](),
    "fedprox": bespoke.FedProx(finetune_epochs=1, finetune_part="head"),
    "moon": bespoke.MOON(finetune_epochs=1),
    "fedavgm": bespoke.FedOpt(finetune_epochs=1),
    "scaffold": bespoke.Scaffold(finetune_epochs=1),
    "feddyn": bespoke.FedDyn(finetune_epochs=1),
}


def numbers(algorithm, backend):
    """What was recorded of each client, split and round, by view, in the order of the views."""
    data = {"new_clients": 1, "validation": 0.1}
    spec = experiment(algorithm, data=data, model={"name": "mlp", "hidden": 8}, evaluation={"every": 1}, momentum=0.5)
    run = bespoke.run(spec, backend=backend, device="cpu")
    found = {}
    for line in run.folder.clients():
        found.setdefault(line["view"], []).append([line[key] for key in ("round", "client", "split", "metrics")])
    assert run.summary["headline"] == next(iter(found))
    return found


@pytest.mark.parametrize("backend", ["loop", "batched"])
@pytest.mark.parametrize("name", TUNED)
def test_the_global_view_of_a_fine_tuned_method_is_the_method_without_fine_tuning(name, backend):
    plain, tuned = (numbers(algorithm, backend) for algorithm in (ALGORITHMS[name](), TUNED[name]))
    assert list(plain) == ["personal"] and list(tuned) == ["personal", "global"]
    assert tuned["global"] == plain["personal"]
    changed = [own != common for own, common in zip(tuned["personal"], tuned["global"], strict=True)]
    assert len(changed) == 3 * 6 * 2 and sum(changed) > len(changed) / 2
