"""How many programs a kernel is launched with, from the one lnc that the process runs at.

A kernel that splits rows gives each program ceil(rows / programs) of them, and each writes its own only. A grid of 2 on
a device of lnc 1 therefore leaves the second half of the rows unwritten: stale values that look like results. With one
row it looks right, so the grid is never a number in the code.

Source: aws-neuron-sdk, "Using Logical NeuronCores (LNC) with NKI": the bracket takes one number, the cores to use; a
kernel's degree must match the graph's.
"""

from __future__ import annotations

from collections.abc import Iterator

from gk_core.errors import LayoutError

__all__ = ["ROWS_PER_PROGRAM", "kernel_grid", "require_grid", "row_chunks"]

ROWS_PER_PROGRAM = 128
"""Partitions of on-chip memory: rows that one program holds."""


def kernel_grid(num_rows: int, lnc: int) -> int:
    """Programs for a kernel that splits rows: one per core, but never more than rows.

    >>> [kernel_grid(rows, lnc) for rows, lnc in ((1, 2), (5, 2), (5, 1))]
    [1, 2, 1]

    Raises:
        LayoutError: no rows, or an lnc that is neither 1 nor 2.
    """
    if num_rows < 1:
        raise LayoutError(f"a kernel needs at least one row, got {num_rows}")
    if lnc not in (1, 2):
        raise LayoutError(f"lnc must be 1 or 2, got {lnc}")
    return min(lnc, num_rows)


def require_grid(grid: int, *, num_rows: int, lnc: int) -> None:
    """Refuse a grid that is not the one for this lnc.

    Raises:
        LayoutError: naming both, and the rows that would stay unwritten.
    """
    wanted = kernel_grid(num_rows, lnc)
    if grid != wanted:
        unwritten = num_rows - min(num_rows, -(-num_rows // grid) * lnc) if grid > 0 else num_rows
        raise LayoutError(
            f"{num_rows} rows at lnc {lnc} take a grid of {wanted}, got {grid}; {unwritten} rows would stay unwritten"
        )


def row_chunks(num_rows: int, lnc: int) -> Iterator[range]:
    """Rows per launch, so that no program gets more than it can hold.

    >>> list(row_chunks(300, 2))
    [range(0, 256), range(256, 300)]
    """
    step = ROWS_PER_PROGRAM * lnc
    return (range(i, min(i + step, num_rows)) for i in range(0, num_rows, step))
