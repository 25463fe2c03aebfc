"""RMSNorm."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rms_norm(x: Array, gain: Array, hidden_size: int, epsilon: float) -> Array:
    """x / sqrt(sum(x^2) / hidden_size + epsilon) * gain; padding is zero, so only the divisor knows of it.

    >>> rms_norm(np.array([[3.0, 4.0, 0.0]]), np.array([2.0, 1.0, 0.0]), 2, 0.0).round(4).tolist()
    [[1.6971, 1.1314, 0.0]]
    """
    mean = (x.astype(np.float32) ** 2).sum(axis=1, keepdims=True) / hidden_size
    result: Array = x / np.sqrt(mean + epsilon) * gain
    return result
