"""The model and its optimiser on minibatches, gradients derived by hand; parameters may be complex.

``batches(round, k, group)`` gives the rows of each minibatch of client k's main pass, in order, their number a multiple
of ``group``; a round of None is a pass before prediction.
"""

from dataclasses import replace

import numpy as np

from golden.common import directions, features, some


def classify(p, z):
    return z @ p["head.weight"].T + p["head.bias"]


def logits(p, x):
    return classify(p, features(p, x))


def softmax(scores):
    scores = np.exp(scores - scores.real.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def error(scores, y):
    """Gradient of the mean cross entropy with respect to the logits."""
    return (softmax(scores) - np.eye(scores.shape[1])[y]) / len(y)


def head_gradient(z, e):
    return {"head.weight": e.T @ z, "head.bias": e.sum(axis=0)}


def backward(p, x, e):
    """From the gradient with respect to the logits to that of all four leaves."""
    z = features(p, x)
    back = (e @ p["head.weight"]) * (1.0 - z * z)
    return {"body.weight": back.T @ x, "body.bias": back.sum(axis=0)} | head_gradient(z, e)


def gradient(p, x, y):
    return backward(p, x, error(logits(p, x), y))


def blend(share, a, b):
    """share a + (1 - share) b."""
    return {name: share * a[name] + (1.0 - share) * b[name] for name in a}


def step(p, g, rate):
    return p | {name: p[name] - rate * g[name] for name in g}


def sgd(problem, p, g, velocity):
    """One step of the configured optimiser on the leaves in ``g``; ``velocity`` is updated in place."""
    return step(p, directions(problem, p, g, velocity), problem.lr)


def train(problem, k, lists, p, trained, slope=gradient, rate=None):
    """Minibatch SGD on the leaves ``trained``."""
    speed, problem = {}, problem if rate is None else replace(problem, lr=rate)
    for rows in lists:
        p = sgd(problem, p, some(slope(p, problem.x[k][rows], problem.y[k][rows]), trained), speed)
    return p
