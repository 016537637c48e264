"""Probes of finished runs, against numbers computed in another way."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from small_runs import experiment

import bespoke
from bespoke import analysis
from bespoke.algorithms.fedlda import FedLDA
from bespoke.algorithms.fedpce import FedPCE
from bespoke.data import from_arrays
from bespoke.errors import UserError
from bespoke.tables import probes

NORMED = {"name": "mlp", "hidden": 8, "norm": "layer"}


def with_conditions(run):
    """The run with the condition of each client in its records."""
    conditions = [f"{('fog', 'contrast')[i % 2]}:{i}" for i in range(6)]
    run.folder.write_json("federation.json", run.folder.read_json("federation.json") | {"conditions": conditions})
    return run


def test_embeddings_are_told_with_their_conditions_and_how_well_these_separate_them():
    run = with_conditions(bespoke.run(experiment(FedPCE(size=4), model=NORMED, rounds=1, rate=1.0)))
    found, own = probes.take("embeddings", run), analysis.embeddings(run)
    assert found["clients"] == list(range(6)) and found["conditions"][1] == "contrast:1"
    assert np.array(found["vectors"]) == pytest.approx(own.vectors, rel=1e-4)
    assert found["silhouette"] == pytest.approx(own.silhouette(), rel=1e-4)
    assert len(json.dumps(found)) < 1000


def test_norms_keep_the_distances_between_the_clients_vectors_of_a_layer():
    run = bespoke.run(experiment("fedbn", model=NORMED | {"hidden": 40}, rate=1.0, epochs=2))
    found = probes.take("norms", run)
    (layer,) = found["layers"]
    assert (found["of"], layer["layer"]) == (1, 1)
    models = [run.models[str(client)].personal for client in range(6)]
    whole = [np.concatenate([model[f"{layer['name']}.{part}"] for part in ("weight", "bias")]) for model in models]
    assert np.shape(whole) == (6, 80) and np.shape(layer["vectors"]) == (6, 6)
    assert pdist(np.array(layer["vectors"])) == pytest.approx(pdist(np.stack(whole)), rel=1e-3)
    assert layer["silhouette"] is None  # all are clean


@pytest.mark.parametrize(("layers", "shown"), [(2, [1, 2]), (12, [1, 7, 12]), (21, [1, 12, 21])])
def test_the_first_the_twelfth_and_the_last_norm_are_shown(monkeypatch, layers, shown):
    some = analysis.Embeddings([0, 1], np.eye(2), ["clean", "clean"])
    monkeypatch.setattr(analysis, "norms", lambda run: {f"norm{n + 1}": some for n in range(layers)})
    found = probes.norms(None)
    assert [layer["layer"] for layer in found["layers"]] == shown
    assert [layer["name"] for layer in found["layers"]] == [f"norm{number}" for number in shown]


def test_the_twelfth_norm_of_fedpces_network_is_the_second_of_the_third_groups_first_block():
    from bespoke.models import ModelSettings, build_task

    task = build_task(ModelSettings(name="fedpce_resnet18", width=8), (3, 32, 32), 10)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in task.norm_names))
    assert len(layers) == 21
    assert layers[11].endswith("group3.0.norm2") and layers[-1].endswith("final_norm")


def test_features_are_a_sample_in_few_components_with_the_scatter_of_all_rows(monkeypatch):
    run = bespoke.run(experiment("fedper", model={"name": "mlp", "hidden": 12}, rounds=1))
    monkeypatch.setattr(probes, "SAMPLE", 50)
    monkeypatch.setattr(probes, "KEPT", 3)
    found, whole = probes.take("features", run), analysis.features(run)
    rows = sum(len(run.pool.train.client(client)) for client in range(6))
    assert (found["rows"], found["dim"], np.shape(found["vectors"])) == (rows, 12, (50, 3))
    drawn = np.sort(np.random.default_rng(0).permutation(rows)[:50])
    assert found["classes"] == whole.classes[drawn].tolist() and found["clients"] == whole.clients[drawn].tolist()
    centred = whole.vectors[drawn] - whole.vectors[drawn].mean(axis=0)
    sizes = np.linalg.svd(centred, compute_uv=False) ** 2
    assert found["kept"] == pytest.approx(sizes[:3].sum() / sizes.sum(), rel=1e-4)
    assert pdist(np.array(found["vectors"])).max() <= pdist(centred).max() * 1.001
    assert found["scatter"] == pytest.approx(whole.scatter(), rel=1e-4)


def test_estimates_of_the_hierarchy_know_rows_variance_and_truth():
    draw = np.random.default_rng(0)
    truth, sizes = draw.standard_normal(5), [3, 8, 20, 5, 9]
    seen = [mean + draw.standard_normal(n) for mean, n in zip(truth, sizes, strict=True)]
    one = np.zeros((1, 1))
    clients = [(np.zeros((n, 1)), y, one, [mean]) for n, y, mean in zip(sizes, seen, truth, strict=True)]
    clients = [tuple(np.asarray(part, dtype=np.float32) for part in client) for client in clients]
    data = SimpleNamespace(between=0.7)
    run = SimpleNamespace(pool=from_arrays(clients, classes=False), experiment=SimpleNamespace(data=data))
    z, n = [y.mean() for y in seen], sizes
    expected = {"local": 0.0, "paper": 0.0, "bayes": 0.0}
    for m in range(5):
        w = {k: 1 / (0.7 + 1 / n[k]) for k in range(5) if k != m}
        common = sum(w[k] * z[k] for k in w) / sum(w.values())
        prior = 1 / (0.7 + 1 / sum(w.values()))
        expected["local"] += (z[m] - truth[m]) ** 2 / 5
        expected["paper"] += ((n[m] * z[m] + sum(w.values()) * common) / (n[m] + sum(w.values())) - truth[m]) ** 2 / 5
        expected["bayes"] += ((n[m] * z[m] + prior * common) / (n[m] + prior) - truth[m]) ** 2 / 5
    assert probes.take("hierarchy", run) == pytest.approx(expected, rel=1e-4)


# --- over the rounds ------------------------------------------------------------------------------------------------

SMALL = {"name": "mlp", "hidden": 6}


def test_gaussianity_is_noted_while_the_run_goes_on_and_survives_a_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "EVERY", 2)
    wanted = experiment(FedLDA(), model=SMALL, rounds=5)
    folder = tmp_path / "run"
    watch = probes.callbacks(["gaussianity", "embeddings", "gaussianity"], folder)
    assert len(watch) == 1
    stopped = []
    bespoke.run(wanted, folder, callbacks=[*watch, stopped.append], stop=lambda: len(stopped) > 2, checkpoint_every=1)
    run = bespoke.run(wanted, folder, resume=True, callbacks=probes.callbacks(["gaussianity"], folder))
    found = probes.take("gaussianity", run)
    assert found["round"] == [0, 2, 4, 5]
    apart = tmp_path / "apart"  # stopped after each round
    each = [bespoke.run(wanted, apart, resume=True, stop=lambda: True) for _ in range(5)]
    for place, number in ((1, 2), (2, 4), (3, 5)):
        fit = analysis.gaussianity(each[number - 1], each[number - 1].server)
        for split in ("train", "test"):
            assert {n: v[place] for n, v in found[split].items()} == pytest.approx(
                {n: fit[split][n] for n in ("nll", "mahalanobis", "kurtosis")}, rel=1e-4
            )
    assert found["test"]["nll"][0] == pytest.approx(analysis.gaussianity(run, None)["test"]["nll"], rel=1e-4)


def test_looking_at_a_run_does_not_change_it(monkeypatch, tmp_path):
    monkeypatch.setattr(probes, "EVERY", 1)
    wanted = experiment("lg_fedavg", model=SMALL)  # its bodies are the clients' own
    run = bespoke.run(wanted, tmp_path / "run", callbacks=probes.callbacks(["gaussianity"], tmp_path / "run"))
    plain = bespoke.run(wanted)
    assert list(run.folder.clients()) == list(plain.folder.clients())
    assert probes.take("gaussianity", run)["round"] == [0, 1, 2, 3]


def test_without_notes_the_ends_are_there_and_an_unknown_probe_is_told():
    run = bespoke.run(experiment("fedavg", model=SMALL))
    assert probes.take("gaussianity", run)["round"] == [0, 3]
    with pytest.raises(UserError, match=r"there is no probe 'norm' \(did you mean 'norms'\?\)"):
        probes.take("norm", run)
