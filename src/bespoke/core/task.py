"""A model as pure functions of its parameters, split by module into body, head and norm layers."""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bespoke.core import rng
from bespoke.core.data import Batch
from bespoke.core.tree import Tree
from bespoke.errors import UserError
from bespoke.gpu import step

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


# How products of matrices and convolutions are computed on CUDA: as float32, with factors rounded to 10 bits (tf32), or
# with factors and activations rounded to 7 bits (bf16, in layers that know it). Parameters and sums stay float32.
PRECISIONS = ("fp32", "tf32", "bf16")


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Let CUDA compute in this precision, and repeatably, while the context lasts."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
    products.allow_tf32 = convolutions.allow_tf32 = precision != "fp32"
    convolutions.deterministic = True
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` (B,) over the real rows; 0 if there is none."""
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def row_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of each row: logits (B, C), labels (B,) -> (B,); under vmap fewer operations than torch's own."""
    return -F.log_softmax(logits, dim=-1).gather(-1, y[:, None])[:, 0]


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Mean cross entropy of logits (B, C) over the real rows of a batch, 0-d."""
    if step.usable(logits):
        return step.cross_entropy(logits, batch.y, batch.mask)
    return masked_mean(row_losses(logits, batch.y), batch.mask)


class Random(nn.Module):
    """A layer that draws in training: ``key`` (2,) is there while a training loss is computed, and None otherwise."""

    key: Tensor | None = None


class Task:
    """A classifier ``head(features(x))`` as functions of a flat parameter tree ``{"conv1.weight": ...}``.

    ``build`` makes the module with torch's own initialisation; ``head`` names the sub-module that turns
    features into logits. Parameters belong to the head, the body or the norm layers by the module that
    owns them, never by their name.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        head: str,
        num_classes: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        precision: str = "fp32",
    ) -> None:
        """``build() -> module``; ``head`` is its dotted name in the module; ``precision`` is one of PRECISIONS."""
        if precision not in PRECISIONS:
            raise UserError(f"there is no precision {precision!r}: use one of {', '.join(PRECISIONS)}")
        if precision != "fp32" and torch.device(device).type != "cuda":
            raise UserError(f"precision {precision} needs a CUDA device: use fp32 on the CPU")
        self._build = build
        self.precision = precision
        self.num_classes = num_classes
        self.device = torch.device(device)
        self.dtype = dtype
        with torch.random.fork_rng(devices=[]):
            module = build()
        _check_module(module, head)
        self._module = module.to(device=self.device, dtype=dtype).requires_grad_(False)
        self._head = self._module.get_submodule(head)
        names = [name for name, _ in self._module.named_parameters()]
        self._prefix = head + "."
        self._whole = _Function(self._module)
        self._random = [layer for layer in self._module.modules() if isinstance(layer, Random)]
        self._features = _Function(_without_head(self._module, head))
        self._classifier = _Function(self._head, self._prefix)
        self.head_names = tuple(n for n in names if n.startswith(self._prefix))
        self.body_names = tuple(n for n in names if not n.startswith(self._prefix))
        norms = {m for m, layer in self._module.named_modules() if isinstance(layer, _NORMS)}
        self.norm_names = tuple(n for n in names if n.rpartition(".")[0] in norms)

    @property
    def feature_dim(self) -> int:
        """d, the number of features that enter the head."""
        if not isinstance(self._head, nn.Linear):
            raise UserError(
                f"this method replaces the head by one of its own, so the head {self._prefix[:-1]!r} must be an "
                f"nn.Linear, not {type(self._head).__name__}"
            )
        return self._head.in_features

    def init(self, key: Tensor) -> Tree:
        """Initial parameters: torch's own init on the CPU, in a generator seeded from ``key`` [2], then moved."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(rng.bits(key.cpu(), torch.tensor(0))))
            module = self._build()
        return {n: p.detach().clone().to(device=self.device, dtype=self.dtype) for n, p in module.named_parameters()}

    def logits(self, params: Tree, x: Tensor) -> Tensor:
        """x (B, ...) -> logits (B, C)."""
        if len(params) != len(self.head_names) + len(self.body_names):
            raise KeyError(f"the model has {len(self.head_names) + len(self.body_names)} tensors, not {len(params)}")
        return self._whole(params, x)

    def features(self, params: Tree, x: Tensor) -> Tensor:
        """x (B, ...) -> features (B, d): what enters the head. Only the body's parameters are read."""
        return self._features(params, x)

    def classify(self, params: Tree, features: Tensor) -> Tensor:
        """features (B, d) -> logits (B, C). Only the head's parameters are read."""
        return self._classifier(params, features)

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """Mean cross entropy over the real rows of a batch, 0-d. Layers that draw do so by the batch's key."""
        for i, layer in enumerate(self._random):
            layer.key = rng.fold_in(batch.key, i)
        try:
            return cross_entropy(self.logits(params, batch.x), batch)
        finally:
            for layer in self._random:
                layer.key = None

    def head(self, params: Tree) -> Tree:
        """The head's part of a parameter tree."""
        return {n: params[n] for n in self.head_names}

    def body(self, params: Tree) -> Tree:
        """Everything but the head."""
        return {n: params[n] for n in self.body_names}

    def norm(self, params: Tree) -> Tree:
        """Scale and shift of the normalisation layers; a model without any is refused."""
        if not self.norm_names:
            raise UserError(
                "this method works on the scales and shifts of normalisation layers, and the model has none: "
                'set [model] norm = "group", or use a model that has such layers'
            )
        return {n: params[n] for n in self.norm_names}

    def check(self, x: Tensor) -> None:
        """Refuse a module that is not head(features(x)) with one row of logits per example; ``x`` (B, ...)."""
        params = dict(self._module.named_parameters())
        head = self._prefix[:-1]
        try:
            logits, again = self.logits(params, x), self.logits(params, x)
        except (RuntimeError, IndexError) as error:  # an index: of a token that has no vector
            reason = str(error).splitlines()[0]
            raise UserError(f"the model cannot take examples of shape {tuple(x.shape[1:])}: {reason}") from error
        if logits.shape != (len(x), self.num_classes):
            raise UserError(
                f"the model gives outputs of shape {tuple(logits.shape)} for {len(x)} examples, "
                f"but the data has {self.num_classes} classes (the largest label plus one, unless num_classes "
                f"says otherwise): make it give ({len(x)}, {self.num_classes})"
            )
        if not torch.equal(logits, again):
            raise UserError("the model gives other outputs when asked twice (dropout?): make it deterministic")
        try:
            composed = self.classify(params, self.features(params, x))
            same = composed.shape == logits.shape and torch.allclose(composed, logits, rtol=1e-4, atol=1e-5)
        except RuntimeError:
            same = False
        if not same:
            raise UserError(
                f"the model is not its head {head!r} applied to features: replacing that module by the identity "
                "and applying it afterwards gives other outputs; name the last layer as head"
            )


class _Function:
    """A module as a function of its parameters: torch.func.functional_call without what each call would check anew."""

    def __init__(self, module: nn.Module, prefix: str = "") -> None:
        self._module = module
        self._slots = [
            (module.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2], prefix + name, own)
            for name, own in module.named_parameters()
        ]

    def __call__(self, params: Tree, x: Tensor) -> Tensor:
        """Put the parameters in place, call, and put the module's own back."""
        try:
            for slots, leaf, name, _ in self._slots:
                slots[leaf] = params[name]
            return self._module(x)
        finally:
            for slots, leaf, _, own in self._slots:
                slots[leaf] = own


def _without_head(module: nn.Module, head: str) -> nn.Module:
    parent, _, leaf = head.rpartition(".")
    # The copy shares no structure with the original, so that putting the identity in place stays local.
    body = copy.deepcopy(module)
    setattr(body.get_submodule(parent), leaf, nn.Identity())
    return body


def _check_module(module: nn.Module, head: str) -> None:
    modules = dict(module.named_modules())
    if not head or head not in modules:
        names = ", ".join(repr(n) for n, m in modules.items() if n and not list(m.children()))
        raise UserError(f"the model has no module named {head!r} to serve as head; its layers are {names}")
    if not list(modules[head].parameters()):
        raise UserError(f"the module {head!r} has no parameters and cannot serve as head: name the last linear layer")
    for name, layer in modules.items():
        if isinstance(layer, _BATCH_NORMS) or getattr(layer, "track_running_stats", False):
            raise UserError(
                f"layer {name!r} keeps running statistics (BatchNorm), which clients cannot share honestly: "
                "use nn.GroupNorm, nn.InstanceNorm2d(affine=True) or nn.LayerNorm instead"
            )
        chance = layer.p if isinstance(layer, _DROPOUTS) else getattr(layer, "dropout", 0.0)  # LSTM, attention
        if isinstance(chance, float | int) and chance > 0:
            raise UserError(
                f"layer {name!r} is dropout with p={chance}, whose draws could not be repeated: set p=0, "
                "or use bespoke.models.layers.Dropout"
            )
    if len(list(module.named_parameters(remove_duplicate=False))) != len(list(module.named_parameters())):
        raise UserError("the model ties parameters between layers, which has no clear split: untie them")
