"""QLSD: Langevin steps of the server on quantised gradients, whose memory stays on the clients."""

import numpy as np

from golden.common import CROSSED, Case, Outcome, combine, finetuned, gradient, mistakes


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
    uniforms,
    normals,
    step,
    levels,
    temperature,
    prior,
    use_memory=True,
    average_from=0,
    thin=1,
    finetune_epochs=0,
    twist="",
):
    """``uniforms[r][k]`` serve client k's quantiser in round r, ``normals[r]`` the server's noise."""
    out, theta, clients = Outcome(), problem.start, problem.population
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
        used = average if average_from and twist != "last sample predicts" else theta
        views = finetuned(problem, used, finetune_epochs, twist=twist)
        out.keep(server, {k: {"memory": m} for k, m in memory.items()}, views)
    return out


FIELDS = {"step": 0.4, "levels": 6, "temperature": 0.5, "prior": 0.9}
CASES = {
    "qlsd": Case(FIELDS),
    "qlsd/mean": Case(FIELDS | {"average_from": 2, "thin": 1, "use_memory": False}),
    "qlsd/thin": Case(FIELDS | {"average_from": 1, "thin": 2}, CROSSED),
    "qlsd/exact": Case(FIELDS | {"levels": 0}),
    "qlsd_ft": Case(FIELDS | {"finetune_epochs": 5}),
}

MISTAKES = [
    *mistakes(
        "qlsd",
        "mean gradient",
        "quantised twice",
        "memory takes all",
        "memory is not added",
        "absent clients do not count",
        "no prior",
        "half the noise",
    ),
    *mistakes("qlsd/mean", "last sample predicts", late=True),
    *mistakes("qlsd_ft", "no fine-tuning", late=True),
]
