"""Attention of one token over its cached keys, its own key, and a sink."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def attend(q: Array, keys: Array, values: Array, key: Array, value: Array, sink: Array) -> Array:
    """[g, d]: softmax over cached scores, the own score and the sink, which has no value.

    q: [g, d], scaled already; keys, values: [n, d], only those that count; key, value: [d]; sink: [g].

    Two equal scores and a sink as large: each key has a third.
    >>> one = np.ones((1, 1))
    >>> attend(one, one, 6 * one, one[0], 3 * one[0], np.ones(1)).round(4).tolist()
    [[3.0]]
    """
    scores = np.concatenate([q @ keys.T, (q @ key)[:, None], sink[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    result: Array = weights[:, :-2] @ values + weights[:, -2:-1] * value
    return result
