"""The papers' figures beside accuracy, each against numbers computed in another way."""

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.stats import multivariate_normal
from small_runs import arrays, experiment, federated
from torch import nn

import bespoke
from bespoke import analysis
from bespoke.algorithms.fedlda import FedLDA
from bespoke.algorithms.fedpce import FedPCE
from bespoke.algorithms.pfedfda import PFedFDA
from bespoke.errors import UserError
from bespoke.models import ModelSettings, build_task
from bespoke.records import CLIENTS, RunFolder
from bespoke.report.charts import COLOURS
from bespoke.runs.checkpoint import load_newest

# --- how Gaussian the features are ---------------------------------------------------------------------------------


def features(run, split, body_of):
    """(z, y) of each client of the training population, with the parameters that ``body_of(client)`` gives."""
    pool, task = run.pool, run.federation.task
    lists = [getattr(pool, split).client(client) for client in range(pool.num_clients)]
    return [
        (task.features(body_of(i), pool.x[rows]).double().numpy(), pool.y[rows].numpy()) for i, rows in enumerate(lists)
    ]


def by_hand(train, test):
    """Mean over clients of the average negative log density, class by class: NumPy and SciPy alone."""
    z, y = (np.concatenate(column) for column in zip(*train, strict=True))
    mean = {k: z[y == k].mean(axis=0) for k in np.unique(y)}
    rest = np.stack([row - mean[k] for row, k in zip(z, y, strict=True)])
    cov = rest.T @ rest / len(z)
    cov += 1e-4 * np.trace(cov) / len(cov) * np.eye(len(cov))

    def nll(part):
        own = [
            np.mean([-multivariate_normal.logpdf(row, mean[k], cov) for row, k in zip(z, y, strict=True)])
            for z, y in part
        ]
        return np.mean(own)

    return nll(train), nll(test)


class Plain(nn.Module):
    """Nothing but a head: the features are the examples."""

    def __init__(self, dim=5):
        super().__init__()
        self.fc = nn.Linear(dim, 3)

    def forward(self, x):
        return self.fc(x)


SHARED = {
    "fedavg": lambda run, client: run.server["model"],
    "fedper": lambda run, client: run.server["body"],
    "ditto": lambda run, client: run.server["model"],
    FedLDA(): lambda run, client: run.server["body"],
}
OWN = dict.fromkeys(("local", "lg_fedavg"), lambda run, client: run.models[str(client)].personal)


@pytest.mark.parametrize(
    ("method", "body"),
    [pytest.param(method, body, id=str(method).split("(")[0]) for method, body in (SHARED | OWN).items()],
)
def test_nll_is_that_of_scipy_whoever_holds_the_body(method, body):
    run = federated(algorithm=method, clients=arrays(clients=3))
    found = analysis.gaussianity(run, run.server)
    parts = [features(run, split, lambda client: body(run, client)) for split in ("train", "test")]
    assert [found[split]["nll"] for split in ("train", "test")] == pytest.approx(by_hand(*parts), rel=1e-9)
    assert [found[split]["rows"] for split in ("train", "test")] == [sum(len(y) for _, y in part) for part in parts]


def test_a_method_that_generates_its_norms_is_looked_at_through_its_personal_models():
    run = bespoke.run(experiment(FedPCE(), model={"name": "mlp", "hidden": 8, "norm": "layer"}, rate=1.0))
    found = analysis.gaussianity(run.federation, run.server)
    parts = [features(run, s, lambda client: run.models[str(client)].personal) for s in ("train", "test")]
    assert [found[split]["nll"] for split in ("train", "test")] == pytest.approx(by_hand(*parts), rel=1e-6)


def test_whitened_numbers_tell_gaussian_from_heavy_tailed_features():
    draw = np.random.default_rng(0)

    def numbers(noise):
        y = [np.arange(n) % 3 for n in (1500, 3000)]
        x = [(100.0 * (2 * k[:, None] + noise((len(k), 5)))).astype(np.float32) for k in y]
        run = federated(clients=list(zip(x, y, strict=True)), model=Plain(), rounds=1, lr=1e-9)
        return analysis.gaussianity(run, run.server)

    normal, heavy = numbers(draw.standard_normal), numbers(lambda shape: draw.standard_t(5, shape))
    assert normal["train"]["mahalanobis"] == pytest.approx(1 / 1.0001, abs=1e-5)  # what the jitter leaves of 1
    assert normal["test"]["mahalanobis"] == pytest.approx(1.0, abs=0.1)
    assert abs(normal["train"]["kurtosis"]) < 0.05 < 0.3 < heavy["train"]["kurtosis"]


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_before_the_first_round_all_have_the_common_body(method):
    run = federated(algorithm=method, clients=arrays(clients=3))
    found = analysis.gaussianity(run, None)
    parts = [features(run, split, lambda client: run.federation.params) for split in ("train", "test")]
    assert [found[split]["nll"] for split in ("train", "test")] == pytest.approx(by_hand(*parts), rel=1e-9)
    assert found != analysis.gaussianity(run, run.server)


def test_a_callback_can_look_at_every_round():
    seen = []
    run = bespoke.run(
        experiment(FedLDA(), model={"name": "mlp", "hidden": 6}),
        callbacks=[lambda event: seen.append(analysis.gaussianity(event.federation, event.server))],
    )
    assert len(seen) == 3 and seen[-1] == analysis.gaussianity(run, run.server) != seen[0]


def test_every_round_can_be_looked_at_and_a_checkpoint_is_the_same(tmp_path):
    wanted = experiment(FedLDA(), model={"name": "mlp", "hidden": 6})
    rounds = [bespoke.run(wanted, tmp_path / "run", resume=True, stop=lambda: True) for _ in range(3)]
    curve = [analysis.gaussianity(run, run.server)["test"]["nll"] for run in rounds]
    assert len(set(curve)) == 3
    whole = bespoke.run(wanted)
    assert analysis.gaussianity(whole, whole.server)["test"]["nll"] == curve[-1]
    stored = load_newest(tmp_path / "run" / "checkpoints")[0].server
    assert analysis.gaussianity(whole.federation, stored)["test"]["nll"] == curve[-1]


def test_dead_features_unknown_classes_and_missing_test_rows_do_no_harm():
    x, y = np.zeros((12, 5), dtype=np.float32), np.arange(12) % 2
    clients = [(x, y, x[:3], np.array([0, 1, 2])), (x, y, x[:2], np.array([2, 2]))]  # nobody trains on class 2
    run = federated(clients=clients, model=Plain())
    found = analysis.gaussianity(run, run.server)
    assert np.isfinite([*found["train"].values(), *found["test"].values()]).all()
    assert found["test"]["rows"] == 2
    run = federated(model=Plain(), test=0.0)
    assert analysis.gaussianity(run, run.server).keys() == {"train"}


# --- features ------------------------------------------------------------------------------------------------------


def test_features_are_those_of_the_shared_body_with_class_and_client():
    run = federated(algorithm="fedper", clients=arrays(clients=3))
    found, parts = analysis.features(run), features(run, "train", lambda client: run.server["body"])
    assert found.vectors == pytest.approx(np.concatenate([z for z, _ in parts]), rel=1e-9)
    assert found.classes.tolist() == np.concatenate([y for _, y in parts]).tolist()
    assert found.clients.tolist() == [i for i, (_, y) in enumerate(parts) for _ in y]
    assert len(analysis.features(run, "test").classes) == sum(len(run.pool.test.client(i)) for i in range(3))
    with pytest.raises(UserError, match="no client has val rows"):
        analysis.features(run, "val")


def test_scatter_splits_the_spread_into_classes_clients_and_the_rest():
    draw = np.random.default_rng(0)
    classes, clients = np.repeat([0, 1, 1, 2], 30), np.arange(120) % 4
    z = draw.standard_normal((120, 3)) + 3.0 * classes[:, None] + 2.0 * ((clients == 1) & (classes == 1))[:, None]
    found = analysis.Features(z, classes, clients).scatter()
    within = between = own = 0.0
    for k in range(3):
        mean = z[classes == k].mean(axis=0)
        within += sum(np.dot(row - mean, row - mean) for row in z[classes == k])
        between += (classes == k).sum() * np.square(mean - z.mean(axis=0)).sum()
        for i in range(4):
            rows = z[(classes == k) & (clients == i)]
            own += len(rows) * np.square(rows.mean(axis=0) - mean).sum()
    assert found == pytest.approx({"between_classes": between / within, "between_clients": own / within})
    assert np.square(z - z.mean(axis=0)).sum() == pytest.approx(between + within)
    same = analysis.Features(np.ones((4, 2)), np.array([0, 0, 1, 1]), np.zeros(4, dtype=int)).scatter()
    assert np.isnan([*same.values()]).all()


# --- betas by condition --------------------------------------------------------------------------------------------


def recorded(path, values, conditions=None):
    """A run folder with betas {round: [(mean, cov) by client]} in two views."""
    folder = RunFolder.create(path)
    sizes = {split: [1, 1, 1] for split in ("train", "val", "test")}
    told = {"clients": 3, "names": ["a", "b", "c"], **sizes} | ({"conditions": conditions} if conditions else {})
    folder.write_json("federation.json", told)
    common = {"group": "train", "split": "test", "total": 1, "metrics": {"accuracy": [1, 1]}}
    for number, own in values.items():
        for client, (mean, cov) in enumerate(own):
            line = {"round": number, "client": client, **common, "logged": {"beta_mean": mean, "beta_cov": cov}}
            folder.append(CLIENTS, [line | {"view": view} for view in ("personal", "global")])
    return folder


def test_betas_are_the_last_rounds_grouped_by_kind(tmp_path):
    values = {1: [(0.9, 0.9)] * 3, 2: [(0.2, 0.5), (0.6, 0.7), (0.1, 0.1)]}
    rows = analysis.betas(recorded(tmp_path, values, ["Gaussian noise:1", "Gaussian noise:4", "clean"]))
    assert [(row["client"], row["beta_mean"], row["beta_cov"]) for row in rows] == [
        (0, 0.2, 0.5),
        (1, 0.6, 0.7),
        (2, 0.1, 0.1),
    ]
    assert [row["condition"] for row in rows] == ["Gaussian noise:1", "Gaussian noise:4", "clean"]
    groups = analysis.by_kind(rows)
    assert groups["Gaussian noise"] == {"clients": 2, "mean": pytest.approx(0.4), "std": pytest.approx(0.2)}
    assert [row["client"] for row in analysis.betas(recorded(tmp_path / "b", values | {3: [(0.3, 0.3)]}))] == [0]
    assert groups["clean"] == {"clients": 1, "mean": 0.1, "std": 0.0}
    assert analysis.by_kind(rows, "beta_cov")["Gaussian noise"]["mean"] == pytest.approx(0.6)


def test_betas_of_a_run_are_those_it_logged():
    run = bespoke.run(experiment(PFedFDA(betas="two"), rate=1.0))
    logged = {row["client"]: row["logged"] for row in run.folder.clients()}
    rows = analysis.betas(run)
    assert {row["client"]: row["beta_cov"] for row in rows} == {c: v["beta_cov"] for c, v in logged.items()}
    assert all(0.0 <= row["beta_mean"] <= 1.0 and row["kind"] == "clean" for row in rows)


def test_records_without_betas_or_with_other_clients_conditions_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no betas"):
        analysis.betas(federated())
    with pytest.raises(UserError, match="is damaged; restore it or run the experiment again"):
        analysis.betas(recorded(tmp_path, {1: [(0.5, 0.5)] * 3}, ["fog:1", "clean"]))


# --- sizes of messages ---------------------------------------------------------------------------------------------

RESNET = ModelSettings(name="resnet18", stem="imagenet", norm="per_group")
MOBILENET = ModelSettings(name="mobilenet_v3_small")


@pytest.mark.parametrize(
    ("settings", "shape", "classes", "with_head", "body", "overhead"),
    [
        (ModelSettings(name="emnist_cnn"), (1, 28, 28), 62, (), 115_776, 6.620),
        (ModelSettings(name="cifar_cnn"), (3, 32, 32), 100, (), 106_400, 6.837),
        (RESNET, (3, 64, 64), 200, (), 11_167_212, 1.164),
        (MOBILENET, (3, 224, 224), 1000, ("body.fc",), 927_008, -2.637),
        (MOBILENET, (3, 224, 224), 1000, (), 1_517_856, 20.599),  # with the same features under both heads
    ],
    ids=["emnist", "cifar100", "tiny_imagenet", "mobilenet_as_printed", "mobilenet"],
)
def test_overheads_of_pfedfdas_table_8(settings, shape, classes, with_head, body, overhead):
    counts = analysis.parameter_counts(build_task(settings, shape, classes), with_head)
    assert counts["body"] == body
    assert counts["overhead_percent"] == pytest.approx(overhead, abs=5e-4)


def test_the_gaussian_head_is_what_pfedfda_sends():
    run = bespoke.run(experiment(PFedFDA(), model={"name": "mlp", "hidden": 6}, rounds=1))
    counts, row = analysis.parameter_counts(run.federation.task), run.folder.rounds()[0]
    assert row["bytes_up"] == 4 * len(row["cohort"]) * (counts["body"] + counts["gaussian"])


# --- embeddings ----------------------------------------------------------------------------------------------------

NORMED = {"name": "mlp", "hidden": 8, "norm": "layer"}


def test_embeddings_are_the_states_of_those_who_took_part():
    run = bespoke.run(experiment(FedPCE(size=4), model=NORMED, rounds=1))
    states, found = run.federation.clients.states(), analysis.embeddings(run)
    assert found.clients == sorted(states) and len(found.clients) == 3
    assert np.array_equal(found.vectors, np.stack([states[c]["state"]["embedding"].numpy() for c in found.clients]))
    assert not np.array_equal(found.vectors, np.eye(6, 4)[found.clients])  # they were trained


def test_without_embeddings_the_norms_of_the_personal_models_are_taken():
    run = bespoke.run(experiment("local", model=NORMED, rate=1.0))
    found = analysis.embeddings(run)
    models = [run.models[str(client)].personal for client in range(6)]
    norms = [np.concatenate([p.numpy() for n, p in model.items() if "norm" in n]) for model in models]
    assert np.array_equal(found.vectors, np.stack(norms)) and found.vectors.shape == (6, 16)
    with pytest.raises(UserError, match="normalisation layers"):
        analysis.embeddings(federated())


def test_norms_are_the_personal_models_layer_by_layer():
    run = bespoke.run(experiment("fedbn", model=NORMED, rate=1.0, epochs=2))
    found = analysis.norms(run)
    (name,) = found
    models = [run.models[str(client)].personal for client in range(6)]
    whole = [np.concatenate([model[f"{name}.weight"], model[f"{name}.bias"]]) for model in models]
    assert np.array_equal(found[name].vectors, np.stack(whole).astype(np.float64))
    assert not np.array_equal(found[name].vectors[0], found[name].vectors[1])  # each client has its own


def test_conditions_follow_the_clients():
    run = bespoke.run(experiment("local", model=NORMED))
    conditions = [f"fog:{i}" for i in range(6)]
    run.folder.write_json("federation.json", run.folder.read_json("federation.json") | {"conditions": conditions})
    found = analysis.embeddings(run)
    assert found.conditions == [f"fog:{c}" for c in found.clients] and found.clients != list(range(6))


def blobs():
    draw = np.random.default_rng(0)
    flat = draw.standard_normal((12, 2)) + 20.0 * (np.arange(12) % 2)[:, None]
    turned = flat @ np.linalg.qr(draw.standard_normal((5, 5)))[0][:2] + 3.0
    return analysis.Embeddings(list(range(12)), turned, [f"{('fog', 'contrast')[i % 2]}:{i}" for i in range(12)])


def test_two_components_keep_what_is_flat_and_the_silhouette_tells_kinds_apart():
    found = blobs()
    assert pdist(found.plane()) == pytest.approx(pdist(found.vectors), rel=1e-9)
    assert found.plane().var(axis=0)[0] > found.plane().var(axis=0)[1]
    assert not found._replace(vectors=np.ones((12, 5))).plane().any()
    assert found.silhouette() > 0.8 > 0.2 > abs(found._replace(conditions=["a", "a", "b", "b"] * 3).silhouette())


def test_the_chart_is_a_picture(tmp_path):
    path = analysis.embedding_chart(blobs(), tmp_path / "clients.svg")
    text = path.read_text()
    assert [text.count(f"fill: {colour}") for colour in COLOURS[:3]] == [7, 7, 0]  # a dot each, and in the legend
    with pytest.raises(UserError, match="must end in"):
        analysis.embedding_chart(blobs(), tmp_path / "clients.txt")
