"""The exceptions for wrong calls, which `phalanx.errors` has too, with the others.

They are here because `phalanx.errors` imports torch, for the base class of the others: a command
that is wrong, or only reads the records of a job, does not wait for that.
"""

__all__ = ["ArgumentTypeError", "UsageError"]


class UsageError(ValueError, RuntimeError):
    """An invalid argument or call; the message has the value, the expected value and a fix.

    Example:
        >>> try:
        ...     phalanx.launch(print, 0)
        ... except phalanx.UsageError as error:
        ...     print(error)
        nprocs is 0: expected at least 1
    """

    __module__ = "phalanx.errors"


class ArgumentTypeError(UsageError, TypeError):
    """An argument of a wrong type, for which PyTorch raises TypeError.

    Example:
        >>> issubclass(phalanx.ArgumentTypeError, TypeError)
        True
    """

    __module__ = "phalanx.errors"
