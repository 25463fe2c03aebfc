"""K and V as stored bytes: both FP8 dialects, scales, the packed order, and where in a buffer they go."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.torch_kv import KVCodec, allocate_group_buffers, per_buffer_kv, stacked_kv
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout, byte_address
from gk_core.kv_spec import KVDtype


def make_layout(
    dtype: KVDtype, order: KByteOrder = KByteOrder.TOKEN_MAJOR, block_size: int = 4, head_size: int = 2
) -> KVLayout:
    return KVLayout(
        num_layers=3, num_blocks=5, num_kv_heads=3, block_size=block_size, head_size=head_size, dtype=dtype,
        k_byte_order=order,
    )  # fmt: skip


def write(codec: KVCodec, buffer: torch.Tensor, half: KVHalf, block: int, token: int, stored: torch.Tensor) -> None:
    """One token [1, h, d] into one slot."""
    layout = codec.layout
    heads = torch.arange(layout.num_kv_heads)
    codec.write(codec.bind(buffer, half), (block * layout.num_kv_heads + heads) * layout.block_size + token, stored)


def fp8_codec(dtype: KVDtype = KVDtype.FP8_E4M3FN) -> KVCodec:
    return KVCodec(make_layout(dtype), torch.float32)


def stored_bytes(codec: KVCodec, values: list[float], scale: float = 1.0) -> list[int]:
    listed: list[int] = codec.encode(torch.tensor(values), scale).view(torch.uint8).tolist()
    return listed


def test_known_bytes_of_both_dialects() -> None:
    """0x77 is 240 in both; 0x78 is 256 in e4m3fn and is never written in the dialect that ends at 240."""
    assert stored_bytes(fp8_codec(), [240.0, 256.0, 448.0, 1.5, -1.0]) == [0x77, 0x78, 0x7E, 0x3C, 0xB8]
    assert stored_bytes(fp8_codec(KVDtype.FP8_E4M3), [240.0, 256.0, 448.0, 1.5, -1.0]) == [0x77, 0x77, 0x77, 0x3C, 0xB8]


def test_writers_saturate_and_never_make_nan_of_a_large_number() -> None:
    """500 becomes the largest finite value; a real NaN stays one."""
    assert stored_bytes(fp8_codec(), [500.0, -500.0, float("inf")]) == [0x7E, 0xFE, 0x7E]
    assert stored_bytes(fp8_codec(KVDtype.FP8_E4M3), [500.0, -500.0]) == [0x77, 0xF7]
    assert stored_bytes(fp8_codec(), [float("nan")]) == [0x7F]


def test_a_scale_divides_on_the_way_in() -> None:
    """x = 3 with scale 2 is stored as the byte of 1.5."""
    assert stored_bytes(fp8_codec(), [3.0], scale=2.0) == [0x3C]
    stored = torch.tensor([0x3C, 0x3C], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert (fp8_codec().decode(stored) * 2.0).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_256_bytes_decode_as_torch_casts_them(dtype: torch.dtype) -> None:
    """NaN included, sign of zero included."""
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    got = KVCodec(make_layout(KVDtype.FP8_E4M3FN), dtype).decode(stored)
    wanted = stored.to(dtype)
    assert torch.equal(got.nan_to_num(nan=777.0), wanted.nan_to_num(nan=777.0))
    assert torch.equal(torch.signbit(got), torch.signbit(wanted))


def test_packed_k_pairs_tokens_2p_and_2p_plus_1() -> None:
    """Block of 4 tokens, 2 dims: packed[1, 0, 1] is token 3 dim 0, which is not where a bare view would put it.

    A view of bytes 0..7 (token t dim c = 2t + c) as [2, 2, 2] would have 5 there, token 2 dim 1.
    """
    layout = make_layout(KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED)
    codec, buffers = KVCodec(layout, torch.float32), allocate_group_buffers(layout)
    k = per_buffer_kv(buffers, layout).k[0]
    assert k.shape == (5, 3, 2, 2, 2)
    for token in range(4):
        values = torch.tensor([2 * token, 2 * token + 1], dtype=torch.uint8).view(torch.float8_e4m3fn)
        stored = values.expand(1, 3, 2).contiguous()
        write(codec, k, KVHalf.K, 2, token, stored)
    raw = k.view(torch.uint8)
    assert raw[2, 0].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert raw[2, 1, 1, 0, 1] == 6  # token 3, dim 0
    assert buffers[0].view(torch.uint8)[0, 2, 0].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_packed_write_keeps_the_other_tokens_lane() -> None:
    """Writing token 2 leaves the bytes of token 3, and all else, as they were."""
    layout = make_layout(KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED)
    codec = KVCodec(layout, torch.float32)
    k = per_buffer_kv(allocate_group_buffers(layout), layout).k[1]
    k.view(torch.uint8).fill_(0x55)
    before = k.view(torch.uint8).clone()
    write(codec, k, KVHalf.K, 4, 2, codec.encode(torch.ones(1, 3, 2), 1.0))
    changed = (k.view(torch.uint8) != before).nonzero().tolist()
    assert changed == [[4, head, 1, dim, 0] for head in range(3) for dim in range(2)]


LAYOUTS = [
    make_layout(KVDtype.FP32, block_size=6, head_size=5),
    make_layout(KVDtype.BF16, block_size=6, head_size=4),
    make_layout(KVDtype.FP16, block_size=6, head_size=4),
    make_layout(KVDtype.FP8_E4M3FN, block_size=6, head_size=4),
    make_layout(KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED, block_size=6, head_size=4),
    make_layout(KVDtype.FP8_E4M3, KByteOrder.PAIR_PACKED, block_size=6, head_size=4),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.dtype.name}-{x.k_byte_order.value}")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_byte_lands_at_the_address_that_the_layout_gives(layout: KVLayout, data: st.DataObject) -> None:
    """A written token's bytes are exactly those at byte_address of its elements, and nothing else changes."""
    codec = KVCodec(layout, torch.float32)
    buffers = allocate_group_buffers(layout)
    kv = per_buffer_kv(buffers, layout)
    layer = data.draw(st.integers(0, layout.num_layers - 1))
    block = data.draw(st.integers(0, layout.num_blocks - 1))
    token = data.draw(st.integers(0, layout.block_size - 1))
    half = data.draw(st.sampled_from(KVHalf))
    # Nonzero small numbers, one per (head, dim), exact in every dtype.
    values = torch.arange(1, 1 + layout.num_kv_heads * layout.head_size, dtype=torch.float32)
    stored = codec.encode(values.view(1, layout.num_kv_heads, layout.head_size), 1.0)
    index = layer // 2
    target = (kv.k if half is KVHalf.K else kv.v)[index]
    write(codec, target, half, block, token, stored)
    flat = [b.view(torch.uint8).flatten() for b in buffers]
    size = layout.dtype.itemsize
    for head, dim in itertools.product(range(layout.num_kv_heads), range(layout.head_size)):
        where = byte_address(layout, layer=layer, half=half, block=block, head=head, token=token, dim=dim)
        assert where.buffer_index == index
        raw = flat[index][where.byte_offset : where.byte_offset + size].clone()
        assert raw.view(stored.dtype).float().item() == stored[0, head, dim].float().item()
        flat[index][where.byte_offset : where.byte_offset + size] = 0
    assert all(not f.any() for f in flat)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"{x.dtype.name}-{x.k_byte_order.value}")
def test_gather_gives_back_what_was_written_in_token_order(layout: KVLayout) -> None:
    """Blocks 3 then 1 of each head, both halves."""
    codec = KVCodec(layout, torch.float32)
    kv = per_buffer_kv(allocate_group_buffers(layout), layout)
    tokens = 2 * layout.block_size
    values = codec.encode(torch.randn(tokens, layout.num_kv_heads, layout.head_size), 1.0)
    heads = torch.arange(layout.num_kv_heads)
    head_blocks = (torch.tensor([3, 1])[None] * layout.num_kv_heads + heads[:, None]).flatten()
    for half, buffer in ((KVHalf.K, kv.k[0]), (KVHalf.V, kv.v[0])):
        for token in range(tokens):
            block = 3 if token < layout.block_size else 1
            write(codec, buffer, half, block, token % layout.block_size, values[token : token + 1])
        got = codec.gather(codec.bind(buffer, half), head_blocks, 2)
        assert torch.equal(got, values.float().transpose(0, 1))


def test_buffers_are_separate_allocations_and_views_share_them() -> None:
    """K and V are halves of one buffer; paired layers are one buffer."""
    layout = make_layout(KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED)
    buffers = allocate_group_buffers(layout)
    kv = per_buffer_kv(buffers, layout)
    assert len(buffers) == len(kv.k) == len(kv.v) == 2
    assert buffers[0].shape == (2, 5, 3, 4, 2)
    assert kv.k[0].data_ptr() == buffers[0].data_ptr()
    assert kv.v[0].data_ptr() == buffers[0].data_ptr() + layout.half_bytes
    assert len({b.untyped_storage().data_ptr() for b in buffers}) == 2
    stacked = stacked_kv(layout)
    assert (stacked.k.shape, stacked.v.shape) == ((2, 5, 3, 2, 2, 2), (2, 5, 3, 4, 2))


def test_a_cache_that_is_not_contiguous_is_refused() -> None:
    """Its flat views would be copies, and writes would be lost."""
    layout = make_layout(KVDtype.FP32)
    buffer = allocate_group_buffers(layout)[0]
    with pytest.raises(LayoutError, match="must each be contiguous"):
        KVCodec(layout, torch.float32).bind(buffer[0].transpose(1, 2), KVHalf.K)


def test_attention_computes_in_float_dtypes_only() -> None:
    """float64 is refused by name."""
    with pytest.raises(UnsupportedError, match=r"got torch\.float64"):
        KVCodec(make_layout(KVDtype.FP32), torch.float64)
