"""Losses as they are written in the papers, and their gradients by complex steps: exact to rounding, derived by nobody.

The functions also take complex numbers, which carry a derivative, and leaves with a leading axis.
"""

import numpy as np

from golden.common import descend

TINY = 1e-30


def slope(loss, p, names):
    """The gradient of ``loss(p)`` with respect to some leaves: each entry of a leaf is moved in a copy of its own."""
    out = {}
    for name in names:
        steps = TINY * 1j * np.eye(p[name].size).reshape(-1, *p[name].shape)
        moved = np.broadcast_to(loss(p | {name: p[name] + steps}), len(steps))
        out[name] = moved.imag.reshape(p[name].shape) / TINY
    return out


def fit(problem, loss, p, names, steps, twist=""):
    """Steps on ``loss(p, t)``, t counting them."""
    velocity = {}
    for t in range(steps):
        p = descend(problem, lambda p, t=t: slope(lambda q: loss(q, t), p, names), p, 1, names, velocity, twist)
    return p


def relu(x):
    return np.where(x.real > 0, x, 0.0)


def turned(matrix):
    return np.swapaxes(matrix, -1, -2)


def features(p, x):
    return np.tanh(x @ turned(p["body.weight"]) + p["body.bias"][..., None, :])


def classify(p, z):
    return z @ turned(p["head.weight"]) + p["head.bias"][..., None, :]


def cross_entropy(logits, y):
    shifted = logits - logits.real.max(axis=-1, keepdims=True)
    return np.mean(np.log(np.exp(shifted).sum(axis=-1)) - shifted[..., np.arange(len(y)), y], axis=-1)


def unit(v):
    """Vectors of length one along the last axis; 0 stays 0."""
    square = (v * v).sum(axis=-1, keepdims=True)
    return v / np.sqrt(np.where(square.real > 1e-24, square, 1e-24))


def layer_norm(x, p, name):
    rest = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((rest * rest).mean(axis=-1, keepdims=True) + 1e-5)
    return rest / spread * p[f"{name}/scale"][..., None, :] + p[f"{name}/shift"][..., None, :]


def class_means(z, y, classes):
    """Means (0 for an absent class) and rows of each class."""
    count = np.array([np.sum(y == c) for c in range(classes)], dtype=float)
    zero = np.zeros(z.shape[1])
    return np.stack([z[y == c].mean(axis=0) if count[c] else zero for c in range(classes)]), count


def nested(p, name):
    """The leaves below ``name/`` as the library nests them."""
    below = {n.partition("/")[2]: v for n, v in p.items() if n.startswith(name + "/")}
    tops = {n.partition("/")[0] for n in below}
    return {n: below[n] if n in below else nested(below, n) for n in tops}


def flat(nest, name):
    """The inverse."""
    out = {}
    for key, value in nest.items():
        out |= flat(value, f"{name}/{key}") if isinstance(value, dict) else {f"{name}/{key}": value}
    return out
