"""The one exception for mistakes that a user can fix, and the first line of any other."""


class UserError(Exception):
    """A mistake or circumstance reported in one sentence: what, where, and what to do.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """


def visible(text: str) -> str:
    """Return text for a terminal: control characters, line breaks included, become escapes such as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
