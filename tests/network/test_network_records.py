"""A run in its folder whose clients live elsewhere: the records of a simulation, with who was missing, and a resume."""

import json

import pytest
from network_runs import Network

import bespoke
from bespoke.network.clients import NetworkClients
from bespoke.network.terms import Terms
from bespoke.records import RunFolder
from bespoke.runs import api, progress
from bespoke.runs.execution import execute
from bespoke.runs.federation import Federation
from bespoke.runs.recording import validation_curve

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


def test_best_rounds_are_chosen_among_rounds_with_equal_clients(tmp_path):
    """The first evaluation lacks the client that all methods find hard, so that its value is the best."""
    found = {2: {0: 9, 1: 9}, 4: {0: 5, 1: 5, 2: 4}, 6: {0: 6, 1: 5, 2: 4}, 8: {0: 6, 1: 5, 2: 3}, 10: {1: 8}}
    folder = RunFolder.create(tmp_path)
    rows = [
        {"round": number, "cohort": [], "refused": {}, "train_loss": None, "bytes_down": 0, "bytes_up": 0}
        | {"padding_waste": 0.0, "host_breaks": 0, "logged": {}}
        for number in range(1, 11)
    ]
    for number, scores in found.items():
        missing = {str(client): "it was offline" for client in range(3) if client not in scores}
        named = {"view": "personal", "metric": "accuracy", "higher": {"accuracy": True}}
        rows[number - 1]["evaluated"] = named | ({"missing": missing} if missing else {})
        about = {"round": number, "group": "train", "view": "personal", "total": 10, "logged": {}}
        for client, right in scores.items():
            own = about | {"client": client, "metrics": {"accuracy": [right, 10]}}
            folder.append("clients.jsonl", [own | {"split": split} for split in ("test", "val")])
    folder.append("rounds.jsonl", rows)
    views = bespoke.summarise(folder)["views"]["personal"]
    assert {select: views[select]["round"] for select in views} == {"last": 10, "best_val": 6, "best_test": 6}
    assert validation_curve(folder, "accuracy") == [None, 14 / 30, 15 / 30, 14 / 30, None]


def test_progress_and_record_name_who_was_not_evaluated(tmp_path, capsys):
    evaluate = NetworkClients.evaluate
    with pytest.MonkeyPatch.context() as patch, progress.shown(EXPERIMENT, True) as callback:
        patch.setattr(NetworkClients, "evaluate", unless_away(evaluate))
        over_a_network(tmp_path / "nodes", tmp_path / "out", callbacks=[callback])
    rounds = RunFolder(tmp_path / "out").rounds()
    assert [row.get("evaluated", {}).get("missing") for row in rounds] == [None, {"1": "it was offline"}, None, None]
    assert "not evaluated {'1': 'it was offline'}" in capsys.readouterr().err


def unless_away(evaluate):
    """An evaluation without client 1 after round 2."""

    def evaluated(self, round, *given):
        self.roster.link.offline = {"key 1"} if round == 2 else set()
        found, self.roster.link.offline = evaluate(self, round, *given), set()
        return found

    return evaluated
