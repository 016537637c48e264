"""``bespoke keys``, ``serve``, ``join`` and ``federation status``: a federation of machines, over Flower."""

import contextlib
import functools
import importlib.util
import ipaddress
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke.cli.live import Live, show_beside
from bespoke.errors import UserError, visible

app = typer.Typer(help="Look at a federation that runs.", no_args_is_help=True)

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS and keys, on this machine only: 127.0.0.1 or localhost.")
]
Ca = Annotated[Path | None, typer.Option(help="The server's ca.crt.")]


def _private(command: Callable[..., None]) -> Callable[..., None]:
    """Let the owner alone read what a command writes, and what it starts: states, models, records, logs."""

    @functools.wraps(command)
    def for_its_owner(*arguments: Any, **options: Any) -> None:
        before = os.umask(0o077)
        try:
            command(*arguments, **options)
        finally:
            os.umask(before)

    return for_its_owner


def keys(
    path: Annotated[Path, typer.Argument(help="The new private key's file; the public key lies beside it, as .pub.")],
) -> None:
    """Make a client's key, and print the public one, which the server's operator registers."""
    _need_flower()
    from bespoke.flower.keys import make_key

    print(make_key(path))
    print(visible(f"private key in {path}: it stays here; public key in {path}.pub"), file=sys.stderr)


@_private
def serve(
    experiment: Annotated[str, typer.Argument(help="The experiment's file, the same as the clients'.")],
    out: Annotated[Path | None, typer.Option(help="The federation's folder; the run's records lie in OUT/run.")] = None,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:9092",
    register: Annotated[
        list[Path] | None, typer.Option(help="A file of clients' public keys, one a line; may be repeated.")
    ] = None,
    certificates: Annotated[
        Path | None, typer.Option(help="The folder of ca.crt, server.crt and server.key; default: OUT/certificates.")
    ] = None,
    make_certificates: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Make them first, for this name or address of the server; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the clients at the start.")] = 600.0,
    live: Live = None,
    insecure: Insecure = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Run an experiment over machines that join: certificates, keys, rounds, records, and what to do when one dies."""
    _need_flower()
    from bespoke.flower import children, server, supervisor
    from bespoke.flower import keys as files
    from bespoke.report.summary import sentence, trouble
    from bespoke.runs.experiment import load

    loaded, _ = load(experiment)
    host, port = supervisor.split(address)
    _check_insecure(insecure, host)
    folder = out or Path("federations") / Path(experiment).name.removesuffix(".toml")
    place = certificates or folder / "certificates"
    if make_certificates and not (resume and (place / files.CA).exists()):  # the same command goes on with a run
        files.make_certificates(place, [*make_certificates, "127.0.0.1", "localhost"])
        _tell(f"certificates in {place}: give {place / files.CA} to the clients")
    lines = files.read_lines(register or [])
    if not insecure:
        if absent := [name for name in (files.CA, files.CERTIFICATE, files.KEY) if not (place / name).is_file()]:
            raise UserError(
                f"{place / absent[0]} is not there: give --certificates, or have them made by --make-certificates HOST"
            )
        if not lines and not resume:
            raise UserError("no client's key is known: give --register with the clients' public keys")
    children.end_as_asked()
    _one_thread()
    show_beside(live, [folder / "run"])
    with _told_when_stopped(f"stopped: all whole rounds are in {folder}; go on with --resume"):
        done = server.serve(
            loaded,
            folder,
            (host, port),
            None if insecure else place,
            lines,
            resume=resume,
            wait=wait,
            told=(lambda text: None) if quiet else _tell,
        )
    for note in done.notes:
        print(visible(f"note: {note}"), file=sys.stderr)
    print(f"{loaded.algorithm_name}, {sentence(done.summary, loaded.evaluation.select)}; records in {folder / 'run'}")
    if trouble(done.summary):
        raise typer.Exit(3)


@_private
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's.")],
    experiment: Annotated[str, typer.Option(help="The experiment's file, the same as the server's.")],
    data: Annotated[
        Path, typer.Option(help="Rows with their labels: a .csv, .parquet or .npz file, or a folder of pictures.")
    ],
    home: Annotated[Path, typer.Option(help="The folder of this client's states, model and report.")],
    test: Annotated[Path | None, typer.Option(help="Rows for scores alone; default: some of the data.")] = None,
    key: Annotated[Path | None, typer.Option(help="This client's private key, of bespoke keys.")] = None,
    ca: Ca = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the server.")] = 600.0,
    insecure: Insecure = False,
) -> None:
    """Take part in a federation with data that stay here, and get a model of one's own."""
    _need_flower()
    from bespoke.flower import children, supervisor

    host, _ = supervisor.split(address)
    _check_insecure(insecure, host)
    if not insecure and (key is None or ca is None):
        raise UserError("give --key and --ca: every client has a key of its own (bespoke keys) and the server's ca.crt")
    children.end_as_asked()
    place = supervisor.Place(
        address, experiment, data, home, None if insecure else key, None if insecure else ca, test, wait
    )
    with _told_when_stopped(f"stopped: what this client keeps is in {home}; the same command takes part again"):
        supervisor.join(place, _tell)
    print(visible(f"model in {home / 'model.safetensors'}, report in {home / 'report.json'}"))


@app.command()
def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's.")],
    ca: Ca = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Show which clients a server knows, which are there, and its runs."""
    _need_flower()
    import httpx

    from bespoke.flower import supervisor, tasks
    from bespoke.network.ledger import fingerprint

    host, _ = supervisor.split(address)
    _check_insecure(insecure, host)
    if not insecure and ca is None:
        raise UserError("give --ca: the server's ca.crt")
    if ca is not None and not ca.is_file():
        raise UserError(f"--ca {ca} is no file: get the server's ca.crt from its operator")
    if why := supervisor.unreachable(address, None if insecure else ca):
        raise UserError(f"there is no server at {address}: {why}")
    where = address, ca.read_bytes() if ca and not insecure else None
    try:
        nodes, runs = tasks.nodes(*where), tasks.runs(*where)
    except httpx.HTTPError as error:
        raise UserError(f"the server at {address} cannot be asked: {error}; check the address and --ca") from None
    found = {
        "clients": [
            {"key": key, "status": node.status, "since": node.last_activated_at} for key, node in nodes.items()
        ],
        "runs": [{"id": str(run.run_id), "status": run.status.status, "ended": run.status.sub_status} for run in runs],
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for client in found["clients"]:
        since = f" since {client['since']}" if client["status"] == "online" else ""
        print(visible(f"client {fingerprint(client['key'])[:16]}: {client['status']}{since}"))
    for run in found["runs"]:
        print(visible(f"run {run['id']}: {run['status']} {run['ended']}".rstrip()))


@app.command()
def sees(
    experiment: Annotated[str, typer.Argument(help="An experiment's file whose data are a contract.")],
    algorithm: Annotated[str | None, typer.Option(metavar="NAME", help="This method instead of the file's.")] = None,
) -> None:
    """Show what a server sees of a client in a round: the arrays of its upload, and what is logged beside it."""
    from bespoke.flower.sight import seen
    from bespoke.network.terms import ROWS
    from bespoke.runs.experiment import load

    up = seen(load(experiment, algorithm)[0])
    for part, number in up.parts.items():
        print(f"{part}: {number:,} numbers")
    print(f"in all: {sum(up.parts.values()):,} numbers, {up.size:,} bytes, and {up.overhead:,} of headers and names")
    if up.compact != up.size:
        print(f"compact: {up.compact:,} bytes for a client with {ROWS} rows, which is what the record counts")
    print(f"logged: {', '.join(up.logged) or 'nothing'}; and once the number of its rows, and its scores")


@app.command()
@_private
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep everything in this new folder.")] = None,
) -> None:
    """Run a server and three clients on this machine, with TLS and keys: pFedFDA on handwritten digits."""
    _need_flower()
    import tempfile

    from bespoke.flower import children
    from bespoke.flower import demo as demonstration

    folder = Path(tempfile.mkdtemp(prefix="bespoke-federation-")) if out is None else out
    children.end_as_asked()
    reports = demonstration.run(folder)
    print(f"\n{demonstration.table(reports).rstrip()}\n\neach on its own test rows; the models:")
    for name in reports:
        print(visible(f"  {folder / name / 'model.safetensors'}"))


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise UserError("Flower is not installed: pip install 'bespoke-fl[flower]'")


def _check_insecure(insecure: bool, host: str) -> None:
    """Refuse an open connection over a network."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if insecure and not loopback:
        raise UserError(f"--insecure is for one machine alone, and {host} is not 127.0.0.1: use keys and certificates")


@contextlib.contextmanager
def _told_when_stopped(sentence: str) -> Iterator[None]:
    """Say how to go on after Ctrl-C or SIGTERM."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _tell(f"bespoke: {sentence}")
        raise


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _tell(text: str) -> None:
    print(visible(text), file=sys.stderr, flush=True)
