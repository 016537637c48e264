"""Callbacks that send a run's numbers to a tracking tool. Each tool is an optional extra of the package."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.report.metrics import Scores, aggregate
from bespoke.report.summary import population
from bespoke.runs.recording import Event

Callback = Callable[[Event], None]


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of a round by name: training loss, bytes, seconds, and every metric of each view and split.

    Metrics are over the training population: `METRIC/VIEW/SPLIT/pooled` and `METRIC/VIEW/SPLIT/mean`.
    """
    row = event.row
    values = {"bytes/down": row["bytes_down"], "bytes/up": row["bytes_up"], "refused": len(row["refused"])}
    if row["train_loss"] is not None:
        values["loss/train"] = row["train_loss"]
    values |= {f"seconds/{phase}": s for phase, s in event.seconds.items()}
    for view, split in dict.fromkeys((r["view"], r["split"]) for r in event.evaluated):
        lines = population(event.evaluated, view, split)
        for metric in dict.fromkeys(name for line in lines for name in line["metrics"]):
            found = aggregate(Scores.of_lines(lines, metric))
            named = {"pooled": found.pooled, "mean": found.mean}
            values |= {f"{metric}/{view}/{split}/{key}": value for key, value in named.items() if value is not None}
    return values


def _tool(name: str, module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"--log {name} needs a missing package: pip install 'bespoke-fl[{name}]'") from error


def tensorboard(tool: Any, folder: Path, name: str, config: dict[str, Any]) -> Callback:
    """Write TensorBoard's event files into the run's folder."""
    writer = tool.SummaryWriter(str(folder / "tensorboard"))

    def callback(event: Event) -> None:
        for tag, value in scalars(event).items():
            writer.add_scalar(tag, value, event.round)
        writer.flush()

    return callback


def wandb(tool: Any, folder: Path, name: str, config: dict[str, Any]) -> Callback:
    """Send the numbers to Weights & Biases; its own environment variables choose project and mode."""
    tracked = tool.init(name=name, dir=str(folder), config=config)
    return lambda event: tracked.log(scalars(event), step=event.round)


def mlflow(tool: Any, folder: Path, name: str, config: dict[str, Any]) -> Callback:
    """Send the numbers to MLflow; its own environment variables choose server and experiment."""
    tool.start_run(run_name=name)
    flat = {f"{t}.{k}": v for t, table in config.items() if isinstance(table, dict) for k, v in table.items()}
    tool.log_params(flat)
    return lambda event: tool.log_metrics(scalars(event), step=event.round)


LOGGERS: dict[str, tuple[str, Callable[[Any, Path, str, dict[str, Any]], Callback]]] = {  # with the module of the tool
    "tensorboard": ("torch.utils.tensorboard", tensorboard),
    "wandb": ("wandb", wandb),
    "mlflow": ("mlflow", mlflow),
}


def make(name: str, folder: Path, label: str, config: dict[str, Any]) -> Callback:
    """Return the callback for a tool by name.

    The tool is looked for at once and started after the first round: until then a folder may be refused to the run,
    and a tool must not have written into it.
    """
    if name not in LOGGERS:
        raise UserError(f"--log {name}: there is no such tool; use one of {', '.join(LOGGERS)}")
    module, start = LOGGERS[name]
    tool, started = _tool(name, module), list[Callback]()

    def callback(event: Event) -> None:
        if not started:
            started.append(start(tool, folder, label, config))
        started[0](event)

    return callback
