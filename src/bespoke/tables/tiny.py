"""A training made tiny: random rows in the set's shape, the fewest clients that the partition takes, two rounds.

A model that has a width becomes narrower. All other settings, those of the method included, are the run file's.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from bespoke.core.settings import Training
from bespoke.data.federate import partitioned
from bespoke.data.partition.schemes import KEYS, PARTITIONS
from bespoke.data.settings import DataSettings
from bespoke.data.sources.built_in import BUILT_IN
from bespoke.errors import UserError
from bespoke.models import MODELS, ModelSettings
from bespoke.runs.federation import QUICK, Evaluation
from bespoke.tables.plan import Job, started

_ROWS = (24, 60, 120, 240)  # for each client, of which it trains on few
_TRAIN_ROWS, _BATCH = 8, 4
_CLIENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
_NARROWER = 4
_SMALL = {"min_rows": 2, "volume": 8, "rows_per_class": 2}  # of a partition
_GENERATED = [load.__name__ for load in BUILT_IN]  # small already, and nothing is read for them


def tiny(job: Job) -> Job:
    """Return the same job on random rows and few clients, for two short rounds."""
    experiment = job.experiment
    data = _fewest(experiment.data, experiment.seed)
    training = _short(experiment.training)
    evaluation = _quick(experiment.evaluation)
    small = replace(experiment, data=data, model=_narrow(experiment.model), training=training, evaluation=evaluation)
    made = replace(job, experiment=small)
    return made if job.start is None else started(made, tiny(job.start))


def _narrow(model: ModelSettings) -> ModelSettings:
    width = model.width or (MODELS[model.name].takes.get("width", 0) if model.name in MODELS else 0)
    return replace(model, width=width // _NARROWER or width)


def _quick(evaluation: Evaluation) -> Evaluation:
    once = evaluation.adapt_every < 0 and evaluation.adapt_rounds > QUICK  # so long that it is done at the end alone
    return replace(
        evaluation,
        every=min(1, evaluation.every),
        adapt_rounds=min(1, evaluation.adapt_rounds),
        adapt_epochs=min(1, evaluation.adapt_epochs),
        adapt_every=0 if once else min(1, evaluation.adapt_every),
    )


def _short(training: Training) -> Training:
    return replace(
        training,
        rounds=2,
        epochs=1,
        steps=min(2, training.steps),
        batch=min(_BATCH, training.batch),
        schedule_rounds=min(2, training.schedule_rounds),
        rate=max(0.5, training.rate),
    )


@cache
def _fewest(data: DataSettings, seed: int) -> DataSettings:
    """Return the data settings with random rows, and with the fewest clients and rows that the partition accepts."""
    if data.name in _GENERATED:
        return data
    takes = PARTITIONS[data.partition].takes(KEYS) if data.partition in PARTITIONS else ()
    changes: dict[str, Any] = {"name": "random", "like": data.name, "path": "", "subsample": 1.0, "keep": 1.0}
    changes |= {key: min(most, getattr(data, key)) for key, most in _SMALL.items() if key in takes}
    if not data.keep_rows:
        changes |= {"keep_rows": _TRAIN_ROWS, "keep_clients": "all"}
    last: UserError | None = None
    for clients, rows, new in product(_CLIENTS, _ROWS, (1, 2, 3, 4) if data.new_clients else (0,)):
        made = replace(data, **changes, clients=clients, new_clients=new, rows=rows * clients)
        try:
            partitioned(made, seed)
        except UserError as error:
            last = error
            continue
        return made
    raise UserError(f"no tiny federation could be made of {data.name} by {data.partition}: {last}")
