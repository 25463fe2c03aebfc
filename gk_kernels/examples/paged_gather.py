"""Gather the blocks of one request from a paged cache: one index per partition."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def paged_gather(cache: nl.NkiTensor, block_ids: nl.NkiTensor) -> nl.NkiTensor:
    """Rows `block_ids` [wanted, 1] int32 of `cache` [num_blocks, block_elements]; wanted <= 128.

    The DMA of partition p reads from row block_ids[p]: its address is that index times the size of
    one row of the tensor that is indexed, whatever the pattern says.
    """
    wanted = block_ids.shape[0]
    width = cache.shape[1]
    out = nl.ndarray((wanted, width), dtype=cache.dtype, buffer=nl.shared_hbm, name="out")
    index = nl.ndarray((wanted, 1), dtype=nl.int32, buffer=nl.sbuf, name="index")
    nisa.dma_copy(dst=index, src=block_ids)
    tile = nl.ndarray((wanted, width), dtype=cache.dtype, buffer=nl.sbuf, name="tile")
    nisa.dma_copy(
        dst=tile,
        src=cache.ap(pattern=[[width, wanted], [1, width]], vector_offset=index, indirect_dim=0),
    )
    nisa.dma_copy(dst=out, src=tile)
    return out
