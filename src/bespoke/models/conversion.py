"""Conversion of any module: a copy in which the layers that clients cannot share are replaced."""

import copy
from collections.abc import Callable

from torch import nn

from bespoke.models import layers

_BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_MOST_GROUPS, _SMALLEST_GROUP = 32, 8


def converted(model: nn.Module, report: Callable[[str], None] = print) -> nn.Module:
    """Return a copy of a module that any method can train, and ``report`` each replacement in one line.

    BatchNorm becomes GroupNorm with the same scales and shifts; its running statistics are dropped, so a trained model
    needs some more training. Dropout becomes :class:`bespoke.models.layers.Dropout`. Dropout inside attention and
    recurrent layers, where it is not a separate layer, is set to 0.
    """
    made, replaced = _convert(copy.deepcopy(model), "", {})
    for line in replaced or ["nothing had to be replaced"]:
        report(line)
    return made


def _convert(layer: nn.Module, name: str, done: dict[int, nn.Module]) -> tuple[nn.Module, list[str]]:
    """Return the layer with its children converted, or its replacement; a layer used twice is converted once."""
    if id(layer) in done:
        return done[id(layer)], []
    new, words = _replacement(layer)
    lines = [f"{name}: {type(layer).__name__} -> {words}"] if words else []
    done[id(layer)] = new
    for child_name, child in list(layer._modules.items()):  # named_children passes over a layer used twice
        if child is None:
            continue
        made, more = _convert(child, f"{name}.{child_name}" if name else child_name, done)
        if made is not child:
            setattr(new, child_name, made)
        lines += more
    return new, lines


def _replacement(layer: nn.Module) -> tuple[nn.Module, str]:
    """Return what replaces a layer, and a description; a layer that may stay is returned unchanged with ""."""
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        groups = _groups(layer.num_features)
        norm = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine)
        return _with_scales_of(layer, norm), f"GroupNorm, {groups} groups of {layer.num_features // groups} channels"
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
        plain = type(layer)(layer.num_features, layer.eps, affine=layer.affine)
        return _with_scales_of(layer, plain), "the same without running statistics"
    if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0:
        by_channel = isinstance(layer, _BY_CHANNEL)
        words = f"bespoke.models.layers.Dropout, p = {layer.p}" + (", by channel" if by_channel else "")
        return layers.Dropout(layer.p, by_channel), words
    chance = getattr(layer, "dropout", 0.0)  # of LSTM, attention
    if isinstance(chance, float | int) and chance > 0:
        layer.dropout = 0.0  # type: ignore[assignment]
        return layer, f"the same with dropout = 0 instead of {chance}"
    return layer, ""


def _groups(channels: int) -> int:
    """Return the largest number of groups, at most 32, that leaves at least 8 channels in each."""
    possible = range(1, _MOST_GROUPS + 1)
    return max((g for g in possible if channels % g == 0 and channels // g >= _SMALLEST_GROUP), default=1)


def _with_scales_of(layer: nn.Module, new: nn.Module) -> nn.Module:
    """Return the new layer with the old one's scales and shifts, including frozen ones."""
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new
