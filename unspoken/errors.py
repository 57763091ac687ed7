"""Errors a person can act on. The command line prints their text alone and exits with `exit_code`."""


class UnspokenError(Exception):
    """A run or a check failed; the message says what, where and what to do. Exit status 1.

    said_by_main: every process of a distributed run fails alike, and the main one's message is enough.
    """

    exit_code = 1

    def __init__(self, *args: object, said_by_main: bool = False):
        super().__init__(*args)
        self.said_by_main = said_by_main


class UsageError(UnspokenError):
    """A wrong option, key or value was given; the message names it and the valid ones. Exit status 2."""

    exit_code = 2


class UnsupportedBackboneError(UsageError):
    """The backbone family is not one this library has been tested with."""


class CacheError(UnspokenError, ValueError):
    """A cache was passed that cannot carry the recycled state."""


def first_line(error: BaseException) -> str:
    """What another library's error says, as far as it fits into a message of ours."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def nearest(name: str, valid: list[str] | tuple[str, ...]) -> str:
    """Return ` (did you mean 'x'?)` for the valid name closest to `name`, or an empty string."""
    import difflib

    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.7)
    return f" (did you mean {match[0]!r}?)" if match else ""
