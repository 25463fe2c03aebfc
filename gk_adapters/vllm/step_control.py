"""Attention control of one decode step out of vLLM's own metadata, as the tensors that a kernel's contract asks for.

Dims: n active rows, R rows of the padded batch, F full-table width, S sliding-table width.

Equal to `gk_core.decode_step.build_attention_control` by property test; a handful of vector operations whatever the
number of rows.
"""

from __future__ import annotations

import torch
from attrs import frozen

from gk_adapters.torch_math import rope_tables
from gk_core.block_table import PAD_SLOT_ID
from gk_core.decode_step import ControlShape
from gk_core.errors import LayoutError
from gk_core.kernel_contract import ControlTensors
from gk_core.model_geometry import ModelGeometry

__all__ = ["GroupStep", "StepRows", "control_of_rows", "row_starts"]


@frozen(kw_only=True, eq=False)
class StepRows:
    """The active rows of one step; row i of the padded batch is entry i here.

    Attributes:
        positions: int64 [n] position of each new token.
        full_table, sliding_table: int [n, at least the needed width] untrimmed block tables; entries past a row's
            position may hold anything.
        slots, slots_swa: int64 [n] where the new K and V go, in each group.
    """

    positions: torch.Tensor
    full_table: torch.Tensor
    sliding_table: torch.Tensor
    slots: torch.Tensor
    slots_swa: torch.Tensor


@frozen(kw_only=True, eq=False)
class GroupStep:
    """One KV cache group's part of a vLLM step, of n rows and T tokens.

    Attributes:
        table: int [n, width] untrimmed block tables.
        slots: int [T] where the new tokens' K and V go.
        window: tokens that a query sees, itself included; None: all. Entries before it are what once was there.
    """

    table: torch.Tensor
    slots: torch.Tensor
    window: int | None = None


def row_starts(
    groups: tuple[GroupStep, ...], firsts: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """When each row may begin, [n], if a row's tokens run one after the other: after whoever writes what it reads.

    vLLM enters blocks into its prefix cache when they are scheduled, so a row can hit blocks that another row of the
    same step has yet to write.

    Args:
        groups: sliding and full.
        firsts, lengths: int [n] each row's tokens among T.
        positions: int [T].

    Raises:
        LayoutError: rows that wait for each other.
    """
    starts = torch.zeros_like(lengths)
    cached = positions[firsts] // block_size
    waits: set[tuple[int, int]] = set()
    for group in groups:
        written = group.slots[: int(lengths.sum())] // block_size
        columns = torch.arange(group.table.shape[1])
        hits = torch.isin(group.table, written) & (columns < cached[:, None])
        if group.window is not None:
            # vLLM leaves the ids of blocks that it has taken back in a running request's table.
            hits &= columns >= ((positions[firsts] - group.window + 1).clamp(min=0) // block_size)[:, None]
        if not hits.any():
            continue
        row_of_token = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        writer = dict(zip(written.tolist(), row_of_token.tolist(), strict=True))
        for row, column in hits.nonzero().tolist():
            waits.add((row, writer[int(group.table[row, column])]))
    for _ in range(len(lengths) + 1):
        before = starts.clone()
        for row, other in waits:
            starts[row] = max(int(starts[row]), int(starts[other] + lengths[other]))
        if torch.equal(before, starts):
            return starts
    raise LayoutError(f"rows wait for each other's blocks in one step: {sorted(waits)}")


def control_of_rows(
    rows: StepRows, shape: ControlShape, geometry: ModelGeometry, dtype: torch.dtype
) -> ControlTensors[torch.Tensor]:
    """Control tensors of a step with its rows in front and inactive rows behind.

    Raises:
        LayoutError: more rows than the shape holds, or a position outside max_model_len.
    """
    n, num_rows, block_size = rows.positions.shape[0], shape.num_rows, shape.block_size
    if n > num_rows:
        raise LayoutError(f"{n} rows do not fit the padded batch of {num_rows}; lower --max-num-seqs")
    if n and not 0 <= int(rows.positions.min()) <= int(rows.positions.max()) < shape.max_model_len:
        raise LayoutError(f"positions must be 0..{shape.max_model_len - 1}, got {rows.positions.tolist()}")
    last = rows.positions // block_size
    start = (last - shape.sliding_width + 1).clamp(min=0)
    in_frame = rows.positions - start * block_size
    window = start[:, None] + torch.arange(shape.sliding_width)
    width = rows.sliding_table.shape[1]
    trimmed = rows.sliding_table.gather(1, window.clamp(max=width - 1)).masked_fill(window > last[:, None], 0)
    columns = torch.arange(min(shape.full_width, rows.full_table.shape[1]))
    full = rows.full_table[:, : len(columns)].masked_fill(columns > last[:, None], 0)

    def padded(values: torch.Tensor, fill: int, wanted: torch.dtype) -> torch.Tensor:
        out = torch.full((num_rows, 1), fill, dtype=wanted)
        out[:n, 0] = values.to(wanted)
        return out

    block_table = torch.zeros(num_rows, shape.full_width, dtype=torch.int32)
    block_table[:n, : full.shape[1]] = full
    block_table_swa = torch.zeros(num_rows, shape.sliding_width, dtype=torch.int32)
    block_table_swa[:n] = trimmed
    positions = padded(rows.positions, 0, torch.float32)
    cos, sin = rope_tables(geometry.rope, geometry.head_size, positions[:, 0], dtype)
    return ControlTensors(
        block_table=block_table,
        block_table_swa=block_table_swa,
        positions=positions,
        positions_swa=padded(in_frame, 0, torch.float32),
        swa_start=padded((in_frame - shape.sliding_window + 1).clamp(min=0), 0, torch.float32),
        update_index=padded(rows.slots, PAD_SLOT_ID, torch.int64),
        update_index_swa=padded(rows.slots_swa, PAD_SLOT_ID, torch.int64),
        active=padded(torch.ones(n), 0, torch.uint8),
        cos=cos,
        sin=sin,
    )
