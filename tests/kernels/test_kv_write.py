"""Writes of the giga kernel, byte for byte, against the core's layout."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gk_adapters.torch_giga import scratch_slots
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout, byte_address
from gk_core.kv_spec import KVDtype
from gk_kernels.reference import kv_write
from tests.kernels.parts import run_part

FP8 = ml_dtypes.float8_e4m3fn
HEADS, BLOCK, D, NUM_BLOCKS, SCRATCH_BLOCKS = 2, 8, 3, 23, 1
PACKED = KVLayout(
    num_layers=2, num_blocks=NUM_BLOCKS, num_kv_heads=HEADS, block_size=BLOCK, head_size=D, dtype=KVDtype.FP8_E4M3FN,
    k_byte_order=KByteOrder.PAIR_PACKED,
)  # fmt: skip


WIDE = evolve(PACKED, num_blocks=NUM_BLOCKS + SCRATCH_BLOCKS)
"""The same with scratch behind the engine's blocks, and the first slot of it."""
SCRATCH = NUM_BLOCKS * BLOCK


def _write(memory: NDArray[Any], k: NDArray[Any], v: NDArray[Any], slots: NDArray[Any], writes: NDArray[Any]) -> None:
    """One step into a group buffer's bytes [2, half of `WIDE`]; k, v [R, kv, d]."""
    packed = memory[0].view(FP8).reshape(WIDE.packed_k_shape)
    values = memory[1].view(FP8).reshape(WIDE.buffer_shape[1:])
    flat = len(k), HEADS * D
    run_part("write_kernel", packed, values, k.reshape(flat), v.reshape(flat), slots, writes, SCRATCH)


def _memory(rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Random bytes of K and V with their scratch, and the part of them that the engine knows."""
    memory = rng.integers(0, 120, (2, WIDE.half_bytes), dtype=np.uint8)
    return memory, memory[:, : PACKED.half_bytes]


def test_300_steps_of_packed_writes_leave_every_byte_where_the_core_says() -> None:
    """Three requests of one token a step, over block borders and a window that gives blocks back to be used again."""
    rng = np.random.default_rng(2)
    memory, buffer = _memory(rng)
    wanted = buffer.copy().reshape(-1)
    free = list(range(1, NUM_BLOCKS))
    tables: list[list[int]] = [[], [], []]
    for position in range(300):
        # Rows start at offsets 0, 1 and 5 of their blocks, so both lanes are written in every step.
        offsets = [(position + first) % BLOCK for first in (0, 1, 5)]
        for row, offset in enumerate(offsets):
            if offset == 0 or not tables[row]:
                tables[row].append(free.pop(0))
                if len(tables[row]) > 4:
                    free.append(tables[row].pop(0))
        blocks = [table[-1] for table in tables]
        slots = np.array([[b * BLOCK + o] for b, o in zip(blocks, offsets, strict=True)] + [[SCRATCH + 6]], np.int32)
        writes = np.array([[1], [1], [1], [0]], np.uint8)
        k, v = rng.integers(0, 120, (2, 4, HEADS, D), dtype=np.uint8)
        _write(memory, k.view(FP8), v.view(FP8), slots, writes)
        for row in range(3):
            for half, tokens in ((KVHalf.K, k), (KVHalf.V, v)):
                for head in range(HEADS):
                    for dim in range(D):
                        at = byte_address(
                            PACKED, layer=0, half=half, block=blocks[row], head=head, token=offsets[row], dim=dim
                        )
                        wanted[at.byte_offset] = tokens[row, head, dim]
        if position % 50 == 49:
            assert np.array_equal(buffer.reshape(-1), wanted)
    assert np.array_equal(buffer.reshape(-1), wanted)


def test_neighbours_of_one_pair_written_in_one_step_both_survive() -> None:
    """Tokens 2 and 3 of block 5: bytes alternate, even token first; nothing else changes."""
    memory = np.zeros((2, WIDE.half_bytes), np.uint8)
    buffer = memory[:, : PACKED.half_bytes]
    k = np.arange(1, 1 + 2 * HEADS * D, dtype=np.uint8).reshape(2, HEADS, D)
    _write(memory, k.view(FP8), k.view(FP8), np.array([[43], [42]], np.int32), np.ones((2, 1), np.uint8))
    start = 5 * HEADS * BLOCK * D + 2 * D  # block 5, head 0, pair 1
    assert buffer[0, start : start + 2 * D].tolist() == [7, 1, 8, 2, 9, 3]
    assert np.count_nonzero(buffer[0]) == k.size


@pytest.mark.parametrize(
    ("scratch_slot", "idle", "wanted"),
    [
        pytest.param(184, 186, [[92, 18], [20, 93], [94, 94], [18, 95]], id="scratch"),
        pytest.param(0, 1, [[0, 18], [20, 1], [2, 2], [18, 3]], id="null block"),
    ],
)
def test_a_pass_sends_rows_of_the_other_lane_away(scratch_slot: int, idle: int, wanted: list[list[int]]) -> None:
    """Slots 37, 40, an idle row, 36: pairs 18, 20, 18; away are pairs of the row's own, and no two rows meet."""
    slots = np.array([[37], [40], [idle], [36]], np.int32)
    writes = np.array([[1], [1], [0], [1]], np.uint8)
    assert run_part("pairs_kernel", slots, writes, BLOCK, scratch_slot).tolist() == wanted


@settings(max_examples=15, deadline=None)
@given(data=st.data(), packed=st.booleans(), scratch=st.booleans())
def test_any_step_writes_what_the_definition_writes(data: st.DataObject, packed: bool, scratch: bool) -> None:
    """Distinct slots, any rows inactive; all other bytes, the null block's too, stay; with scratch and without."""
    rows = data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(BLOCK, NUM_BLOCKS * BLOCK - 1), min_size=rows, max_size=rows, unique=True))
    active = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    layout, first = (WIDE, SCRATCH) if scratch else (PACKED, 0)
    shape = layout.packed_k_shape if packed else layout.buffer_shape[1:]
    k, v = (rng.integers(0, 120, s, dtype=np.uint8).view(FP8) for s in (shape, layout.buffer_shape[1:]))
    expected_k, expected_v = k.copy(), v.copy()
    new_k, new_v = (rng.integers(0, 120, (rows, HEADS, D), dtype=np.uint8).view(FP8) for _ in range(2))
    index = np.array([[s if a else -1] for s, a in zip(slots, active, strict=True)])
    targets, writes = scratch_slots(index, BLOCK, first)
    run_part("write_kernel", k, v, new_k.reshape(rows, -1), new_v.reshape(rows, -1), targets, writes, first)
    kv_write.write_tokens(expected_k, new_k, targets[:, 0], active)  # type: ignore[arg-type]
    kv_write.write_tokens(expected_v, new_v, targets[:, 0], active)  # type: ignore[arg-type]
    assert k[:NUM_BLOCKS].tobytes() == expected_k[:NUM_BLOCKS].tobytes()
    assert v[:NUM_BLOCKS].tobytes() == expected_v[:NUM_BLOCKS].tobytes()


@pytest.mark.parametrize("block", [3, 24])
def test_a_block_size_that_is_no_power_of_two_is_not_traced(block: int) -> None:
    """Slots are split by shifts; the adapter refuses such caches before."""
    cache = np.zeros((2, 1, block, D), np.float32)
    new = np.zeros((1, D), np.float32)
    with pytest.raises(AssertionError, match="power of two"):
        run_part(
            "write_kernel", cache, cache.copy(), new, new, np.zeros((1, 1), np.int32), np.ones((1, 1), np.uint8), 0
        )
