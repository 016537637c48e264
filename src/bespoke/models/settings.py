"""The ``[model]`` table of an experiment."""

from dataclasses import dataclass

from bespoke.core.settings import knob


@dataclass(frozen=True)
class ModelSettings:
    """The ``[model]`` table. Empty values and 0 mean the model's default."""

    name: str = knob("cnn", "model")
    norm: str = knob("", "normalisation layers: none, group, instance, layer or per_group; empty = the model's default")
    hidden: int = knob(
        0, "units of the hidden layer, which are the features; 0 = the model's default", low=0, high=10**6
    )
    width: int = knob(0, "channels of the first convolution; 0 = the model's default", low=0, high=10**5)
    dropout: float = knob(0.0, "share of the features to drop in training", low=0, high=0.9)
    stem: str = knob(
        "",
        "first convolution of a ResNet: imagenet is 7x7, stride 2, with a max-pool, cifar is 3x3, stride 1, without; "
        "empty = the model's default",
        choices=("", "imagenet", "cifar"),
    )
    stem_pool: bool = knob(False, "put the 3x3 max-pool, stride 2, after the cifar stem too")
    final_norm: str = knob(
        "",
        "one more normalisation before the head of a ResNet: of the feature vector, or of the maps before they are "
        "averaged; empty = the model's default",
        choices=("", "none", "vector", "map"),
    )
    vectors: str = knob("", "word vectors for tokens: an .npy file of shape (vocabulary, 300)")
    vocabulary: int = knob(0, "number of random word vectors, where no file is given", low=0)
    start: str = knob(
        "", "weights that every method starts from: a .safetensors file with this model's parameters; empty = drawn"
    )
