"""The contract suite: every check over every method, and proof that each check can fail."""

from dataclasses import dataclass, replace
from typing import final

import pytest
import torch

from bespoke.algorithms import ALGORITHMS
from bespoke.contract import CHECKS, Subject, check_method
from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm

TOLERANCE = {"pfedvmp": 1e-8}  # it squares the inverse of a Gram matrix, which costs a digit

# What is repeated at the default settings is repeated less often here: the same code, in half the time.
FEWER = {
    "fedala": {"first_passes": 3},
    "fedrep": {"head_epochs": 3},
    "pfedbred": {"prox_steps": 2},
    "pfedme": {"inner_steps": 2},
    "self_fl": {"max_steps": 12, "default_steps": 6},
} | {name: {"finetune_epochs": 2} for name in ("fedavg_ft", "fedbabu", "fedep_ft", "fedpa_ft", "qlsd_ft")}

CASES = [
    pytest.param(name, check, id=f"{name}-{check}", marks=pytest.mark.xdist_group(name))
    for name in ALGORITHMS
    for check in CHECKS
]


@pytest.mark.xdist_group("probe")
def test_tests_of_a_group_stay_together(request) -> None:
    """Else each worker would compute the trials of every method for itself."""
    if request.config.getoption("loadgroup", False):  # as xdist tells its workers
        assert request.node.nodeid.endswith("@probe")


@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name: str, check: str) -> None:
    method = replace(ALGORITHMS[name](), **FEWER.get(name, {}))
    CHECKS[check](Subject(method, tolerance=TOLERANCE.get(name, 1e-9)))


class Toy(Algorithm):
    """FedAvg in miniature, for the faulty methods below to differ from in one thing each."""

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}

    def personalize(self, local, state, down):
        return down["model"]


@dataclass(frozen=True)
class Sound(Toy):
    pass


class NotFrozen(Toy):
    """Forgets the decorator, so that its field is no hyper-parameter."""

    rate: float = 1.0


@final
@dataclass(frozen=True)
class CutsAtHalf(Toy):
    """Lets its result depend on the length of the batch, which padding changes."""

    def client_update(self, local, state, down):
        task = local.task

        def loss(w, batch):
            half = len(batch.y) // 2 + 1
            return task.loss(w, batch._replace(x=batch.x[:half], y=batch.y[:half], mask=batch.mask[:half]))

        return state, {"model": local.sgd(loss, down["model"])}


@final
@dataclass(frozen=True)
class OwnCoin(Toy):
    """Draws from torch's own generator."""

    def client_update(self, local, state, down):
        noise = tree.map(lambda p: 1e-3 * torch.randn(p.shape, dtype=p.dtype), down["model"])
        return state, {"model": tree.add(down["model"], noise)}


@final
@dataclass(frozen=True)
class FirstWins(Toy):
    """Keeps the upload that happens to come first."""

    def aggregate(self, task, server, uploads, key):
        return {"model": tree.map(lambda x: x[0], uploads.tree["model"])}


@final
@dataclass(frozen=True)
class Grows(Toy):
    """Hands back a state of another shape."""

    def client_init(self, task, params, client):
        return {"seen": torch.zeros(1, dtype=torch.float64)}

    def client_update(self, local, state, down):
        _, up = super().client_update(local, state, down)
        return {"seen": torch.zeros(2, dtype=torch.float64)}, up


@final
@dataclass(frozen=True)
class HatesSingles(Toy):
    """Divides by the number of rows beyond the first."""

    def client_update(self, local, state, down):
        share = 1.0 / (local.n - 1).to(local.task.dtype)
        return state, {"model": tree.map(lambda p: p + 0.0 * share, down["model"])}


@final
@dataclass(frozen=True)
class Leaks(Toy):
    """Declares the model private and sends it all the same."""

    private = ("model",)


@final
@dataclass(frozen=True)
class Forgets(Toy):
    """Declares private what it does not have."""

    private = ("head",)


@final
@dataclass(frozen=True)
class NoisyEvaluation(Toy):
    """Personalises with a draw that changes from call to call."""

    calls = []  # noqa: RUF012

    def personalize(self, local, state, down):
        self.calls.append(1)
        return tree.map(lambda p: p + 1e-3 * len(self.calls), down["model"])


@final
@dataclass(frozen=True)
class NewClientsGetNothing(Toy):
    """Has a NaN for whoever it does not know."""

    def tailor(self, server, clients):
        shift = torch.where(clients < 0, torch.nan, 0.0).double()
        return {"shift": shift}

    def personalize(self, local, state, down):
        return tree.map(lambda p: p + down["shift"], down["model"])


@final
@dataclass(frozen=True)
class NeverLearns(Toy):
    """Sends back what it received."""

    def client_update(self, local, state, down):
        return state, {"model": down["model"]}


@final
@dataclass(frozen=True)
class ReadsTheWidth(Toy):
    """Lets the padded width of its block into the result."""

    def client_update(self, local, state, down):
        shift = 1e-3 * len(local.labels()[1])
        return state, {"model": tree.map(lambda p: p + shift, down["model"])}


@final
@dataclass(frozen=True)
class CannotBeMapped(Toy):
    """Turns a tensor into a Python number."""

    def client_update(self, local, state, down):
        scale = 1.0 + 1e-6 * float(local.n)
        return state, {"model": tree.map(lambda p: p * scale, down["model"])}


@final
@dataclass(frozen=True)
class ReadsTheRate(Toy):
    """Turns the learning rate, which all clients share, into a Python number."""

    def client_update(self, local, state, down):
        scale = 1.0 - 1e-3 * local.lr.item()
        return state, {"model": tree.map(lambda p: p * scale, down["model"])}


@final
@dataclass(frozen=True)
class LooksOverTheFence(Toy):
    """Reaches through the desk to the whole pool."""

    def client_update(self, local, state, down):
        mean = local._strategy._rows.x.mean()
        return state, {"model": tree.map(lambda p: p + 1e-6 * mean, down["model"])}


@final
@dataclass(frozen=True)
class LooksOverTheFenceLater(Toy):
    """Does so in adaptation alone, for clients that never took part."""

    def adapt(self, local, state, down):
        local.log(seen=local._strategy._rows.x.mean())
        return state

    def client_init(self, task, params, client):
        return {"shift": torch.zeros((), dtype=task.dtype, device=task.device)}

    def personalize(self, local, state, down):
        local.log(seen=local._strategy._rows.x.mean())
        return down["model"]


def test_a_look_over_the_fence_in_evaluation_is_seen() -> None:
    with pytest.raises(AssertionError, match="change logged in evaluation/seen"):
        CHECKS["neighbours_do_not_matter"](Subject(LooksOverTheFenceLater()))


@final
@dataclass(frozen=True)
class TrainsWithoutDropout(Toy):
    """Forgets the batch's key in its loss."""

    def client_update(self, local, state, down):
        task = local.task

        def loss(w, batch):
            return task.objective.mean_loss(task.logits(w, batch.x), batch)

        return state, {"model": local.sgd(loss, down["model"])}


@final
@dataclass(frozen=True)
class SendsConstants(Toy):
    """Makes the model's constants a part of the server's state."""

    def server_init(self, task, params, num_clients, key):
        return {"model": params, "rest": dict(task.constants())}

    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"])}


@final
@dataclass(frozen=True)
class CountsClasses(Toy):
    """Needs classes, and does not say so."""

    def client_init(self, task, params, client):
        return {"seen": torch.zeros(task.num_classes, dtype=task.dtype, device=task.device)}


# What beginners write, each with the words that name the mistake.


@final
@dataclass(frozen=True)
class Swapped(Toy):
    def client_update(self, local, state, down):
        return {"model": local.sgd(local.task.loss, down["model"])}, state


@final
@dataclass(frozen=True)
class UploadOnly(Toy):
    def client_update(self, local, state, down):
        return {"model": local.sgd(local.task.loss, down["model"])}


@final
@dataclass(frozen=True)
class SendsNaN(Toy):
    def client_update(self, local, state, down):
        return state, {"model": tree.map(lambda p: p / 0.0, down["model"])}


@final
@dataclass(frozen=True)
class EditsInPlace(Toy):
    def client_update(self, local, state, down):
        down["model"]["head.bias"] += 1.0
        return state, {"model": local.sgd(local.task.loss, down["model"])}


@final
@dataclass(frozen=True)
class SendsAFloat(Toy):
    def client_update(self, local, state, down):
        return state, {"model": local.sgd(local.task.loss, down["model"]), "share": 0.5}


@final
@dataclass(frozen=True)
class PersonalizesNothing(Toy):
    def personalize(self, local, state, down):
        local.finetune(down["model"], 1)


@final
@dataclass(frozen=True)
class PredictsNothing(Toy):
    def predict(self, task, personal, x):
        task.logits(personal, x)


@final
@dataclass(frozen=True)
class ForgetsTheMean(Toy):
    def aggregate(self, task, server, uploads, key):
        return uploads.tree


@final
@dataclass(frozen=True)
class AggregatesNothing(Toy):
    def aggregate(self, task, server, uploads, key):
        tree.mean(uploads.tree, uploads.weights)


@final
@dataclass(frozen=True)
class StartsWithNothing(Toy):
    def client_init(self, task, params, client):
        pass


@final
@dataclass(frozen=True)
class LogsAVector(Toy):
    def client_update(self, local, state, down):
        local.log(share=torch.ones(3))
        return super().client_update(local, state, down)


MISTAKES = {
    PredictsNothing: "predict must return one row of outputs per example",
    ForgetsTheMean: "aggregate changes the server's names, shapes or types: did it forget the mean",
    AggregatesNothing: "aggregate must return the server's state as a dict of tensors, not None",
    StartsWithNothing: "client_init must return a state as a dict of tensors, not NoneType",
    LogsAVector: r"local.log\(share=...\) takes one number, not a tensor of shape \(3,\)",
    Swapped: r"must return \(state, upload\), in this order",
    UploadOnly: r"client_update must return \(state, upload\), not a dict",
    SendsNaN: "not finite",
    EditsInPlace: r"changes what it received in place \(model/head.bias\)",
    SendsAFloat: "'share' is a float, not a tensor",
    PersonalizesNothing: "personalize must return a personal model as a dict of tensors, not NoneType",
}


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_check_method_names_a_beginners_mistake(kind) -> None:
    with pytest.raises(AssertionError, match=MISTAKES[kind]):
        check_method(kind())


def test_a_value_of_the_desk_may_not_become_a_number_though_all_clients_share_it() -> None:
    with pytest.raises(AssertionError, match="becomes a Python number"):
        check_method(ReadsTheRate())


FAULTS = {
    "is_frozen": (NotFrozen, "frozen"),
    "answers_are_sound": (EditsInPlace, "in place"),
    "desk_values_stay_tensors": (ReadsTheRate, "becomes a Python number"),
    "loop_equals_batched": (CutsAtHalf, "differs by"),
    "loop_equals_batched_with_kept_moments": (CannotBeMapped, "mapping them failed"),
    "chunks_change_nothing": (ReadsTheWidth, "differs by"),
    "padding_changes_nothing": (ReadsTheWidth, "differs by"),
    "same_seed_same_bits": (OwnCoin, "differs by"),
    "order_does_not_matter": (FirstWins, "differs by"),
    "shapes_stay": (Grows, "names, shapes or types"),
    "awkward_clients_work": (HatesSingles, "refused"),
    "private_stays_private": (Forgets, "no such name"),
    "evaluation_changes_nothing": (NoisyEvaluation, "second evaluation"),
    "new_client_works": (NewClientsGetNothing, "not finite"),
    "neighbours_do_not_matter": (LooksOverTheFence, "change the upload"),
    "dropout_draws_in_training": (TrainsWithoutDropout, "without key=batch.key"),
    "constants_stay_at_home": (SendsConstants, "which the model keeps constant"),
    "any_objective_works": (CountsClasses, "declare needs_classes"),
    "learns": (NeverLearns, "an even guess has"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_finds_its_fault(check: str) -> None:
    faulty, words = FAULTS[check]
    with pytest.raises(AssertionError, match=words):
        CHECKS[check](Subject(faulty()))


def test_an_upload_of_what_is_private_is_stopped_by_the_library() -> None:
    with pytest.raises(ValueError, match="declares private"):
        CHECKS["private_stays_private"](Subject(Leaks()))


def test_a_check_that_failed_fails_again() -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match=r"without key=batch\.key"):
            CHECKS["dropout_draws_in_training"](Subject(TrainsWithoutDropout()))


def test_a_sound_method_of_ones_own_passes() -> None:
    assert check_method(Sound()) == list(CHECKS)


def test_a_step_that_closes_over_a_tensor_is_refused() -> None:
    @dataclass(frozen=True)
    class Closes(Toy):
        def client_update(self, local, state, down):
            anchor = down["model"]
            loss = lambda w, batch: local_loss(w, batch) + tree.sq_dist(w, anchor)  # noqa: E731
            local_loss = local.task.loss
            return state, {"model": local.sgd(loss, anchor)}

    with pytest.raises(TypeError, match="closes over the tensor 'anchor'"):
        CHECKS["loop_equals_batched"](Subject(Closes()))


def test_the_toy_federation_is_as_awkward_as_promised() -> None:
    from bespoke.contract import SIZES, toy

    pool, _, _ = toy()
    assert min(SIZES) == 1 and max(SIZES) == 32 and len(SIZES) == 7
    classes = [set(pool.y[pool.train.client(i)].tolist()) for i in range(pool.total_clients)]
    assert classes[4] == {1} and classes[2] <= {0, 1} and {0, 1, 2} in classes
    assert pool.num_clients == 7 and pool.total_clients == 8
    assert len(rng.cohort(rng.key(11), 1, 7, 4 / 7, "fixed")) == 4
