"""FedBABU: the body under a fixed head; copies are fine-tuned before prediction."""

import numpy as np

from golden.common import ALL, BODY, BOTH, CROSSED, HEAD, Case, Outcome, mean, mistakes, some
from golden.minibatch import logits, train


def fedbabu(problem, batches, finetune_epochs=5, finetune_part="all", finetune_lr=0.0, twist=""):
    out, body, head, seen = Outcome(), some(problem.start, BODY), some(problem.start, HEAD), set()
    for round, (now, cohort) in enumerate(problem.rounds(), 1):
        parts = []
        for k in cohort:
            lists = batches(round, k, 1)
            p = train(now, k, lists, body | head, ALL if twist == "head trained" else BODY)
            parts.append(p)
            if twist == "weight decay of the head":
                shrunk = (1.0 - problem.lr * problem.decay) ** len(lists)
                parts[-1] = p | {name: p[name] * shrunk for name in HEAD}
        total = mean(problem, cohort, parts, twist)
        body, head = some(total, BODY), some(total, HEAD)
        seen |= set(cohort)
        views, tuned = [], {}
        for k, x in enumerate(problem.x_test):
            p = body | head
            if twist == "fine-tunes its own body" and k in cohort:
                p = parts[cohort.index(k)]
            part = HEAD if (finetune_part == "head") != (twist == "fine-tunes the other part") else ALL
            rate = problem.lr if twist == "fine-tunes at the training rate" or not finetune_lr else finetune_lr
            lists = [np.arange(len(problem.y[k]))] * (0 if twist == "no fine-tuning" else finetune_epochs)
            lists = [] if twist == "unseen not fine-tuned" and k not in seen else lists
            tuned[k] = train(problem, k, lists, p, part, rate=rate)
            views.append({"personal": logits(tuned[k], x), "global": logits(body | head, x)})
        if twist == "the fine-tuned body is sent":
            body = mean(problem, cohort, [some(tuned[k], BODY) for k in cohort])
        out.keep({"body": body}, {k: {"head": head} for k in seen}, views)
    return out


CASES = {
    "fedbabu": Case(),
    "fedbabu/head": Case({"finetune_epochs": 2, "finetune_part": "head", "finetune_lr": 0.1}, CROSSED),
}

MISTAKES = [
    *mistakes("fedbabu", "other weighting", "head trained", "the fine-tuned body is sent", variants=BOTH),
    *mistakes("fedbabu", "unseen not fine-tuned", variants=BOTH, late=True),
    *mistakes(
        "fedbabu",
        "no fine-tuning",
        "fine-tunes the other part",
        "fine-tunes its own body",
        variants=BOTH,
        late=True,
    ),
    *mistakes(
        "fedbabu/head",
        "fine-tunes at the training rate",
        "fine-tunes the other part",
        variants=("momentum",),
        late=True,
    ),
    *mistakes("fedbabu", "weight decay of the head", variants=("momentum",)),
]
