"""The shipped tables and figures: all of the papers' are there, and every run that they name can be loaded."""

import dataclasses
from functools import cache

import pytest

from bespoke.data.federate import check_settings
from bespoke.runs.experiment import load
from bespoke.tables import spec

PAPERS = {
    "pfedfda": "t1 t2 t3 t4 t5 t6 t7 t8 t9 f2 f3 f4",
    "self_fl": "t1 t2 f1a f1b f2a f2b f3 synthetic",
    "fedlda": "t1 t2 f1a f1b",
    "fedpce": "t1 t2 t3 t4 t5 f1 f3 f4",
    "pfedvmp": "t1 t2 t3 t4 t5 t6 t7 f2 f3 f4",
}
NAMES = [f"{paper}/{name}" for paper, names in PAPERS.items() for name in names.split()]
ASKED = """
fedlda_fall fedlda_level fedlda_partitions fedpac_mixing fedpce_fedbn fedpce_level fedpce_reading pfedfda_betas
pfedfda_cifar100 pfedfda_few pfedfda_pairs pfedfda_shorter pfedvmp_baselines pfedvmp_level pfedvmp_xi self_fl_rounds
self_fl_steps
"""
QUESTIONS = [f"questions/{name}" for name in ASKED.split()]
DRAWN = {"pfedfda/f3", "pfedvmp/f4"}  # from partitions, without a run
PROBED = {"gaussianity", "norms", "embeddings", "features", "hierarchy"}
PUBLISHED = {"pfedfda/t2": 84, "pfedfda/t1": 96, "pfedvmp/t1": 120, "fedlda/t1": 70, "fedpce/t2": 72, "self_fl/t1": 10}


@cache
def table(name):
    return spec.find(name)


@cache
def loaded(base, algorithm, overrides):
    experiment, _ = load(base, algorithm, overrides)
    check_settings(experiment.data)
    return experiment


def trainings(name, seed=0):
    """Return the experiment of each entry that is run, or would be if its data were at hand, without its name."""
    entries = [e for e in table(name).entries if e.cell.kind == "run" and e.base and not e.row.best_of]
    return {e.id: loaded(e.base, e.algorithm, tuple(e.overrides(seed))) for e in entries}


def test_all_tables_and_figures_of_the_papers_are_there():
    assert set(spec.listed()) == {*NAMES, *QUESTIONS}
    assert {name for name in NAMES if table(name).kind == "figure"} == {n for n in NAMES if "/t" not in n}


@pytest.mark.parametrize("name", NAMES)
def test_a_table_says_what_it_is(name):
    found = table(name)
    first = found.path.read_text().splitlines()[0]
    assert first.startswith(f"# {found.paper}") and first.endswith(".")
    assert len(found.about) > 80
    assert all(part.label for part in (*found.rows, *found.cells))


@pytest.mark.parametrize("name", [*NAMES, *QUESTIONS])
def test_every_run_of_a_table_loads_with_its_overrides_and_those_of_its_evaluation(name):
    found = trainings(name)
    assert found or not any(cell.kind == "run" for cell in table(name).cells)
    for entry in table(name).entries:
        if entry.runs and entry.cell.evaluate:
            loaded(entry.base, entry.algorithm, (*entry.overrides(0), *entry.cell.evaluate))
        if entry.cell.kind == "benchmark" and entry.base:
            load(entry.base, None, entry.overrides(0))


@pytest.mark.parametrize("name", [*NAMES, *QUESTIONS])
def test_derived_numbers_come_from_entries_that_there_are(name):
    for entry in table(name).entries:
        for cell in entry.cell.of:
            other, _, id = cell.rpartition(":")
            if entry.row.id not in entry.cell.sources:
                table(other or name).entry(f"{id}/{entry.row.id}")
        for source in entry.cell.sources.get(entry.row.id, ()):
            table(name).entry(source)
        if entry.cell.start:
            assert table(name).entry(entry.cell.start).runs


@pytest.mark.parametrize("name", NAMES)
def test_published_accuracies_are_percentages(name):
    for entry in table(name).entries:
        if entry.published is not None and entry.cell.kind == "run" and not entry.metric:
            assert 0 <= entry.published <= 100
            assert entry.published == 0 or entry.published > 1  # no share of 1
        if entry.deviation is not None:
            assert entry.published is not None and 0 <= entry.deviation < 5


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_every_printed_number_is_there(name, count):
    assert sum(entry.published is not None for entry in table(name).entries) == count


def test_some_printed_numbers():
    wanted = {
        ("pfedfda/t1", "cifar100s_25/pfedfda"): 22.7,
        ("pfedfda/t2", "cifar10_dir0.1/fedpac"): 90.8,
        ("pfedfda/t3", "cifar100_volume63/apfl"): 40.5,
        ("pfedfda/t4", "contrast/fedbabu"): 67.0,
        ("pfedfda/t5", "dir0.5_s/mb"): 37.3,
        ("pfedfda/t9", "cifar100/statistics"): 2.861,
        ("self_fl/t2", "global_e/ditto_w"): 10.23,
        ("fedlda/t1", "wrn16_2_dir/fedlda"): 90.38,
        ("fedlda/t2", "resnet18_cifar100/lg_fedavg"): 39.48,
        ("fedpce/t1", "cifar100_cl/fedpce"): 27.97,
        ("fedpce/t2", "cifar10_noise_cl/fedavg"): 14.45,
        ("pfedvmp/t1", "cifar100_dir0.3/gpfl"): 52.48,
        ("pfedvmp/t3", "cifar10_dir0.3_std/fedproto"): 15.73,
        ("pfedvmp/t6", "cifar100_dir0.3_d640/pfedvmp"): 57.19,
    }
    assert {key: table(key[0]).entry(key[1]).published for key in wanted} == wanted
    assert table("fedpce/t1").entry("cifar10_col/fedprox").deviation == 0.27


@pytest.mark.parametrize("name", [name for name in NAMES if "/t" not in name])
def test_a_figure_names_what_draws_it_and_what_it_needs(name):
    found = table(name)
    assert found.figure and not any(cell.missing for cell in found.cells)
    assert all(cell.kind == ("benchmark" if name in DRAWN else "run") for cell in found.cells)
    assert {cell.probe for cell in found.cells} == ({found.figure} if found.figure in PROBED else {""})
    if found.figure == "curves":
        assert all(experiment.evaluation.every for experiment in trainings(name).values())


def test_a_best_round_is_looked_for_among_several():
    for name in NAMES:
        experiments = trainings(name)
        for entry in table(name).entries:
            if entry.selection == "best_test" and entry.id in experiments:
                assert experiments[entry.id].evaluation.every, entry.id


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("pfedfda/t6", "pfedfda/t2"),
        ("pfedfda/f2", "pfedfda/t1"),
        ("fedlda/f1a", "fedlda/t1"),
        ("fedlda/f1b", "fedlda/t1"),
        ("self_fl/t1", "self_fl/f1b"),
        ("self_fl/f3", "self_fl/f1b"),
        ("fedpce/f1", "fedpce/t1"),
        ("fedpce/f3", "fedpce/t1"),
        ("fedpce/f4", "fedpce/t1"),
        ("pfedvmp/t3", "pfedvmp/t1"),
        ("pfedvmp/f2", "pfedvmp/t1"),
        ("pfedvmp/f3", "pfedvmp/t1"),
    ],
)
def test_what_shows_the_runs_of_another_table_needs_no_training_of_its_own(name, other):
    known = [experiment.tables() for experiment in trainings(other, seed=1).values()]
    assert all(experiment.tables() in known for experiment in trainings(name, seed=1).values())


def test_fedavg_and_fedavg_ft_are_one_training_and_seeds_are_partitions():
    found, later = trainings("pfedfda/t2"), trainings("pfedfda/t2", seed=2)
    for cell in table("pfedfda/t2").cells:
        assert found[f"{cell.id}/fedavg"] == found[f"{cell.id}/fedavg_ft"]
    assert table("pfedfda/t2").entry("cifar10_dir0.5/fedavg").view == "global"
    assert found["cifar10_dir0.5/ditto"].data.replay == 42 and later["cifar10_dir0.5/ditto"].data.replay == 44
    assert trainings("fedpce/t1", seed=2)["cifar10_col/fedbn"].data.fold == 2


def test_new_clients_are_corrupted_when_one_trained_run_is_evaluated_again():
    found = trainings("pfedfda/t4")
    by_row = {}
    for id, experiment in found.items():
        by_row.setdefault(id.partition("/")[2], []).append(experiment)
    assert all(len(own) == 12 and all(each == own[0] for each in own) for own in by_row.values())
    assert sum(bool(cell.evaluate) for cell in table("pfedfda/t4").cells) == 10
    best = {row.id: row.best_of for row in table("pfedfda/t4").rows if row.best_of}
    assert best == {"fedbabu": ("fedbabu_head", "fedbabu_all"), "fedpac": ("fedpac_head", "fedpac_all")}
    assert not table("pfedfda/t4").entry("clean/fedbabu").runs


def test_settings_of_papers_that_no_default_gives():
    fedpce = trainings("fedpce/t1")["cifar10_col/fedpce"]
    wanted = {"optimizer": "adam", "keep_optimizer": True, "weighting": "uniform", "steps": 50, "lr_final": 1e-6}
    assert {key: getattr(fedpce.training, key) for key in wanted} == wanted
    assert (fedpce.evaluation.when, fedpce.evaluation.adapt_rounds) == ("local", 200)
    fedlda = trainings("fedlda/t1")["wrn16_2_2000/fedlda"]
    assert dataclasses.replace(fedlda.data, volume=500) == trainings("fedlda/t1")["wrn16_2_500/fedlda"].data
    assert fedlda.data.clients == 20
    assert (fedlda.training.rate, fedlda.training.lr, fedlda.training.momentum) == (0.1, 0.1, 0.5)
    assert trainings("pfedfda/f4")["cifar100_e1/fedavg_ft"].method.finetune_epochs == 1
    assert trainings("pfedvmp/t1")["cifar10_dir0.3/moon"].evaluation.when == "local"
