"""The ``[model]`` table of an experiment."""

from dataclasses import dataclass

from bespoke.core.settings import knob


@dataclass(frozen=True)
class ModelSettings:
    """The ``[model]`` table."""

    name: str = knob("cnn", "model")
    norm: str = knob("none", "normalisation layers: none, group, instance or layer")
    hidden: int = knob(64, "mlp, cnn: units of the hidden layer, which are the features", low=1)
    width: int = knob(16, "cnn: channels of the first convolution; the second has twice as many", low=1)
