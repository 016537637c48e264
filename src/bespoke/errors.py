"""The one exception for mistakes that a user can fix, the first line of any other, and values as short text."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


class UserError(Exception):
    """A mistake or circumstance reported in one sentence: what, where, and what to do.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether a GPU's memory ran out: torch's error, known by its name, or that of a library that got none.

    cuSOLVER and cuBLAS call it an internal error if there is none for a handle.
    """
    if type(error).__name__ == "OutOfMemoryError":
        return True
    signs = r"ALLOC_FAILED|CUDA error: out of memory|INTERNAL_ERROR,? when calling `cu\w+Create\b"
    return isinstance(error, RuntimeError) and bool(re.search(signs, str(error)))


_JOINERS = "\u200c\u200d"  # shape the letters of several scripts, and join emoji


def visible(text: str) -> str:
    """Return text for a terminal: control characters, line breaks included, become escapes such as \\x1b.

    A joiner between two letters that it may join stays; elsewhere it would only hide, so that names look the same.
    """
    if text.isprintable():
        return text
    around = zip(f" {text}", text, f"{text[1:]} ", strict=False)
    return "".join(
        c if c.isprintable() or (c in _JOINERS and _joined(before, after)) else c.encode("unicode_escape").decode()
        for before, c, after in around
    )


def _joined(before: str, after: str) -> bool:
    """Return whether both are letters or signs of scripts that know joiners, or emoji: of none that Latin has."""
    return all(c > "\u05ff" and c.isprintable() for c in (before, after))


def short(text: str, longest: int = 80) -> str:
    """Return a name for people: visible, and of a long one the beginning."""
    text = visible(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def distinct(names: Iterable[str], longest: int = 80) -> dict[str, str]:
    """Return each name as `short` writes it; of those that would read the same both ends, numbered if they must be."""
    found = {name: short(name, longest) for name in names}
    often = Counter(found.values())
    taken = {text for text, times in often.items() if times == 1}
    turns: dict[str, Iterator[str]] = {}  # what else names of the same ends may be called
    for name, text in found.items():
        if often[text] > 1:
            whole, ends = visible(name), longest // 2 - 3
            text = f"{whole[:ends]}…{whole[-ends:]}"
            found[name] = next(each for each in turns.setdefault(text, _numbered(text)) if each not in taken)
            taken.add(found[name])
    return found


def _numbered(text: str) -> Iterator[str]:
    yield text
    yield from (f"{text} ({number})" for number in itertools.count(2))


def natural(text: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts `run2` before `run10`, and `0.25` before `0.3`; numbers may have any length."""
    parts = re.split(r"(?<![0-9])(?<![0-9]\.)0*([0-9]+)", text)  # every second one is a number without leading zeros
    return [(len(part) if turn % 2 else 0, part) for turn, part in enumerate(parts)], text


def listed(names: Sequence[str], most: int) -> str:
    """Return names one after another; of more than `most` the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def shown(value: object, longest: int = 80) -> str:
    """Return a value as one short line, whatever its size and depth."""
    try:
        text = " ".join(repr(value).split("\n"))
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or tables in tables
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
