"""What crosses the wire: uploads hold what is shared and no more, and bytes are those of the docstrings."""

from dataclasses import dataclass

import pytest
import toy
from golden.common import BODY, HEAD, LATE_CLASS
from golden.qlsd import FIELDS
from golden_runs import grouped, library, method_of, one_round, problem, start, training
from toy import BACKENDS, CLASSES, HIDDEN

from bespoke.algorithms import ALGORITHMS
from bespoke.core import tree
from bespoke.maths import langevin

B, H = (sum(start()[name].size for name in part) for part in (BODY, HEAD))
M, C, D = B + H, CLASSES, HIDDEN
GATE = 2 * D * D + 6 * D  # two linear layers with norms, from D to D or from D to 2 D


@dataclass(frozen=True)
class Sent:
    """Numbers down and up for each client; ``by_class`` of those up are for each class that the client has."""

    down: int
    up: int
    by_class: int = 0
    names: frozenset | None = None  # the upload's
    says: str = ""  # the docstring


def part(name, size, more="."):
    """The same part of the model, up and down, and nothing more."""
    return Sent(size, size, 0, frozenset({name}), f"the {name} up, the {name} down{more}")


SENT = {
    "local": Sent(0, 0, 0, frozenset(), "none."),
    "fedavg": part("model", M),
    "fedavg_ft": part("model", M),
    "fedprox": part("model", M),
    "fedper": part("body", B),
    "fedrep": part("body", B),
    "lg_fedavg": part("head", H),
    "ditto": part("model", M),
    "apfl": part("model", M),
    "pfedme": part("model", M),
    "per_fedavg": part("model", M),
    "fedrod": part("model", M, more=";"),
    "fedbabu": part("body", B),
    "fedpac": Sent(M + C * D + C, M + C + 1, by_class=2 * D),
    "fedproto": Sent(C * D + C, C, by_class=D),
    "moon": Sent(M, M),
    "fedcp": Sent(M + GATE, M + GATE),
    "gpfl": Sent(B + C * D + GATE, B + C * D + GATE),
    "fedpa": Sent(M, M),
    "fedep": Sent(2 * M + 2, M + 1),
    "fedep/sep": Sent(M + 2, M + 1),
    "qlsd/exact": Sent(M, M + 1),
    "pfedgp": Sent(B, B + 1),
    "pfedbred": Sent(M, M),
    "fedavgm": part("model", M),
    "fedadam": part("model", M),
    "feddyn": part("model", M),
    "fedala": part("model", M),
    "scaffold": Sent(2 * M, 2 * M, 0, frozenset({"model", "change"}), "the model and a control up, the model and"),
}


@pytest.mark.parametrize("case", [grouped(case) for case in SENT])
def test_bytes_are_those_of_the_docstring(case):
    sent = SENT[case]
    present = [len(set(y)) for y in problem("plain").y]
    for row in library(case, "plain", "batched").rounds():  # four bytes a number, whatever the run's precision
        assert row["bytes_down"] == 4 * sent.down * len(row["cohort"])
        assert row["bytes_up"] == sum(4 * (sent.up + sent.by_class * present[k]) for k in row["cohort"])
    assert f"Bytes per client and round: {sent.says}" in type(method_of(case)).__doc__


@pytest.mark.xdist_group("qlsd")
def test_bytes_of_quantised_numbers():
    quantised = langevin.quantised_bytes(toy.start(), FIELDS["levels"]) + 4
    for row in library("qlsd/mean", "plain", "batched").rounds():
        assert row["bytes_down"] == 4 * 2 * M * len(row["cohort"])
        assert row["bytes_up"] == quantised * len(row["cohort"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [case for case, sent in SENT.items() if sent.names is not None])
def test_uploads_hold_what_is_shared_and_no_more(case, backend):
    made = method_of(case)
    trained, states, _ = one_round(made, training("plain", epochs=1), backend)
    assert trained.uploads.tree.keys() == SENT[case].names
    leaves = set(tree.flatten(trained.uploads.tree))
    private = {path for state in states.values() for path in tree.flatten(state)}
    assert not leaves & private
    if case in ("fedper", "fedrep"):
        assert leaves == {"body/body.weight", "body/body.bias"}
        assert private == {"head/head.weight", "head/head.bias"}
    assert set(made.private) == {name for state in states.values() for name in state}


@pytest.mark.parametrize("name", ["fedpac", "fedproto"])
def test_a_message_packed_by_present_classes_has_the_counted_size(name):
    trained, _, _ = one_round(ALGORITHMS[name](), training("plain"), "loop", who=[1, 2], seed=LATE_CLASS)
    for i, counted in enumerate(trained.logged["bytes_up"]):
        up = tree.map(lambda leaf, i=i: leaf[i], trained.uploads.tree)
        by_class = {n: up.pop(n)[up["rows"] > 0] for n in ("prototype", "moment") if n in up}
        packed = [leaf.float().numpy().tobytes() for leaf in tree.leaves({**up, **by_class})]
        assert counted == len(b"".join(packed)) < tree.nbytes(trained.uploads.tree, stacked=True)
