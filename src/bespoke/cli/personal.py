"""``bespoke personalize RUN`` and ``bespoke predict MODEL``: a model for a client that comes later, and its use."""

import csv
import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bespoke.errors import UserError, shown, visible

if TYPE_CHECKING:
    from bespoke.core.inputs import InputContract
    from bespoke.runs.personal import PersonalModel

_DATA = "a .csv, .parquet or .npz file, or a folder of pictures"
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Trust = Annotated[
    bool, typer.Option("--trust-code", help="Import a model, method or transform of somebody's own by its path.")
]
Delimiter = Annotated[str, typer.Option(help="Between the columns of CSV files.")]
Threads = Annotated[int, typer.Option(min=1, max=1024, help="CPU threads, as for run.")]
_ROW, _PICTURE, _PREDICTION = "row", "picture", "prediction"  # columns of a file of predictions
_HEADER = re.compile(rf"({_ROW}|{_PICTURE}),{_PREDICTION}(_0)?[,\n]".encode())  # how one begins


def personalize(
    run: Annotated[Path, typer.Argument(help="The folder of a trained run.")],
    data: Annotated[Path, typer.Option(help=f"The new client's rows with their labels: {_DATA}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The model's file, .safetensors.")],
    evaluate: Annotated[
        Path | None, typer.Option(help="Other rows of the client with their labels, for a score.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The client's name; default: that of the data.")] = None,
    adapt_rounds: Annotated[int | None, typer.Option(help="Rounds of adaptation; default: as in the run.")] = None,
    delimiter: Delimiter = ",",
    trust_code: Trust = False,
    device: Device = "cpu",
    threads: Threads = 1,
) -> None:
    """Make a model for a client that never took part, from a run's folder and the client's own rows."""
    import torch

    from bespoke.report.units import written
    from bespoke.runs import model_files, progress
    from bespoke.runs.opened import open_run

    torch.set_num_threads(threads)
    name = name or data.stem
    model_files.check_target(out)  # before an adaptation, which may be long
    if out.exists() and (owner := model_files.read(out)[0]["about"].get("client")) != name:
        raise UserError(f"-o {out} would overwrite the model of client {shown(owner)}: choose another file")
    opened = open_run(run, trust_code=trust_code, device=device)
    for note in opened.notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    contract = opened.pool.inputs
    x, y = _labelled(data, contract, delimiter)
    held_out = None if evaluate is None else _labelled(evaluate, contract, delimiter)  # a mistake is told at once
    with progress.adaptation():
        model = opened.personalize(x, y, name=name, adapt_rounds=adapt_rounds)
    told = f"{opened.experiment.algorithm_name} after round {opened.last_round}, {len(x)} rows of {name}"
    if held_out is not None:
        model = model.scored(*held_out, of=f"the rows in {evaluate}")
        score = model.about["score"]
        metric, value = score["metric"], score["value"]
        told += f": {f'{metric} is not finite' if value is None else written(metric, value)}"
        told += f" on the {score['rows']} rows in {evaluate}"
    model.save(out)
    print(visible(f"{told}; model in {out}"))


def predict(
    model: Annotated[Path, typer.Argument(help="The file of a personal model.")],
    data: Annotated[Path, typer.Option(help=f"The rows to predict for: {_DATA}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The CSV file of predictions.")],
    delimiter: Delimiter = ",",
    trust_code: Trust = False,
    device: Device = "cpu",
    threads: Threads = 1,
) -> None:
    """Predict with a personal model: a line for each row or picture, with class names and probabilities."""
    import torch

    from bespoke.data import read_rows
    from bespoke.data.sources.own import picture_names
    from bespoke.files import write_atomic
    from bespoke.runs.personal import load_model

    torch.set_num_threads(threads)
    if out.exists() and (not _holds_predictions(out) or (data.exists() and out.samefile(data))):
        raise UserError(f"-o {out} would overwrite a file that holds no predictions: choose another file")
    loaded = load_model(model, trust_code=trust_code, device=device)
    x, _ = read_rows(data, loaded.contract, delimiter=delimiter)
    names = (_PICTURE, picture_names(data)) if data.is_dir() else (_ROW, range(len(x)))
    columns = dict([names]) | _columns(loaded, x)
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_atomic(out, sink.getvalue())
    print(visible(f"{len(x)} predictions in {out}"))


def _holds_predictions(path: Path) -> bool:
    """Return whether a file is one that :func:`predict` has written."""
    if not path.is_file():  # a pipe may never end
        return False
    with path.open("rb") as file:
        return _HEADER.match(file.read(100)) is not None


def _labelled(path: Path, contract: "InputContract", delimiter: str) -> tuple[Any, Any]:
    """Return rows with their labels; refuse data without any."""
    from bespoke.data import read_rows

    x, y = read_rows(path, contract, delimiter=delimiter)
    if y is None:
        where = "folders of classes" if path.is_dir() else "an array 'y'" if path.suffix == ".npz" else ""
        raise UserError(f"{path} has no labels: it needs {where or f'the column {contract.label!r}'}")
    return x, y


def _columns(model: "PersonalModel", x: Any) -> dict[str, list[Any]]:
    """Return predictions and, where there are any, probabilities (n,) by column."""
    objective, outputs = model.task.objective, model.logits(x).cpu()
    found, probabilities = objective.predictions(outputs), model.probabilities(outputs)
    places = range(outputs.shape[1])
    names = model.contract.named(places) if objective.classes else list(map(str, places))
    if objective.classes:
        columns: dict[str, list[Any]] = {_PREDICTION: [names[i] for i in found.tolist()]}
    else:
        parts = found.reshape(len(found), -1).T.tolist()
        columns = {_PREDICTION if len(parts) == 1 else f"{_PREDICTION}_{i}": part for i, part in enumerate(parts)}
    if probabilities is not None:
        columns |= {f"p_{name}": part for name, part in zip(names, probabilities.T.tolist(), strict=True)}
    return columns
