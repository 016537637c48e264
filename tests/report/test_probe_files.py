"""What `bespoke run --probe` keeps, and what a report draws of it."""

import os
import zipfile

import numpy as np
import pytest
import torch
from page_runs import HOSTILE, written
from small_runs import experiment

import bespoke
from bespoke import analysis
from bespoke.algorithms.fedpce import FedPCE
from bespoke.errors import UserError
from bespoke.report import probes
from bespoke.report.page import html, page_of


def made(rows=30, width=4, clients=3, embedded=0):
    drawn = np.random.default_rng(0)
    vectors = drawn.normal(size=(rows, width)).astype(np.float32)
    many = drawn.normal(size=(embedded, 5)).astype(np.float32)
    labels, owners = np.arange(rows) % 2, np.arange(rows) % clients
    return probes.Probe("train", 4, vectors, labels, owners, many, np.arange(embedded))


def test_a_probe_is_read_as_it_was_written(tmp_path):
    assert probes.read(tmp_path) is None
    probe = made(embedded=3)
    probes.write(tmp_path, probe)
    found = probes.read(tmp_path)
    assert (found.rows, found.round) == ("train", 4)
    for name in ("vectors", "classes", "clients", "embeddings", "members"):
        assert np.array_equal(getattr(found, name), getattr(probe, name)), name


def test_features_are_those_of_train_rows_and_the_settings_stay(tmp_path):
    """Every kept vector is the body's of a train row of its client, with that row's class; no test row is read."""
    run = bespoke.run(experiment(rounds=1, model={"name": "mlp"}), tmp_path / "a")
    before, config = run.experiment.hash(), (tmp_path / "a" / "config.toml").read_bytes()
    test = run.pool.test.index.flatten()  # rows that nobody may look at
    kept = run.pool.x[test].clone()
    run.pool.x[test] = float("nan") if run.pool.x.is_floating_point() else 0
    analysis.probe(run)
    run.pool.x[test] = kept
    probe = probes.read(tmp_path / "a")
    assert (run.experiment.hash(), (tmp_path / "a" / "config.toml").read_bytes()) == (before, config)
    assert probe.rows == "train" and np.isfinite(probe.vectors).all() and probe.vectors.dtype == np.float32
    body = run.server.get("model", run.server)
    for client in range(run.pool.num_clients):
        rows = run.pool.train.client(client)
        with torch.no_grad():
            every = run.federation.task.features(body, run.pool.x[rows]).numpy()
        own = probe.clients == client
        assert own.sum() == min(probes.EACH, len(rows))
        near = np.abs(every[None] - probe.vectors[own][:, None]).max(-1)
        assert near.min(1).max() < 1e-5
        assert np.array_equal(run.pool.y[rows].numpy()[near.argmin(1)], probe.classes[own])


def test_embeddings_of_fedpce_are_kept(tmp_path):
    model = {"name": "mlp", "norm": "layer", "hidden": 8}
    run = bespoke.run(experiment(FedPCE(size=4, hidden=4), rounds=1, model=model), tmp_path / "a")
    analysis.probe(run)
    probe = probes.read(tmp_path / "a")
    states = run.federation.inspect().states()
    assert probe.members.tolist() == list(states) and len(states)
    for row, state in zip(probe.embeddings, states.values(), strict=True):
        assert np.array_equal(row, state["state"]["embedding"].numpy())


@pytest.mark.parametrize(
    ("clients", "rows", "width"), [(1, 10**6, 10), (100, 500, 512), (5000, 3, 64), (10, 50, 10**6), (3, 0, 4)]
)
def test_a_probe_is_bounded(clients, rows, width):
    taken = probes.shares([rows] * clients, width)
    total = sum(taken.values())
    assert total <= probes.ROWS and total * width <= max(probes.NUMBERS, width)
    assert all(0 < n <= min(rows, probes.EACH) for n in taken.values()) and bool(taken) == bool(rows)


def test_a_page_draws_features_by_class_and_by_client(tmp_path):
    names = HOSTILE[:3]
    conditions, classes = ["clean", "noise:2", "noise:3"], [HOSTILE[5], "dog"]  # a link, which plotly would draw
    written(tmp_path / "a", "fedpce", names, conditions=conditions, class_names=classes)
    probes.write(tmp_path / "a", made(embedded=3))
    page = page_of(tmp_path / "a")
    (section,) = [each for each in page.sections if each.name == "probe"]
    by_class, by_client, embedded = section.charts
    assert [trace["name"][:17] for trace in by_class.figure["data"]] == ["class &#36;\\alpha", "class dog"]
    assert len(by_client.figure["data"]) == 3 and sum(len(t["x"]) for t in by_client.figure["data"]) == 30
    assert "30 train rows of 3 clients, after round 4" in by_class.caption
    assert [trace["name"] for trace in embedded.figure["data"]] == ["clean", "noise"]
    points = [text for trace in by_class.figure["data"] for text in trace["customdata"]]
    assert any(text.startswith("&lt;script&gt;") for text in points) and all("<script>" not in text for text in points)
    assert sum("&lt;a href=" in text for text in points) == 15 and all("<a" not in text for text in points)
    assert "<script>document" not in html(page)


def test_without_a_probe_there_is_no_such_section(tmp_path):
    written(tmp_path / "a")
    assert all(each.name != "probe" for each in page_of(tmp_path / "a").sections)


def _packed(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("vectors.npy", b"0" * 10**6)


def _pickled(path):
    np.savez(path, vectors=np.array([{"a": 1}], dtype=object))


def _other(path):
    np.savez(path, **{**probes.asdict(made()), "clients": np.zeros(2, np.int64)})


def _nobody(path):
    np.savez(path, **{**probes.asdict(made()), "clients": np.full(30, -1)})


def _without_numbers(path):
    np.savez(path, **{**probes.asdict(made()), "vectors": np.zeros((30, 0), np.float32)})


def _vast(rows):
    """Return what writes features that claim more rows than any memory holds."""

    def spoil(path):
        with zipfile.ZipFile(path, "w") as file:
            for name, value in probes.asdict(made()).items():
                with file.open(f"{name}.npy", "w") as entry:
                    if name == "vectors":
                        claimed = {"descr": "<f4", "fortran_order": False, "shape": (rows, 8)}
                        np.lib.format.write_array_header_1_0(entry, claimed)
                    else:
                        np.save(entry, value)

    return spoil


SPOILT = [lambda path: path.write_bytes(b"PK"), _packed, _pickled, _other, _nobody, _without_numbers]
SPOILT += [_vast(2**44), _vast(2**70), os.mkfifo, lambda path: path.symlink_to("/dev/zero")]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_file_that_is_no_probe_is_refused(tmp_path, spoil):
    spoil(tmp_path / probes.NAME)
    with pytest.raises(UserError, match=r"probe.npz is damaged: remove it, or write it again with bespoke run"):
        probes.read(tmp_path)


def test_a_run_without_features_still_ends_well(tmp_path, monkeypatch, capsys):
    from bespoke.cli import main

    run = bespoke.run(experiment(rounds=1), tmp_path / "a")
    monkeypatch.setattr(analysis, "probe", lambda run: (_ for _ in ()).throw(UserError("there are none")))
    main._probe(run)
    assert capsys.readouterr().err == "note: no probe: there are none\n"
