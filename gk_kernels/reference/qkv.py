"""Rotary embedding, and values as the cache stores them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotation of x [R, heads, d] by angles [R, d / 2].

    >>> rotate(np.array([[[1.0, 2.0]]]), np.array([[0.6]]), np.array([[0.8]])).round(4).tolist()
    [[[-1.0, 2.0]]]
    """
    first, second = np.split(x, 2, axis=2)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([first * c - second * s, second * c + first * s], axis=2)


def as_stored(x: Array, scale: float, dtype: Any) -> Array:
    """x / scale in the cache's dtype; FP8 saturates at its largest finite value.

    >>> import ml_dtypes
    >>> as_stored(np.array([3.0, 2000.0, -2000.0]), 2.0, ml_dtypes.float8_e4m3fn).astype(float).tolist()
    [1.5, 448.0, -448.0]
    >>> as_stored(np.array([500.0]), 1.0, ml_dtypes.float8_e4m3).astype(float).tolist()
    [240.0]
    """
    scaled = np.asarray(x, np.float32) / np.float32(scale)
    if np.dtype(dtype).itemsize == 1:
        limit = 448.0 if np.dtype(dtype).name == "float8_e4m3fn" else 240.0
        scaled = np.clip(scaled, -limit, limit)
    result: Array = scaled.astype(dtype)
    return result
