"""Errors that a person can act on."""


class SettingError(ValueError):
    """A setting that cannot work: what is wrong, in numbers, and what would fix it.

    The command line prints the message on one line and exits with code 2.

    >>> raise SettingError("top_k is 40 but there are 32 experts. Set --model.top-k to 32 or less.")
    """


class RunError(RuntimeError):
    """A run that cannot go on (unreadable checkpoint, full disk, non-finite loss), with the way out."""
