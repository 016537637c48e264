"""The files inside archives, read in place: a name inside an archive is compared, but never becomes a path."""

import bz2
import csv
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bespoke.errors import UserError

Wanted = Callable[[str], bool]

# What the standard readers, NumPy and Pillow raise on bytes that they cannot read.
_DAMAGE = (
    *(EOFError, OSError, ValueError, LookupError, RuntimeError, TypeError, OverflowError, SyntaxError, MemoryError),
    *(zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, struct.error, csv.Error),
)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Report in one sentence what is wrong with the file that is read inside."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: check the path") from None
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file that can be read") from None
    except _DAMAGE as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or damaged ({reason}): get it again") from None


def members(paths: Iterable[Path], wanted: Wanted = lambda name: True) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every wanted file: plain files, and the members of archives.

    Archives are tar (also compressed) and zip; a file that is itself compressed (.gz, .bz2), in an archive or not, is
    given uncompressed and without that suffix. Names have slashes as in the archive.
    """
    for path in paths:
        with reading(path):
            yield from _inside(path, wanted)


def _inside(path: Path, wanted: Wanted) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"PK":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if not name.endswith("/") and wanted(_plain_name(name)):
                    yield _plain_name(name), _expanded(archive.read(name))
    elif tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            for info in tar:
                if info.isfile() and wanted(_plain_name(info.name)):
                    content = tar.extractfile(info)
                    assert content is not None  # a plain file has content
                    yield _plain_name(info.name), _expanded(content.read())
    elif wanted(_plain_name(path.name)):
        yield _plain_name(path.name), _expanded(path.read_bytes())


def _plain_name(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".bz2")


def _expanded(content: bytes) -> bytes:
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)
    return bz2.decompress(content) if content[:3] == b"BZh" else content
