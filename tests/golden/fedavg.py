"""FedAvg, and FedAvg with fine-tuning; with mu > 0 FedProx."""

from dataclasses import replace

from golden.common import ALL, BOTH, HEAD, Case, Outcome, mean, mistakes, predictions, train, train_near


def fedavg(problem, finetune_epochs=0, finetune_part="all", finetune_lr=0.0, mu=0.0, twist=""):
    """The mean of local models; copies are fine-tuned before prediction."""
    out, w = Outcome(), problem.start
    everyone, seen = range(len(problem.x)), set()
    strength = {"no proximal term": 0.0, "mu instead of mu/2": 2.0 * mu}.get(twist, mu)
    for now, cohort in problem.rounds():
        received = w
        anchors = {"anchored to the first model": lambda p: problem.start, "anchored to itself": lambda p: p}
        anchor = anchors.get(twist, lambda p, received=received: received)
        parts = [train_near(now, k, received, anchor, strength, twist=twist) for k in cohort]
        if twist == "absent clients averaged too":
            absent = [k for k in range(problem.population) if k not in cohort]
            w = mean(problem, cohort + absent, parts + [received] * len(absent))
        else:
            w = mean(problem, cohort, parts, twist)
        trained = HEAD if (finetune_part == "head") != (twist == "fine-tunes the other part") else ALL
        epochs = 0 if twist == "no fine-tuning" else finetune_epochs
        slower = finetune_lr and twist != "fine-tunes at the training rate"
        tuned = replace(problem, lr=finetune_lr) if slower else problem
        personal = [train(tuned, k, w, epochs, trained, twist=twist) if epochs else w for k in everyone]
        if twist == "fine-tuned model is sent":
            w = mean(problem, cohort, [personal[k] for k in cohort])
        seen |= set(cohort)
        views = predictions(problem, personal, w if finetune_epochs else None)
        out.keep({"model": w}, {k: {} for k in seen}, views)
    return out


CASES = {
    "fedavg": Case(),
    "fedavg_ft": Case({"finetune_epochs": 5}),
    "fedavg_ft/head": Case({"finetune_epochs": 2, "finetune_part": "head"}),
    "fedavg_ft/rate": Case({"finetune_epochs": 2, "finetune_lr": 0.03}),
}

MISTAKES = [
    *mistakes("fedavg", "one step less", "other weighting", "absent clients averaged too", variants=BOTH),
    *mistakes("fedavg_ft", "other weighting", "one step less", "fine-tuned model is sent", variants=BOTH),
    *mistakes("fedavg_ft", "no fine-tuning", "fine-tunes the other part", variants=BOTH, late=True),
    *mistakes("fedavg_ft/head", "no fine-tuning", "fine-tunes the other part", variants=BOTH, late=True),
    *mistakes("fedavg_ft/rate", "no fine-tuning", "fine-tunes at the training rate", variants=BOTH, late=True),
    *mistakes(CASES, "no momentum", "no weight decay", variants=("momentum",)),
]
