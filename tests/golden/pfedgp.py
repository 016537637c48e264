"""pFedGP: a Gaussian process on a tree of classes takes the head's place; the body is trained through it and averaged.

Its prediction as a function of the network has no simple gradient by hand, which is taken by the complex step:
f(x + ih) has the derivative in its imaginary part, exact to rounding.
"""

import numpy as np

from golden.common import BODY, Case, Outcome, descend, features, mean, mistakes

JITTER, TINY = 1e-3, 1e-12


def split_classes(classes, centre):
    """Two groups by 2-means on class means ``centre[c]``, from the farthest pair; the left has the smallest label."""
    distance = lambda a, b: ((a - b) ** 2).sum()  # noqa: E731
    pairs = [(distance(centre[a], centre[b]), a, b) for i, a in enumerate(classes) for b in classes[i + 1 :]]
    far, a, b = max(pairs, key=lambda p: p[0])
    left, right = [], []
    if far > TINY * max((m**2).sum() for m in centre.values()):
        middle = [centre[a], centre[b]]
        for _ in range(10):
            left = [c for c in classes if distance(centre[c], middle[0]) <= distance(centre[c], middle[1])]
            right = [c for c in classes if c not in left]
            middle = [np.mean([centre[c] for c in part], axis=0) for part in (left, right)]
    if not right:
        half = (len(classes) + 1) // 2
        left, right = classes[:half], classes[half:]
    return (left, right) if min(left) < min(right) else (right, left)


def class_tree(z, y, twist=""):
    """The nodes, each a pair of lists of classes; the group that was made first is split first."""
    centre = {c: z[y == c].mean(axis=0) for c in sorted(set(y.tolist()))}
    groups, nodes = [sorted(centre)], []
    while any(len(g) > 1 for g in groups):
        i = next(i for i, g in enumerate(groups) if len(g) > 1)
        if twist == "one class against the rest":
            left, right = groups[i][:1], groups[i][1:]
        else:
            left, right = split_classes(groups[i], centre)
        nodes.append((left, right))
        groups[i] = left
        groups.append(right)
    return nodes


def unit(z):
    return z / np.sqrt((z * z).sum(axis=1, keepdims=True) + TINY)


def rbf(a, b, variance):
    square = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1)[None] - 2.0 * a @ b.T
    return variance * np.exp(-square / 2.0)


def pg_mean(c):
    return np.tanh(c / 2.0) / (2.0 * c)


def mean_field(k, kappa, twist=""):
    """omega of rows with targets kappa = +-1/2 under the kernel matrix k."""
    c = np.sqrt(np.diag(k))
    for _ in range(2 if twist == "two mean-field steps" else 10):
        omega = pg_mean(c)
        s = np.linalg.inv(np.linalg.inv(k) + np.diag(omega))
        c = np.sqrt((s @ kappa) ** 2 + np.diag(s))
    return omega


def left_probability(m, v, link):
    x, w = np.polynomial.hermite.hermgauss(20)
    f = m[:, None] + np.sqrt(2.0 * v)[:, None] * x
    if link == "exp_log":
        return np.exp(-np.log1p(np.exp(-f)) @ w / np.sqrt(np.pi))
    return 1.0 / (1.0 + np.exp(-f)) @ w / np.sqrt(np.pi)


def node(z, z_new, kappa, variance, link, twist=""):
    """P(left) of new rows; z may be complex, omega comes from its real part."""
    k = rbf(z, z, variance) + (0.0 if twist == "no jitter" else JITTER) * np.eye(len(z))
    omega = mean_field(k.real, kappa, twist)
    cross = rbf(z_new, z, variance)
    inner = np.linalg.inv(k + np.diag(1.0 / omega))
    m = cross @ inner @ (kappa / (1.0 if twist == "labels for targets" else omega))
    v = variance + (0.0 if twist == "no jitter" else JITTER) - ((cross @ inner) * cross).sum(axis=1)
    return left_probability(m, v, link)


def gp_loss(p, x, y, nodes, draws, variance, link, twist=""):
    """Sum over nodes of the mean -log P(own side) of half the rows, given the other half; draws[t] orders the rows."""
    z, total = unit(features(p, x)), 0.0
    for (left, right), order in zip(nodes, draws, strict=False):
        target, side = np.zeros(len(y), bool), np.zeros(len(y))
        for classes, sign in ((left, 1.0), (right, -1.0)):
            rows = [i for i in np.argsort(order, kind="stable") if y[i] in classes]
            side[rows] = sign
            target[rows[: len(rows) // 2]] = True
        context = (side != 0) & ~target
        if not target.any():
            continue
        prob = node(z[context], z[target], side[context] / 2.0, variance, link, twist)
        own = np.where(side[target] > 0, prob, 1.0 - prob)
        error = -np.log(own + TINY)
        total = total + (error.sum() if twist == "sum over rows" else error.mean())
    return total


def complex_step(fn, p, names, h=1e-30):
    slope = {}
    for name in names:
        slope[name] = np.zeros_like(p[name])
        for i in np.ndindex(*p[name].shape):
            moved = p[name].astype(complex)
            moved[i] += 1j * h
            slope[name][i] = np.imag(fn(p | {name: moved})) / h
    return slope


def gp_logits(p, x, y, x_new, classes, variance, link, twist=""):
    """Log-probabilities of a client's classes along the tree; absent ones at the floor."""
    raw, out = features(p, x), np.full((len(x_new), classes), -30.0)
    z, z_new = unit(raw), unit(features(p, x_new))
    for c in set(y.tolist()):
        out[:, c] = 0.0
    for left, right in class_tree(raw, y, twist):
        rows = np.isin(y, left + right)
        prob = node(z[rows], z_new, np.where(np.isin(y[rows], left), 0.5, -0.5), variance, link, twist)
        out[:, left] += np.log(prob + TINY)[:, None]
        out[:, right] += np.log(1.0 - prob + TINY)[:, None]
    return np.maximum(out, -30.0)


def pfedgp(problem, orders, variance=8.0, link="expected_sigmoid", twist=""):
    """``orders[r][k][s]`` (T, rows) orders client k's rows for the split of step s in round r."""
    out, seen = Outcome(), set()
    body, classes = {name: problem.start[name] for name in BODY}, len(problem.start["head.bias"])
    for r, (now, cohort) in enumerate(problem.rounds()):
        parts, learned = [], []
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            nodes = class_tree(features(body, x), y, twist)
            step = iter(orders[r][k])

            def slope(p, x=x, y=y, nodes=nodes, step=step):
                order = next(step)
                return complex_step(lambda q: gp_loss(q, x, y, nodes, order, variance, link, twist), p, BODY)

            parts.append(descend(now, slope, body, problem.epochs, BODY))
            learned.append(k if nodes or twist == "one class counts" else None)
        able = [(k, part) for k, part in zip(learned, parts, strict=True) if k is not None]
        if able:
            body = mean(problem, [k for k, _ in able], [part for _, part in able], twist)
        seen |= set(cohort)
        rows = zip(problem.x, problem.y, problem.x_test, strict=True)
        views = [{"personal": gp_logits(body, *own, classes, variance, link, twist)} for own in rows]
        out.keep({"body": body}, {k: {} for k in seen}, views)
    return out


# The personal model is a function of its rows through inverses of kernel matrices, of condition 1e4.
CASES = {
    "pfedgp": Case(epochs=2, tolerance=1e-8),
    "pfedgp/exp_log": Case({"link": "exp_log", "variance": 3.0}, epochs=2, tolerance=1e-8),
}

MISTAKES = [
    *mistakes(
        "pfedgp",
        "other weighting",
        "one class against the rest",
        "two mean-field steps",
        "labels for targets",
        "no jitter",
        "sum over rows",
    ),
]
