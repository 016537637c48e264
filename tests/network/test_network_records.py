"""A run in its folder whose clients live elsewhere: the records of a simulation, with who was missing, and a resume."""

import json

import pytest
from network_runs import Network

import bespoke
from bespoke.network.terms import Terms
from bespoke.records import RunFolder
from bespoke.runs import api
from bespoke.runs.execution import execute
from bespoke.runs.federation import Federation

EXPERIMENT = bespoke.Experiment(
    data=bespoke.DataSettings(name="digits", clients=3, new_clients=1, validation=0.2),
    model=bespoke.ModelSettings(name="mlp", hidden=6),
    algorithm="pfedfda",
    training=bespoke.Training(rounds=4, rate=0.7, batch=64),
    evaluation=bespoke.Evaluation(every=2),
)


def over_a_network(folder, out, offline=None, **options):
    """The run of the experiment in the folder ``out``, with nodes in ``folder``; nobody is there in one round."""
    parts = api.built(EXPERIMENT, "cpu", "fp32")
    pool, task, params, _ = parts
    training, seed = EXPERIMENT.training, EXPERIMENT.seed
    terms = Terms(EXPERIMENT.hash(), EXPERIMENT.method, task, params, training, seed, pool.num_clients)
    network = Network(terms, folder, pool=pool)
    clients = network.clients()
    train = clients.train

    def unless_offline(round, *given):
        network.wire.offline = set(network.keys) if round == offline else set()
        trained, network.wire.offline = train(round, *given), set()
        return trained

    clients.train = unless_offline
    everyone = pool.num_clients, pool.total_clients
    federation = Federation(terms.algorithm, task, params, clients, *everyone, training, EXPERIMENT.evaluation, seed)
    chosen = api.DEFAULTS | {"checkpoint_every": 1, "progress": False} | options
    return execute(EXPERIMENT, federation, pool, parts.described, out, chosen)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def flat(row):
    """The numbers of a line by name, and what is no number as text."""
    found = {}

    def walk(name, value):
        if isinstance(value, dict | list):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                walk(f"{name}/{key}", each)
        else:
            found[name] = value if isinstance(value, float) else str(value)

    walk("", row)
    return found


def test_a_run_over_a_network_has_the_records_of_its_simulation_also_when_it_is_resumed(tmp_path):
    bespoke.run(EXPERIMENT, tmp_path / "loop", backend="loop", device="cpu", progress=False)
    calls = []
    begun = over_a_network(tmp_path / "nodes", tmp_path / "out", stop=lambda: calls.append(0) or len(calls) > 1)
    assert begun.last_round == 2
    done = over_a_network(tmp_path / "nodes", tmp_path / "out", resume=True)
    assert done.last_round == 4 and done.notes == []
    for name in ("rounds.jsonl", "clients.jsonl"):
        ours, theirs = lines(tmp_path / "out", name), lines(tmp_path / "loop", name)
        assert len(ours) == len(theirs)
        for one, two in zip(ours, theirs, strict=True):
            assert flat(one) == pytest.approx(flat(two), abs=1e-9), name
    environment = json.loads((tmp_path / "out" / "environment.json").read_text())
    assert environment["backend"] == "network"


def test_the_record_names_who_was_missing(tmp_path):
    done = over_a_network(tmp_path / "nodes", tmp_path / "out", offline=2)
    rounds = RunFolder(tmp_path / "out").rounds()
    cohort = rounds[1]["cohort"]
    assert [row.get("missing") for row in rounds] == [
        None,
        dict.fromkeys(map(str, cohort), "it was offline"),
        None,
        None,
    ]
    assert "no upload was accepted" in rounds[1]["note"] and rounds[1]["bytes_up"] == 0
    assert (done.summary["missing"], done.summary["rounds_refused"]) == (len(cohort), 1)
    assert done.notes == ["every upload was refused or missing in 1 of 4 rounds, which taught nothing"]
    assert done.folder.export_parquet() and (tmp_path / "out" / "rounds.parquet").exists()
    again = over_a_network(tmp_path / "nodes", tmp_path / "out", resume=True)  # who was missing needs no state
    assert again.last_round == 4
