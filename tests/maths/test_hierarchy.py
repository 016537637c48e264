"""The closed forms of the two-level Gaussian, against linear algebra and draws."""

import numpy as np
import pytest

from bespoke.data import federate_data
from bespoke.data.settings import DataSettings
from bespoke.maths.hierarchy import estimates, expected_errors, references

DRAW = np.random.default_rng(4)
WITHIN = DRAW.uniform(0.005, 0.5, 7)
Z = DRAW.normal(size=7)
BETWEEN = [1e-3, 0.1, 1.0, 10.0]


def covariance(between):
    """Of all theta and z, jointly (14, 14), around theta_0."""
    theta = between * np.eye(7)
    return np.block([[theta, theta], [theta, theta + np.diag(WITHIN)]])


def posterior_mean(between):
    """E[theta | z] by conditioning, with a prior on theta_0 so wide that it says nothing."""
    joint = covariance(between) + 1e7
    return joint[:7, 7:] @ np.linalg.solve(joint[7:, 7:], Z)


def under_the_papers_postulate(between):
    """For each client theta_0 by weighted least squares, as if its own theta were theta_0."""
    found = []
    for m in range(7):
        scale = 1.0 / np.sqrt(np.where(np.arange(7) == m, WITHIN, between + WITHIN))
        found.append(np.linalg.lstsq(scale[:, None], scale * Z, rcond=None)[0][0])
    return np.array(found)


@pytest.mark.parametrize("between", BETWEEN)
def test_the_estimates_are_those_of_linear_algebra(between):
    found = estimates(Z, WITHIN, between)
    assert np.abs(found["local"] - Z).max() < 1e-15
    assert np.abs(found["paper"] - under_the_papers_postulate(between)).max() < 1e-12
    assert np.abs(found["bayes"] - posterior_mean(between)).max() < 1e-5


@pytest.mark.parametrize("between", BETWEEN)
def test_the_expected_errors_follow_from_the_covariance(between):
    """An estimate is a matrix times z, so its error has a covariance; rows sum to 1, so theta_0 does not matter."""
    expected = expected_errors(WITHIN, between)
    for name in expected:
        matrix = np.stack([estimates(unit, WITHIN, between)[name] for unit in np.eye(7)], axis=1)
        assert np.abs(matrix.sum(axis=1) - 1.0).max() < 1e-12
        error = np.concatenate([-np.eye(7), matrix], axis=1)
        assert np.diag(error @ covariance(between) @ error.T) == pytest.approx(expected[name], rel=1e-10)
    assert (expected["bayes"] <= np.minimum(expected["local"], expected["paper"])).all()


def test_the_numbers_of_equal_clients():
    """Twenty clients: where they differ much more than they scatter, equation (3) is worse than being alone."""
    found = {
        (between, within): {name: round(e[0], 4) for name, e in expected_errors(np.full(20, within), between).items()}
        for between, within in ((0.01, 1.0), (1.0, 0.1), (1.0, 0.01), (1.0, 1.0))
    }
    assert found[0.01, 1.0] == {"local": 1.0, "paper": 0.0595, "bayes": 0.0594}
    assert found[1.0, 0.1] == {"local": 0.1, "paper": 0.4378, "bayes": 0.0914}
    assert found[1.0, 0.01] == {"local": 0.01, "paper": 0.0335, "bayes": 0.0099}
    assert found[1.0, 1.0] == {"local": 1.0, "paper": 0.9138, "bayes": 0.525}


@pytest.mark.parametrize("between", [0.001, 1.0])
def test_a_federations_references_are_what_the_theory_expects(between):
    pool = federate_data(DataSettings(name="synthetic_hierarchy", clients=400, between=between), 0)
    within = 1.0 / np.array(pool.train.sizes)
    expected = {name: errors.mean() for name, errors in expected_errors(within, between).items()}
    found = references(pool, between)
    assert found == pytest.approx(expected, rel=0.15)
    assert found["bayes"] < min(found["local"], found["paper"]) * 1.02
    assert (found["paper"] > found["local"]) == (between == 1.0)


def test_one_client_is_alone():
    assert {name: e[0] for name, e in estimates(Z[:1], WITHIN[:1], 1.0).items()} == pytest.approx(
        dict.fromkeys(("local", "paper", "bayes"), Z[0])
    )
