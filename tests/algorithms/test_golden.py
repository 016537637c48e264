"""Every method against its equations in NumPy (golden/), on both backends, in float64."""

import ast
import math

import golden_runs
import numpy as np
import pytest
import toy
from golden import common, complex_step, minibatch
from golden_runs import CASES, FILE, FILES, MISTAKES, differences, grouped, library, problem
from scipy.optimize import approx_fprime

from bespoke.algorithms import ALGORITHMS, method_class

# One case of each method, and where a rate of its own takes part. FedPCE's case has a schedule and Adam already.
FURTHER = [case for case in ALGORITHMS if case != "fedpce"]
FURTHER += ["fedep/strong", "apfl/adaptive", "fedavg_ft/rate", "fedbabu/head", "fedrod/refit"]

# --- the comparison -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "variant", "backend"), [grouped(name, *run) for name, case in CASES.items() for run in case.runs]
)
def test_the_library_follows_the_equations(case, variant, backend):
    found = differences(case, variant, backend)
    assert max(found.values()) < CASES[case].tolerance, found


@pytest.mark.parametrize(
    ("case", "variant", "backend"),
    [grouped(case, *run) for case in FURTHER for run in (("cosine", "loop"), ("adam", "batched"))],
)
def test_the_library_follows_the_equations_under_a_schedule_and_with_adam(case, variant, backend):
    found = differences(case, variant, backend)
    assert max(found.values()) < CASES[case].tolerance, found


@pytest.mark.parametrize("case", [grouped(case) for case in CASES if golden_runs.on_minibatches(case)])
def test_the_library_follows_the_equations_on_minibatches(case):
    found = differences(case, "momentum", "batched", "small")
    assert max(found.values()) < CASES[case].tolerance, found


def test_every_method_has_its_equations():
    assert {case.partition("/")[0] for case in CASES} == set(ALGORITHMS)
    for case, file in FILE.items():
        assert method_class(case.partition("/")[0]).__module__ == f"bespoke.algorithms.{file}"


@pytest.mark.xdist_group("fedavg")
def test_the_runs_have_partial_participation_and_someone_who_never_took_part():
    cohorts = [row["cohort"] for row in library("fedavg", "plain", "loop").rounds()]
    absent = set(range(toy.POPULATION)) - set().union(*cohorts)
    assert len(absent) == 1
    assert len({len(c) for c in cohorts}) > 1  # not always as many
    came_back = [k for k in range(toy.POPULATION) if [k in c for c in cohorts] == [True, False, True]]
    assert came_back


def test_a_class_is_met_late_where_that_matters():
    cases = [name for name, case in CASES.items() if case.seed == common.LATE_CLASS]
    cohorts = {tuple(map(tuple, golden_runs.problem_of(case, "plain").cohorts)) for case in cases}
    assert cohorts == {((2, 3), (1, 3), (1, 2, 3))}
    classes = [set(y) for y in problem("plain").y]
    assert not classes[1] <= classes[2] | classes[3]


def test_the_recorded_minibatches_are_pairs_of_a_clients_own_rows():
    recorded = golden_runs.recorded
    for k in range(toy.POPULATION):
        assert len(recorded(1)[1, k]) == golden_runs.EPOCHS * (toy.TRAIN_ROWS[k] // 2)
        assert all(0 <= row < toy.TRAIN_ROWS[k] for pair in recorded(3)[2, k] for row in pair)
        assert len(recorded(3)[1, k]) == 3 * math.ceil(len(recorded(1)[1, k]) / 3)


# --- the comparison has teeth ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "twist", "variant", "batches", "late"),
    [pytest.param(*m, id=f"{m.case}-{m.variant}-{m.twist}", marks=grouped(m.case).marks) for m in MISTAKES],
)
def test_a_mistake_in_one_term_is_seen(case, twist, variant, batches, late):
    found, bar = differences(case, variant, "batched", batches, twist), CASES[case].noticed
    assert max(found[kind] for kind in ("server", "states", "counts", "views")) > bar, found
    if late:  # the mistake stays where it was made
        assert max(found["server"], found["states"], found["uploads"]) < CASES[case].tolerance
        assert min(found["counts"], found["views"]) > bar


# --- the equations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_equations_stand_alone(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {
        "dataclasses",
        "golden",
        "itertools",
        "numpy",
        "scipy",
        "typing",
    }


def test_the_gradient_derived_by_hand():
    given = problem("plain")
    shapes = [given.start[n].shape for n in common.ALL]

    def unpack(flat):
        parts = np.split(flat, np.cumsum([np.prod(s) for s in shapes])[:-1])
        return {n: part.reshape(s) for n, part, s in zip(common.ALL, parts, shapes, strict=True)}

    x, y = given.x[1], given.y[1]
    slope = approx_fprime(
        common.vector(given.start), lambda f: common.loss_sum(common.logits(unpack(f), x), y) / len(y), 1e-7
    )
    assert np.allclose(common.vector(common.gradient(given.start, x, y)), slope, atol=1e-6)
    assert np.abs(slope).max() > 0.1


def test_the_gradient_for_complex_numbers_is_the_same():
    given = problem("plain")
    plain, known = (fn(given.start, given.x[1], given.y[1]) for fn in (minibatch.gradient, common.gradient))
    assert max(np.abs(plain[name] - known[name]).max() for name in known) < 1e-15


def test_complex_steps_give_the_gradient_derived_by_hand():
    given = problem("plain")
    x, y = given.x[1], given.y[1]

    def loss(p):
        return complex_step.cross_entropy(complex_step.classify(p, complex_step.features(p, x)), y)

    found = complex_step.slope(loss, given.start, common.ALL)
    want = common.gradient(given.start, x, y)
    assert max(np.abs(found[n] - want[n]).max() for n in want) < 1e-14
    assert min(np.abs(want[n]).max() for n in want) > 1e-2
