"""Downloads of official files, checked by MD5 where one is published."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bespoke.data import home
from bespoke.data.sources.entry import Entry, File
from bespoke.errors import UserError, reason

Progress = Callable[[str], Any]  # a progress bar with pooch's interface, for a file's name


def download(entry: Entry, file: File, progress: Progress | None = None) -> Path:
    """Return the official file, downloaded if needed, with the right MD5 where one is known."""
    import pooch

    folder = home.root() / "downloads" / (file.shared or entry.name)
    path = folder / file.name
    pooch.get_logger().setLevel("ERROR")
    problem = ""
    for address in file.addresses:
        bar = progress(file.name) if progress is not None and not path.exists() else None
        try:
            with home.writing(file.name), _network():
                folder.mkdir(parents=True, exist_ok=True)
                downloader = pooch.HTTPDownloader(progressbar=bar or False, timeout=60)
                pooch.retrieve(address, None, file.name, folder, downloader=downloader)
        except _Unreachable as error:
            problem = f"cannot download {file.name} from {address}: {error}"
            continue
        finally:
            if bar is not None:
                bar.close()
        found = _md5(path)
        if file.md5 is None or found == file.md5:
            return path
        set_aside(path)
        problem = (
            f"{file.name} from {address} has the MD5 {found}, but {file.md5} is expected (kept as {path}.rejected)"
        )
    raise UserError(f"{problem}; get the file elsewhere and run bespoke data import {entry.name} FILE")


class _Unreachable(Exception):
    """A network error, as opposed to a full disk: requests' errors are OSErrors too."""


@contextmanager
def _network() -> Iterator[None]:
    import requests

    try:
        yield
    except (requests.RequestException, ValueError) as error:
        if isinstance(error, requests.RequestException) and error.response is not None:
            error.response.close()  # pooch leaves it open
        cause = getattr(error.args[0], "reason", error) if error.args else error  # the last of several tries
        raise _Unreachable(reason(cause).rpartition("): ")[2]) from None


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def set_aside(path: Path) -> None:
    """Keep a wrong file under another name, so that nothing uses it."""
    os.replace(path, path.with_name(f"{path.name}.rejected"))
