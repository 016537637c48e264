"""pFedVMP: FedPer without its pull, its centroids and messages, awkward clients, and its paper's comparison."""

import numpy as np
import pytest
import torch
from awkward_runs import PRECISIONS, everything_finite, healthy_gap
from golden.common import COHORTS
from golden.pfedvmp import pull
from golden_runs import library, run, training
from scipy.optimize import approx_fprime
from torch.nn import functional as F
from toy import BACKENDS, data, same_bits, start, task

from bespoke.algorithms import method_class
from bespoke.algorithms.fedper import FedPer
from bespoke.algorithms.pfedvmp import PFedVMP
from bespoke.contract import CHECKS, Subject
from bespoke.core import tree
from bespoke.maths import gaussian
from bespoke.runs.experiment import experiments_folder, load

pytestmark = pytest.mark.xdist_group("pfedvmp")


def test_the_gradient_of_the_pull():
    draw = np.random.default_rng(0)
    z, y, mu, known = draw.normal(size=(7, 5)), np.arange(7) % 3, draw.normal(size=(3, 5)), np.array([1.0, 0.0, 1.0])
    value, slope = pull(z, y, mu, known)
    rows = known[y] > 0
    want = F.mse_loss(torch.from_numpy(z[rows]), torch.from_numpy(mu[y][rows])).item() * rows.mean()
    assert value == pytest.approx(want, rel=1e-12)
    by_difference = approx_fprime(z.ravel(), lambda v: pull(v.reshape(7, 5), y, mu, known)[0], 1e-7)
    assert np.abs(slope.ravel() - by_difference).max() < 1e-6 and np.abs(slope).max() > 0.01


# --- FedPer is pFedVMP without the pull -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_pull_it_is_fedper_to_the_bit(backend):
    settings = training("momentum", batch=4, epochs=2, clip=1.0)
    methods = FedPer(), PFedVMP(xi=0.0), PFedVMP(xi=1.0)
    plain, still, drawn = (run(method, settings, backend, one_block=True, cohorts=COHORTS) for method in methods)
    for r in range(3):
        assert same_bits(plain.server[r]["body"], still.server[r]["body"])
        assert plain.states[r].keys() == still.states[r].keys()
        assert all(same_bits(plain.states[r][c], still.states[r][c]) for c in plain.states[r])
        assert all(same_bits(plain.uploads[r][c]["body"], still.uploads[r][c]["body"]) for c in plain.uploads[r])
        assert plain.scores(round=r + 1) == still.scores(round=r + 1, view="personal")
    # No centroid exists in the first round, and the pull waits: the same bits; from then on others.
    assert same_bits(plain.server[0]["body"], drawn.server[0]["body"])
    assert not same_bits(plain.server[1]["body"], drawn.server[1]["body"])


def test_a_centroid_exists_once_a_class_was_met():
    ran = library("pfedvmp", "plain", "loop")
    met = np.zeros(3)
    for r, cohort in enumerate(COHORTS):
        for k in cohort:
            met = np.maximum(met, np.bincount(data().y[data().train.client(k)], minlength=3) > 0)
        assert np.array_equal(ran.server[r]["known"].numpy(), met)
    assert not ran.first["known"].any() and not ran.first["centroid"].any()


# --- the message ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bytes_of_a_message(backend):
    """What is recorded is what body, means and the smaller form of each precision take."""
    ran = library("pfedvmp", "plain", backend)
    body = tree.nbytes(task().body(start()))
    for r, cohort in enumerate(COHORTS):
        for k in cohort:
            up, recorded = ran.uploads[r][k], ran.logged[r][k]["bytes_up"]
            assert recorded == body + 4 * float(gaussian.message_floats(up["count"], 5))
            assert np.array_equal(up["count"], np.bincount(data().y[data().train.client(k)], minlength=3))
            dense = tree.nbytes({n: v for n, v in up.items() if n != "count"})
            assert recorded <= dense
    assert "precision" not in library("pfedvmp/mean", "plain", backend).uploads[0][0]
    assert not any("head" in up for round in ran.uploads for up in round.values())


def test_the_nearest_centroid_is_a_second_view():
    ran = library("pfedvmp", "plain", "loop")
    assert list(ran.views[0][0]) == ["personal", "centroid"]
    server, x = ran.server[-1], data().x[data().test.client(1)]
    z = torch.tanh(x @ server["body"]["body.weight"].T + server["body"]["body.bias"])
    nearest = torch.cdist(z, server["centroid"]).argmin(dim=1)
    assert torch.equal(ran.views[-1][1]["centroid"].argmax(dim=1), nearest)


# --- edge cases and switches ----------------------------------------------------------------------------------

AWKWARD = {"plain": PFedVMP(), "mild": PFedVMP(xi=1.0), "mean": PFedVMP(xi=1.0, aggregation="mean")}


@pytest.mark.parametrize(("backend", "dtype"), PRECISIONS)
@pytest.mark.parametrize("case", AWKWARD)
def test_awkward_clients_give_finite_numbers(case, backend, dtype):
    ran = everything_finite(AWKWARD[case], backend, dtype)
    assert ran.server[-1]["known"].tolist() == [1.0, 1.0, 1.0, 0.0]  # nobody trains on the last class
    if case == "mild" and dtype == torch.float64:
        sent = [gaussian.unpack(up["precision"], 8) for up in ran.uploads[-1].values()]
        assert torch.equal(sent[3][1], torch.eye(8, dtype=dtype))  # of one row: alpha I
        assert all(torch.equal(part[3], torch.zeros(8, 8, dtype=dtype)) for part in sent)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", AWKWARD)
def test_healthy_clients_do_not_notice_odd_ones(case, backend):
    assert healthy_gap(AWKWARD[case], backend) < 1e-8


@pytest.mark.parametrize("fields", [{"aggregation": "mean"}, {"xi": 0.0}, {"alpha": 0.1, "cut": 0.01}], ids=str)
def test_loop_equals_batched_with_every_switch(fields):
    CHECKS["loop_equals_batched"](Subject(PFedVMP(**fields), tolerance=1e-8))


# --- the comparison of its paper ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedpa_ft", "fedep_ft", "qlsd_ft", "pfedgp", "pfedbred"])
def test_the_settings_of_pfedvmps_comparison_load(name, tmp_path):
    folder = experiments_folder() / "pfedvmp" / "algorithms"
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / f"{name}.toml").write_text((folder / f"{name}.toml").read_text())
    (tmp_path / "some.toml").write_text("[training]\nrounds = 1000\nlr = 0.01\nbatch = 10\n")
    loaded, source = load(tmp_path / "some.toml", name)
    assert source == str(tmp_path / "algorithms" / f"{name}.toml")
    assert (loaded.algorithm_name, type(loaded.method)) == (name, method_class(name))
    assert loaded.training.lr == (0.05 if name == "pfedgp" else 0.01)  # its own optimiser, or the paper's for all
