"""A training made tiny: random rows in the set's shape, the fewest clients that the partition takes, two rounds."""

from dataclasses import replace
from functools import cache
from typing import Any

from bespoke.core.settings import Training
from bespoke.data import DATASETS
from bespoke.data.federate import partitioned
from bespoke.data.settings import DataSettings
from bespoke.errors import UserError
from bespoke.tables.plan import Job

_ROWS = (120, 400, 1200, 4000)
_CLIENTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
_SMALL = {"min_rows": 2, "volume": 20, "rows_per_class": 2}  # of a partition


def tiny(job: Job) -> Job:
    """Return the same job on random rows and few clients, for two short rounds."""
    experiment = job.experiment
    data = _fewest(experiment.data, experiment.seed)
    training = _short(experiment.training)
    evaluation = replace(
        experiment.evaluation,
        every=1 if experiment.evaluation.every else 0,
        adapt_rounds=min(2, experiment.evaluation.adapt_rounds),
        adapt_epochs=min(1, experiment.evaluation.adapt_epochs),
    )
    return replace(job, experiment=replace(experiment, data=data, training=training, evaluation=evaluation))


def _short(training: Training) -> Training:
    return replace(
        training,
        rounds=2,
        epochs=1,
        steps=min(2, training.steps),
        batch=min(4, training.batch),
        schedule_rounds=min(2, training.schedule_rounds),
        rate=max(0.5, training.rate),
    )


@cache
def _fewest(data: DataSettings, seed: int) -> DataSettings:
    """Return the data settings with random rows, and with the fewest clients and rows that the partition accepts."""
    shipped = data.name in DATASETS.shipped and data.name not in ("gaussian", "synthetic_hierarchy", "digits")
    changes: dict[str, Any] = {"name": "random", "like": data.name, "path": ""} if shipped else {}
    changes |= {key: min(most, getattr(data, key)) for key, most in _SMALL.items()}
    changes |= {"keep": 1.0, "keep_rows": min(8, data.keep_rows), "subsample": 1.0}
    if data.clients == 0 and not shipped:
        return data
    last: UserError | None = None
    for clients in _CLIENTS:
        for rows in _ROWS if shipped else (0,):
            for new in (1, 2, 3) if data.new_clients else (0,):
                if new >= clients:
                    continue
                wanted = changes | {"clients": clients, "new_clients": new} | ({"rows": rows} if rows else {})
                made = replace(data, **wanted)
                try:
                    partitioned(made, seed)
                except UserError as error:
                    last = error
                    continue
                return made
    raise UserError(f"no tiny federation could be made of {data.name} by {data.partition}: {last}")
