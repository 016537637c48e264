"""The one exception for mistakes that a user can fix."""


class UserError(Exception):
    """A mistake or circumstance reported in one sentence: what, where, and what to do.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """
