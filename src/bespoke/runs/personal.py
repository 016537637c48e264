"""One client's own model: from a run or from a file, with all that prediction needs and nobody's rows."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bespoke.core import rng, tree
from bespoke.core.algorithm import Algorithm
from bespoke.core.data import Transform
from bespoke.core.inputs import InputContract
from bespoke.core.objective import Objective, binary_cross_entropies
from bespoke.core.task import Task
from bespoke.core.tree import Tree
from bespoke.data.examples import as_labels, as_targets
from bespoke.data.transforms import Step
from bespoke.engine.rows import CHUNK, fetch
from bespoke.errors import UserError, reason
from bespoke.models.text import check_tokens
from bespoke.report.metrics import Scores
from bespoke.runs import exporting, model_files

_PROBED = 100  # outputs of a made-up example that a file tells at most
_CLOSE = 1e-3  # between two machines, of 1 and of an output's size


def ready(task: Task, x: Tensor, transform: Transform | None, extra: Tree, key: Tensor | None = None) -> Tensor:
    """Prepare raw examples x (B, ...) for a model: transformed, in its type, on its device."""
    rows = torch.arange(x.shape[0], device=task.device)  # len(x) would fix the number of rows of an exported graph
    key = rng.key(0, task.device) if key is None else key
    return fetch(x.to(task.device), rows, rows, key, tree.to(extra, task.device), transform, task.dtype, train=False)[0]


def checked_rows(task: Task, contract: InputContract, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Return examples x (n, ...) in a contract's form, and as many targets y (n,) or (n, T) as the objective takes."""
    examples, targets = _checked_examples(task, contract, x), _checked_targets(task, contract, y)
    if len(examples) != len(targets):
        raise UserError(f"there are {len(examples)} rows in x and {len(targets)} in y: give equally many")
    return examples, targets


def _checked_examples(task: Task, contract: InputContract, x: Any) -> Tensor:
    """Return examples x (n, ...), or a table of n rows, in a contract's form."""
    examples = torch.from_numpy(np.require(contract.encode(x), requirements=["C", "W"]))
    check_tokens(task.constants(), examples)
    return examples


def _checked_targets(task: Task, contract: InputContract, y: Any) -> Tensor:
    """Return targets (n,) or (n, T) as the objective takes them; names of classes become their numbers."""
    objective, y = task.objective, y.detach().cpu() if isinstance(y, Tensor) else np.asarray(y)
    if not objective.classes:
        targets = torch.from_numpy(as_targets(y, "these rows")).to(task.device, task.dtype)
        if targets[:1].numel() not in (0, task.num_outputs):
            raise UserError(f"y has {targets[0].numel()} numbers per row, but this model has {task.num_outputs}")
        if wrong := objective.complaint(targets):
            raise UserError(f"y does not fit the objective {objective.name!r}: {wrong}")
        return targets
    if contract.classes and not isinstance(y, Tensor) and y.dtype.kind in "UOST":
        y = contract.encode_labels(y)
    labels = torch.from_numpy(as_labels(y, "these rows")).to(task.device)
    if len(labels) and not 0 <= labels.min() <= labels.max() < task.num_outputs:
        outside = labels[(labels < 0) | (labels >= task.num_outputs)][0]
        raise UserError(f"y has the label {int(outside)}, outside 0..{task.num_outputs - 1}")
    return labels


@dataclass(frozen=True)
class PersonalModel:
    """One client's own model: ``personal`` is what the method's ``predict`` takes."""

    algorithm: Algorithm
    task: Task
    personal: Tree
    contract: InputContract  # of its inputs
    card: dict[str, Any]  # what a file says of it beside that: see ``about``
    transform: Transform | None = None  # how examples become what the task takes
    extra: Tree = field(default_factory=dict)  # the client's constants for the transform

    def __repr__(self) -> str:
        origin = self.card["method"]
        method = origin.get("name") or origin.get("path") or origin["object"]
        shape = "x".join(map(str, self.contract.shape))
        return (
            f"personal model of client {self.about.get('client')!r} by {method}: {shape} {self.contract.dtype} -> "
            + (f"{self.task.num_outputs} {'classes' if self.task.objective.classes else 'outputs'}")
        )

    @property
    def about(self) -> dict[str, Any]:
        """Where the model comes from: client, rows trained on, experiment, round, seed, versions, and its score."""
        about: dict[str, Any] = self.card["about"]
        return about

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class, where the data gave any."""
        return self.contract.classes

    # --- predictions ------------------------------------------------------------------------------------------------

    def logits(self, x: Any) -> Tensor:
        """Return outputs (B, O) for examples x (B, ...) in the form of the client's own data."""
        return self._in_chunks(_checked_examples(self.task, self.contract, x))

    def _in_chunks(self, x: Tensor) -> Tensor:
        """Return outputs (B, O) for examples that were checked."""
        key = rng.key(0, self.task.device)
        with torch.no_grad():
            chunks = enumerate(x.split(CHUNK))
            return torch.cat([self._outputs(rows, rng.fold_in(key, i)) for i, rows in chunks])

    def _outputs(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Return outputs (B, O) of the first view, for a chunk of examples that were checked."""
        examples = ready(self.task, x, self.transform, self.extra, key)
        out = self.algorithm.predict(self.task, self.personal, examples)
        first: Tensor = next(iter(out.values())) if isinstance(out, dict) else out
        return first

    def predict(self, x: Any) -> Tensor:
        """Predict for examples x (B, ...): class numbers (B,), numbers or labels, by the objective."""
        return self.task.objective.predictions(self.logits(x))

    def predict_proba(self, x: Any) -> Tensor:
        """Return the probability of each class, or of each label, for examples x (B, ...): (B, O)."""
        found = self.probabilities(self.logits(x))
        if found is None:
            raise UserError(f"the objective {self.task.objective.name!r} has no probabilities: use predict")
        return found

    def probabilities(self, outputs: Tensor) -> Tensor | None:
        """Return the probability of each class or label from outputs (B, O), or None where the objective has none."""
        if self.task.objective.classes:
            return outputs.softmax(dim=-1)
        return outputs.sigmoid() if self.task.objective.row_losses is binary_cross_entropies else None

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """Return the objective's metrics, headline first, of examples x (B, ...) and targets y (B,) or (B, T)."""
        examples, targets = checked_rows(self.task, self.contract, x, y)
        if not len(examples):
            raise UserError("there are no rows to evaluate: give at least one")
        outputs = self._in_chunks(examples)
        found, mask = {}, torch.ones_like(outputs[:, 0])
        for name, metric in self.task.objective.metrics.items():
            pair = [part.tolist() for part in metric.fn(outputs, targets, mask)]
            found[name] = float(Scores.of([0], [len(targets)], [pair]).values()[0])
        return found

    def score(self, x: Any, y: Any) -> float:
        """Return the headline metric, such as the accuracy, of examples x (B, ...) and targets y (B,) or (B, T)."""
        return next(iter(self.evaluate(x, y).values()))

    def scored(self, x: Any, y: Any, of: str) -> "PersonalModel":
        """Return the same model with its headline metric on rows x and y as its score; ``of`` says what they are."""
        metric, value = next(iter(self.evaluate(x, y).items()))
        score = {"metric": metric, "value": value if math.isfinite(value) else None, "of": of, "rows": len(y)}
        return replace(self, card=self.card | {"about": self.about | {"score": score}})

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the model as a .safetensors file, whole or not at all, for :func:`load_model`.

        It holds weights, the contract of the inputs, names of classes, the method, and where all comes from. Of
        methods whose predictions need more than weights it says on stderr what else it holds.
        """
        self.write(path)
        if self.card["holds"]:
            print(f"note: {path} holds {self.card['holds']}", file=sys.stderr)

    def write(self, path: str | Path) -> None:
        """Write the file of :meth:`save`, without a word."""
        card, constants = self.card | {"probe": self.probe()}, self.task.constants()
        model_files.write(path, card, self.personal, constants, self.extra, str(self.about.get("experiment", "")))

    def probe(self) -> list[list[float]]:
        """Return outputs of made-up examples, by which a file tells its model from others; none if there cannot be any.

        They show what no text of the layers does: the code of ``forward``, and of a method or a transform.
        """
        mine = self.on("cpu")
        try:
            with torch.no_grad():
                found = mine._outputs(_made_up(self.contract))[:, :_PROBED]
        except Exception:  # a user's own code may refuse examples that nobody has seen
            return []
        return found.tolist() if torch.isfinite(found).all() else []

    # --- other programs ---------------------------------------------------------------------------------------------

    def module(self) -> nn.Module:
        """Return a plain torch module of the model's headline outputs (B, O), with the scaling of its inputs inside.

        It is a graph of torch's own operations on the CPU with its weights, and needs nothing of bespoke;
        ``torch.save`` writes it whole.
        """
        return exporting.as_module(self._exported(), self.contract.shape)

    def export_onnx(self, path: str | Path) -> None:
        """Write the model's headline outputs as an ONNX file with inputs ``x`` (B, ...) and outputs ``logits``.

        The file is compared with the model on random examples before it is written. Needs the extra ``onnx``.
        """
        exporting.write_onnx(self._exported(), self.on("cpu").logits, _made_up(self.contract), Path(path), repr(self))

    def _exported(self) -> Any:
        mine = self.on("cpu")
        return exporting.exported(
            lambda personal, x: replace(mine, personal=personal)._outputs(x),
            mine.personal,
            _made_up(self.contract),
            repr(self),
        )

    def on(self, device: torch.device | str) -> "PersonalModel":
        """Return the same model on another device."""
        if self.task.device == torch.device(device):
            return self
        return replace(self, task=self.task.on(device), personal=tree.to(self.personal, device))


def _made_up(contract: InputContract) -> Tensor:
    """Return three examples of a contract's form that nobody has, the same on every machine; tokens are all 0."""
    size, dtype = (3, *contract.shape), getattr(torch, contract.dtype)
    if dtype == torch.int64:
        return torch.zeros(size, dtype=dtype)
    drawn = rng.uniform(rng.key(0), size, torch.float64)
    return (256 * drawn).to(dtype) if dtype == torch.uint8 else (4 * drawn - 2).to(dtype)


def load_model(
    path: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    algorithm: Algorithm | None = None,
    objective: Objective | str | None = None,
    transform: Transform | Step | Sequence[Step] | None = None,
    trust_code: bool = False,
    device: str = "cpu",
) -> PersonalModel:
    """Load the personal model that :meth:`PersonalModel.save` has written; nothing of the file is run or unpickled.

    A model, method, objective or transform of somebody's own is imported from the path that the file names only with
    ``trust_code=True``; those that no file can name are given again, as ``model``, ``algorithm`` and so on. A model
    that is given must have the names, shapes and layers of the saved one.
    """
    where = str(path)
    card, personal, constants, extra = model_files.read(path)
    numbers = sum(leaf.numel() for leaf in (*tree.leaves(personal), *constants.values()))
    method = model_files.rebuilt_method(card, algorithm, trust_code, where)
    goal = model_files.rebuilt_objective(card, objective, trust_code, where)
    task = model_files.rebuilt_task(card, constants, numbers, goal, model, trust_code, where)
    change = model_files.rebuilt_transform(card, transform, trust_code, where)
    found = PersonalModel(method, task, personal, InputContract.from_dict(card["inputs"]), card, change, extra)
    check_fit(found, where)
    try:
        return found.on(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"load_model(device={device!r}): {reason(error)}; use cpu") from None


def check_fit(model: PersonalModel, where: str) -> None:
    """Refuse a file whose tensors are not those that its method and model need, by one prediction on the CPU.

    Its outputs of made-up examples, where it has any, tell whether model, method and transform are those that it was
    saved with.
    """
    told, examples = model.card.get("probe", []), _made_up(model.contract)
    examples = examples if told else torch.zeros_like(examples)
    try:
        with torch.no_grad():
            out = model._outputs(examples)
    except KeyError as error:
        raise UserError(f"{where} is damaged: it has no tensor {error}, which its method needs") from None
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is damaged: its tensors do not fit its model and method: {reason(error)}") from None
    if tuple(out.shape) != (len(examples), model.task.num_outputs):
        raise UserError(
            f"{where} is damaged: its outputs have the shape {tuple(out.shape[1:])}, not ({model.task.num_outputs},)"
        )
    there, here = torch.tensor(told, dtype=out.dtype), out[:, :_PROBED]
    if told and (there.shape != here.shape or not torch.allclose(here, there, rtol=_CLOSE, atol=_CLOSE)):
        raise UserError(
            f"{where} is of another model than this one: the code of the model, the method or the transform computes "
            "other outputs from its weights; give those that it was saved with"
        )
