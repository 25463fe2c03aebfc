"""Add a row vector and a column vector to a matrix: the two directions of broadcasting."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def add_broadcast(x: nl.NkiTensor, row: nl.NkiTensor, column: nl.NkiTensor) -> nl.NkiTensor:
    """`x` [rows, cols] + `row` [1, cols] + `column` [rows, 1]; rows at most 128.

    Along the free dimension a stride of 0 broadcasts any operand. Across partitions it does not: each
    partition needs its own copy, so the DMA writes the row to all of them (stride 0 in HBM).
    """
    rows, cols = x.shape
    out = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.sbuf, name="tile")
    nisa.dma_copy(dst=tile, src=x)
    every_row = nl.ndarray((rows, cols), dtype=row.dtype, buffer=nl.sbuf, name="every_row")
    nisa.dma_copy(dst=every_row, src=row.ap(pattern=[[0, rows], [1, cols]]))
    per_row = nl.ndarray((rows, 1), dtype=column.dtype, buffer=nl.sbuf, name="per_row")
    nisa.dma_copy(dst=per_row, src=column)

    total = nl.ndarray((rows, cols), dtype=nl.float32, buffer=nl.sbuf, name="total")
    nisa.tensor_tensor(dst=total, data1=tile, data2=every_row, op=nl.add)
    result = nl.ndarray((rows, cols), dtype=x.dtype, buffer=nl.sbuf, name="result")
    nisa.tensor_tensor(dst=result, data1=total, data2=per_row.broadcast(1, cols), op=nl.add)
    nisa.dma_copy(dst=out, src=result)
    return out
