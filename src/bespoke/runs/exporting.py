"""A personal model for other programs: a graph of torch's own operations, and an ONNX file."""

import contextlib
import importlib
import io
import keyword
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bespoke.core import tree
from bespoke.core.tree import Tree
from bespoke.errors import UserError, reason
from bespoke.files import write_atomic

_EXTRA = ("onnx", "onnxscript", "onnxruntime")
_CLOSE = 1e-5  # of an output, relative to 1 or to its size


class _Graph(nn.Module):
    """A function of a tree and of examples, with the tree's tensors as parameters and buffers."""

    def __init__(self, outputs: Callable[[Tree, Tensor], Tensor], held: Tree) -> None:
        super().__init__()
        self._outputs = outputs
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for path, leaf in tree.flatten(held).items():
            words = re.split(r"[./]", path if not path.endswith("/") else f"{path}empty")
            *parents, name = (f"{word}_" if keyword.iskeyword(word) else word for word in words)
            place: nn.Module = self
            for parent in parents:
                if parent not in place._modules:
                    place.add_module(parent, nn.Module())
                place = place.get_submodule(parent)
            if leaf.is_floating_point():
                place.register_parameter(name, nn.Parameter(leaf.detach().clone(), requires_grad=False))
            else:
                place.register_buffer(name, leaf.clone())
            self._places[path] = place, name

    def forward(self, x: Tensor) -> Tensor:
        held = {path: getattr(place, name) for path, (place, name) in self._places.items()}
        return self._outputs(tree.unflatten(held), x)


def exported(outputs: Callable[[Tree, Tensor], Tensor], held: Tree, examples: Tensor, what: str) -> Any:
    """Return a function of a tree ``held`` and of examples x (B, ...) as a torch.export program of x."""
    rows = torch.export.Dim("rows", min=1)
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(_Graph(outputs, held), (examples,), dynamic_shapes=({0: rows},), strict=False)
    except Exception as error:  # a method's or a user's prediction may be untraceable in any way
        why = reason(error)
        if "Constraints violated" in why:
            why = "its code fixes the number of rows, as len(x) does; write x.shape[0]"
        raise UserError(f"the {what} is no graph of torch's operations: {why}") from error


def as_module(program: Any, shape: Sequence[int]) -> nn.Module:
    """Return an exported program of examples (B, *shape) as a module that ``torch.save`` can write."""
    found: torch.fx.GraphModule = program.module()
    for node in found.graph.find_nodes(op="call_module", target="_guards_fn"):  # a local function, which no file holds
        found.graph.erase_node(node)
    found.graph.eliminate_dead_code()
    graph = torch.fx.Graph()
    copied: Any = graph.graph_copy(found.graph, {})
    graph.output(copied[0])
    (node,) = graph.find_nodes(op="placeholder")
    x: Any = torch.fx.Proxy(node)
    with graph.inserting_before(node.next):
        torch._assert(x.shape[1:] == tuple(shape), f"x has examples of the shape {tuple(shape)}")
    for node in graph.find_nodes(op="get_attr"):  # what is no parameter loading would take for a fixed number
        parent, _, name = str(node.target).rpartition(".")
        place = found.get_submodule(parent)
        value = getattr(place, name)
        delattr(place, name)
        place.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return torch.fx.GraphModule(found, graph, "PersonalModule")  # with what the graph uses alone


def write_onnx(program: Any, outputs: Callable[[Tensor], Tensor], examples: Tensor, path: Path, what: str) -> None:
    """Write an exported program as an ONNX file, once onnxruntime has given the same ``outputs`` of examples (B, ...).

    Outputs count as the same within 1e-5 of 1 or of their own size.
    """
    _, _, runtime = (_needed(name) for name in _EXTRA)
    try:
        with _quiet():
            made = torch.onnx.export(program, dynamo=True, input_names=["x"], output_names=["logits"], verbose=False)
        data = made.model_proto.SerializeToString()  # type: ignore[union-attr]  # it is None for the older exporter
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # an operation that ONNX does not have, a model of more than 2 GB
        raise UserError(f"the {what} is no ONNX graph ({_cause(error)}): save it as a file of bespoke") from error
    for x in (examples, examples[:1]):
        found, wanted = torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), outputs(x)
        if found.shape != wanted.shape or not bool(
            ((found - wanted).abs() <= _CLOSE * wanted.abs().clamp(min=1.0)).all()
        ):
            raise UserError(f"onnxruntime computes other outputs than the {what}: save it as a file of bespoke")
    write_atomic(path, data)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what torch says about its own exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _cause(error: BaseException) -> str:
    """Return the first line of the innermost cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return reason(error)


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"export_onnx needs the package {name}: pip install 'bespoke-fl[onnx]'") from None
