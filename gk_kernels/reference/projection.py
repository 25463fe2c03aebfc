"""Output projection."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


def project_out(heads: Array, weight: Array, bias: Array) -> Array:
    """heads [R, q, d] @ weight [q * d, H] + bias [H]."""
    result: Array = heads.reshape(heads.shape[0], -1) @ weight + bias
    return result
