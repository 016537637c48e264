"""``bespoke doctor``: what this machine offers, what is missing, and what that would give."""

import importlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from bespoke._version import __version__
from bespoke.errors import reason, visible
from bespoke.machine import cores

PACKAGE = "bespoke-fl"
OK, MISSING, BROKEN = "ok", "missing", "broken"  # what is missing is optional, what is broken is necessary
GIVES = {  # what the optional extras are for
    "flower": "clients on other machines, through Flower",
    "tensorboard": "--log tensorboard",
    "wandb": "--log wandb",
    "mlflow": "--log mlflow",
    "tune": "bespoke tune",
    "hf": "Hugging Face data sets",
    "onnx": "model.export_onnx(...)",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str  # OK, MISSING or BROKEN
    text: str


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check what bespoke finds here: torch, GPU, compilers, folders, extras; exit code 1 if it cannot work."""
    found = list(findings())
    if as_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        width = max(len(each.name) for each in found)
        for each in found:
            print(visible(f"{each.state:<8}{each.name:<{width}}  {each.text}"))
    if any(each.state == BROKEN for each in found):
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Yield what was found, thing by thing."""
    yield Finding("bespoke", OK, f"{__version__} on Python {platform.python_version()}, {Path(__file__).parents[1]}")
    try:
        required = list(_required())
    except metadata.PackageNotFoundError:
        required = []
        yield Finding("packages", MISSING, f"{PACKAGE} is not installed but found on Python's path; pip would check it")
    else:
        yield _packages(required)
    torch = _imported("torch")
    if isinstance(torch, str):
        yield Finding("torch", BROKEN, f"cannot be imported: {torch}; install it as README.md says")
    else:
        yield Finding("torch", OK, f"{torch.__version__}, {cores()} CPU cores")
        yield from _gpu(torch)
    yield _data_folder()
    yield _writable("this folder", Path.cwd, MISSING, "start elsewhere, or name the folders of runs with --out")
    yield _writable("temporary files", lambda: Path(tempfile.gettempdir()), BROKEN, "set TMPDIR to another folder")
    yield from _extras(required)


def _imported(name: str) -> Any:
    """Return a module, or why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a damaged library may raise anything
        return reason(error)


# --- packages -----------------------------------------------------------------------------------------------------


def _required() -> Iterator[tuple[str, str, str]]:
    """Yield each package that bespoke's metadata name, its oldest version, and its extra, "" if it is always needed."""
    for line in metadata.requires(PACKAGE) or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        oldest, extra = re.search(r">=\s*([\d.]+)", line), re.search(r"""extra\s*==\s*["']([^"']+)["']""", line)
        if name:
            yield name[0], oldest[1] if oldest else "0", extra[1] if extra else ""


def _lacks(name: str, oldest: str) -> str:
    """Return what is wrong with an installed package, "" if nothing is."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return name
    return f"{name} {version} (older than {oldest})" if _numbers(version) < _numbers(oldest) else ""


def _numbers(version: str) -> list[int]:
    """Return the numbers at the beginning of a version: [2, 11, 0] of 2.11.0rc1+cpu."""
    return [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]


def _packages(required: Sequence[tuple[str, str, str]]) -> Finding:
    """Return whether everything that is always needed is installed."""
    needed = [(name, oldest) for name, oldest, extra in required if not extra]
    lacking = [wrong for name, oldest in needed if (wrong := _lacks(name, oldest))]
    if lacking:
        return Finding("packages", BROKEN, f"without {', '.join(lacking)}: install bespoke again, as README.md says")
    return Finding("packages", OK, f"all {len(needed)} that are needed")


def _extras(required: Sequence[tuple[str, str, str]]) -> Iterator[Finding]:
    """Yield for each optional extra whether its packages are installed, and what it gives."""
    for extra, gives in GIVES.items():
        if extra not in {of for _, _, of in required}:
            continue  # the installed metadata are of another version
        lacking = [wrong for name, oldest, of in required if of == extra and (wrong := _lacks(name, oldest))]
        if lacking:
            how = f"""pip install "{PACKAGE}[{extra}]" would give {gives} (it lacks {", ".join(lacking)})"""
            yield Finding(f"extra {extra}", MISSING, how)
        else:
            yield Finding(f"extra {extra}", OK, gives)


# --- the GPU ------------------------------------------------------------------------------------------------------


def _gpu(torch: Any) -> Iterator[Finding]:
    """Yield what torch sees of GPUs, and what compiles kernels for them."""
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        seen = [torch.cuda.get_device_properties(number) for number in range(count)]
    except Exception as error:
        yield Finding("GPU", MISSING, f"torch cannot use it: {reason(error)}; runs use the CPU")
        return
    if not seen:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is built for CPUs"
        yield Finding("GPU", MISSING, f"torch sees none ({built}); an NVIDIA GPU would train a whole cohort at once")
        return
    named = ", ".join(f"{gpu.name} with {gpu.total_memory / 2**30:.0f} GiB" for gpu in seen)
    yield Finding("GPU", OK, named)
    triton = _imported("triton")
    if isinstance(triton, str):
        yield Finding("Triton", MISSING, f"cannot be imported: {triton}; it would give faster kernels on the GPU")
        return
    yield Finding("Triton", OK, str(triton.__version__))
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))), None)
    if compiler:
        yield Finding("C compiler", OK, f"{compiler}, with which Triton builds its launchers")
    else:
        yield Finding("C compiler", MISSING, "install gcc: Triton needs it, and would give faster kernels on the GPU")


# --- folders ------------------------------------------------------------------------------------------------------


def _data_folder() -> Finding:
    """Return where data sets are kept, and how many are there."""

    def look() -> Finding:
        from bespoke.data import home
        from bespoke.data.sources import catalogue, store

        kept = sum(store.holds(name) for name in catalogue.CATALOGUE)
        where = f"{home.root()} ({kept} of {len(catalogue.CATALOGUE)} data sets); ${home.VARIABLE} names another folder"
        beside = home.nearest()
        if not (beside.is_dir() and os.access(beside, os.W_OK | os.X_OK)):
            return Finding("data", MISSING, f"{where}, since this one cannot be written")
        return Finding("data", OK, where)

    return _careful("data", MISSING, look)


def _writable(name: str, place: Callable[[], Path], otherwise: str, cure: str) -> Finding:
    """Return whether a file can be written to a folder, which is tried, and the space left there."""

    def look() -> Finding:
        folder = place()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"bespoke")
        except OSError as error:
            return Finding(name, otherwise, f"{folder} cannot be written ({error.strerror}): {cure}")
        free = shutil.disk_usage(folder).free
        return Finding(name, OK, f"{folder} can be written, {free / 2**30:.1f} GiB free")

    return _careful(name, otherwise, look)


def _careful(name: str, otherwise: str, look: Callable[[], Finding]) -> Finding:
    """Return what was found, or ``otherwise`` and why nothing was: an import may fail, or the folder be gone."""
    try:
        return look()
    except Exception as error:
        return Finding(name, otherwise, f"cannot be looked at: {reason(error)}")
