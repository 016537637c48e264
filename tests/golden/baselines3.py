"""FedPA, FedEP, QLSD, pFedGP and pFedBreD once more, in NumPy alone.

Model, optimiser and twists are those of ``reference``. Random draws are given as arrays. Where a gradient has no simple
form by hand (a Gaussian process's prediction as a function of the network) it is taken by the complex step: f(x + ih)
has the derivative in its imaginary part, exact to rounding.
"""

from dataclasses import dataclass

import numpy as np

from golden.reference import BODY, HEAD, descend, gradient, logits, mean, train

ALL = BODY + HEAD


@dataclass
class Outcome:
    """By round: the server, the states of those who took part, and everyone's logits on its test rows."""

    server: list
    states: list
    logits: list


def flat(p):
    return np.concatenate([p[name].ravel() for name in ALL])


def shaped(vector, like):
    parts = np.split(vector, np.cumsum([like[name].size for name in ALL])[:-1])
    return {name: part.reshape(like[name].shape) for name, part in zip(ALL, parts, strict=True)}


def combine(fn, *trees):
    return {name: fn(*(t[name] for t in trees)) for name in trees[0]}


def path(problem, slope, p):
    """The iterates of a local pass, one after each step; momentum runs on."""
    velocity, iterates = {}, []
    for _ in range(problem.epochs):
        p = descend(problem, slope, p, 1, velocity=velocity)
        iterates.append(p)
    return iterates


def own_slope(problem, k):
    return lambda p: gradient(p, problem.x[k], problem.y[k])


def finetuned(problem, w, epochs):
    return [logits(train(problem, k, w, epochs) if epochs else w, problem.x_test[k]) for k in range(len(problem.x))]


# --- FedPA ------------------------------------------------------------------------------------------------------


def shrunk_covariance(samples, rho, twist=""):
    """rho_L I + (1 - rho_L) S for samples (L, d), d x d."""
    count, d = samples.shape
    r = 1.0 / (1.0 + (count - 1) * rho)
    centred = samples - samples.mean(axis=0)
    over = count if twist == "biased covariance" else count - 1
    return r * np.eye(d) + (1.0 - r) * centred.T @ centred / over


def recursion(theta, samples, rho):
    """The paper's dynamic programme for Sigma^-1 (theta - mean), without any d x d matrix."""
    m, delta, kept = samples[0], theta - samples[0], []
    for t in range(2, len(samples) + 1):
        u = samples[t - 1] - m
        v = u.copy()
        for k, (vk, uvk) in enumerate(kept, start=2):
            g = rho * (k - 1) / k
            v = v - g * (vk @ u) / (1.0 + g * uvk) * vk
        uv, ud, g = u @ v, u @ delta, rho * (t - 1) / t
        delta = delta - (1.0 + g * (t * ud - uv) / (1.0 + g * uv)) * v / t
        kept.append((v, uv))
        m = ((t - 1) * m + samples[t - 1]) / t
    return delta * (1.0 + (len(samples) - 1) * rho)


def fedpa(problem, samples, burn_in, rho, server_lr=1.0, server_momentum=0.0, warm=0, finetune_epochs=0, twist=""):
    out, theta, seen = Outcome([], [], []), problem.start, set()
    velocity = combine(np.zeros_like, theta)
    for r, cohort in enumerate(problem.cohorts):
        deltas = []
        for k in cohort:
            iterates = path(problem, own_slope(problem, k), theta)
            steps = len(iterates)
            count = min(samples, steps - burn_in)
            if count < 2 or (r < warm and twist != "no warm rounds"):
                deltas.append(combine(np.subtract, theta, iterates[-1]))
                continue
            windows = [[] for _ in range(burn_in + count)]
            for t, p in enumerate(iterates):
                windows[t * (burn_in + count) // steps].append(flat(p))
            if twist != "burn-in is sampled":
                windows = windows[burn_in:]
            drawn = np.stack([w[-1] if twist == "last iterate of a window" else np.mean(w, axis=0) for w in windows])
            sigma = shrunk_covariance(drawn, 0.0 if twist == "no covariance" else rho, twist)
            away = flat(theta) - (drawn[-1] if twist == "last sample for the mean" else drawn.mean(axis=0))
            deltas.append(shaped(np.linalg.solve(sigma, away), theta))
        step = mean(problem, cohort, deltas, twist)
        m = 0.0 if twist == "no server momentum" else server_momentum
        velocity = combine(lambda d, v, m=m: d + m * v, step, velocity)
        theta = combine(lambda w, v: w - server_lr * v, theta, velocity)
        seen |= set(cohort)
        out.server.append({"model": theta, "velocity": velocity})
        out.states.append({k: {} for k in seen})
        out.logits.append(finetuned(problem, theta, 0 if twist == "no fine-tuning" else finetune_epochs))
    return out


# --- FedEP ------------------------------------------------------------------------------------------------------


def fedep(problem, precision, server_lr=1.0, warm=1, variant="ep", finetune_epochs=0, twist=""):
    """Natural parameters throughout: q = (eta, n c), a site (n_k c mu_0 + moved, n_k c)."""
    c, out = (2.0 * precision if twist == "other precision" else precision), Outcome([], [], [])
    mu = first = problem.start
    clients = problem.population
    rows, damping = np.zeros(clients), np.zeros(clients)
    moved, pending = {}, {}  # by client, over n c: what its site gained, and what it gained last, before damping
    for r, cohort in enumerate(problem.cohorts):
        heard = rows[rows > 0]
        n = heard.mean() * clients if len(heard) else 0.0
        deltas = []
        for k in cohort:
            size = len(problem.y[k])
            zero = combine(np.zeros_like, mu)
            site = combine(lambda a, b, k=k: a + damping[k] * b, moved.get(k, zero), pending.get(k, zero))
            if twist == "sites forget":
                site = zero
            if r < warm:
                delta = combine(np.subtract, path(problem, own_slope(problem, k), mu)[-1], mu)
                pending[k] = zero
            else:
                total = max(n, size)
                eta_q, lambda_q = combine(lambda m, t=total: t * c * m, mu), total * c
                start = first if variant == "ep" else mu
                if twist == "sites start at the initial weights":
                    start = problem.start
                eta_k = combine(lambda m, a, s=size, t=total: s * c * m + t * c * a, start, site)
                eta_c, lambda_c = combine(np.subtract, eta_q, eta_k), lambda_q - size * c
                if twist == "cavity is q":
                    eta_c, lambda_c = eta_q, lambda_q
                over = 1.0 if twist == "sum of the loss, mean of the prior" else size
                scale = min(1.0, size / (total * c * problem.lr)) / over

                def slope(p, k=k, eta_c=eta_c, lambda_c=lambda_c, scale=scale):
                    g = gradient(p, problem.x[k], problem.y[k])
                    return {name: g[name] + scale * (lambda_c * p[name] - eta_c[name]) for name in g}

                iterates = path(problem, slope, mu)
                ends = iterates[-1:] if twist == "last iterate" else iterates
                delta = combine(lambda *ps: sum(ps[1:]) / (len(ps) - 1) - ps[0], mu, *ends)
                pending[k] = delta if variant == "ep" else zero
            moved[k] = site
            deltas.append(delta)
            rows[k] = size
        step = 1.0 if r < warm else server_lr
        by_rows = [float(len(problem.y[k])) if problem.weighting == "samples" else 1.0 for k in cohort]
        weights = by_rows if r < warm or twist == "weighted by rows" else [1.0] * len(cohort)
        change = combine(lambda *ds, w=weights: sum(a * d for a, d in zip(w, ds, strict=True)) / sum(w), *deltas)
        mu = combine(lambda m, d, s=step: m + s * d, mu, change)
        first = mu if r < warm else first
        for k in cohort:
            damping[k] = step / (1.0 if twist == "sites are not damped" else len(cohort))
        server = {"model": mu, "first": first, "rows": rows.copy(), "damping": damping.copy(), "round": r + 1.0}
        out.server.append(server)
        out.states.append({k: {"site": moved[k], "pending": pending[k]} for k in moved})
        out.logits.append(finetuned(problem, mu, 0 if twist == "no fine-tuning" else finetune_epochs))
    return out


# --- QLSD -------------------------------------------------------------------------------------------------------


def quantised(v, levels, uniform):
    """Each entry of a tensor up or down to a multiple of |v| / levels."""
    norm = np.sqrt((v**2).sum())
    if not levels or norm == 0.0:
        return v
    low = np.floor(levels * np.abs(v) / norm)
    up = uniform < levels * np.abs(v) / norm - low
    return norm * np.sign(v) * (low + up) / levels


def qlsd(
    problem,
    step,
    levels,
    temperature,
    prior,
    uniforms,
    normals,
    use_memory=True,
    average_from=0,
    thin=1,
    finetune_epochs=0,
    twist="",
):
    """``uniforms[r][k]`` serve client k's quantiser in round r, ``normals[r]`` the server's noise."""
    out, theta, clients = Outcome([], [], []), problem.start, problem.population
    zero = combine(np.zeros_like, theta)
    memory, total, rows, kept, average = {}, zero, np.zeros(clients), [], theta
    for r, cohort in enumerate(problem.cohorts):
        sent = []
        for k in cohort:
            size = 1.0 if twist == "mean gradient" else len(problem.y[k])
            g = combine(lambda g, s=size: s * g, gradient(theta, problem.x[k], problem.y[k]))
            news = combine(np.subtract, g, memory.get(k, zero))
            c = {name: quantised(news[name], levels, uniforms[r][k][name]) for name in news}
            if twist == "quantised twice":
                c = {name: quantised(c[name], levels, 0.5) for name in c}
            sent.append(c)
            rows[k] = len(problem.y[k])
            share = {
                n: 1.0 / (1.0 + (min(v.size / levels**2, np.sqrt(v.size) / levels) if levels else 0))
                for n, v in c.items()
            }
            if twist == "memory takes all":
                share = dict.fromkeys(share, 1.0)
            gain = 1.0 if use_memory else 0.0
            old = memory.get(k, zero)
            memory[k] = {n: old[n] + gain * share[n] * c[n] for n in c}
        heard = rows[rows > 0]
        gamma = step / (heard.mean() * clients)
        news = combine(lambda *cs: sum(cs), *sent)
        scale = 1.0 if twist == "absent clients do not count" else clients / len(cohort)
        base = zero if twist == "memory is not added" else total
        slope = combine(
            lambda m, c, t, s=scale: m + s * c + (0.0 if twist == "no prior" else prior) * t, base, news, theta
        )
        total = {n: total[n] + gain * share[n] * news[n] for n in news}
        spread = np.sqrt((1.0 if twist == "half the noise" else 2.0) * gamma * temperature)
        theta = combine(lambda t, g, z, a=gamma, b=spread: t - a * g + b * z, theta, slope, normals[r])
        server = {"model": theta, "memory": total, "rows": rows.copy(), "round": r + 1.0}
        if average_from:
            late = r + 1 - average_from
            if late >= 0 and late % thin == 0:
                kept.append(theta)
            average = combine(lambda *ts: sum(ts) / len(ts), *kept) if kept else theta
            server |= {"mean": average, "kept": float(len(kept))}
        out.server.append(server)
        out.states.append({k: {"memory": m} for k, m in memory.items()})
        used = average if average_from and twist != "last sample predicts" else theta
        out.logits.append(finetuned(problem, used, 0 if twist == "no fine-tuning" else finetune_epochs))
    return out


# --- pFedBreD ---------------------------------------------------------------------------------------------------


def pfedbred(problem, prior, eta, lam, prox_steps, prox_lr, meta_lr, twist=""):
    """With full batches both batches of a meta step are the same rows."""
    out, w, own = Outcome([], [], []), problem.start, {}
    repetitions = -(-problem.epochs // 2) if prior == "mh" and twist != "one batch each" else problem.epochs
    move = lambda a, b, s: combine(lambda x, y: x + s * y, a, b)  # noqa: E731

    def round_of(k, w, theta, last):
        slope = own_slope(problem, k)
        for _ in range(repetitions):
            if prior == "mh" and twist != "no meta step":
                ahead = w if twist == "gradient at the old point" else move(w, slope(w), -meta_lr)
                new = move(ahead if twist == "meta step from ahead" else w, slope(ahead), -meta_lr)
                w_prior = w if twist == "meta step for the prior alone" else new
                w, shown = w_prior, new
            else:
                shown = w
            away = slope(shown) if prior == "lg" else combine(np.subtract, last, theta)
            if twist == "away from the current model":
                away = combine(np.subtract, w, theta)
            s = move(shown, away, eta if twist == "other sign" else -eta)
            starts_at_mean = (prior == "lg") != (twist == "starts at the other point")
            theta = s if starts_at_mean else w
            for _ in range(prox_steps):
                anchor = w if twist == "tied to the global model" else s
                pull = combine(lambda g, t, a: g + lam * (t - a), slope(theta), theta, anchor)
                theta = move(theta, pull, -prox_lr)
            centre = w if twist == "envelope at the global model" else s
            w = combine(lambda x, m, t: x - problem.lr * lam * (m - t), w, centre, theta)
        return w, theta

    for cohort in problem.cohorts:
        parts = []
        for k in cohort:
            theta, last = own.get(k, (problem.start, problem.start))
            if twist == "personal model is not kept":
                theta = last = w
            sent, theta = round_of(k, w, theta, last)
            own[k] = (theta, sent)
            parts.append(theta if twist == "sends the personal model" else sent)
        w = mean(problem, cohort, parts, twist)
        shown = []
        for k in range(len(problem.x)):
            if k in own:
                personal = own[k][0]
            else:
                base = problem.start if twist == "unseen starts at the first model" else w
                personal = w if twist == "unseen untrained" else round_of(k, w, base, w)[1]
            shown.append(logits(personal, problem.x_test[k]))
        out.server.append({"model": w})
        out.states.append({k: {"personal": t, "last": s} for k, (t, s) in own.items()})
        out.logits.append(shown)
    return out


def pfedme(problem, lam, prox_steps, prox_lr):
    """pFedMe with prox steps that start at w, no weight decay, means by rows: what pFedBreD is with eta = 0."""
    w, server, own = problem.start, [], {}
    for cohort in problem.cohorts:
        parts = []
        for k in cohort:
            mine = w
            for _ in range(problem.epochs):
                theta = mine
                for _ in range(prox_steps):
                    g = gradient(theta, problem.x[k], problem.y[k])
                    theta = {n: theta[n] - prox_lr * (g[n] + lam * (theta[n] - mine[n])) for n in theta}
                mine = {n: mine[n] - problem.lr * lam * (mine[n] - theta[n]) for n in mine}
            own[k] = theta
            parts.append(mine)
        w = mean(problem, cohort, parts)
        server.append(w)
    return server, own


# --- pFedGP -----------------------------------------------------------------------------------------------------

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


def features(p, x):
    return np.tanh(x @ p["body.weight"].T + p["body.bias"])


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


def pfedgp(problem, draws, classes, variance=8.0, link="expected_sigmoid", twist=""):
    """``draws[r][k][s]`` (T, rows) orders client k's rows for the split of step s in round r."""
    out, seen = Outcome([], [], []), set()
    body = {name: problem.start[name] for name in BODY}
    for r, cohort in enumerate(problem.cohorts):
        parts, learned = [], []
        for k in cohort:
            x, y = problem.x[k], problem.y[k]
            nodes = class_tree(features(body, x), y, twist)
            step = iter(draws[r][k])

            def slope(p, x=x, y=y, nodes=nodes, step=step):
                order = next(step)
                return complex_step(lambda q: gp_loss(q, x, y, nodes, order, variance, link, twist), p, BODY)

            parts.append(descend(problem, slope, body, problem.epochs, BODY))
            learned.append(k if nodes or twist == "one class counts" else None)
        able = [(k, part) for k, part in zip(learned, parts, strict=True) if k is not None]
        if able:
            body = mean(problem, [k for k, _ in able], [part for _, part in able], twist)
        seen |= set(cohort)
        out.server.append({"body": body})
        out.states.append({k: {} for k in seen})
        shown = [
            gp_logits(body, problem.x[k], problem.y[k], problem.x_test[k], classes, variance, link, twist)
            for k in range(len(problem.x))
        ]
        out.logits.append(shown)
    return out
