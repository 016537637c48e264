"""The one exception for mistakes that a user can mend."""


class UserError(Exception):
    """A mistake or circumstance told in one sentence: what, where, and what to do.

    The command line prints the sentence and exits with code 2; no traceback is shown.
    """
