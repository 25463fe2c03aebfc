"""Regions: strides, bounds, paired layers, overlaps."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gk_core.errors import LayoutError
from gk_core.kv_layout import KVHalf
from gk_core.region import (
    Descriptor,
    KVRegion,
    StridedRun,
    block_descriptor,
    descriptor_index,
    regions_of_buffers,
    strided_run,
)
from tests.core.layout_builders import make_layout, make_target_layout


def make_region(
    base_address: int = 0x1000, num_blocks: int = 4, block_bytes: int = 8, block_stride_bytes: int = 16
) -> KVRegion:
    return KVRegion(
        buffer_index=2,
        half=KVHalf.V,
        base_address=base_address,
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        block_stride_bytes=block_stride_bytes,
        device_id=3,
    )


def test_a_block_address_steps_by_the_stride_not_by_the_block_length() -> None:
    """0x1000 + 3 * 16 = 0x1030."""
    assert block_descriptor(make_region(), 3) == Descriptor(address=0x1030, length_bytes=8, device_id=3)


def test_part_of_a_block_is_offset_inside_it() -> None:
    """0x1000 + 1 * 16 + 5; the rest of the block unless a length is given."""
    assert block_descriptor(make_region(), 1, offset_bytes=5) == Descriptor(address=0x1015, length_bytes=3, device_id=3)
    assert block_descriptor(make_region(), 1, offset_bytes=5, length_bytes=2).length_bytes == 2


def test_a_region_ends_with_its_last_blocks_data() -> None:
    """3 strides and one block: the gap after the last block is not part of it."""
    assert make_region().size_bytes == 56
    assert make_region().end_address == 0x1038


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_outside_the_region_has_no_address(block: int) -> None:
    """One before, one past."""
    with pytest.raises(LayoutError, match=r"is outside the region's 0\.\.3"):
        block_descriptor(make_region(), block)


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (0, 9), (5, 4), (8, 0), (0, -1)])
def test_bytes_outside_the_block_have_no_address(offset: int, length: int) -> None:
    """Before it, across its end, nothing at all."""
    with pytest.raises(LayoutError, match="outside the block's 8 bytes"):
        block_descriptor(make_region(), 0, offset_bytes=offset, length_bytes=length)


def test_a_whole_region_is_one_strided_run() -> None:
    """One row, however many blocks."""
    assert strided_run(make_region(), offset_bytes=2, length_bytes=3) == StridedRun(
        address=0x1002, length_bytes=3, stride_bytes=16, count=4, device_id=3
    )


@given(block=st.integers(0, 40), offset=st.integers(0, 6), length=st.integers(1, 7))
def test_a_strided_run_is_its_blocks_descriptors(block: int, offset: int, length: int) -> None:
    """Row i of the run is block i."""
    region = make_region(num_blocks=41, block_bytes=13, block_stride_bytes=17)
    run = strided_run(region, offset_bytes=offset, length_bytes=length)
    one = block_descriptor(region, block, offset_bytes=offset, length_bytes=length)
    assert (run.address + block * run.stride_bytes, run.length_bytes) == (one.address, one.length_bytes)
    assert one.address + one.length_bytes <= region.end_address


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be >= 1, got 0"),
        ({"block_bytes": 0}, "block_bytes must be >= 1, got 0"),
        ({"base_address": -8}, "base_address must be >= 0, got -8"),
        ({"block_stride_bytes": 7}, "stride 7 bytes is below block length 8"),
    ],
)
def test_numbers_that_describe_no_region_are_refused(change: dict[str, int], message: str) -> None:
    """Naming the number."""
    with pytest.raises(LayoutError, match=message):
        make_region(**change)


def test_36_layers_give_36_regions_of_18_buffers() -> None:
    """Paired layers are one buffer: K at its base, V half a buffer further."""
    layout = make_target_layout()
    bases = [0x10_0000 + (i // 2) * layout.buffer_bytes for i in range(36)]
    regions = regions_of_buffers(layout, bases)
    assert len(regions) == 36
    assert [(r.buffer_index, r.half) for r in regions[:4]] == [
        (0, KVHalf.K), (0, KVHalf.V), (1, KVHalf.K), (1, KVHalf.V),
    ]  # fmt: skip
    assert regions[0].base_address == 0x10_0000
    assert regions[1].base_address == 0x10_0000 + 296_345_600
    assert regions[35].base_address == 0x10_0000 + 35 * 296_345_600
    assert {(r.block_bytes, r.block_stride_bytes, r.num_blocks) for r in regions} == {(8192, 8192, 36_175)}


def test_regions_cost_no_memory_per_block() -> None:
    """1,302,300 block addresses are arithmetic: as many bytes as for two blocks."""

    def size(num_blocks: int) -> int:
        layout = make_target_layout(num_blocks=num_blocks)
        regions = regions_of_buffers(layout, [(i // 2) * layout.buffer_bytes for i in range(36)])
        return sum(sys.getsizeof(r) for r in regions)

    assert size(36_175) == size(2)


def test_an_odd_last_layer_has_a_buffer_of_its_own() -> None:
    """5 layers, 3 buffers, 6 regions of 7 blocks of 48 bytes."""
    layout = make_layout()
    size = layout.buffer_bytes
    assert (layout.block_bytes, size) == (48, 672)
    regions = regions_of_buffers(layout, [0, 0, size, size, 2 * size])
    assert [r.base_address for r in regions] == [0, 336, 672, 1008, 1344, 1680]


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ([0, 0, 672, 672], "got 4 for 5"),
        ([0, 1, 672, 672, 1344], "layers 0 and 1 must share buffer 0, got base addresses 0x0, 0x1"),
        ([0, 0, 671, 671, 1344], r"regions overlap: buffer 0 V ends at 0x2a0, buffer 1 K begins at 0x29f"),
        ([0, 0, 0, 0, 1344], "regions overlap"),
    ],
)
def test_buffers_that_do_not_pair_or_overlap_are_refused(bases: list[int], message: str) -> None:
    """A count, a pair and an overlap by one byte."""
    with pytest.raises(LayoutError, match=message):
        regions_of_buffers(make_layout(), bases)


def test_descriptor_indices_use_each_ranks_own_block_count() -> None:
    """Ranks of one peer with 111,680 and 111,488 blocks: block 5 of region 1."""
    assert descriptor_index(region=1, block=5, num_blocks=111_680) == 111_685
    assert descriptor_index(region=1, block=5, num_blocks=111_488) == 111_493
    assert descriptor_index(region=0, block=36_174, num_blocks=36_175) == 36_174


@pytest.mark.parametrize(("region", "block"), [(0, 36_175), (0, -1), (-1, 0)])
def test_a_block_one_past_the_end_has_no_descriptor_index(region: int, block: int) -> None:
    """It would be the next region's first block."""
    with pytest.raises(LayoutError, match="outside"):
        descriptor_index(region=region, block=block, num_blocks=36_175)
