"""The files inside archives, read in place and in pieces; a name inside an archive never becomes a path.

Every byte that is unpacked is counted, and an :class:`Allowance` says how many there may be: no file, however small,
can make an import use more memory than its data set needs.
"""

import bz2
import csv
import gzip
import io
import lzma
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from bespoke.errors import UserError, reason, shown

Wanted = Callable[[str], bool]

VARIABLE = "BESPOKE_MAX_BYTES"  # unpacked bytes of one import, in place of the default
ALWAYS = 2**26  # unpacked bytes that are allowed however small the files are
RATIO = 50  # unpacked bytes for each byte on disk; that of true data sets is below 10
PIECE = 2**20  # bytes that are unpacked at a time
HEADERS = 2**20  # bytes of a tar archive before a file's content: extended names and the like
DICTIONARY = 2**27  # bytes of memory for unpacking xz

# What the standard readers, NumPy and Pillow raise on bytes that they cannot read.
_DAMAGE = (
    *(EOFError, OSError, ValueError, LookupError, RuntimeError, TypeError, OverflowError, SyntaxError),
    *(zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, struct.error, csv.Error),
)


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Report in one sentence what is wrong with the file that is read inside."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"there is no file {where}: check the path") from None
    except (IsADirectoryError, PermissionError) as error:
        raise UserError(f"cannot read {where}: {error.strerror}; give a file that can be read") from None
    except _DAMAGE as error:
        raise UserError(f"{where} is truncated or damaged ({reason(error)[:200].rstrip('.')}): get it again") from None


# --- how much may be unpacked ---------------------------------------------------------------------------------------


def plausible(paths: Sequence[Path]) -> int:
    """Return how many bytes files may unpack to that hold true data."""
    return max(ALWAYS, RATIO * sum(path.stat().st_size for path in paths if path.is_file()))


class Allowance:
    """The bytes that may be unpacked in all; the user's variable goes before the ``default``."""

    def __init__(self, default: float) -> None:
        self.most = self.left = _of_the_user() or default

    def spend(self, count: int, where: str) -> None:
        """Count bytes before or after they are unpacked; refuse those beyond the allowance."""
        self.left -= count
        if self.left < 0:
            raise UserError(
                f"{where} unpacks to more than the {self.most:.0f} bytes that are allowed here: it is another file or "
                f"a hostile one; if you trust it, set {VARIABLE} to a larger number of bytes"
            )


def _of_the_user() -> int | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text)):
        raise UserError(f"{VARIABLE} = {text!r} is no number of bytes: set it to a whole number such as 4000000000")
    return int(text)


class Counted(io.RawIOBase):
    """A stream whose bytes are counted and come in pieces; damage is told in one sentence."""

    def __init__(self, file: Any, where: str, allowance: Allowance) -> None:
        super().__init__()
        self.file, self.where, self.allowance = file, where, allowance
        self.window: int | None = None  # bytes until it is set again; None: any number

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most one piece into the buffer."""
        with reading(self.where):
            piece = self.file.read(min(len(buffer), PIECE))
            if self.window is not None:
                self.window -= len(piece)
                if self.window < 0:
                    raise ValueError("a file in it has a header of unusual length")
        self.allowance.spend(len(piece), self.where)
        buffer[: len(piece)] = piece
        return len(piece)


class _Xz(io.RawIOBase):
    """An xz stream that is unpacked with bounded memory; :class:`lzma.LZMAFile` knows no bound."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self.file, self.unpacking = file, lzma.LZMADecompressor(memlimit=DICTIONARY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.unpacking.eof:
            packed = self.file.read(2**14) if self.unpacking.needs_input else b""
            if self.unpacking.needs_input and not packed:
                raise EOFError("it ends in the middle")
            piece = self.unpacking.decompress(packed, len(buffer))
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)
        return 0


def unpacked(file: IO[bytes], start: bytes) -> Any:
    """Return the stream inside a gzip, bzip2 or xz stream with this ``start``, and any other as it is."""
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    return io.BufferedReader(_Xz(file)) if start.startswith(b"\xfd7zXZ\0") else file


# --- the files of a data set ----------------------------------------------------------------------------------------


class Member(NamedTuple):
    """One file, alone or in an archive: its name with slashes, where it is, for a sentence, and its content."""

    name: str
    where: str
    file: IO[bytes]

    @property
    def last(self) -> str:
        """Return the name without its folders."""
        return self.name.rpartition("/")[2]

    def read(self, most: int) -> bytes:
        """Return the whole content, of which there may be ``most`` bytes."""
        with reading(self.where):
            content = self.file.read(most + 1)
        if len(content) > most:
            raise UserError(f"{self.where} has more than the {most} bytes that such a file can have: get it again")
        return content

    def lines(self, longest: int = 2**16) -> Iterator[bytes]:
        """Yield the lines with their ends."""
        with reading(self.where):
            while line := self.file.readline(longest + 1):
                if len(line) > longest:
                    raise UserError(f"{self.where} has a line of more than {longest} bytes: get it again")
                yield line


def names_of(paths: Sequence[Path]) -> str:
    """Return the files' names for a sentence."""
    return ", ".join(path.name for path in paths)


class Files:
    """The files that a data set is read from, and what may be unpacked from them."""

    def __init__(self, paths: Sequence[Path], allowance: Allowance) -> None:
        self.paths, self.allowance = list(paths), allowance

    def __str__(self) -> str:
        return names_of(self.paths)

    def members(self, wanted: Wanted = lambda name: True) -> Iterator[Member]:
        """Yield every wanted file: plain files, and the members of archives; read each before the next.

        Archives are tar (also compressed) and zip; a file that is itself compressed (.gz, .bz2), in an archive or
        not, is given uncompressed and without that suffix.
        """
        for path in self.paths:
            with reading(path), path.open("rb") as file:
                start = file.read(6)
                file.seek(0)
                if start[:2] == b"PK":
                    yield from self._zipped(path, file, wanted)
                else:
                    yield from self._plain_or_tar(path, unpacked(file, start), wanted)

    def _zipped(self, path: Path, file: IO[bytes], wanted: Wanted) -> Iterator[Member]:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                name = _plain_name(info.filename)
                if not info.is_dir() and wanted(name):
                    where = f"{shown(info.filename, 100)} in {path.name}"
                    with reading(where), opened(archive, info) as content:
                        yield self._member(name, where, self._counted(content, where))

    def _plain_or_tar(self, path: Path, file: Any, wanted: Wanted) -> Iterator[Member]:
        counted = Counted(file, str(path), self.allowance)
        content = io.BufferedReader(counted)
        if _starts_a_tar(content.peek(tarfile.BLOCKSIZE)[: tarfile.BLOCKSIZE]):
            yield from self._in_a_tar(path, counted, content, wanted)
        elif wanted(_plain_name(path.name)):
            yield Member(_plain_name(path.name), str(path), content)

    def _in_a_tar(self, path: Path, counted: Counted, file: IO[bytes], wanted: Wanted) -> Iterator[Member]:
        counted.window = HEADERS
        with tarfile.open(fileobj=file, mode="r|") as tar:
            while (info := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined] # or it would keep them all
                where = f"{shown(info.name, 100)} in {path.name}"
                if info.isfile() and info.issparse():
                    raise UserError(f"{where} is a sparse file: pack it again without holes")
                if info.isfile() and isinstance(content := tar.extractfile(info), io.BufferedReader):
                    counted.window = None
                    if wanted(_plain_name(info.name)):
                        yield self._member(_plain_name(info.name), where, content)
                    while content.read(PIECE):
                        pass
                counted.window = HEADERS

    def _counted(self, file: Any, where: str) -> Any:
        return io.BufferedReader(Counted(file, where, self.allowance))

    def _member(self, name: str, where: str, file: Any) -> Member:
        inside = unpacked(file, file.peek(6)[:6])
        return Member(name, where, file if inside is file else self._counted(inside, where))


def opened(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Open a file in a zip archive whose compression can be undone in pieces."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("it is neither stored nor deflated")
    return archive.open(info)


def _starts_a_tar(block: bytes) -> bool:
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _plain_name(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".bz2")
