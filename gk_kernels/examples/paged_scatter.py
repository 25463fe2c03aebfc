"""Write new tokens into a paged cache; a row whose slot is out of range is left out."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def paged_scatter(cache: nl.NkiTensor, rows: nl.NkiTensor, slots: nl.NkiTensor) -> nl.NkiTensor:
    """A copy of `cache` [num_slots, width] with row i of `rows` [count, width] at slots[i].

    slots [count, 1] int32, count at most 128; num_slots or more means: do not write this row. Such a
    mix is legal and warned of: it is reported to hang devices, where a scratch slot is the safer choice.
    """
    num_slots, width = cache.shape
    count = rows.shape[0]
    out = nl.ndarray((num_slots, width), dtype=cache.dtype, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out, src=cache)
    index = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name="index")
    nisa.dma_copy(dst=index, src=slots)
    tile = nl.ndarray((count, width), dtype=rows.dtype, buffer=nl.sbuf, name="tile")
    nisa.dma_copy(dst=tile, src=rows)
    nisa.dma_copy(
        dst=out.ap(pattern=[[width, count], [1, width]], vector_offset=index, indirect_dim=0),
        src=tile,
        oob_mode=nisa.oob_mode.skip,
    )
    return out
