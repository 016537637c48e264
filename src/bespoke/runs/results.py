"""The result of a run: its records, its numbers, and a model for every client."""

import contextlib
import hashlib
import html
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from bespoke import __version__
from bespoke.clients import processes, states
from bespoke.core import tree
from bespoke.core.data import FederatedData
from bespoke.core.tree import Tree
from bespoke.errors import UserError, listed, shown, visible
from bespoke.models.start import write_start
from bespoke.records import RunFolder
from bespoke.registry import closest
from bespoke.report.columns import Columns, client_table, curve_table
from bespoke.report.metrics import Scores
from bespoke.report.summary import Evaluations, pick, sentence, summarise
from bespoke.runs import model_files, newcomers
from bespoke.runs.experiment import Experiment
from bespoke.runs.federation import Federation
from bespoke.runs.folder import TemporaryFolder
from bespoke.runs.lock import FolderLock
from bespoke.runs.personal import PersonalModel

_NAMED = 10  # clients in a sentence
_RESERVED = {"", "con", "prn", "aux", "nul"} | {f"{port}{i}" for port in ("com", "lpt") for i in range(10)}


@dataclass(repr=False)
class Run:
    """A finished (or interrupted) run: its records, and its models on request."""

    experiment: Experiment
    folder: RunFolder
    federation: Federation
    server: Tree
    pool: FederatedData
    notes: list[str] = field(default_factory=list)
    round: int | None = None  # that the server's state is of; None: the last recorded one

    def __repr__(self) -> str:
        return "\n".join(self._told() + [f"note: {note}" for note in self.notes])

    def _told(self) -> list[str]:
        """Return what the run is and found, in a few lines."""
        named, new = self.experiment, self.pool.total_clients - self.pool.num_clients
        try:
            done, found = str(self.last_round), sentence(self.summary, named.evaluation.select)
        except UserError as error:  # the folder is gone or damaged
            done, found = "?", str(error)
        return [
            f"{named.algorithm_name} on {named.data.name}, seed {named.seed}, {done} of {named.training.rounds} rounds",
            f"clients: {self.pool.num_clients}" + (f" and {new} new" if new else ""),
            found,
            f"records: {self.folder.path}",
        ]

    def _repr_html_(self) -> str:
        title, *told = (visible(line) for line in (*self._told(), *(f"note: {note}" for note in self.notes)))
        lines = [f"<b>{html.escape(title)}</b>", *map(html.escape, told)]
        with contextlib.suppress(UserError):
            lines.append(self.clients._repr_html_())
        return "<br>\n".join(lines)

    def __fspath__(self) -> str:
        """The run's folder: ``compare([run, other])`` takes runs as it takes folders."""
        return str(self.folder.path)

    @property
    def last_round(self) -> int:
        """The round that the server's state and the models are of."""
        if self.round is not None:
            return self.round
        rounds = self.folder.rounds()
        return rounds[-1]["round"] if rounds else 0

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's numbers, derived from its records: see ``bespoke.summarise``."""
        return summarise(self.folder)

    @cached_property
    def clients(self) -> Columns:
        """Every client's name, rows and metrics, before and after personalisation: a dict of columns.

        ``pandas.DataFrame(run.clients)`` takes it as it is; :func:`bespoke.report.client_table` lists the columns.
        """
        return client_table(self.folder)

    def curves(self, statistic: str = "pooled", *, group: str = "all", split: str = "test") -> Columns:
        """Return the metrics over the evaluated rounds, a dict of columns: ``round``, ``train_loss``, ``accuracy``...

        The arguments are those of :func:`bespoke.report.curve_table`: the statistic over clients, which clients, and
        which of their rows.
        """
        return curve_table(self.folder, statistic, group, split)

    def metric(
        self,
        name: str | None = None,
        statistic: str = "pooled",
        *,
        view: str | None = None,
        select: str = "last",
        group: str = "all",
    ) -> float:
        """Return one number of the summary, by default the headline metric pooled over all test rows.

        ``statistic`` is ``pooled``, ``mean``, ``std``, ``worst10`` or another aggregate over clients; ``view`` a
        prediction (default: the headline), ``select`` the round (``last``, ``best_val``, ``best_test``), ``group``
        the clients (``all`` of the training population, ``train``, ``unseen``, ``new``; ``train:noise`` for those of
        one condition).
        """
        if ":" in group:  # a condition, of which the summary has the kind and the headline metric alone
            found = Evaluations(self.folder).pick(name, view, select, group)
        else:
            found = pick(self.summary, name, view, select, group)
        if found and statistic not in found:
            raise UserError(f"there is no statistic {statistic!r}; use one of {', '.join(found)}")
        value = found.get(statistic)
        if value is None:
            why = f"the {statistic} is not defined or not finite"
            if not found.get("clients"):
                why = "no client was evaluated on its own test rows"
            raise UserError(f"there is no {name or self.summary['metric'] or 'value'}: {why}")
        return float(value)

    @property
    def accuracy(self) -> float:
        """Pooled test accuracy of the headline view, last round, all clients of the training population."""
        return self.metric("accuracy")

    @cached_property
    def models(self) -> dict[str, PersonalModel]:
        """The personal model of every client by name, new clients included; made on first use.

        In a run of several processes all of them must ask, and each gets all models.
        """
        everyone = range(self.pool.total_clients)
        shared, own = self.federation.down(self.server, everyone)
        trees = self.federation.inspect().personal(
            self.last_round, everyone, shared, own
        )  # as they were evaluated last, to the bit
        scores, sizes = self._scores(), self.pool.train.sizes
        found = {
            name: self._model(
                personal, name, sizes[i], tree.map(lambda leaf, i=i: leaf[i].clone(), self.pool.extra), scores.get(i)
            )
            for i, (name, personal) in enumerate(zip(self.pool.names, trees, strict=True))
        }
        return Models(found)

    def _model(self, personal: Tree, name: str, rows: int, extra: Tree, score: dict[str, Any] | None) -> PersonalModel:
        """Return the model of a client that learned from so many ``rows``, with what its file will say."""
        about = self._card["about"] | {"client": name, "rows": rows, "score": score}
        return PersonalModel(
            self.experiment.method,
            self.federation.task,
            personal,
            self.pool.inputs,
            self._card | {"about": about},
            self.pool.transform,
            extra,
        )

    @cached_property
    def _card(self) -> dict[str, Any]:
        """What the files of all clients' models say alike."""
        experiment, task = self.experiment, self.federation.task
        about = {
            "experiment": experiment.hash(),
            "round": self.last_round,
            "seed": experiment.seed,
            "precision": task.precision,
            "versions": {"bespoke": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        return model_files.card_of(experiment, task, self.pool) | {"about": about}

    def personalize(self, x: Any, y: Any, *, name: str = "new", adapt_rounds: int | None = None) -> PersonalModel:
        """Return the model of a client that never took part, from its rows x (n, ...) and y (n,) or (n, T).

        It adapts and personalises as the first new client of the run would have done, to the bit, one client after
        another; nobody else's rows are needed. x may be a table, as for :meth:`PersonalModel.predict`, and y class
        numbers or names of classes. ``adapt_rounds`` replaces that of ``[evaluation]``. What a long adaptation costs is
        said on stderr.
        """
        personal, extra, rows = newcomers.personal_of(
            self.experiment, self.federation, self.server, self.last_round, self.pool, x, y, adapt_rounds
        )
        return self._model(personal, name, rows, extra, None)

    def _scores(self) -> dict[int, dict[str, Any]]:
        """Return each client's last recorded value of the headline metric on its own test rows, and what it is."""
        try:
            metric, view = self.summary["metric"], self.summary["headline"]
            lines = {line["client"]: line for line in self.folder.clients() if _scored(line, metric, view)}
        except UserError:  # the folder is gone or damaged
            return {}
        values = {client: float(Scores.of_lines([line], metric).values()[0]) for client, line in lines.items()}
        return {
            client: {
                "metric": metric,
                "value": value if math.isfinite(value) else None,
                "of": "the client's own test rows",
                "rows": lines[client]["total"],
                "view": view,
                "round": lines[client]["round"],
            }
            for client, value in values.items()
        }

    def save_models(self, out: str | Path | None = None) -> Path:
        """Write every personal model as ``NAME.safetensors`` in a folder, by default ``models`` in the run's own.

        :func:`load_model` loads them. The files' names are those of :func:`file_names`. A file there that is no model
        of this run is not overwritten but refused by name, and so is a run's folder in which another process runs.
        """
        if out is None and isinstance(self.folder, TemporaryFolder):
            raise UserError(
                "this run has no folder to keep its models in: give one, as in save_models('models'), or run with out="
            )
        models, folder = self.models, self.folder.path / "models" if out is None else Path(out)
        if not processes.first():
            return folder
        owner = self.experiment.hash()
        with contextlib.closing(FolderLock(self.folder.path)) if out is None else contextlib.nullcontext():
            RunFolder.create(folder)
            for file, model in zip(file_names(list(models)), models.values(), strict=True):
                path = folder / f"{file}.safetensors"
                if os.path.lexists(path) and states.owner(path) != owner:
                    raise UserError(f"{path} is no model of this run: move it away, then save the models again")
                model.write(path)
            if self.experiment.method.holds:
                print(f"note: the models in {folder} hold {self.experiment.method.holds}", file=sys.stderr)
        return folder

    def save_start(self, path: str | Path) -> None:
        """Write the server's model as a file that ``[model] start`` takes; refuse a server without a whole model."""
        task = self.federation.task
        whole = [part for part in (self.server, *self.server.values()) if isinstance(part, dict)]
        found = next((part for part in whole if part.keys() == task.shapes.keys()), None)
        if found is None:
            raise UserError(
                f"the server of {self.experiment.algorithm_name} keeps no whole model to start from: save a personal "
                "model with save_models, or run a method that shares all weights, such as fedavg"
            )
        write_start(path, found, task)


class Models(dict[str, PersonalModel]):
    """Personal models by the names of their clients."""

    def __missing__(self, name: object) -> PersonalModel:
        raise no_model(name, self)


class UnknownClientError(UserError, KeyError):
    """A client without a model: one sentence as any mistake, and a KeyError, on which ``get`` of a mapping relies."""

    __str__ = Exception.__str__  # a KeyError's own is its message in quotes


def no_model(name: object, known: Collection[str], where: str = "") -> UnknownClientError:
    """Return the error for a client that is none of those with a model."""
    there = listed([repr(each) for each in known], _NAMED)
    return UnknownClientError(
        f"there is no model of a client {shown(name)}{where}{closest(name, known)}: there are {there}"
    )


def _scored(line: dict[str, Any], metric: str, view: str) -> bool:
    return line["split"] == "test" and line["view"] == view and metric in line["metrics"]


def file_names(names: Sequence[str]) -> list[str]:
    """Return a file name without its ending for each client, different ones also where upper and lower case are one.

    All but letters, digits, spaces and ``_.-`` is percent-encoded as in a URL, and so is a leading dot. A name that is
    then too long, empty, reserved on Windows, or the same as another but for case is shortened and ends with ``~`` and
    a hash; no other name holds a ``~``.
    """
    encoded = [quote(name.encode("utf-8", "surrogatepass"), safe=" ").replace("~", "%7E") for name in names]
    encoded = [f"%2E{name[1:]}" if name.startswith(".") else name for name in encoded]
    alike = Counter(name.lower() for name in encoded)
    return [
        f"{file[:100].replace('.', '%2E')}~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
        if len(file) > 200 or alike[file.lower()] > 1 or file.lower().partition(".")[0].strip() in _RESERVED
        else file
        for name, file in zip(names, encoded, strict=True)
    ]
