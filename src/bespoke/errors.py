"""The one exception for mistakes that a user can fix, the first line of any other, and values as short text."""

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence


class UserError(Exception):
    """A mistake or circumstance reported in one sentence: what, where, and what to do.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


_JOINERS = "\u200c\u200d"  # shape the letters of several scripts, and join emoji


def visible(text: str) -> str:
    """Return text for a terminal: control characters, line breaks included, become escapes such as \\x1b.

    Joiners stay where they join something, and not where they would only hide in plain letters.
    """
    return "".join(
        c if c.isprintable() or (c in _JOINERS and not before.isascii()) else c.encode("unicode_escape").decode()
        for before, c in zip(f" {text}", text, strict=False)
    )


def isolated(text: str) -> str:
    """Return a name for the middle of a sentence, whose order letters from right to left would change."""
    if any(unicodedata.bidirectional(c) in ("R", "AL") for c in text):
        return f"\u2068{text}\u2069"
    return text


def short(text: str, longest: int = 80) -> str:
    """Return a name for people: visible, and of a long one the beginning."""
    text = visible(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def distinct(names: Iterable[str], longest: int = 80) -> dict[str, str]:
    """Return each name as `short` writes it; of those that would read the same both ends, numbered if they must be."""
    found = {name: short(name, longest) for name in names}
    often = Counter(found.values())
    taken = {text for text, times in often.items() if times == 1}
    for name, text in found.items():
        if often[text] > 1:
            whole, ends = visible(name), longest // 2 - 3
            text = f"{whole[:ends]}…{whole[-ends:]}"
            numbered = (f"{text} ({number})" for number in itertools.count(2))
            found[name] = next(each for each in itertools.chain([text], numbered) if each not in taken)
            taken.add(found[name])
    return found


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
