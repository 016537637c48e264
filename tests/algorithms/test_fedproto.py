"""FedProto: without its pull it is local training; only prototypes travel."""

import pytest
from golden.common import LATE_CLASS
from golden_runs import minibatches, one_round, training
from toy import BACKENDS, CLASSES, HIDDEN, same_bits

from bespoke.algorithms.fedproto import FedProto
from bespoke.algorithms.local import LocalOnly
from bespoke.core import tree

pytestmark = pytest.mark.xdist_group("fedproto")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fedproto_without_its_pull_is_local_training_to_the_bit(backend):
    alone, proto = (minibatches(method, backend, LATE_CLASS) for method in (LocalOnly(), FedProto(lam=0.0)))
    for a, b in zip(alone.states, proto.states, strict=True):
        assert a.keys() == b.keys()
        assert all(same_bits(a[c]["model"], b[c]["model"]) for c in a)
    pulled = minibatches(FedProto(lam=5.0), backend, LATE_CLASS)
    assert not same_bits(alone.states[-1][3]["model"], pulled.states[-1][3]["model"])


def test_fedproto_shares_no_weights():
    trained, _, fed = one_round(FedProto(), training("plain"), "batched", who=[0, 1])
    shared, own = fed.down(fed.start(), [0, 1])
    for message in (shared, tree.map(lambda leaf: leaf[0], trained.uploads.tree)):
        assert {name: tuple(leaf.shape) for name, leaf in message.items()} == {
            "prototype": (CLASSES, HIDDEN),
            "rows": (CLASSES,),
        }
    assert own == {}
