"""What one decode step reads and writes, checked and turned into indices once, before any layer runs.

Dims: R rows of the call, a active rows, F table width, h KV heads, n tokens per block, m blocks gathered per row,
S = m * n keys.

Rows that are not active are left out here, so nothing of them can reach a block or a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.torch_math import MASKED
from gk_core.block_table import NULL_BLOCK_ID, PAD_SLOT_ID
from gk_core.errors import LayoutError
from gk_core.kernel_contract import ControlTensors
from gk_core.kv_layout import KVLayout

__all__ = ["KindPlan", "OwnToken", "StepPlan", "plan_step"]

Ints = NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class OwnToken:
    """Rows whose own K and V join attention without being written: an index of PAD_SLOT_ID on an active row."""

    rows: torch.Tensor
    positions: torch.Tensor


@frozen(kw_only=True, eq=False)
class KindPlan:
    """One attention kind's part of a step.

    Attributes:
        num_blocks: m.
        head_blocks: [a * h * m] gathered (block, head) pairs, see `KVCodec.gather`.
        mask: [a, 1, 1, S], 0 or a large negative number.
        valid: [a, 1, S, 1] bool, keys that may be read.
        written: indices into the active rows that write, None when all do.
        places: where those rows' K and V go, see `KVCodec.write`.
        own: rows that write nothing, None when there are none.
    """

    num_blocks: int
    head_blocks: torch.Tensor
    mask: torch.Tensor
    valid: torch.Tensor
    written: torch.Tensor | None
    places: torch.Tensor
    own: OwnToken | None


@frozen(kw_only=True, eq=False)
class StepPlan:
    """A step: active rows, and the plans of sliding and full layers."""

    active: torch.Tensor
    sliding: KindPlan
    full: KindPlan


def plan_step(control: ControlTensors[torch.Tensor], layout: KVLayout, dtype: torch.dtype) -> StepPlan | None:
    """Indices of one step; None when no row is active.

    Raises:
        LayoutError: an active row needs a block that the table does not have or that lies outside the cache; an update
            index that is not the slot of the row's position; two rows writing one slot.
    """
    active = np.flatnonzero(control.active.numpy()[:, 0])
    if not len(active):
        return None
    zeros = np.zeros(len(active), np.int64)
    full = _Reads(
        name="block_table", table=_rows(control.block_table, active), position=_column(control.positions, active),
        start=zeros, slot=_column(control.update_index, active), rows=active,
    )  # fmt: skip
    sliding = _Reads(
        name="block_table_swa", table=_rows(control.block_table_swa, active),
        position=_column(control.positions_swa, active), start=_column(control.swa_start, active),
        slot=_column(control.update_index_swa, active), rows=active,
    )  # fmt: skip
    return StepPlan(
        active=torch.from_numpy(active),
        sliding=_plan_kind(sliding, layout, dtype),
        full=_plan_kind(full, layout, dtype),
    )


@frozen(kw_only=True, eq=False)
class _Reads:
    name: str
    table: Ints
    position: Ints
    start: Ints
    slot: Ints
    rows: Ints


def _rows(tensor: torch.Tensor, active: Ints) -> Ints:
    rows: Ints = tensor.numpy()[active].astype(np.int64)
    return rows


def _column(tensor: torch.Tensor, active: Ints) -> Ints:
    column: Ints = tensor.numpy()[active, 0].astype(np.int64)
    return column


def _plan_kind(reads: _Reads, layout: KVLayout, dtype: torch.dtype) -> KindPlan:
    block_size = layout.block_size
    own_block = reads.position // block_size
    width = int(own_block.max()) + 1
    if width > reads.table.shape[1] or reads.position.min() < 0:
        row = int(own_block.argmax()) if width > reads.table.shape[1] else int(reads.position.argmin())
        raise LayoutError(
            f"row {reads.rows[row]}: position {reads.position[row]} is outside {reads.name}'s "
            f"{reads.table.shape[1] * block_size} slots"
        )
    table = reads.table[:, :width]
    writes = reads.slot != PAD_SLOT_ID
    # The last key read from the cache: the own token when it is written, else the one before it.
    last_key = np.where(writes, reads.position, reads.position - 1)
    block = np.arange(width)
    needed = (block >= (reads.start // block_size)[:, None]) & (block * block_size <= last_key[:, None])
    _require_blocks(reads, table, needed, layout)
    _require_slots(reads, table, writes, own_block, block_size)

    # Blocks that are not needed may be null, evicted or another request's: gather a needed one in their place.
    safe = np.where(needed.any(axis=1), table[np.arange(len(table)), needed.argmax(axis=1)], NULL_BLOCK_ID)
    gathered = np.where(needed, table, safe[:, None])
    heads = np.arange(layout.num_kv_heads)
    head_blocks = gathered[:, None, :] * layout.num_kv_heads + heads[None, :, None]
    key = np.arange(width * block_size)
    valid = (key >= reads.start[:, None]) & (key <= reads.position[:, None])
    mask = torch.from_numpy(np.where(valid, np.float32(0), np.float32(MASKED))).to(dtype)
    written = np.flatnonzero(writes)
    slots = reads.slot[written][:, None]
    places = (slots // block_size * layout.num_kv_heads + heads) * block_size + slots % block_size
    own = np.flatnonzero(~writes)
    return KindPlan(
        num_blocks=width,
        head_blocks=torch.from_numpy(np.ascontiguousarray(head_blocks).reshape(-1)),
        mask=mask[:, None, None, :],
        valid=torch.from_numpy(valid)[:, None, :, None],
        written=None if len(written) == len(writes) else torch.from_numpy(written),
        places=torch.from_numpy(places.reshape(-1)),
        own=OwnToken(rows=torch.from_numpy(own), positions=torch.from_numpy(reads.position[own])) if len(own) else None,
    )


def _require_blocks(reads: _Reads, table: Ints, needed: NDArray[Any], layout: KVLayout) -> None:
    bad = needed & ((table <= NULL_BLOCK_ID) | (table >= layout.num_blocks))
    if bad.any():
        row, block = (int(i) for i in np.argwhere(bad)[0])
        raise LayoutError(
            f"row {reads.rows[row]}: {reads.name} has block {table[row, block]} at entry {block}, which the step reads "
            f"or writes; must be 1..{layout.num_blocks - 1} (0 is the null block: evicted too early, or never filled)"
        )


def _require_slots(reads: _Reads, table: Ints, writes: NDArray[Any], own_block: Ints, block_size: int) -> None:
    wanted = table[np.arange(len(table)), own_block] * block_size + reads.position % block_size
    bad = writes & (reads.slot != wanted)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise LayoutError(
            f"row {reads.rows[row]}: update index {reads.slot[row]} is not the slot {wanted[row]} that {reads.name} "
            f"gives its position; use that slot, or {PAD_SLOT_ID} to write nothing"
        )
    slots = reads.slot[writes].tolist()
    if len(set(slots)) < len(slots):
        slot = next(s for i, s in enumerate(slots) if s in slots[:i])
        raise LayoutError(f"{reads.name}: two rows write slot {slot}; every row needs a block of its own")
