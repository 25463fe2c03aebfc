"""The new K and V go to their slots; every other byte of the cache stays as it is.

One indirect DMA must not mix rows to write with rows to skip (which is reported to hang devices), so every row has a
valid slot, distinct from all others'. Rows that write nothing have theirs in scratch blocks behind the engine's, which
no table names: what they put there is never read into a result. A plain write is then one scatter.

Packed K stores tokens in pairs, so a write is read, merge, write: a pass for even tokens, then one for odd tokens,
which re-reads what the first wrote, so both lanes of a pair survive whoever wrote them. Rows of the other lane go to
the scratch blocks too.

A cache from outside may have no scratch blocks. There, rows that write nothing point at the null block, and every
write is read, merge, write: they put back the bytes that they found.
"""

from __future__ import annotations

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl


class WritePlan(NamedTuple):
    """Where one attention kind's new tokens go; the same for all its layers.

    Attributes:
        rows: int32 [R, kv], index of a token's row in the cache seen as [num_blocks * kv * block, d].
        writes: uint8 [R, 1], 1 where a row writes; None where all may, since the others' slots are scratch.
        pairs: int32 [R, 2, kv], packed K: pair rows of the even and of the odd pass; None when K is not packed.
        lanes: uint8 [R, 2], packed K: rows that write in each pass.
    """

    rows: nl.NkiTensor
    writes: nl.NkiTensor | None
    pairs: nl.NkiTensor | None
    lanes: nl.NkiTensor | None


def make_write_plan(
    slots: nl.NkiTensor, writes: nl.NkiTensor, block_size: int, num_kv_heads: int, packed: bool, scratch_slot: int,
    name: str,
) -> WritePlan:  # fmt: skip
    """Plan from slots [R, 1] int32, all of them valid, and flags [R, 1] uint8, both in HBM.

    scratch_slot: first of 2 R slots that no table names; 0: there are none, the null block stands in for them.
    """
    count = slots.shape[0]
    slot = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_slot")
    nisa.dma_copy(dst=slot, src=slots)
    flags = nl.ndarray((count, 1), dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_flags")
    nisa.dma_copy(dst=flags, src=writes)
    rows = rows_of_slots(slot, block_size, num_kv_heads, f"{name}_rows")
    merged = flags if scratch_slot == 0 else None
    if not packed:
        return WritePlan(rows=rows, writes=merged, pairs=None, lanes=None)

    # A row of the other lane must not touch its pair in this pass: its neighbour may be writing the same pair.
    away = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_away")
    nisa.iota(dst=away, pattern=[[1, 1]], offset=scratch_slot, channel_multiplier=2)
    if scratch_slot == 0:
        nisa.tensor_scalar(dst=away, data=away, op0=nl.bitwise_and, operand0=block_size - 1)
    pairs = nl.ndarray((count, 2, num_kv_heads), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_pairs")
    lanes = nl.ndarray((count, 2), dtype=nl.uint8, buffer=nl.sbuf, name=f"{name}_lanes")
    for lane in range(2):
        odd = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_odd{lane}")
        nisa.tensor_scalar(dst=odd, data=slot, op0=nl.bitwise_and, operand0=1)
        in_lane = lanes[:, lane : lane + 1]
        nisa.scalar_tensor_tensor(
            dst=in_lane, data=odd, op0=nl.equal, operand0=float(lane), op1=nl.multiply, operand1=flags
        )
        target = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_target{lane}")
        nisa.tensor_copy(dst=target, src=away)
        nisa.tensor_copy_predicated(dst=target, src=slot, predicate=in_lane)
        of_lane = rows_of_slots(target, block_size, num_kv_heads, f"{name}_lane{lane}")
        nisa.tensor_scalar(dst=pairs[:, lane, :], data=of_lane, op0=nl.right_shift, operand0=1)
    return WritePlan(rows=rows, writes=merged, pairs=pairs, lanes=lanes)


def rows_of_slots(slot: nl.NkiTensor, block_size: int, num_kv_heads: int, name: str) -> nl.NkiTensor:
    """Cache rows [R, kv] of slots [R, 1]: (slot / block) * kv * block + head * block + slot % block, exact int32."""
    count = slot.shape[0]
    shift = 0
    while 1 << shift < block_size:
        shift += 1
    assert 1 << shift == block_size, "the block size must be a power of two"
    block = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_block")
    nisa.tensor_scalar(dst=block, data=slot, op0=nl.right_shift, operand0=shift, op1=nl.left_shift, operand1=shift)
    per_block = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_per_block")
    nisa.memset(dst=per_block, value=num_kv_heads - 1)
    nisa.tensor_tensor(dst=block, data1=block, data2=per_block, op=nl.multiply)
    # (kv - 1) * block * block_size + slot = kv * block * block_size + offset
    out = nl.ndarray((count, num_kv_heads), dtype=nl.int32, buffer=nl.sbuf, name=name)
    for head in range(num_kv_heads):
        of_head = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf, name=f"{name}_head{head}")
        nisa.memset(dst=of_head, value=head * block_size)
        nisa.tensor_tensor(dst=of_head, data1=of_head, data2=slot, op=nl.add)
        nisa.tensor_tensor(dst=out[:, head : head + 1], data1=of_head, data2=block, op=nl.add)
    return out


def write_tokens(cache: nl.NkiTensor, new: nl.NkiTensor, plan: WritePlan, num_kv_heads: int, name: str) -> None:
    """Tokens `new` [R, kv * d], in the cache's dtype, into K or V [num_blocks, kv, block, d]."""
    count = new.shape[0]
    d = cache.shape[3]
    table = cache.reshape((cache.shape[0] * cache.shape[1] * cache.shape[2], d))
    for head in range(num_kv_heads):
        mine = new[:, head * d : (head + 1) * d]
        there = table.ap(pattern=[[d, count], [1, d]], vector_offset=plan.rows[:, head : head + 1], indirect_dim=0)
        if plan.writes is None:
            nisa.dma_copy(dst=there, src=mine)
        else:
            old = nl.ndarray((count, d), dtype=cache.dtype, buffer=nl.sbuf, name=f"{name}_{head}_old")
            nisa.dma_copy(dst=old, src=there)
            nisa.tensor_copy_predicated(dst=old, src=mine, predicate=plan.writes.broadcast(1, d))
            nisa.dma_copy(dst=there, src=old)


def write_packed_keys(
    cache: nl.NkiTensor, new: nl.NkiTensor, pairs: nl.NkiTensor, lanes: nl.NkiTensor, num_kv_heads: int, name: str
) -> None:
    """Tokens `new` [R, kv * d] into packed K [num_blocks, kv, block / 2, d, 2]: even tokens, then odd ones.

    pairs, lanes: of a `WritePlan`.
    """
    count = new.shape[0]
    d = cache.shape[3]
    table = cache.reshape((cache.shape[0] * cache.shape[1] * cache.shape[2], 2 * d))
    for lane in range(2):
        for head in range(num_kv_heads):
            old = nl.ndarray((count, d, 2), dtype=cache.dtype, buffer=nl.sbuf, name=f"{name}_old{lane}_{head}")
            there = table.ap(
                pattern=[[2 * d, count], [1, 2 * d]], vector_offset=pairs[:, lane, head : head + 1], indirect_dim=0
            )
            nisa.dma_copy(dst=old, src=there)
            nisa.tensor_copy_predicated(
                dst=old[:, :, lane], src=new[:, head * d : (head + 1) * d],
                predicate=lanes[:, lane : lane + 1].broadcast(1, d),
            )  # fmt: skip
            nisa.dma_copy(dst=there, src=old)
