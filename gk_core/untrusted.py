"""Showing what a peer or a client sent inside an error message, without running or printing too much of it."""

from __future__ import annotations

__all__ = ["shown"]

_MOST = 64


def shown(value: object) -> str:
    """A short, escaped, one-line form of any value; numbers of many digits and containers give their type only.

    >>> shown("5557\\n"), shown(True), shown([1, 2]), shown(1 << 20_000)
    ("'5557\\\\n'", 'True', 'a list', 'an int of 20001 bits')
    """
    if isinstance(value, (str, bytes)):
        return ascii(value[:_MOST]) + ("..." if len(value) > _MOST else "")
    if type(value) is int and value.bit_length() > _MOST:
        # Python refuses to print ints of thousands of digits, which would turn a refusal into another error.
        return f"an int of {value.bit_length()} bits"
    if value is None or type(value) in (bool, float, int):
        return repr(value)
    return f"a {type(value).__name__[:_MOST]}"
