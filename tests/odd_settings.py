"""What the fuzz tests of experiments and of command lines share: settings of every kind, right and wrong."""

from hypothesis import strategies as st

import bespoke
from bespoke.algorithms import ALGORITHMS, method_class
from bespoke.core.objective import METRICS, OBJECTIVES, ObjectiveSettings
from bespoke.data import DATASETS, PARTITIONS
from bespoke.models import MODELS, ModelSettings

TABLES = {
    "data": bespoke.DataSettings,
    "model": ModelSettings,
    "objective": ObjectiveSettings,
    "training": bespoke.Training,
    "evaluation": bespoke.Evaluation,
}
KINDS = TABLES | {name: method_class(name) for name in ALGORITHMS}
SMALL = {
    "seed": 0,
    "data": {"name": "gaussian", "rows": 60, "dim": 4, "num_classes": 3, "clients": 4},
    "model": {"name": "mlp", "hidden": 4},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 1},
    "evaluation": {},
    "objective": {},
}
OTHERS = (
    {},
    {"data": {"name": "digits", "clients": 6}, "model": {"name": "cnn"}},
    {"data": {"name": "synthetic_hierarchy", "clients": 3}, "model": {"name": "linear"}},
    {"data": {"name": "digits", "clients": 6}, "model": {"name": "sent140_lstm", "vocabulary": 17}},
    *({"data": {**SMALL["data"], "partition": name}} for name in PARTITIONS),
)
NAMES = [
    "gaussian",
    "digits",
    "synthetic_hierarchy",
    "files",
    "natural",
    "dirichlet",
    *PARTITIONS,
    *MODELS,
    *OBJECTIVES,
]
NAMES += [*ALGORITHMS, *DATASETS, "auto", "mine:Net", "os:system", "group", "cifar_s", "fog:3", "accuracy", "split"]

numbers = st.one_of(
    st.integers(-3, 12),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**19, 10**30, -(10**30), 10**400]),
    st.floats(),
    st.sampled_from([1e-300, 1e-40, 1e17, 1e18, 1e38, 1e300]),
)
texts = st.one_of(
    st.sampled_from(NAMES), st.text(max_size=8), st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
)
values = st.recursive(st.one_of(numbers, texts, st.booleans()), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
tables = st.sampled_from([*TABLES, "algorithm", "algorithm"])
often, seldom = (st.integers(0, 9).map(lambda n, low=low: n >= low) for low in (1, 9))


def fitting(field):
    """Values of the field's own type, small ones and those at the bounds."""
    rules, default = field.metadata, field.default
    if "choices" in rules:
        return st.sampled_from(rules["choices"])
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, int):
        edges = [rules.get("low", 0), rules.get("high", 2**31 - 1), 0, 1, 2, 3, 10, 1000, 10**6, 2**31 - 1]
        return st.one_of(st.integers(0, 12), st.sampled_from(edges))
    if isinstance(default, float):
        return st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.2e-38, 1e-9, 0.5, 0.99, 1.0, 1e6, 1e18]))
    if isinstance(default, tuple) and "low" in rules:
        return st.lists(st.integers(rules["low"], 4), max_size=3)
    if isinstance(default, tuple):
        return st.lists(st.sampled_from([*METRICS, "loss", "nothing"]), max_size=3)
    return st.sampled_from(NAMES)
