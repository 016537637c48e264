"""Self-FL's recurrent net for the sentiment of tweets, written as matrix products."""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bespoke.core import memory
from bespoke.errors import UserError, reason
from bespoke.models import layers
from bespoke.models.settings import ModelSettings

_WORD, _HIDDEN, _FEATURES = 300, 100, 30


class WordVectors(nn.Module):
    """Fixed, untrained word vectors: tokens (B, T), whole numbers -> (B, T, 300)."""

    vectors: Tensor

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.register_buffer("vectors", vectors)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T) to (B, T, 300)."""
        if x.is_floating_point():
            raise UserError("a token model needs whole numbers (int32 or int64) as examples: use another model")
        return nn.functional.embedding(x, self.vectors)


def check_tokens(constants: Mapping[str, Tensor], x: Tensor) -> None:
    """Refuse tokens x (N, T) that have no word vector; ``constants`` are those of the model, by name."""
    for vectors in (value for name, value in constants.items() if name.endswith(".words.vectors")):
        if not x.is_floating_point() and len(x) and not 0 <= x.min() <= x.max() < len(vectors):
            raise UserError(
                f"the examples hold tokens from {x.min()} to {x.max()}, but the model has word vectors for 0 to "
                f"{len(vectors) - 1}: set [model] vocabulary to {x.max() + 1} or more, or give more vectors"
            )


class LSTM(nn.Module):
    """One recurrent layer: (B, T, inputs) -> (B, T, hidden), from a zero state.

    The rows of its weights belong to the input, forget, cell and output gates in this order. There is one bias
    per gate, and the forget gate gets 1 more.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.weight_x = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_h = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        for weight in (self.weight_x, self.weight_h):
            nn.init.uniform_(weight, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, inputs) to (B, T, hidden)."""
        driven = x @ self.weight_x.T + self.bias  # (B, T, 4 hidden)
        h = c = driven.new_zeros(x.shape[0], self.hidden)
        outputs = []
        for step in driven.unbind(1):
            i, f, g, o = (step + h @ self.weight_h.T).chunk(4, 1)
            c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 1)


class Last(nn.Module):
    """The last step of a sequence: (B, T, d) -> (B, d)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, d) to (B, d)."""
        return x[:, -1]


def _word_vectors(settings: ModelSettings) -> Tensor:
    """Return the vectors of the file, or random ones that are the same in every run: (vocabulary, 300) float32."""
    if not settings.vectors and not settings.vocabulary:
        raise UserError(
            f"the model {settings.name} needs word vectors: set [model] vectors to an .npy file of shape "
            f"(vocabulary, {_WORD}), or vocabulary for random ones"
        )
    if not settings.vectors:
        what = f"[model] vocabulary = {settings.vocabulary:,} vectors of {_WORD} numbers"
        memory.require(4 * settings.vocabulary * _WORD, what, "lower it")
        drawn = np.random.default_rng(0).standard_normal((settings.vocabulary, _WORD), dtype=np.float32)
        return torch.from_numpy(0.4 * drawn)  # about the spread of GloVe's
    try:  # mapped, so that its header is compared with the file's size before anything is read
        found = np.load(Path(settings.vectors).expanduser(), mmap_mode="r", allow_pickle=False)
        if isinstance(found, np.ndarray) and found.ndim == 2 and found.shape[1] == _WORD and found.dtype.kind == "f":
            vectors = found.astype(np.float32)
        else:
            raise UserError(f"[model] vectors = {settings.vectors!r} must hold numbers of shape (vocabulary, {_WORD})")
    except (OSError, ValueError, EOFError, OverflowError, MemoryError) as error:
        raise UserError(
            f"[model] vectors = {settings.vectors!r} cannot be read as an .npy file: {reason(error)}"
        ) from None
    if settings.vocabulary not in (0, len(vectors)):
        raise UserError(
            f"[model] vocabulary = {settings.vocabulary}, but {settings.vectors!r} holds {len(vectors)} vectors: "
            "leave it out"
        )
    return torch.from_numpy(vectors)


def sent140_lstm(settings: ModelSettings, input_shape: Sequence[int], num_outputs: int) -> nn.Module:
    """Build fixed word vectors of tokens (B, T), two recurrent layers of 100, the last step, linear to 30 features.

    243,892 parameters for two classes, besides the vectors.
    """
    if len(input_shape) != 1:
        raise UserError(
            f"the model {settings.name} needs rows of tokens, but the examples have shape {tuple(input_shape)}: "
            "use a model for images"
        )
    body = OrderedDict(
        words=WordVectors(_word_vectors(settings)),
        lstm1=LSTM(_WORD, _HIDDEN),
        lstm2=LSTM(_HIDDEN, _HIDDEN),
        last=Last(),
        fc=layers.linear(_HIDDEN, _FEATURES),
    )
    return layers.Classifier(nn.Sequential(body), layers.linear(_FEATURES, num_outputs))
