"""Files that are written whole or not at all, and settings that are read from them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from bespoke.errors import UserError

_MOST_BYTES, _MOST_LEVELS, _MOST_BITS = 2**18, 4, 4096  # of a file of settings, its tables, and a whole number
_MOST_DOTS = 50  # of a key
# Without its end, a string goes on to the end of the line or of the text, where TOML refuses it.
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\?.)*?(?:"{3,5}|\Z)'
    r"|'{3}.*?(?:'{3,5}|\Z)"
    r'|"(?:\\?[^\n])*?(?:"|$)'
    r"|'[^\n]*?(?:'|$)"
    r"|#[^\n]*",
    re.DOTALL | re.MULTILINE,
)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def experiments_folder() -> Path:
    """Return the folder of the shipped experiments: in the installed package, or at the root of a checkout."""
    inside = Path(__file__).parent / "experiments"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "experiments"


def reason_and_cure(error: OSError) -> str:
    """Return why writing failed, and what to do about it."""
    return f"{error.strerror or error}; {'make room' if error.errno in _FULL else 'fix the problem'}"


def write_error(path: Path, error: OSError, then: str = "") -> UserError:
    """Return the error for a file that could not be written; ``then`` says how to go on afterwards."""
    return UserError(f"cannot write {path}: {reason_and_cure(error)}{then}")


def fsync_folder(path: Path) -> None:
    """Flush new names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole or not at all: a temporary file next to it, fsync, rename, fsync of the folder.

    The pieces may be generated during writing, so that a large file is never in memory as a whole. The temporary
    file's name cannot be foretold and is opened only if nothing has it, a link included.
    """
    short = os.fsdecode(os.fsencode(path.name)[:200])  # with the rest, no longer than a name may be
    temporary = path.with_name(f".{short}.{secrets.token_hex(8)}.tmp")
    file = temporary.open("xb")
    try:
        with file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def temporary_of(name: str) -> str | None:
    """Return the file that :func:`write_whole` was writing under this temporary name, or None for other names."""
    found = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", name, re.DOTALL)
    return found[1] if found else None


def write_atomic(path: str | os.PathLike[str], data: bytes | str | Iterable[bytes], then: str = "") -> None:
    """Write a file whole or not at all, or say in one sentence why that failed and how to go on ``then``."""
    pieces = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    try:
        write_whole(Path(path), pieces)
    except OSError as error:
        raise write_error(Path(path), error, then) from error


def check_out(path: str | os.PathLike[str], suffixes: Sequence[str]) -> str:
    """Return the suffix of a file to be written, after checking that it is one of these and that the folder is there.

    A mistake is then told before anything is computed.
    """
    suffix, folder = Path(path).suffix.lower(), Path(path).parent
    if suffix not in suffixes:
        known = " or ".join(filter(None, [", ".join(suffixes[:-1]), suffixes[-1]]))
        raise UserError(f"cannot write {path}: its name must end in {known}")
    if not folder.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {folder}; create it first")
    return suffix


def make_folder(path: Path, instead: str = "choose another one") -> None:
    """Make a folder unless it is there, or say in one sentence why that failed and what to do ``instead``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path}: {error.strerror}; {instead}") from None


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise an OSError unless a path leads to a regular file: reading a pipe or a device may never end."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "Is a directory" if code == errno.EISDIR else "it is no regular file", str(path))


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; refuse others as :func:`check_regular` does."""
    check_regular(path)
    return open(path, "rb")


def read_toml(path: Path, levels: int = _MOST_LEVELS) -> dict[str, Any]:
    """Return the tables of a file of settings; a ValueError says why it cannot be one, an OSError that it is not there.

    What no such file holds is refused before it can fill the memory or the stack.
    """
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    return parse_toml(text.decode(), levels)


def read_settings(path: Path, what: str, levels: int = _MOST_LEVELS) -> dict[str, Any]:
    """Return the tables of a file of settings, or say in one sentence why it cannot be read or be ``what``."""
    try:
        return read_toml(path, levels)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is not valid TOML: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot {what}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def parse_toml(text: str, levels: int = _MOST_LEVELS) -> dict[str, Any]:
    """Return the tables of a TOML text; a ValueError refuses deep nesting and numbers of thousands of digits."""
    words = re.split(r"[=,\[\]{}\n]", _STRING_OR_COMMENT.sub("", text))  # only a key has several dots between these
    if any(word.count(".") > _MOST_DOTS for word in words):  # a.b.c... takes tomllib the square of its length
        raise ValueError(_TOO_DEEP)
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise
        raise ValueError(_TOO_LONG) from None  # int() stops at 4,300 digits
    _check_values(found, levels)
    return found


_TOO_DEEP, _TOO_LONG = "its tables or lists are nested too deeply", "it holds a number of thousands of digits"


def _check_values(value: Any, levels: int) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise ValueError(_TOO_DEEP)
        for each in value.values() if isinstance(value, dict) else value:
            _check_values(each, levels - 1)
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(_TOO_LONG)
