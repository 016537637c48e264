"""A model as pure functions of its parameters, split by module into body, head and norm layers."""

import contextlib
import copy
import inspect
import random
import re
from collections.abc import Callable, Container, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from bespoke.core import rng
from bespoke.core.data import Batch
from bespoke.core.objective import CLASSIFICATION, Objective
from bespoke.core.tree import Tree
from bespoke.errors import UserError, reason, shown

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


# How matmuls and convolutions are computed on CUDA: as float32, with factors rounded to 10 bits (tf32), or with
# factors and activations rounded to 7 bits (bf16, in layers that support it). Parameters and sums stay float32.
PRECISIONS = ("fp32", "tf32", "bf16")


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that there is not, or not on this device."""
    if precision not in PRECISIONS:
        raise UserError(f"there is no precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision != "fp32" and device.type != "cuda":
        raise UserError(f"precision {precision} needs a CUDA device: use fp32 on the CPU")


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Let CUDA compute in this precision, deterministically, while the context lasts.

    Attention is computed by plain products: torch's own kernels for it cannot be mapped over clients.
    """
    products, convolutions, attention = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mha
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    fast = attention.get_fastpath_enabled()
    products.allow_tf32 = convolutions.allow_tf32 = precision != "fp32"
    convolutions.deterministic = True
    attention.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before
        attention.set_fastpath_enabled(fast)


class Random(nn.Module):
    """A layer that draws in training: it has a key (2,) while a training loss is computed, and None otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._key: Tensor | None = None
        self._calls = 0

    def start(self, key: Tensor | None) -> None:
        """Draw by this key from now on; None stops drawing."""
        self._key, self._calls = key, 0

    def draw(self) -> Tensor | None:
        """Return a new key for each call, since a model may use one layer several times."""
        key, calls = self._key, self._calls
        self._calls += 1
        return key if key is None or not calls else rng.fold_in(key, calls)


class Task:
    """A model ``head(features(x))`` as functions of a flat parameter tree ``{"conv1.weight": ...}``.

    ``build`` makes the module with torch's own initialisation; ``head`` names the sub-module that turns
    features into outputs. Parameters belong to the head, the body or the norm layers by the module that
    owns them, never by their name. Frozen parameters (``requires_grad=False``) and buffers are constants of
    the task and in no tree.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        head: str,
        num_outputs: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: str = "fp32",
        objective: Objective = CLASSIFICATION,
        key: Tensor | None = None,
    ) -> None:
        """Take ``build() -> module``, the dotted name of its ``head``, and a ``precision`` of PRECISIONS.

        ``key`` [2] is that of :meth:`init`; it matters if ``build`` draws constants.
        """
        check_precision(precision, torch.device(device))
        self._build = build
        self.precision = precision
        self.num_outputs = num_outputs
        self.objective = objective
        self.device = torch.device(device)
        self.dtype = dtype
        module = self._built(rng.key(0) if key is None else key)
        _check_module(module, head)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trained.items()}
        self._module = module.to(device=self.device, dtype=dtype).requires_grad_(False)
        self._head = self._module.get_submodule(head)
        self._prefix = head + "."
        numbers = _random_layers(self._module)
        self._whole = _Function(self._module, "", trained, numbers)
        self._features = _Function(_without_head(self._module, head), "", trained, numbers)
        self._classifier = _Function(self._head, self._prefix, trained, numbers)
        self.head_names = tuple(n for n in trained if n.startswith(self._prefix))
        self.body_names = tuple(n for n in trained if not n.startswith(self._prefix))
        norms = {m for m, layer in self._module.named_modules() if isinstance(layer, _NORMS)}
        self.norm_names = tuple(n for n in trained if n.rpartition(".")[0] in norms)

    def _built(self, key: Tensor) -> nn.Module:
        """Build a new module; torch's CPU generator, NumPy's and Python's are seeded from ``key`` [2] meanwhile."""
        seed = int(rng.bits(key.cpu(), torch.tensor(0)))
        numpys, pythons = np.random.get_state(), random.getstate()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                np.random.seed(seed)
                random.seed(seed)
                return self._build()
        finally:
            np.random.set_state(numpys)
            random.setstate(pythons)

    @property
    def structure(self) -> str:
        """The module's layers and their settings as torch prints them, without addresses in memory."""
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(self._module))

    @property
    def head_name(self) -> str:
        """The dotted name of the sub-module that is the head."""
        return self._prefix[:-1]

    @property
    def num_classes(self) -> int:
        """C, the number of classes; refused where the objective has none."""
        if not self.objective.classes:
            raise UserError(f"the objective {self.objective.name!r} has no classes: use a method that needs none")
        return self.num_outputs

    @property
    def feature_dim(self) -> int:
        """d, the number of features that enter the head."""
        if not isinstance(self._head, nn.Linear):
            raise UserError(
                f"this method replaces the head by its own, so the head {self._prefix[:-1]!r} must be an nn.Linear, "
                f"not {type(self._head).__name__}"
            )
        return self._head.in_features

    def init(self, key: Tensor) -> Tree:
        """Return initial parameters: torch's init on the CPU, by a generator seeded from ``key`` [2], then moved."""
        module = self._built(key)
        mine = self.constants()
        for name, value in _constants(module).items():
            if not _same(value.to(mine[name]), mine[name]):
                raise ValueError(f"{name} is a constant of the model, drawn at random: give Task(...) the key of init")
        own = dict(module.named_parameters())
        return {n: own[n].detach().clone().to(device=self.device, dtype=self.dtype) for n in self.shapes}

    def constants(self) -> dict[str, Tensor]:
        """Return frozen parameters and buffers by name: what a saved model needs besides its parameters."""
        return {name: value for name, value in _constants(self._module).items() if name not in self.shapes}

    def on(self, device: torch.device | str) -> "Task":
        """Return the same task, with the same constants, on another device and in fp32."""

        def build() -> nn.Module:
            module = copy.deepcopy(self._module)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in self.shapes)
            return module

        return Task(build, self.head_name, self.num_outputs, device, self.dtype, "fp32", self.objective)

    def logits(self, params: Tree, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Map x (B, ...) to outputs (B, O). A training loss passes ``key=batch.key``, by which random layers draw."""
        if len(params) != len(self.shapes):
            raise KeyError(f"the model has {len(self.shapes)} tensors, not {len(params)}")
        return self._whole(params, x, key)

    def features(self, params: Tree, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Map x (B, ...) to features (B, d), which enter the head. Only the body's parameters are read."""
        return self._features(params, x, key)

    def classify(self, params: Tree, features: Tensor, key: Tensor | None = None) -> Tensor:
        """Map features (B, d) to outputs (B, O). Only the head's parameters are read."""
        return self._classifier(params, features, key)

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """Return the mean loss over the real rows of a batch, 0-d. Random layers draw by the batch's key."""
        return self.error(self.logits(params, batch.x, batch.key), batch)

    def error(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss of outputs (B, O) over the real rows of a batch, 0-d."""
        return self.objective.mean_loss(outputs, batch)

    def head(self, params: Tree) -> Tree:
        """Return the head's part of a parameter tree."""
        return {n: params[n] for n in self.head_names}

    def body(self, params: Tree) -> Tree:
        """Return everything but the head."""
        return {n: params[n] for n in self.body_names}

    def norm(self, params: Tree) -> Tree:
        """Return the scales and shifts of the normalisation layers; refuse a model without any."""
        if not self.norm_names:
            raise UserError(
                "this method works on scales and shifts of normalisation layers, and the model has none that train: "
                'set [model] norm = "group", or use a model with such layers'
            )
        return {n: params[n] for n in self.norm_names}

    def check(self, x: Tensor, y: Tensor | None = None) -> None:
        """Refuse a module that is not head(features(x)) with one row of outputs per example; ``x`` (B, ...).

        With targets ``y`` (B, ...) the objective's losses and metrics are tried as well.
        """
        params = {name: p for name, p in self._module.named_parameters() if name in self.shapes}
        head, before = self._prefix[:-1], {name: value.clone() for name, value in self.constants().items()}
        try:
            outputs, again = self.logits(params, x), self.logits(params, x)
        except (RuntimeError, IndexError, TypeError) as error:  # an IndexError: a token without a vector
            kind = str(x.dtype).removeprefix("torch.")
            hint = "" if x.is_floating_point() else f"; they are {kind}: use float32 unless the model embeds tokens"
            shape = tuple(x.shape[1:])
            raise UserError(f"the model cannot take examples of shape {shape}: {reason(error)}{hint}") from error
        for name, value in self.constants().items():
            if not _same(value, before[name]):
                raise UserError(
                    f"the buffer {name!r} changes when the model is called, and clients cannot share such a state: "
                    "make it a constant"
                )
        if not isinstance(outputs, Tensor):
            raise UserError(
                f"the model returns a {type(outputs).__name__}: make its forward return one tensor of shape "
                f"(examples, {self.num_outputs})"
            )
        if outputs.shape != (len(x), self.num_outputs):
            raise UserError(
                f"the model returns outputs of shape {tuple(outputs.shape)} for {len(x)} examples, but "
                f"{self._wanted()}: make it return ({len(x)}, {self.num_outputs})"
            )
        if not torch.equal(outputs, again):
            raise UserError("the model returns different outputs for the same input (dropout?): make it deterministic")
        try:
            composed = self.classify(params, self.features(params, x))
            same = composed.shape == outputs.shape and torch.allclose(composed, outputs, rtol=1e-4, atol=1e-5)
        except RuntimeError:
            same = False
        if not same:
            raise UserError(
                f"the model is not its head {head!r} applied to features: replacing that module by the identity "
                "and applying it afterwards gives different outputs; name the last layer as head"
            )
        if y is not None:
            self.objective.check(outputs, y)

    def _wanted(self) -> str:
        if self.objective.classes:
            return (
                f"the data has {self.num_outputs} classes (the largest label plus one, unless num_classes says "
                "otherwise)"
            )
        return f"the objective {self.objective.name!r} needs {self.num_outputs} per example"


class _Function:
    """A module as a function of its parameters: torch.func.functional_call without the checks of each call."""

    def __init__(self, module: nn.Module, prefix: str, trained: Container[str], numbers: dict[str, int]) -> None:
        """Make only the ``trained`` parameters arguments; ``numbers`` are those of the layers that draw."""
        self._module = module
        self._slots = [
            (module.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2], prefix + name, own)
            for name, own in module.named_parameters()
            if prefix + name in trained
        ]
        self._random = [
            (numbers[(prefix + name).rstrip(".")], layer)
            for name, layer in module.named_modules()
            if isinstance(layer, Random)
        ]

    def __call__(self, params: Tree, x: Tensor, key: Tensor | None) -> Tensor:
        """Put the parameters and the layers' keys in place, call, and put the module's own back."""
        drawing = [] if key is None else self._random
        try:
            for slots, leaf, name, _ in self._slots:
                slots[leaf] = params[name]
            for number, layer in drawing:
                layer.start(rng.fold_in(key, number))  # type: ignore[arg-type]  # there is a key
            return self._module(x)
        finally:
            for slots, leaf, _, own in self._slots:
                slots[leaf] = own
            for _, layer in drawing:
                layer.start(None)


def _random_layers(module: nn.Module) -> dict[str, int]:
    """Return the number of each layer that draws within the whole module, by all its names."""
    found: dict[int, int] = {}
    return {
        name: found.setdefault(id(layer), len(found))
        for name, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, Random)
    }


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and the frozen parameters."""
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    return frozen | dict(module.named_buffers())


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether all values are equal; NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _without_head(module: nn.Module, head: str) -> nn.Module:
    parent, _, leaf = head.rpartition(".")
    # The copy shares tensors with the original but no structure, so that inserting the identity stays local.
    body = copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
    setattr(body.get_submodule(parent), leaf, nn.Identity())
    return body


def _check_module(module: nn.Module, head: str) -> None:
    modules = dict(module.named_modules())
    if not head or head not in modules:
        names = ", ".join(repr(n) for n, m in modules.items() if n and not list(m.children()))
        raise UserError(f"the model has no module named {shown(head)} to serve as head; its layers are {names}")
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise UserError(f"{name} is lazy and has no size yet: call the model once on some examples first")
    _check_inputs(module)
    if not list(modules[head].parameters()):
        raise UserError(f"the module {head!r} has no parameters and cannot serve as head: name the last linear layer")
    if not all(p.requires_grad for p in modules[head].parameters()):
        raise UserError(
            f"the head {head!r} has frozen parameters (requires_grad=False), and methods train heads: "
            "unfreeze it, or name another layer"
        )
    for name, layer in modules.items():
        if isinstance(layer, _BATCH_NORMS) or getattr(layer, "track_running_stats", False):
            raise UserError(
                f"layer {name!r} keeps running statistics (BatchNorm), which clients cannot share: "
                "use GroupNorm or LayerNorm, or let bespoke.models.converted(model) replace it"
            )
        chance = layer.p if isinstance(layer, _DROPOUTS) else getattr(layer, "dropout", 0.0)  # LSTM, attention
        if isinstance(chance, float | int) and chance > 0:
            raise UserError(
                f"layer {name!r} is dropout with p={chance}, whose draws cannot be repeated: set p=0, use "
                "bespoke.models.layers.Dropout, or let bespoke.models.converted(model) replace it"
            )
    if len(list(module.named_parameters(remove_duplicate=False))) != len(list(module.named_parameters())):
        raise UserError("the model ties parameters between layers, so it has no clear split: untie them")


def _check_inputs(module: nn.Module) -> None:
    """Refuse a forward that needs more than one batch of examples."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(None)
    except TypeError:
        raise UserError(
            f"the model's forward{signature} needs more than one batch of examples: wrap it in a module whose "
            "forward(x) splits x into these inputs"
        ) from None
