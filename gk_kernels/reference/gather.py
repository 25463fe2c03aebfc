"""Keys of one row out of a paged cache, in token order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def gather_row(cache: Array, table: Array, head: int) -> Array:
    """[width * block, d] float32 of one head: K or V [blocks, kv, block, d], or packed K [blocks, kv, block / 2, d, 2].

    >>> packed = np.arange(8.0).reshape(1, 1, 2, 2, 2)  # pair p, dim c, lane s
    >>> gather_row(packed, np.array([0]), 0).tolist()
    [[0.0, 2.0], [1.0, 3.0], [4.0, 6.0], [5.0, 7.0]]
    """
    blocks = cache[np.asarray(table), head].astype(np.float32)
    if cache.ndim == 5:
        blocks = np.moveaxis(blocks, -1, -2)
    result: Array = blocks.reshape(-1, cache.shape[3])
    return result
