"""A personal model for other programs: a plain torch module, and an ONNX file."""

import copy
import importlib.util
import operator
import pickle
import sys

import numpy as np
import pytest
import torch
from personal_models import DIM, NEW, Net, federated, shipped
from torch import nn

import bespoke
from bespoke import UserError

DIGITS = {"name": "digits", "clients": 4, "subsample": 0.1}
NORMALISED = {"name": "random", "like": "cifar10", "rows": 60, "normalise": "cifar", "clients": 4}
SHIPPED = {
    "digits": (DIGITS, {"name": "cnn", "norm": "group", "width": 4, "hidden": 8, "dropout": 0.2}),
    "moments": (NORMALISED, {"name": "wrn16_2", "norm": "per_group"}),
}
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
with_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs the extra onnx")
pytestmark = pytest.mark.xdist_group("exporting")  # the first export in a process imports half of torch


def predictors():
    """One method for each way to predict: by the hook, and by whether the personal model has views."""
    found = {}
    for name in sorted(bespoke.ALGORITHMS.shipped):
        method = bespoke.ALGORITHMS[name]()
        found.setdefault((type(method).predict, getattr(method, "finetune_epochs", 0) > 0), name)
    return sorted(found.values())


def close(found, wanted):
    return bool(((found - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1.0)).all())


# --- modules --------------------------------------------------------------------------------------------------------


def plain(module):
    """Whether a module is a graph of torch's own operations, besides its check of the input's shape."""
    called = [node.target for node in module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    known = (getattr, operator.getitem, operator.eq, torch._assert)
    return len(called) > 2 and all(each in known or type(each).__module__ == "torch._ops" for each in called)


@pytest.mark.parametrize("name", predictors())
def test_a_module_gives_the_headline_outputs(name):
    model = federated(name).models["h1"]
    module = model.module()
    assert isinstance(module, nn.Module) and plain(module)
    for rows in (1, 2, 9):
        assert torch.allclose(module(torch.from_numpy(NEW[:rows])), model.logits(NEW[:rows]), rtol=1e-6, atol=1e-6)
    module.eval().train()
    assert not any(p.requires_grad for p in module.parameters())


def test_a_module_holds_the_weights_of_its_view_alone():
    model = federated("fedavg_ft").models["h1"]
    module = model.module()
    held = {name.removeprefix("personal."): value for name, value in module.state_dict().items()}
    assert held.keys() == model.personal["personal"].keys()
    assert all(torch.equal(held[name], value) for name, value in model.personal["personal"].items())
    module.load_state_dict({name: torch.zeros_like(value) for name, value in module.state_dict().items()})
    assert not module(torch.from_numpy(NEW)).any()
    assert model.logits(NEW).any()  # the model keeps its own


@pytest.mark.parametrize("which", SHIPPED)
def test_the_scaling_of_inputs_is_inside(which):
    run = shipped("fedper", *SHIPPED[which])
    model, x = next(iter(run.models.values())), run.pool.x[:5]
    assert torch.allclose(model.module()(x), model.logits(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg_ft", "pfedgp"])
def test_a_module_is_saved_whole_and_loaded_without_bespoke(name, tmp_path):
    model = federated(name).models["h1"]
    module = model.module()
    torch.save(module, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=False)
    assert again.state_dict().keys() >= module.state_dict().keys()  # and constants that the code makes
    assert torch.equal(again(torch.from_numpy(NEW)), module(torch.from_numpy(NEW)))
    assert b"bespoke" not in (tmp_path / "a.pt").read_bytes()


def test_frozen_weights_are_saved_with_a_module():
    class Shifted(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(DIM))
            self.inner.requires_grad_(False)

        def forward(self, x):
            return super().forward(x + self.shift.square())

    model = federated(model=Shifted()).models["h1"]
    module = copy.deepcopy(model.module())
    again = pickle.loads(pickle.dumps(module))
    assert again.state_dict().keys() == module.state_dict().keys()
    assert torch.equal(again(torch.from_numpy(NEW)), model.logits(NEW))


def test_a_module_takes_examples_of_its_shape_alone():
    module = federated().models["h1"].module()
    for wrong in (NEW[:, :5], NEW[0], NEW[None]):
        with pytest.raises(AssertionError, match=r"x has examples of the shape \(6,\)"):
            module(torch.from_numpy(wrong))


def test_a_prediction_that_is_no_graph():
    class Fixed(Net):
        def forward(self, x):
            return super().forward(x.reshape(len(x), -1))

    class Looking(Net):
        def forward(self, x):
            return super().forward(x if x.sum().item() > 0 else -x)

    with pytest.raises(UserError, match=r"client 'h1' by fedavg.* its code fixes the number of rows, as len\(x\) does"):
        federated(model=Fixed()).models["h1"].module()
    with pytest.raises(UserError, match=r"client 'h1' by fedavg.* is no graph of torch's operations: ") as error:
        federated(model=Looking()).models["h1"].module()
    assert "\n" not in str(error.value)


# --- ONNX -----------------------------------------------------------------------------------------------------------


@with_onnx
@pytest.mark.parametrize("name", [name for name in predictors() if name != "pfedgp"])
def test_onnxruntime_computes_the_same(name, tmp_path, capfd):
    import onnxruntime

    model = federated(name).models["h1"]
    model.export_onnx(tmp_path / "a.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    for rows in (1, 9):
        (found,) = session.run(["logits"], {"x": NEW[:rows]})
        assert close(torch.from_numpy(found), model.logits(NEW[:rows]))
    assert capfd.readouterr() == ("", "")


@with_onnx
def test_onnx_of_pictures(tmp_path):
    import onnxruntime

    run = shipped("fedper", *SHIPPED["digits"])
    model, x = run.models["0"], run.pool.x[:5]
    model.export_onnx(tmp_path / "a.onnx")
    (found,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"x": x.numpy()})
    assert x.dtype == torch.uint8 and close(torch.from_numpy(found), model.logits(x))


@with_onnx
def test_pfedgp_is_no_onnx_graph(tmp_path):
    with pytest.raises(UserError, match=r"by pfedgp.* is no ONNX graph \(.*cholesky.*\): save it as a file") as error:
        federated("pfedgp").models["h1"].export_onnx(tmp_path / "a.onnx")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


@with_onnx
def test_other_outputs_are_refused(tmp_path, monkeypatch):
    model = federated().models["h1"]
    monkeypatch.setattr("bespoke.runs.exporting._CLOSE", -1.0)
    with pytest.raises(UserError, match="onnxruntime computes other outputs than the personal model of client 'h1'"):
        model.export_onnx(tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"export_onnx needs the package onnx: pip install 'bespoke-fl\[onnx\]'"):
        federated().models["h1"].export_onnx(tmp_path / "a.onnx")


def test_float64_models_are_exported_too():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = federated().models["h1"]
    finally:
        torch.set_default_dtype(before)
    out = model.module()(torch.from_numpy(NEW))
    assert out.dtype == torch.float64 and np.allclose(out, model.logits(NEW))
