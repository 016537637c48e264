"""Mutants of the methods: mistakes that a reader might make, each of which some test of the method has to notice.

    python tests/mutants.py [--jobs 16] [--only pfedfda] [--list]

Each mutant replaces one passage of a method's file in a copy of the sources; then the method's own tests and its golden
comparison run on the copy. The table says which test caught the mutant, or MISSED. The exit status is 1 if fewer than
95 % are caught, and 2 if a passage does not occur exactly once or the tests fail without any mutant.
"""

import argparse
import compileall
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
METHODS = Path("src", "bespoke", "algorithms")
ENOUGH = 0.95


class Mutant(NamedTuple):
    """One passage of a method's file, and what a mistake would make of it."""

    method: str  # the file's stem
    means: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Rewrite the method's file below ``root``."""
        path = root / METHODS / f"{self.method}.py"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def trouble(self) -> str:
        """What keeps this mutant from being one, or an empty string."""
        found = (ROOT / METHODS / f"{self.method}.py").read_text(encoding="utf-8").count(self.old)
        if found != 1:
            return f"{self.method}, {self.means}: the passage occurs {found} times, not once: {self.old!r}"
        return f"{self.method}, {self.means}: nothing changes" if self.old == self.new else ""


MUTANTS: list[Mutant] = []


def of(method: str, *mutants: tuple[str, str, str]) -> None:
    MUTANTS.extend(Mutant(method, *given) for given in mutants)


# --- the five papers' methods ---------------------------------------------------------------------------------

of(
    "pfedfda",
    (
        "the head in training is not shrunk",
        "head = gaussian.lda_head(shared, gaussian.log_prior(local, self.smooth), self.shrink)\n\n",
        "head = gaussian.lda_head(shared, gaussian.log_prior(local, self.smooth))\n\n",
    ),
    (
        "the head in prediction is not shrunk",
        "head = gaussian.lda_head(own, gaussian.log_prior(local, self.smooth), self.shrink)",
        "head = gaussian.lda_head(own, gaussian.log_prior(local, self.smooth))",
    ),
    (
        "the search does not shrink",
        "amount=self.shrink)",
        "amount=1e-4)",
    ),
    (
        "repair is idle",
        "(gaussian.repair(cov),)",
        "(cov,)",
    ),
    (
        "the search's prior is not smoothed",
        "parts)), gaussian.log_prior(local, self.smooth)",
        "parts)), gaussian.log_prior(local, 1e-9)",
    ),
    (
        "no prior in training",
        "shared, gaussian.log_prior(local, self.smooth), self.shrink)\n\n",
        "shared, 0.0 * gaussian.log_prior(local, self.smooth), self.shrink)\n\n",
    ),
    (
        "statistics of the received body",
        "features = local.features(body)",
        'features = local.features(down["body"])',
    ),
    (
        "features of every epoch by default",
        'self.train_statistics == "epochs"',
        'self.train_statistics != "epochs"',
    ),
    (
        "one pass whatever was asked for",
        "stats = self._interpolated(local, features, down, few_rows=0)",
        "stats = self._interpolated(local, local.features(body), down, few_rows=0)",
    ),
    (
        "one pass with the received body whatever was asked for",
        'trained_with_features(local, loss, down["body"], *head)',
        'trained_with_features(local, loss, down["body"], *head)[0], local.features(down["body"])',
    ),
    (
        "few rows count in training",
        "down, few_rows=0)",
        "down, self.few_rows)",
    ),
    (
        "every class has its own mean in prediction",
        "known or self._interpolated(local, local.features(body), down, self.few_rows)",
        "known or self._interpolated(local, local.features(body), down, 0)",
    ),
    (
        "predicts with shared statistics",
        "gaussian.received(local.task, state) if state else None",
        "gaussian.received(local.task, state or down)",
    ),
    (
        "searches again in spite of what was trained",
        "known or self._interpolated(",
        "self._interpolated(",
    ),
    (
        "own statistics under the aggregated body",
        '(state or down)["body"]',
        'down["body"]',
    ),
    (
        "a client without training predicts with room for statistics",
        "if not state:\n            return state",
        "if True:\n            return state",
    ),
    (
        "without betas the shared statistics alone",
        "return shared.mean.new_ones(2)",
        "return shared.mean.new_zeros(2)",
    ),
    (
        "single rows are folded",
        "(member.sum(dim=0) > 1)",
        "(member.sum(dim=0) > 0)",
    ),
    (
        "folds estimate from the rows they hold out",
        "(repeated - part)",
        "part",
    ),
    (
        "always two folds",
        "local.folds(self.folds, ",
        "local.folds(2, ",
    ),
    (
        "folds without the ridge",
        "gaussian.estimate(z, rest, shared.mean, self.ridge)",
        "gaussian.estimate(z, rest, shared.mean, 1.0)",
    ),
    (
        "betas exchanged",
        "interpolate(own, shared, beta[0], beta[1])",
        "interpolate(own, shared, beta[1], beta[0])",
    ),
    (
        "interpolates the other way",
        "interpolate(own, shared, beta[0], beta[1])",
        "interpolate(shared, own, beta[0], beta[1])",
    ),
    (
        "at most becomes fewer than",
        "counts > few_rows",
        "counts >= few_rows",
    ),
    (
        "sends its own means",
        'up = {"body": body, "mean": stats.mean,',
        'up = {"body": body, "mean": shared.mean,',
    ),
    (
        "means start centred",
        "means = rng.uniform(key, (task.num_classes, task.feature_dim), task.dtype)",
        "means = rng.uniform(key, (task.num_classes, task.feature_dim), task.dtype) - 0.5",
    ),
)

of(
    "scaffold",
    (
        "correction reversed",
        'tree.sub(down["control"], state["own"])',
        'tree.sub(state["own"], down["control"])',
    ),
    (
        "no correction",
        "tree.add(g, correction), seen",
        "g, seen",
    ),
    (
        "controls of corrected gradients",
        'tree.add(seen["sum"], g)',
        'tree.add(seen["sum"], tree.add(g, correction))',
    ),
    (
        "sums for means",
        'total / seen["steps"]',
        "total",
    ),
    (
        "the other option",
        'self.control == "start"',
        'self.control == "steps"',
    ),
    (
        "controls are not kept",
        'return {"own": own}, {',
        "return state, {",
    ),
    (
        "sends its control",
        '"change": tree.sub(own, state["own"])',
        '"change": own',
    ),
    (
        "the control moves all the way",
        'len(uploads.clients) / server["clients"]',
        'server["clients"] / server["clients"]',
    ),
    (
        "weighted by rows",
        'uploads.mean("model", equal)',
        'uploads.mean("model")',
    ),
    (
        "changes weighted by rows",
        'uploads.mean("change", equal)',
        'uploads.mean("change")',
    ),
    (
        "no server rate",
        "rate = torch.ones_like(uploads.weights), self.server_lr",
        "rate = torch.ones_like(uploads.weights), 1.0",
    ),
)

of(
    "self_fl",
    (
        "the steps ignore the schedule",
        "others, local.lr.double(), curvature)",
        "others, torch.full_like(local.lr, local.training.lr).double(), curvature)",
    ),
    (
        "mean for median",
        "sigma[known > 0].median()",
        "sigma[known > 0].mean()",
    ),
    (
        "a first-timer weighs as if its variance were 1",
        "sigma[known > 0].median() if known.any() else torch.ones_like(sigma0)",
        "torch.ones_like(sigma0)",
    ),
    (
        "a first-timer weighs by its own variance",
        'torch.where(up["known"] > 0, up["sigma"], typical)',
        'up["sigma"]',
    ),
    (
        "default steps end at the maximum",
        "steps=max(self.max_steps, self.default_steps), limit=steps",
        "steps=self.max_steps, limit=steps",
    ),
    (
        "the headline is the global model",
        '{"personal": state["theta"], "global": down["model"]}',
        '{"global": down["model"], "personal": state["theta"]}',
    ),
    (
        "a client's own part stays in its start",
        'uncertainty.others_mean(start, state["theta"], weight, others)',
        "start",
    ),
    (
        "W of those heard of alone",
        "weights.sum() * (len(known) / known.sum().clamp(min=1.0))",
        "weights.sum()",
    ),
    (
        "curvature by the other rule",
        'if self.steps_rule == "mean" else 1.0',
        'if self.steps_rule == "sum" else 1.0',
    ),
    (
        "one result is enough",
        '"known": (state["history"]["count"] >= 2).double()',
        '"known": (state["history"]["count"] >= 1).double()',
    ),
    (
        "a start of its own after one result",
        'able = (state["history"]["count"] >= 2)',
        'able = (state["history"]["count"] >= 1)',
    ),
    (
        "warm rounds count",
        "tree.where(local.round > self.warm_rounds, noted, old)",
        "noted",
    ),
    (
        "no smoothing",
        "(1.0 - share) * old + share * new",
        "new",
    ),
    (
        "moves as if one client were there",
        "active / len(sigma)",
        "1.0 / len(sigma)",
    ),
    (
        "warm rounds are smoothed",
        "1.0 if warm else active / len(sigma)",
        "active / len(sigma)",
    ),
    (
        "warm rounds weigh by uncertainty",
        "warm or not self.own_weight",
        "not self.own_weight",
    ),
    (
        "the last variance between clients",
        "weights = 1.0 / (sigma0 +",
        'weights = 1.0 / (server["sigma0"] +',
    ),
    (
        "rows for weights",
        "uploads.weights if by_rows else weights)",
        "uploads.weights)",
    ),
    (
        "the centre by rows",
        'centre = uploads.mean("theta", torch.ones_like(uploads.weights))',
        'centre = uploads.mean("theta")',
    ),
    (
        "a single client resets the variance between clients",
        'scatter / over if active > 1 else server["sigma0"]',
        'scatter / over if active > 1 else torch.zeros_like(server["sigma0"])',
    ),
    (
        "n - 1 between clients alone",
        '(state["history"]["count"] - 1.0).clamp(min=1.0) if self.variance == "n-1" else 1.0',
        "1.0",
    ),
    (
        "n - 1 within clients alone",
        'active - 1.0 if self.variance == "n-1" else 1.0',
        "1.0",
    ),
    (
        "the variance from before the round is sent",
        '"sigma": self._variance(state),',
        '"sigma": sigma,',
    ),
    (
        "adaptation starts over",
        'start = tree.where(local.round == 1, down["model"], state["theta"])',
        'start = down["model"]',
    ),
    (
        "an unseen client starts at the first model",
        'start = tree.where(local.round == 1, down["model"], state["theta"])',
        'start = state["theta"]',
    ),
    (
        "steps rounded down",
        ".round().long()",
        ".long()",
    ),
)

of(
    "fedlda",
    (
        "momentum is the own share of the means",
        "self.momentum * shared.mean + (1.0 - self.momentum) * own",
        "(1.0 - self.momentum) * shared.mean + self.momentum * own",
    ),
    (
        "momentum is the own share of the covariance",
        "self.momentum * shared.cov + (1.0 - self.momentum) * cov",
        "(1.0 - self.momentum) * shared.cov + self.momentum * cov",
    ),
    (
        "the covariance is not interpolated",
        "self.momentum * shared.cov + (1.0 - self.momentum) * cov",
        "cov",
    ),
    (
        "no penalty",
        "lam * _correlation(",
        "0.0 * _correlation(",
    ),
    (
        "the penalty's sign",
        "batch) + lam * _correlation(",
        "batch) - lam * _correlation(",
    ),
    (
        "the diagonal is penalised",
        "cov.abs().sum() - torch.diagonal(cov).abs().sum()",
        "cov.abs().sum()",
    ),
    (
        "squares for absolute values",
        "cov.abs().sum() - torch.diagonal(cov).abs().sum()",
        "cov.square().sum() - torch.diagonal(cov).square().sum()",
    ),
    (
        "the penalty is not divided by d",
        "off / z.shape[1]",
        "off",
    ),
    (
        "class centres are the global ones",
        "mean = gaussian.class_means(z, member, mean)",
        "mean = mean",
    ),
    (
        "the batch's centre is 0",
        "(weight @ z / weight.sum().clamp(min=1.0))[None]",
        "0.0 * (weight @ z)[None]",
    ),
    (
        "centred on the own means",
        'around = mean if self.local_centre == "interpolated" else own',
        "around = own",
    ),
    (
        "statistics of the received body",
        "z, y, mask = local.features(body)",
        'z, y, mask = local.features(down["body"])',
    ),
    (
        "no ridge",
        "gaussian.tied_covariance(z, member, around, self.ridge)",
        "gaussian.tied_covariance(z, member, around, 0.0)",
    ),
    (
        "the head is not shrunk",
        "gaussian.log_prior(local, self.smooth), self.shrink)",
        "gaussian.log_prior(local, self.smooth))",
    ),
    (
        "no prior",
        "gaussian.log_prior(local, self.smooth), self.shrink)",
        "0.0 * gaussian.log_prior(local, self.smooth), self.shrink)",
    ),
    (
        "the prior is not smoothed",
        "gaussian.log_prior(local, self.smooth)",
        "gaussian.log_prior(local, 1e-4)",
    ),
    (
        "means start in [0, 0.2)",
        "task.dtype) - 0.1",
        "task.dtype)",
    ),
    (
        "an absent class has mean 0",
        "own = gaussian.class_means(z, member, shared.mean)",
        "own = gaussian.class_means(z, member, 0.0 * shared.mean)",
    ),
)

of(
    "fedpce",
    (
        "all nets start alike",
        "self._mlp(rng.fold_in(key, i), leaf)",
        "self._mlp(key, leaf)",
    ),
    (
        "the first layer's bound",
        "- 1.0\n            ) * self.size**-0.5",
        "- 1.0\n            ) * self.hidden**-0.5",
    ),
    (
        "the first layer's weights are not centred",
        "2.0 * rng.uniform(rng.fold_in(key, i), shape, leaf.dtype) - 1.0",
        "2.0 * rng.uniform(rng.fold_in(key, i), shape, leaf.dtype)",
    ),
    (
        "the last layer starts large",
        "* 0.01\n",
        "* 1.0\n",
    ),
    (
        "weights and biases of a net start alike",
        "rng.fold_in(key, i), shape, leaf.dtype)",
        "rng.fold_in(key, 0), shape, leaf.dtype)",
    ),
    (
        "embeddings start at 0",
        "(torch.arange(self.size, device=task.device) == client).to(task.dtype)",
        "torch.zeros(self.size, device=task.device, dtype=task.dtype)",
    ),
    (
        "the model's cosine ends at 0",
        '"model": (local.training.lr, local.training.lr_final)',
        '"model": (local.training.lr, 0.0)',
    ),
    (
        "the MLPs train at the embedding's rate",
        '"mlp": (self.mlp_lr, self.mlp_lr_final)',
        '"mlp": (self.embedding_lr, self.embedding_lr_final)',
    ),
    (
        "the embedding's rate does not fall",
        "(self.embedding_lr, self.embedding_lr_final)",
        "(self.embedding_lr, self.embedding_lr)",
    ),
    (
        "a new embedding trains at the others' rate",
        "rate = local.task, (self.new_lr, self.new_lr_final)",
        "rate = local.task, (self.embedding_lr, self.embedding_lr_final)",
    ),
    (
        "the embedding is not kept",
        'return state | {"embedding": params["embedding"]}, {',
        "return state, {",
    ),
    (
        "leaves without their start",
        "name: start[name] + row",
        "name: row",
    ),
    (
        "no rectifier",
        'torch.relu(net["w1"] @ embedding + net["b1"])',
        'net["w1"] @ embedding + net["b1"]',
    ),
    (
        "no hidden bias",
        '@ embedding + net["b1"]',
        "@ embedding",
    ),
    (
        "no last bias",
        ' + net["b2"]\n',
        "\n",
    ),
    (
        "a new client keeps its first embedding",
        "return state | local.sgd(\n            loss, own",
        "return state or local.sgd(\n            loss, own",
    ),
)

of(
    "pfedvmp",
    (
        "no pull",
        "plain + xi * prototypes.pull",
        "plain + 0.0 * prototypes.pull",
    ),
    (
        "pulled from the first round",
        'down["centroid"], down["known"])\n        z, y',
        'down["centroid"], torch.ones_like(down["known"]))\n        z, y',
    ),
    (
        "statistics of the received body",
        "z, y, mask = local.features(params)",
        'z, y, mask = local.features(down["body"])',
    ),
    (
        "an absent class sends the old centroid",
        'torch.zeros_like(down["centroid"]))',
        'down["centroid"])',
    ),
    (
        "alpha dropped",
        "gaussian.class_precisions(z, member, self.alpha, self.cut)",
        "gaussian.class_precisions(z, member, 1.0, self.cut)",
    ),
    (
        "cut dropped",
        "gaussian.class_precisions(z, member, self.alpha, self.cut)",
        "gaussian.class_precisions(z, member, self.alpha, 1e-4)",
    ),
    (
        "precisions count for nothing",
        'precision = gaussian.unpack(up["precision"].double(), task.feature_dim)',
        "precision = torch.eye(task.feature_dim, device=mean.device, dtype=mean.dtype) * (count[..., None, None] > 0)",
    ),
    (
        "the ablation does not weigh by rows",
        "precision = count[..., None, None] * torch.eye(",
        "precision = (count[..., None, None] > 0) * torch.eye(",
    ),
    (
        "centroids are forgotten",
        'precision, count, server["centroid"])',
        'precision, count, torch.zeros_like(server["centroid"]))',
    ),
    (
        "classes are forgotten",
        'torch.maximum(server["known"], (count.sum(dim=0) > 0).to(task.dtype))',
        "(count.sum(dim=0) > 0).to(task.dtype)",
    ),
    (
        "the head is not kept",
        'return {"head": task.head(params)}, up',
        "return state, up",
    ),
    (
        "a new client fits everything",
        'self.new_head_epochs, part="head")',
        "self.new_head_epochs)",
    ),
    (
        "a new client fits nothing",
        'return {"head": local.task.head(params)}',
        "return state",
    ),
    (
        "the body weighs clients alike",
        'uploads.mean("body")',
        'uploads.mean("body", torch.ones_like(uploads.weights))',
    ),
    (
        "the headline is the nearest centroid",
        '{"personal": task.classify(personal["model"], z), "centroid": near}',
        '{"centroid": near, "personal": task.classify(personal["model"], z)}',
    ),
    (
        "bytes of full precisions",
        'gaussian.message_floats(up["count"], task.feature_dim)',
        'up["precision"].numel() + up["mean"].numel()',
    ),
    (
        "predicts from centroids at 0",
        '"centroid": down["centroid"],\n',
        '"centroid": 0.0 * down["centroid"],\n',
    ),
)

# --- the baselines --------------------------------------------------------------------------------------------

of(
    "apfl",
    (
        "alpha ignores the schedule",
        "w, local.lr, steps=1)",
        "w, torch.full_like(local.lr, local.training.lr), steps=1)",
    ),
    (
        "the mixture trains w too",
        "tree.detach(w), batch.x",
        "w, batch.x",
    ),
    (
        "a new alpha counts at once",
        "torch.where(batch.step == 0, first, alpha)",
        "alpha",
    ),
    (
        "alpha is not kept within [0, 1]",
        ".clamp(0.0, 1.0)",
        "",
    ),
    (
        "alpha weighs the global model's logits",
        "alpha * task.logits(v, x, key) + (1.0 - alpha) * task.logits(w, x, key)",
        "alpha * task.logits(w, x, key) + (1.0 - alpha) * task.logits(v, x, key)",
    ),
    (
        "alpha is not kept",
        'return {"personal": params["personal"], "alpha": alpha}',
        'return {"personal": params["personal"], "alpha": first}',
    ),
    (
        "an unseen client starts at the first model",
        'start = tree.where(local.round == 1, down["model"], state["personal"])',
        'start = state["personal"]',
    ),
    (
        "adaptation starts over",
        'start = tree.where(local.round == 1, down["model"], state["personal"])',
        'start = down["model"]',
    ),
    (
        "always moves by alpha",
        "slope * (v - v.detach())",
        "(v - v.detach())",
    ),
)

of(
    "ditto",
    (
        "tied to its own old model",
        "local.sgd(tied, v, anchor,",
        "local.sgd(tied, v, v,",
    ),
    (
        "the personal model starts at the received one",
        'self._personal_pass(local, state["personal"], down["model"])}, {',
        'self._personal_pass(local, down["model"], down["model"])}, {',
    ),
    (
        "no tie",
        "near(local.task.loss, self.lam)",
        "near(local.task.loss, 0.0)",
    ),
    (
        "personal epochs ignored",
        "epochs=self.personal_epochs or None, ",
        "",
    ),
    (
        "the batches of the global pass",
        "or None, tag=1)",
        "or None, tag=0)",
    ),
    (
        "an unseen client starts at the first model",
        'start = tree.where(local.round == 1, down["model"], state["personal"])',
        'start = state["personal"]',
    ),
    (
        "adaptation starts over",
        'start = tree.where(local.round == 1, down["model"], state["personal"])',
        'start = down["model"]',
    ),
)

of(
    "fedala",
    (
        "takes over nothing at first",
        "tree.map(torch.ones_like, self._top(task, params))",
        "tree.zeros_like(self._top(task, params))",
    ),
    (
        "never learnt",
        "(w - rate * g).clamp(0.0, 1.0)",
        "(w - 0.0 * g).clamp(0.0, 1.0)",
    ),
    (
        "uphill",
        "(w - rate * g)",
        "(w + rate * g)",
    ),
    (
        "not clipped",
        "(w - rate * g).clamp(0.0, 1.0)",
        "w - rate * g",
    ),
    (
        "exchanged",
        "a + (b - a) * w",
        "b + (a - b) * w",
    ),
    (
        "the other part",
        'self.part == "head"',
        'self.part != "head"',
    ),
    (
        "all of a pass",
        "self.share * local.num_steps",
        "1.0 * local.num_steps",
    ),
    (
        "long in every round",
        'torch.where(state["learnt"] > 0.0, 1, self.first_passes)',
        'torch.where(state["learnt"] > 0.0, self.first_passes, self.first_passes)',
    ),
    (
        "the first round counts as learnt",
        'torch.where(differ, 1.0, state["learnt"])',
        'torch.ones_like(state["learnt"])',
    ),
    (
        "weights are not kept",
        '"mix": mix, "learnt": learnt}, {',
        '"mix": state["mix"], "learnt": learnt}, {',
    ),
    (
        "its model is not kept",
        'return {"own": model, "mix": mix',
        'return {"own": state["own"], "mix": mix',
    ),
    (
        "trains the received model",
        "local.sgd(local.task.loss, start)",
        'local.sgd(local.task.loss, down["model"])',
    ),
    (
        "a new client starts at the first model",
        'tree.where(local.round == 1, down["model"], state["own"])',
        'state["own"]',
    ),
    (
        "predicts with its own model",
        "return self._aggregated(local, state, down)[0]",
        'return state["own"]',
    ),
)

of(
    "fedavg",
    (
        "fine-tunes at the training rate",
        "lr = self.finetune_lr or None",
        "lr = None",
    ),
    (
        "fine-tunes everything",
        "self.finetune_part, lr",
        '"all", lr',
    ),
    (
        "no fine-tuning",
        'down["model"], self.finetune_epochs,',
        'down["model"], 0,',
    ),
)

of(
    "fedbabu",
    (
        "the headline is the global model",
        '{"personal": tuned, "global": model}',
        '{"global": model, "personal": tuned}',
    ),
    (
        "fine-tunes at the training rate",
        "self.finetune_part, lr=self.finetune_lr or None",
        "self.finetune_part",
    ),
    (
        "fine-tunes everything",
        "self.finetune_epochs, self.finetune_part",
        'self.finetune_epochs, "all"',
    ),
    (
        "the head trains and is dropped",
        'lambda body, batch, head: loss(body | head, batch), down["body"], state["head"]\n        )',
        'lambda body, batch, head: loss(body, batch), down["body"] | state["head"], state["head"]\n'
        "        )\n"
        "        body = local.task.body(body)",
    ),
)

of(
    "fedbn",
    (
        "norms are not kept",
        'return {"norm": task.norm(params)}, {',
        "return state, {",
    ),
    (
        "an unseen client keeps the first norms",
        'return {"norm": norm}',
        "return state",
    ),
    (
        "norms do not train",
        'local.sgd(task.loss, down["model"] | state["norm"])',
        'local.sgd(lambda p, b, n: task.loss(p | n, b), down["model"], state["norm"]) | state["norm"]',
    ),
)

of(
    "fedcp",
    (
        "v_i from the received head",
        'self.lam, direction(local.task, state["personal"])',
        'self.lam, direction(local.task, down["head"])',
    ),
    (
        "v_i from the global head in prediction",
        '"context": direction(local.task, state["personal"])',
        '"context": direction(local.task, down["head"])',
    ),
    (
        "sends its own head",
        "0.5 * (own + shared)",
        "1.0 * own",
    ),
    (
        "no noise in the gate",
        'gate(p["gate"], z, context, batch.key), batch.key',
        'gate(p["gate"], z, context), batch.key',
    ),
    (
        "no tie",
        "+ lam * mmd(",
        "+ 0.0 * mmd(",
    ),
    (
        "v_i is not normalised",
        "F.normalize(head[task.head_names[0]].sum(dim=0), dim=0)",
        "head[task.head_names[0]].sum(dim=0)",
    ),
    (
        "gates exchanged",
        "task.classify(own, r * z, key) + task.classify(shared, (1.0 - r) * z, key)",
        "task.classify(own, (1.0 - r) * z, key) + task.classify(shared, r * z, key)",
    ),
    (
        "the global head trains",
        'gated(\n                task, z, p["personal"], head,',
        'gated(\n                task, z, p["personal"], p["personal"],',
    ),
    (
        "an unseen client starts at the first head",
        'tree.where(local.round == 1, down["head"], state["personal"])',
        'state["personal"]',
    ),
    (
        "adaptation starts over",
        'tree.where(local.round == 1, down["head"], state["personal"])',
        'down["head"]',
    ),
)

of(
    "feddyn",
    (
        "no linear term",
        "tied(params, batch, anchor) - tree.dot(slope, params)",
        "tied(params, batch, anchor)",
    ),
    (
        "linear term added",
        "- tree.dot(slope, params)",
        "+ tree.dot(slope, params)",
    ),
    (
        "no pull",
        "near(local.task.loss, self.alpha)",
        "near(local.task.loss, 0.0)",
    ),
    (
        "alpha instead of alpha / 2",
        "near(local.task.loss, self.alpha)",
        "near(local.task.loss, 2.0 * self.alpha)",
    ),
    (
        "gradients are not kept",
        'return {"slope": slope}, {',
        "return state, {",
    ),
    (
        "gradients of the other sign",
        "tree.sub(model, w), -self.alpha)",
        "tree.sub(model, w), self.alpha)",
    ),
    (
        "weighted by rows",
        'uploads.mean("model", torch.ones_like(uploads.weights))',
        'uploads.mean("model")',
    ),
    (
        "h over the senders",
        'len(uploads.clients) / server["clients"]',
        'server["clients"] / server["clients"]',
    ),
    (
        "the h before",
        "tree.add(mean, h, -1.0 / self.alpha)",
        'tree.add(mean, server["h"], -1.0 / self.alpha)',
    ),
    (
        "h not over alpha",
        "-1.0 / self.alpha",
        "-1.0",
    ),
    (
        "never fine-tuned",
        'down["model"], self.finetune_epochs)',
        'down["model"], 0)',
    ),
)

of(
    "fedep",
    (
        "the pull has no bound",
        ".clamp(max=1.0 / local.lr)",
        "",
    ),
    (
        "the bound ignores the schedule",
        ".clamp(max=1.0 / local.lr)",
        ".clamp(max=1.0 / local.training.lr)",
    ),
    (
        "factors are not damped",
        'down["damping"].to(rows.dtype))',
        "1.0)",
    ),
    (
        "factors forget",
        'site = tree.add(state["site"], state["pending"],',
        'site = tree.add(tree.zeros_like(state["site"]), state["pending"],',
    ),
    (
        "the cavity keeps the first factor",
        "m - share * first - a",
        "m - a",
    ),
    (
        "the cavity is q",
        "- share * tree.sq_norm(params)",
        "",
    ),
    (
        "the last iterate",
        "mean, last), mu)",
        "last, last), mu)",
    ),
    (
        "weighted by rows",
        "uploads.weights if warm else equal",
        "uploads.weights",
    ),
    (
        "the server's rate in warm rounds too",
        "step = 1.0 if warm else self.server_lr",
        "step = self.server_lr",
    ),
    (
        "mu_0 stays at the start",
        '"first": model if warm else server["first"]',
        '"first": server["first"]',
    ),
    (
        "one warm round",
        "warm = bool(rounds <= self.warm_rounds)",
        "warm = bool(rounds <= 1)",
    ),
    (
        "powers for factors",
        'ready & (self.variant == "ep")',
        'ready & (self.variant == "sep")',
    ),
)

of(
    "fedpa",
    (
        "no covariance",
        "count, self.rho\n",
        "count, 0.0\n",
    ),
    (
        "the burn-in is sampled",
        '// seen["steps"] - burn_in',
        '// seen["steps"]',
    ),
    (
        "burn-in at the end",
        "(steps - burn_in).clamp(0, self.samples)",
        "steps.clamp(0, self.samples)",
    ),
    (
        "no warm rounds",
        "(count > 1) & (local.round > self.warm_rounds)",
        "count > 1",
    ),
    (
        "the server forgets its velocity",
        'tree.add(delta, server["velocity"], self.server_momentum)',
        "delta",
    ),
    (
        "the server's rate ignored",
        "velocity, -self.server_lr)",
        "velocity, -1.0)",
    ),
    (
        "weighs clients alike",
        'uploads.mean("delta")',
        'uploads.mean("delta", uploads.weights / uploads.weights)',
    ),
)

of(
    "fedpac",
    (
        "mixing the other way",
        'if self.mixing == "solved":\n',
        'if self.mixing == "none":\n',
    ),
    (
        "no pull",
        "plain + lam * prototypes.pull",
        "plain + 0.0 * prototypes.pull",
    ),
    (
        "pulled in the first round",
        'down["rows"].sum().expand(task.num_classes)',
        'down["rows"].new_ones(task.num_classes)',
    ),
    (
        "an unknown class is not pulled",
        'down["rows"].sum().expand(task.num_classes)',
        'down["rows"]',
    ),
    (
        "the head at the body's rate",
        "epochs=self.head_epochs, lr=rate, tag=1)",
        "epochs=self.head_epochs, tag=1)",
    ),
    (
        "the body under the received head",
        'local.sgd(aligned, down["body"], head, target, known)',
        'local.sgd(aligned, down["body"], down["head"], target, known)',
    ),
    (
        "prototypes before training",
        "**prototypes.own(local.features(body), task.num_classes)}",
        "**mine}",
    ),
    (
        "heads mixed by the wrong client",
        "torch.tensordot(mixture, h.double(), dims=1)",
        "torch.tensordot(mixture.T, h.double(), dims=1)",
    ),
    (
        "small weights stay",
        'simplex.mixtures(up["variance"], vectors, self.smallest)',
        'simplex.mixtures(up["variance"], vectors, 0.0)',
    ),
    (
        "owners count alike",
        'prototypes.combine(up, up["rows"], server)',
        'prototypes.combine(up, torch.ones_like(up["rows"]), server)',
    ),
    (
        "a new client starts at the first client's head",
        "torch.where(clients < 0, len(met), clients)",
        "clients.clamp(min=0)",
    ),
    (
        "refitted at the body's rate",
        'self.refit_epochs, "head", lr=rate)',
        'self.refit_epochs, "head")',
    ),
)

of(
    "fedper",
    (
        "the head is not kept",
        'return {"head": task.head(params)}, {',
        "return state, {",
    ),
    (
        "an unseen client fits everything and keeps the head",
        'self.new_head_epochs or None, part="head"\n',
        "self.new_head_epochs or None\n",
    ),
    (
        "no epochs mean no fitting",
        "self.new_head_epochs or None,",
        "self.new_head_epochs,",
    ),
)

of(
    "fedproto",
    (
        "the other pull",
        'if self.pull == "rows"',
        'if self.pull == "means"',
    ),
    (
        "the other average",
        'rows if self.average == "rows"',
        'rows if self.average != "rows"',
    ),
    (
        "no pull",
        "plain + lam * pull",
        "plain + 0.0 * pull",
    ),
    (
        "prototypes before training",
        "state, task = self.adapt(local, state, down), local.task\n"
        '        up = prototypes.own(local.features(state["model"]), task.num_classes)',
        'before, task = local.features(state["model"]), local.task\n'
        "        state, up = self.adapt(local, state, down), prototypes.own(before, task.num_classes)",
    ),
    (
        "classes it has not are near",
        'known & (personal["own"] > 0)',
        "known",
    ),
    (
        "the headline is the nearest prototype",
        '"personal": task.classify(personal["model"], z),\n            "prototype": prototypes.nearest(z, c, known),',
        '"prototype": prototypes.nearest(z, c, known),\n            "personal": task.classify(personal["model"], z),',
    ),
)

of(
    "fedprox",
    (
        "no term",
        "near(local.task.loss, self.mu)",
        "near(local.task.loss, 0.0)",
    ),
    (
        "anchored to 0",
        'near(local.task.loss, self.mu), down["model"], down["model"])',
        'near(local.task.loss, self.mu), down["model"], {n: 0.0 * p for n, p in down["model"].items()})',
    ),
    (
        "fine-tunes everything",
        "self.finetune_epochs, self.finetune_part)",
        "self.finetune_epochs)",
    ),
    (
        "mu instead of mu / 2",
        "near(local.task.loss, self.mu)",
        "near(local.task.loss, 2.0 * self.mu)",
    ),
)

of(
    "fedrep",
    (
        "the body under the old head",
        'down["body"],\n            head,',
        'down["body"],\n            state["head"],',
    ),
    (
        "head epochs ignored",
        'down["body"] | state["head"], self.head_epochs,',
        'down["body"] | state["head"], None,',
    ),
    (
        "body epochs ignored",
        "            epochs=self.body_epochs,\n",
        "",
    ),
    (
        "the head is not kept",
        'return {"head": head}, {',
        "return state, {",
    ),
    (
        "one optimiser for both phases",
        "            tag=1,\n",
        "",
    ),
    (
        "no refit",
        'down["body"] | state["head"], self.refit_epochs,',
        'down["body"] | state["head"], 0,',
    ),
)

of(
    "fedrod",
    (
        "gamma ignored",
        "prior = self.gamma * share",
        "prior = share",
    ),
    (
        "the prior enters both losses",
        "+ task.error(personal, batch)",
        "+ task.error(personal + prior, batch)",
    ),
    (
        "no prior",
        "task.error(generic + prior, batch)",
        "task.error(generic, batch)",
    ),
    (
        "the personal loss trains the generic head",
        "personal = generic.detach() +",
        "personal = generic +",
    ),
    (
        "the personal loss trains the body",
        "z.detach(), batch.key",
        "z, batch.key",
    ),
    (
        "the other start",
        'self.head_start == "copy"',
        'self.head_start == "zero"',
    ),
    (
        "never refitted",
        "head, self.refit_epochs)",
        "head, 0)",
    ),
    (
        "the refitted head predicts alone",
        '"personal": generic + task.classify(personal["head"], z)',
        '"personal": task.classify(personal["head"], z)',
    ),
    (
        "the headline is the generic head",
        'return {"personal": generic + task.classify(personal["head"], z), "global": generic}',
        'return {"global": generic, "personal": generic + task.classify(personal["head"], z)}',
    ),
    (
        "the head is not kept",
        'return {"head": params["head"]}, {',
        "return state, {",
    ),
)

of(
    "gpfl",
    (
        "contexts exchanged",
        'valve(p["valve"], z, for_all), valve(p["valve"], z, for_own)',
        'valve(p["valve"], z, for_own), valve(p["valve"], z, for_all)',
    ),
    (
        "guided by fixed embeddings",
        'F.normalize(p["embedding"], dim=1).T',
        "F.normalize(anchor, dim=1).T",
    ),
    (
        "pulled to the trained embeddings",
        "away = f - anchor[batch.y]",
        'away = f - p["embedding"][batch.y]',
    ),
    (
        "no pull",
        "+ lam * pull",
        "",
    ),
    (
        "no decay",
        "0.5 * decay *",
        "0.0 * decay *",
    ),
    (
        "the other magnitude",
        'self.magnitude == "mean"',
        'self.magnitude == "batch"',
    ),
    (
        "contexts of the other time",
        'if self.context == "lagged"',
        'if self.context == "received"',
    ),
    (
        "no guidance",
        "plain + cross_entropy(cosines, batch)",
        "plain",
    ),
    (
        "the trained embedding is not kept",
        '"trained": p["embedding"]}',
        '"trained": down["embedding"]}',
    ),
    (
        "an unseen client has no context",
        'task, state = local.task, state | {"trained": down["embedding"]}',
        "task = local.task",
    ),
)

of(
    "lg_fedavg",
    (
        "the body is not kept",
        'return {"body": task.body(params)}, {',
        "return state, {",
    ),
    (
        "an unseen client keeps the first body",
        "return self.client_update(local, state, down)[0]",
        "return state",
    ),
)

of(
    "local",
    (
        "starts afresh each round",
        "return self.adapt(local, state, down), {}",
        "self.adapt(local, state, down)\n        return state, {}",
    ),
    (
        "one epoch whatever the settings",
        'local.sgd(local.task.loss, state["model"])',
        'local.sgd(local.task.loss, state["model"], epochs=1)',
    ),
)

of(
    "moon",
    (
        "attracted to the past",
        "(far - near) / tau",
        "(near - far) / tau",
    ),
    (
        "no temperature",
        "(far - near) / tau",
        "(far - near)",
    ),
    (
        "a contrast from the first round on",
        "mu * seen * masked_mean",
        "mu * masked_mean",
    ),
    (
        "the negative is the received model",
        "task.features(previous, batch.x",
        "task.features(received, batch.x",
    ),
    (
        "keeps what it received",
        'return {"previous": model,',
        'return {"previous": down["model"],',
    ),
    (
        "fine-tunes everything",
        "self.finetune_epochs, self.finetune_part)",
        "self.finetune_epochs)",
    ),
)

of(
    "fedopt",
    (
        "v starts at tau",
        "self.tau**2",
        "self.tau",
    ),
    (
        "v starts at 0",
        "torch.full_like(p, self.tau**2)",
        "torch.zeros_like(p)",
    ),
    (
        "no momentum",
        'tree.add(delta, server["m"], b1)',
        "delta",
    ),
    (
        "a damped gradient under plain momentum",
        'm = tree.add(delta, server["m"], b1)',
        'm = tree.map(lambda m, d: b1 * m + (1.0 - b1) * d, server["m"], delta)',
    ),
    (
        "an undamped gradient under the adaptive rules",
        "b1 * m + (1.0 - b1) * d",
        "b1 * m + d",
    ),
    (
        "no server rate",
        "tree.add(w, m, rate)",
        "tree.add(w, m)",
    ),
    (
        "tau under the root",
        "(v.sqrt() + self.tau)",
        "(v + self.tau**2).sqrt()",
    ),
    (
        "Yogi is Adam",
        "return v - new * square * torch.sign(v - square)",
        "return self.beta2 * v + new * square",
    ),
    (
        "Adagrad forgets",
        "return v + square",
        "return self.beta2 * v + square",
    ),
    (
        "never fine-tuned",
        'down["model"], self.finetune_epochs)',
        'down["model"], 0)',
    ),
)

of(
    "per_fedavg",
    (
        "the same batch twice",
        "grad_and_value(loss)(adapted, batches[1])",
        "grad_and_value(loss)(adapted, batches[0])",
    ),
    (
        "no inner step",
        "adapted = descend(w, grad(loss)(w, batches[0]), alpha)",
        "adapted = w",
    ),
    (
        "the Hessian's sign",
        "product(loss, w, v, batches[2]), -alpha)",
        "product(loss, w, v, batches[2]), alpha)",
    ),
    (
        "the Hessian at the adapted model",
        "product(loss, w, v, batches[2])",
        "product(loss, adapted, v, batches[2])",
    ),
    (
        "the Hessian on the second batch",
        "product(loss, w, v, batches[2])",
        "product(loss, w, v, batches[1])",
    ),
    (
        "the other scale of delta",
        'self.delta_scale == "relative"',
        'self.delta_scale == "absolute"',
    ),
    (
        "adapts at the outer rate",
        "descend(w, local.gradient(loss, w), alpha)",
        "descend(w, local.gradient(loss, w), local.lr)",
    ),
    (
        "no weight decay",
        "decay = local.training.weight_decay",
        "decay = 0.0",
    ),
    (
        "weight decay at the adapted model",
        "tree.add(v, w, decay)",
        "tree.add(v, adapted, decay)",
    ),
    (
        "steps of the optimiser by default",
        'plain = self.optimizer == "published"',
        'plain = self.optimizer != "published"',
    ),
)

of(
    "pfedbred",
    (
        "the prior moves the other way",
        "mean = tree.add(w, away, -eta)",
        "mean = tree.add(w, away, eta)",
    ),
    (
        "tied to the global model",
        "tree.sub(theta, mean), lam)",
        "tree.sub(theta, w), lam)",
    ),
    (
        "starts at the other point",
        'theta = mean if prior == "lg" else w',
        'theta = w if prior == "lg" else mean',
    ),
    (
        "meta batches exchanged",
        "first, batch = batches",
        "batch, first = batches",
    ),
    (
        "an unseen client starts at the first model",
        "tree.where(local.round == 1, fresh, state)",
        "state",
    ),
    (
        "adaptation starts over",
        "tree.where(local.round == 1, fresh, state)",
        "fresh",
    ),
    (
        "the meta gradient at the old point",
        "slope(tree.add(w, slope(w, first), -meta_lr), batch)",
        "slope(w, batch)",
    ),
    (
        "away from the current model",
        'tree.sub(last, seen["personal"])',
        'tree.sub(w, seen["personal"])',
    ),
    (
        "the meta step follows the schedule",
        "local.lr.clamp(min=1e-8) if plain else torch.full_like(local.lr, local.training.lr)",
        "torch.full_like(local.lr, local.training.lr)",
    ),
    (
        "w does not take the meta step",
        " + meta_share * m",
        "",
    ),
    (
        "steps of the optimiser by default",
        'plain = grad(loss), self.optimizer == "published"',
        'plain = grad(loss), self.optimizer != "published"',
    ),
)

of(
    "pfedgp",
    (
        "a client with one class counts",
        "(present.sum() > 1)",
        "(present.sum() > 0)",
    ),
    (
        "weighs clients alike",
        "weights = uploads.weights * uploads",
        "weights = 1.0 * uploads",
    ),
    (
        "omega carries a gradient",
        "omega_of(k.detach(), context",
        "omega_of(k, context",
    ),
    (
        "the rows predict themselves",
        "torch.where(target, 0.0, side)",
        "side",
    ),
    (
        "chains alike",
        "rng.fold_in(key, i + 1), self.gibbs_steps",
        "rng.fold_in(key, 1), self.gibbs_steps",
    ),
    (
        "one chain predicts",
        "torch.stack(chains).mean(dim=0)",
        "chains[0]",
    ),
    (
        "no jitter of the own variance",
        "own = self.variance + gp.JITTER",
        "own = self.variance",
    ),
    (
        "predicts with all rows",
        "local.n, self.max_rows, rng",
        "local.n, 500, rng",
    ),
    (
        "the tree of raw rows in prediction alone",
        "z, side = gp.normalised(features.z[rows])",
        "z, side = (features.z[rows])",
    ),
)

of(
    "pfedme",
    (
        "no beta",
        "(1.0 - self.beta) * w + self.beta * m",
        "m",
    ),
    (
        "the other start",
        'self.inner_start == "w"',
        'self.inner_start == "theta"',
    ),
    (
        "no weight decay",
        "local.training.weight_decay",
        "0.0",
    ),
    (
        "the inner steps ignore the schedule",
        "local.lr * (self.inner_lr / local.training.lr)",
        "local.lr * 0.0 + self.inner_lr",
    ),
    (
        "no lambda in the outer step",
        "lam * (w - theta)",
        "(w - theta)",
    ),
    (
        "keeps the other model",
        'w if self.personal == "w" else theta',
        'theta if self.personal == "w" else w',
    ),
    (
        "tied to itself",
        "grad_and_value(loss)(theta, batch, w)",
        "grad_and_value(loss)(theta, batch, theta)",
    ),
    (
        "steps of the optimiser by default",
        'lam), self.optimizer == "published"',
        'lam), self.optimizer != "published"',
    ),
    (
        "no momentum of theta",
        "tree.add(ahead, tree.sub(theta, before), momentum)",
        "ahead",
    ),
    (
        "momentum outlives theta",
        '(w, w) if afresh else (seen["personal"], seen["before"])',
        '(w, seen["before"]) if afresh else (seen["personal"], seen["before"])',
    ),
    (
        "a whole round at eta",
        "local.sgd(loss, w, w, lr=self.inner_lr)",
        "local.sgd(loss, w, w)",
    ),
    (
        "a whole round ends at theta",
        "tree.sub(theta, w), lam * local.lr)",
        "tree.sub(theta, w), 1.0)",
    ),
    (
        "shows theta as the global model",
        '"global": down["model"]}',
        '"global": state["personal"]}',
    ),
)

of(
    "qlsd",
    (
        "thinning is ignored",
        "(late % self.thin == 0)",
        "(late >= 0)",
    ),
    (
        "averages from the first round",
        'late = new["round"] - self.average_from',
        'late = new["round"] - 1',
    ),
    (
        "the mean of the last two",
        "1.0 / kept, (kept == 0).double()",
        "0.5 + 0.0 / kept, (kept == 0).double()",
    ),
    (
        "before its first sample the start predicts",
        "(kept == 0).double()",
        "0.0 * kept",
    ),
    (
        "the mean gradient",
        "rows * g - m",
        "g - m",
    ),
    (
        "half the noise",
        "(2.0 * gamma * self.temperature) ** 0.5",
        "(gamma * self.temperature) ** 0.5",
    ),
    (
        "no prior",
        "slope = tree.add(slope, theta, self.prior)\n",
        "slope = tree.add(slope, theta, 0.0)\n",
    ),
    (
        "absent clients do not count",
        "m + len(known) / active * c",
        "m + c",
    ),
    (
        "the memory is not added",
        "m + len(known) / active * c",
        "len(known) / active * c",
    ),
    (
        "the memory takes all",
        "share / (1.0 + langevin.excess(m.numel(), self.levels)) * c",
        "share * c",
    ),
    (
        "the last sample predicts",
        '"mean" if self.average_from else "model"',
        '"model"',
    ),
    (
        "a memory without being asked",
        "1.0 if self.use_memory else 0.0",
        "1.0",
    ),
)


# --- running them ---------------------------------------------------------------------------------------------


def first_failure(method: str, only: Collection[str]) -> str:
    """Run what test files say of a method, or ``only`` these tests of it, to the first failure, which is named."""
    import golden_runs
    import pytest

    class Selected:
        failed = ""

        @staticmethod
        def name(nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            return f"{Path(file).name}::{test}"

        def pytest_collection_modifyitems(self, items: list) -> None:
            """Keep what is about this method: one run of each case first, then the others.

            Comparisons with twisted equations say nothing of the library.
            """
            ranks, runs = {}, Counter()
            for item in items:
                given = item.callspec.params if hasattr(item, "callspec") else {}
                case = given.get("case", given.get("name"))
                elsewhere = item.path.name != own.name and (golden_runs.FILE.get(case) != method or "twist" in given)
                if not elsewhere and (not only or self.name(item.nodeid) in only):
                    ranks[item] = runs[item.function, case]
                    runs[item.function, case] += 1
            items[:] = sorted(ranks, key=ranks.get)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.failed:
                self.failed = self.name(report.nodeid)

    tests = Path(golden_runs.__file__).parent / "algorithms"
    own = tests / f"test_{method}.py"
    shared = [tests / f"test_{name}.py" for name in ("golden", "adaptation", "passes")]
    selected, files = Selected(), [*shared, *([own] if own.exists() else [])]
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not slow"]
    status = pytest.main([*options, *map(str, files)], plugins=[selected])
    return selected.failed or ("" if status == 0 else f"BROKEN: pytest says {status!r}")


def outcome(base: Path, method: str, mutant: Mutant | None, only: Collection[str] = ()) -> str:
    """Return the test that fails in a copy of the sources, "" if none does, or "BROKEN ..." where they do not run."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        copy = Path(folder)
        shutil.copytree(base / "src", copy / "src")
        (copy / "experiments").symlink_to(base / "experiments")
        if mutant:
            mutant.apply(copy)
        os.chdir(base)
        sys.dont_write_bytecode = False  # pytest keeps what it makes of the tests beside them, for the next mutant
        sys.path[:0] = [str(copy / "src"), str(base / "tests")]
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            import bespoke

            assert Path(bespoke.__file__).is_relative_to(copy)
            try:
                return first_failure(method, only)
            finally:
                os.chdir(ROOT)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    asked.add_argument("--only", nargs="*", help="how mutants begin in the list: fedpac, or fedpa: (default: all)")
    asked.add_argument("--list", action="store_true", help="list the mutants and stop")
    args = asked.parse_args()
    chosen = [m for m in MUTANTS if f"{m.method}: {m.means}".startswith(tuple(args.only or ("",)))]
    troubles = [trouble for m in chosen if (trouble := m.trouble())]
    if troubles or args.list:
        print(*(troubles or (f"{m.method}: {m.means}" for m in chosen)), sep="\n")
        return 2 if troubles else 0
    start, caught = time.monotonic(), dict[Mutant, str]()
    # Each job has a process of its own, forked from one that has imported what takes long and is no part of the copy.
    os.environ["OMP_NUM_THREADS"] = "1"
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["torch", "torch.func", "sympy", "numpy", "scipy.optimize", "scipy.special", "pytest"]
    )
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for name in ("src", "tests", "experiments"):
            shutil.copytree(ROOT / name, base / name)
        shutil.copy(ROOT / "pyproject.toml", base)
        compileall.compile_dir(base, quiet=2)
        with ProcessPoolExecutor(args.jobs, processes, max_tasks_per_child=1) as pool:
            for m, future in [(m, pool.submit(outcome, base, m.method, m)) for m in chosen]:
                caught |= {m: future.result()} if future.result() else {}
                print(f"{m.method:10}  {m.means:52}  {caught.get(m, 'MISSED')}", flush=True)
            # A test that fails without any mutant has caught nothing.
            by_method = {m.method: {test for other, test in caught.items() if other.method == m.method} for m in caught}
            unchanged = {k: pool.submit(outcome, base, k, None, tests) for k, tests in by_method.items()}
            broken = [f"{k}, unchanged: {future.result()}" for k, future in unchanged.items() if future.result()]
            broken += [f"{m.method}, {m.means}: {test}" for m, test in caught.items() if test.startswith("BROKEN")]
    share = len(caught) / len(chosen)
    print(*broken, f"caught {len(caught)} of {len(chosen)} ({share:.1%}) in {time.monotonic() - start:.0f} s", sep="\n")
    return 2 if broken else int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
