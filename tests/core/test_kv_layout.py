"""Where every byte of the cache lives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_layout import (
    DMA_OFFSET_LIMIT,
    KByteOrder,
    KVHalf,
    KVLayout,
    OffsetUnit,
    byte_address,
    layout_for,
    max_dma_offset,
    offset_in_head,
    require_dma_reach,
    stacked_cap_blocks,
)
from gk_core.kv_spec import KVDtype

from .layout_builders import make_layout, make_target_layout, make_target_specs

PACKED = KByteOrder.PAIR_PACKED


def test_a_block_of_the_target_is_8192_bytes() -> None:
    """1 head * 128 tokens * 64 dims * 1 byte."""
    layout = make_target_layout()
    assert (layout.head_bytes, layout.block_bytes) == (8192, 8192)
    assert layout.num_buffers == 18
    assert layout.half_bytes == 296_345_600
    assert layout.buffer_bytes == 592_691_200
    assert layout.kv_bytes == 10_668_441_600


def test_shapes_are_halves_blocks_heads_tokens_dims() -> None:
    """[2, B, kv, block, d], and the packed view of a K half."""
    assert make_layout().buffer_shape == (2, 7, 3, 4, 2)
    assert make_target_layout().buffer_shape == (2, 36_175, 1, 128, 64)
    assert make_target_layout().packed_k_shape == (36_175, 1, 64, 64, 2)


def test_sizes_of_the_small_layout() -> None:
    """4 tokens * 2 dims * 2 bytes = 16; 3 heads; 7 blocks; 2 halves; 3 buffers."""
    layout = make_layout()
    assert (layout.head_bytes, layout.block_bytes, layout.half_bytes) == (16, 48, 336)
    assert (layout.buffer_bytes, layout.num_buffers, layout.kv_bytes) == (672, 3, 2016)


@pytest.mark.parametrize(
    ("where", "buffer", "offset"),
    [
        ((0, KVHalf.K, 0, 0, 0, 0), 0, 0),
        ((1, KVHalf.K, 0, 0, 0, 1), 0, 2),
        ((0, KVHalf.K, 0, 0, 1, 0), 0, 4),
        ((0, KVHalf.K, 0, 1, 0, 0), 0, 16),
        ((2, KVHalf.K, 1, 0, 0, 0), 1, 48),
        ((4, KVHalf.V, 0, 0, 0, 0), 2, 336),
        ((3, KVHalf.V, 5, 2, 3, 1), 1, 336 + 240 + 32 + 12 + 2),
        ((4, KVHalf.V, 6, 2, 3, 1), 2, 670),
    ],
)
def test_token_major_addresses(where: tuple[int, KVHalf, int, int, int, int], buffer: int, offset: int) -> None:
    """(layer, half, block, head, token, dim) of the small BF16 layout, worked by hand."""
    layer, half, block, head, token, dim = where
    a = byte_address(make_layout(), layer=layer, half=half, block=block, head=head, token=token, dim=dim)
    assert (a.buffer_index, a.byte_offset) == (buffer, offset)


@pytest.mark.parametrize(
    ("half", "block", "head", "token", "dim", "offset"),
    [
        (KVHalf.K, 0, 0, 0, 1, 2),
        (KVHalf.K, 0, 0, 1, 0, 1),
        (KVHalf.K, 0, 0, 2, 0, 4),
        (KVHalf.K, 6, 1, 3, 1, 144 + 8 + 4 + 2 + 1),
        (KVHalf.V, 0, 0, 1, 0, 168 + 2),
        (KVHalf.V, 6, 1, 3, 1, 168 + 144 + 8 + 6 + 1),
    ],
)
def test_packed_addresses(half: KVHalf, block: int, head: int, token: int, dim: int, offset: int) -> None:
    """FP8: two tokens of a pair lie side by side in K; V stays token-major."""
    layout = make_layout(dtype=KVDtype.FP8_E4M3FN, k_byte_order=PACKED)
    assert (layout.head_bytes, layout.block_bytes, layout.half_bytes) == (8, 24, 168)
    a = byte_address(layout, layer=4, half=half, block=block, head=head, token=token, dim=dim)
    assert (a.buffer_index, a.byte_offset) == (2, offset)


def test_packed_content_is_pair_interleaved_not_a_bare_view() -> None:
    """Block 4, d 2: the element at packed[1, 0, 1] is token 3, dim 0; a bare view would show token 2, dim 1."""
    layout = make_layout(dtype=KVDtype.FP8_E4M3FN, k_byte_order=PACKED)
    storage = bytearray(8)
    for token in range(4):
        for dim in range(2):
            storage[offset_in_head(layout, KVHalf.K, token, dim)] = token * 10 + dim
    assert list(storage) == [0, 10, 1, 11, 20, 30, 21, 31]
    packed = [[[storage[(p * 2 + c) * 2 + s] for s in range(2)] for c in range(2)] for p in range(2)]
    assert packed[1][0][1] == 30
    assert all(packed[p][c][s] == (2 * p + s) * 10 + c for p in range(2) for c in range(2) for s in range(2))


def test_token_major_content_is_row_after_row() -> None:
    """The same stamps in the other order: V always, K when it is not packed."""
    for layout, half in (
        (make_layout(), KVHalf.K),
        (make_layout(dtype=KVDtype.FP8_E4M3FN, k_byte_order=PACKED), KVHalf.V),
    ):
        assert [offset_in_head(layout, half, t, c) for t in range(4) for c in range(2)] == list(range(8))


def test_an_address_shows_the_sum_that_leads_there() -> None:
    """Terms are (what, count, bytes each), half first."""
    a = byte_address(make_layout(), layer=3, half=KVHalf.V, block=5, head=2, token=3, dim=1)
    assert a.terms == (("half", 1, 336), ("block", 5, 48), ("head", 2, 16), ("token", 3, 4), ("dim", 1, 2))
    packed = make_layout(dtype=KVDtype.FP8_E4M3FN, k_byte_order=PACKED)
    b = byte_address(packed, layer=4, half=KVHalf.K, block=6, head=1, token=3, dim=1)
    assert b.terms == (
        ("half", 0, 168), ("block", 6, 24), ("head", 1, 8), ("token pair", 1, 4), ("dim", 1, 2),
        ("token in pair", 1, 1),
    )  # fmt: skip


def test_paired_layers_share_addresses_and_others_do_not() -> None:
    """Layers 2 and 3 are one buffer."""
    a, b, c = (byte_address(make_layout(), layer=i, half=KVHalf.K, block=1, head=2, token=3, dim=0) for i in (2, 3, 4))
    assert a == b
    assert (c.buffer_index, c.byte_offset) == (2, a.byte_offset)


DIMS = st.permutations([2, 3, 4, 5]).filter(lambda p: p[2] % 2 == 0)


@given(dims=DIMS, dtype=st.sampled_from(KVDtype), packed=st.booleans())
@settings(deadline=None, max_examples=60)
def test_addresses_are_a_bijection_onto_the_bytes_of_a_buffer(dims: list[int], dtype: KVDtype, packed: bool) -> None:
    """Every element has its own place, no byte is left over, and the terms add up."""
    blocks, heads, tokens, size = dims
    order = PACKED if packed and dtype.is_fp8 else KByteOrder.TOKEN_MAJOR
    layout = make_layout(
        num_blocks=blocks, num_kv_heads=heads, block_size=tokens, head_size=size, dtype=dtype, k_byte_order=order
    )
    taken: list[int] = []
    for half in KVHalf:
        for b in range(blocks):
            for h in range(heads):
                for t in range(tokens):
                    for d in range(size):
                        a = byte_address(layout, layer=1, half=half, block=b, head=h, token=t, dim=d)
                        assert a.byte_offset == sum(count * each for _, count, each in a.terms)
                        taken += range(a.byte_offset, a.byte_offset + dtype.itemsize)
    assert sorted(taken) == list(range(layout.buffer_bytes))


@pytest.mark.parametrize(("name", "limit"), [("layer", 5), ("block", 7), ("head", 3), ("token", 4), ("dim", 2)])
def test_coordinates_outside_the_layout_are_refused(name: str, limit: int) -> None:
    """The last one of each passes, the next and -1 do not; the message names coordinate and limit."""
    last = {"layer": 4, "block": 6, "head": 2, "token": 3, "dim": 1}
    byte_address(make_layout(), half=KVHalf.K, **last)
    for value in (limit, -1):
        with pytest.raises(LayoutError, match=rf"{name} {value} is outside 0\.\.{limit - 1}"):
            byte_address(make_layout(), half=KVHalf.K, **(last | {name: value}))


@pytest.mark.parametrize("name", ["num_layers", "num_blocks", "num_kv_heads", "block_size", "head_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    """Each by name."""
    wrong: dict[str, Any] = {name: 0}
    with pytest.raises(LayoutError, match=f"{name} must be >= 1, got 0"):
        make_layout(**wrong)


def test_packed_k_with_an_odd_block_is_refused() -> None:
    """The last token would have no partner; the same block is fine token-major."""
    make_layout(block_size=5, dtype=KVDtype.FP8_E4M3)
    with pytest.raises(LayoutError, match="block_size must be even, got 5"):
        make_layout(block_size=5, dtype=KVDtype.FP8_E4M3, k_byte_order=PACKED)


@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.FP16, KVDtype.FP32])
def test_packed_k_is_fp8_only(dtype: KVDtype) -> None:
    """Wider elements are not packed."""
    with pytest.raises(UnsupportedError, match=f"one-byte elements, got {dtype.dtype_name}"):
        make_layout(dtype=dtype, k_byte_order=PACKED)


def test_the_layout_of_specs_is_theirs() -> None:
    """36 honest specs and a block count."""
    layout = layout_for(make_target_specs(), num_blocks=36_175, k_byte_order=PACKED)
    assert layout == make_target_layout()
    with pytest.raises(LayoutError, match="at least one layer spec"):
        layout_for((), num_blocks=2, k_byte_order=PACKED)


def test_the_target_reaches_296_345_600_bytes() -> None:
    """36175 * 8192, below 2^32."""
    assert max_dma_offset(make_target_layout()) == 296_345_600
    assert DMA_OFFSET_LIMIT == 4_294_967_296
    require_dma_reach(make_target_layout())
    require_dma_reach(make_target_layout(), unit=OffsetUnit.TWO_BYTES)


@pytest.mark.parametrize(("unit", "wraps"), [(OffsetUnit.BYTES, 524_288), (OffsetUnit.TWO_BYTES, 262_144)])
def test_a_half_wraps_at_524_288_blocks(unit: OffsetUnit, wraps: int) -> None:
    """One block fewer passes; the refusal names the remedy."""
    require_dma_reach(make_target_layout(num_blocks=wraps - 1), unit=unit)
    with pytest.raises(LayoutError, match=rf"limit 4294967295; use at most {wraps - 1} blocks \(got {wraps}\)"):
        require_dma_reach(make_target_layout(num_blocks=wraps), unit=unit)


@pytest.mark.parametrize(
    ("unit", "together", "blocks"),
    [
        (OffsetUnit.BYTES, False, 29_127),
        (OffsetUnit.BYTES, True, 14_563),
        (OffsetUnit.TWO_BYTES, False, 14_563),
        (OffsetUnit.TWO_BYTES, True, 7281),
    ],
)
def test_a_stacked_cache_would_be_capped(unit: OffsetUnit, together: bool, blocks: int) -> None:
    """18 buffers of 8192-byte blocks in one range."""
    layout = make_target_layout()
    assert stacked_cap_blocks(layout, unit=unit, k_and_v_together=together) == blocks


@given(num_blocks=st.integers(1, 2**21), unit=st.sampled_from(OffsetUnit))
@settings(deadline=None)
def test_reach_is_refused_exactly_where_an_offset_would_wrap(num_blocks: int, unit: OffsetUnit) -> None:
    """A uint32 holds num_blocks * block_bytes * unit, or the layout is refused."""
    layout: KVLayout = make_target_layout(num_blocks=num_blocks)
    fits = num_blocks * 8192 * unit.value <= 0xFFFF_FFFF
    try:
        require_dma_reach(layout, unit=unit)
    except LayoutError:
        assert not fits
    else:
        assert fits
