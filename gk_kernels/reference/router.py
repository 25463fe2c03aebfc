"""Router."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def route(normed: Array, weight: Array, bias: Array, experts_per_token: int) -> Array:
    """Affinities [T, E]: softmax over the best logits, 0 elsewhere.

    >>> route(np.ones((1, 1)), np.array([[0.0, 1.0, 1.0, -1.0]]), np.zeros(4), 2).tolist()
    [[0.0, 0.5, 0.5, 0.0]]
    """
    logits = normed @ weight.astype(np.float32) + bias.astype(np.float32)
    best = np.argsort(-logits, axis=1, kind="stable")[:, :experts_per_token]
    top = np.take_along_axis(logits, best, axis=1)
    powers = np.exp(top - top.max(axis=1, keepdims=True))
    out = np.zeros_like(logits)
    np.put_along_axis(out, best, powers / powers.sum(axis=1, keepdims=True), axis=1)
    return out
