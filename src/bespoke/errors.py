"""The one exception for mistakes that a user can fix, the first line of any other, and values as short text."""

from collections.abc import Sequence


class UserError(Exception):
    """A mistake or circumstance reported in one sentence: what, where, and what to do.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


def visible(text: str) -> str:
    """Return text for a terminal: control characters, line breaks included, become escapes such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(text: str, longest: int = 80) -> str:
    """Return a name for people: visible, and of a long one the beginning."""
    text = visible(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


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
