"""Methods over a network of bytes: the same numbers as one client after another, through refusals and a resume.

All of them are in tests/flower, over a grid; here are one without an upload, one with a state, one with claims and one
whose server sends each client its own.
"""

import pytest
import toy
from eventful_runs import assert_the_same_as_a_simulation, loop, spoil
from network_runs import Network, federation, terms


@pytest.mark.parametrize("name", ["local", "ditto", "pfedvmp", "fedpac"])
def test_a_federation_over_a_network_equals_its_simulation(name, tmp_path):
    assert_the_same_as_a_simulation(name, Network(terms(name), tmp_path, spoil))


def test_the_comparison_sees_that_clients_learn():
    server, states, _ = loop("ditto")
    assert toy.gap(server, federation(terms("ditto"), None).start()) > 1e-3
    assert toy.gap(states[0], states[1]) > 1e-3
