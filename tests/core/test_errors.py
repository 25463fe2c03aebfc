"""The error tree."""

from __future__ import annotations

import pytest

from gk_core import errors
from gk_core.errors import GkError, Mismatch, PeerMismatchError, TransferError


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "Mismatch"])
def test_every_error_is_a_gk_error_with_a_docstring(name: str) -> None:
    """A caller that catches GkError catches everything that gk raises on purpose."""
    error = getattr(errors, name)
    assert issubclass(error, GkError)
    assert error.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("LayoutError", ValueError),
        ("CheckpointError", ValueError),
        ("RequestError", ValueError),
        ("MissingDependencyError", ImportError),
    ],
)
def test_errors_are_also_what_a_python_programmer_would_catch(name: str, builtin: type[Exception]) -> None:
    """Bad numbers are ValueErrors, a missing package is an ImportError."""
    assert issubclass(getattr(errors, name), builtin)


@pytest.mark.parametrize("name", ["PeerLostError", "TransferTimeoutError"])
def test_failures_of_a_moving_transfer_are_transfer_errors(name: str) -> None:
    """Retry or recompute: one except clause for both."""
    assert issubclass(getattr(errors, name), TransferError)


def test_capacity_is_not_a_transfer_failure() -> None:
    """A full pool is waited for, not retried as a transfer."""
    assert not issubclass(errors.CapacityError, TransferError)


def test_a_peer_mismatch_holds_every_mismatch_and_prints_both_values() -> None:
    """All differences are named at once, so that an operator fixes them in one go."""
    error = PeerMismatchError(
        (
            Mismatch(field="block_size", ours="128", theirs="64"),
            Mismatch(field="k_byte_order", ours="pair_packed", theirs="token_major"),
        )
    )
    assert [m.field for m in error.mismatches] == ["block_size", "k_byte_order"]
    assert str(error) == (
        "peers differ: block_size: ours 128, theirs 64; k_byte_order: ours pair_packed, theirs token_major"
    )
