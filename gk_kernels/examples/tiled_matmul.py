"""Matrix product in tiles: contraction on partitions, accumulation in PSUM."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def tiled_matmul(left_transposed: nl.NkiTensor, right: nl.NkiTensor) -> nl.NkiTensor:
    """`left_transposed` [K, M] and `right` [K, N] to their product [M, N] in float32.

    A matmul contracts at most 128 rows into at most 128 x 512 results, one PSUM bank. The first
    pass over K overwrites the bank and the later ones add to it.
    """
    k_size, m_size = left_transposed.shape
    n_size = right.shape[1]
    k_tile = nl.tile_size.pmax
    m_tile = nl.tile_size.gemm_stationary_fmax
    n_tile = nl.tile_size.gemm_moving_fmax
    out = nl.ndarray((m_size, n_size), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for m in range(0, m_size, m_tile):
        rows = min(m_tile, m_size - m)
        for n in range(0, n_size, n_tile):
            cols = min(n_tile, n_size - n)
            sums = nl.ndarray((rows, cols), nl.float32, buffer=nl.psum, name=f"sums{m}_{n}")
            for k in range(0, k_size, k_tile):
                depth = min(k_tile, k_size - k)
                where = f"{m}_{n}_{k}"
                stationary = nl.ndarray((depth, rows), dtype=left_transposed.dtype, buffer=nl.sbuf, name=f"left{where}")
                nisa.dma_copy(dst=stationary, src=left_transposed[k : k + depth, m : m + rows])
                moving = nl.ndarray((depth, cols), dtype=right.dtype, buffer=nl.sbuf, name=f"right{where}")
                nisa.dma_copy(dst=moving, src=right[k : k + depth, n : n + cols])
                nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=k > 0)
            result = nl.ndarray((rows, cols), nl.float32, buffer=nl.sbuf, name=f"result{m}_{n}")
            nisa.tensor_copy(dst=result, src=sums)
            nisa.dma_copy(dst=out[m : m + rows, n : n + cols], src=result)
    return out
