"""Copy a matrix through SBUF, 128 rows at a time: the smallest whole kernel."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def copy_tiles(x: nl.NkiTensor) -> nl.NkiTensor:
    """`x` [rows, cols] in HBM to a new tensor of the same shape.

    A tile's rows lie on the partitions of SBUF, of which there are 128; the last tile is shorter.
    """
    rows, cols = x.shape
    out = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    for first in range(0, rows, nl.tile_size.pmax):
        size = min(nl.tile_size.pmax, rows - first)
        tile = nl.ndarray((size, cols), dtype=x.dtype, buffer=nl.sbuf, name=f"tile{first}")
        nisa.dma_copy(dst=tile, src=x[first : first + size, :])
        nisa.dma_copy(dst=out[first : first + size, :], src=tile)
    return out
