"""KV layout: where every byte of the cache lives.

Dims: B blocks (num_blocks), h KV heads of this rank, n tokens per block (block_size), d head size.

Each group buffer is one allocation [2, B, h, n, d]: the K half, then the V half. The kernel indexes each buffer from
its own base, so a block's DMA offset spans one half and stays under 2^32 for any pool that HBM holds.

Packed FP8 K keeps the same storage but not the same order: the kernel reads packed[p, c, s] = K[token 2p+s, dim c], so
inside one head the two tokens of a pair lie next to each other. V is never packed.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_spec import KVDtype, LayerKVSpec
from gk_core.model_geometry import buffer_of_layer

__all__ = [
    "DMA_OFFSET_LIMIT",
    "ByteAddress",
    "KByteOrder",
    "KVHalf",
    "KVLayout",
    "OffsetUnit",
    "byte_address",
    "layout_for",
    "max_dma_offset",
    "offset_in_head",
    "require_dma_reach",
    "stacked_cap_blocks",
]

DMA_OFFSET_LIMIT = 2**32
"""Exclusive limit of a hardware access-pattern offset (a uint32), in the unit of `OffsetUnit`."""


class KVHalf(Enum):
    """Which half of a group buffer."""

    K = 0
    V = 1


class KByteOrder(Enum):
    """Order of one head's elements inside one block of K."""

    TOKEN_MAJOR = "token_major"
    PAIR_PACKED = "pair_packed"


class OffsetUnit(Enum):
    """What one byte of cache counts for against the 2^32 limit; public text does not say which, so it is an input.

    BYTES: each byte once. TWO_BYTES: each one-byte element counts as two, as it does for hardware that addresses
    two-byte elements, or whose offset is signed.
    """

    BYTES = 1
    TWO_BYTES = 2


@frozen(kw_only=True)
class KVLayout:
    """The layout of one rank's KV cache.

    Attributes:
        num_layers: decoder layers; buffer j holds layers 2j and 2j+1.
        num_blocks: blocks per buffer, block 0 being the null block.
        num_kv_heads: heads on this rank.
        block_size: tokens per block.
        head_size: elements per head.
        dtype: element type.
        k_byte_order: token-major, or pair-packed (FP8 only).

    Raises:
        LayoutError: a number is out of range, or packed K with an odd block size.
        UnsupportedError: packed K with elements wider than one byte.
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_size: int
    dtype: KVDtype
    k_byte_order: KByteOrder

    def __attrs_post_init__(self) -> None:
        for name in ("num_layers", "num_blocks", "num_kv_heads", "block_size", "head_size"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.k_byte_order is KByteOrder.PAIR_PACKED:
            if not self.dtype.is_fp8:
                raise UnsupportedError(
                    f"packed K holds one-byte elements, got {self.dtype.dtype_name}; "
                    "use an FP8 KV cache or token-major K"
                )
            if self.block_size % 2:
                raise LayoutError(
                    f"packed K pairs tokens 2p and 2p+1 of a block, so block_size must be even, got {self.block_size}"
                )

    @property
    def num_buffers(self) -> int:
        """Group buffers."""
        return (self.num_layers + 1) // 2

    @property
    def buffer_shape(self) -> tuple[int, int, int, int, int]:
        """[2, num_blocks, kv, block, d]."""
        return (2, self.num_blocks, self.num_kv_heads, self.block_size, self.head_size)

    @property
    def packed_k_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the packed view of a K half: [num_blocks, kv, block // 2, d, 2]."""
        return (self.num_blocks, self.num_kv_heads, self.block_size // 2, self.head_size, 2)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one block of K or V."""
        return self.block_size * self.head_size * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one half: kv * block * d * itemsize. 8192 for the 120B target."""
        return self.num_kv_heads * self.head_bytes

    @property
    def half_bytes(self) -> int:
        """Bytes of one half of one buffer."""
        return self.num_blocks * self.block_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one group buffer."""
        return 2 * self.half_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of all group buffers."""
        return self.num_buffers * self.buffer_bytes


@frozen(kw_only=True)
class ByteAddress:
    """Where one element lies, and the terms whose sum its byte offset is.

    Attributes:
        buffer_index: group buffer.
        byte_offset: bytes from the buffer's base.
        terms: (what, count, bytes each), in order; the sum of count * bytes is `byte_offset`.
    """

    buffer_index: int
    byte_offset: int
    terms: tuple[tuple[str, int, int], ...]


def layout_for(specs: tuple[LayerKVSpec, ...], *, num_blocks: int, k_byte_order: KByteOrder) -> KVLayout:
    """The layout of a cache with these (uniform) specs."""
    if not specs:
        raise LayoutError("a layout needs at least one layer spec, got none")
    first = specs[0]
    return KVLayout(
        num_layers=len(specs),
        num_blocks=num_blocks,
        num_kv_heads=first.num_kv_heads,
        block_size=first.block_size,
        head_size=first.head_size,
        dtype=first.dtype,
        k_byte_order=k_byte_order,
    )


def offset_in_head(layout: KVLayout, half: KVHalf, token: int, dim: int) -> int:
    """Elements from the start of one head of one block to (token, dim).

    Token-major: token * d + dim. Packed K: (token // 2) * 2d + dim * 2 + token % 2.

    Raises:
        LayoutError: token or dim outside the block.
    """
    _require_below("token", token, layout.block_size)
    _require_below("dim", dim, layout.head_size)
    if half is KVHalf.K and layout.k_byte_order is KByteOrder.PAIR_PACKED:
        return (token // 2) * 2 * layout.head_size + dim * 2 + token % 2
    return token * layout.head_size + dim


def byte_address(
    layout: KVLayout, *, layer: int, half: KVHalf, block: int, head: int, token: int, dim: int
) -> ByteAddress:
    """Buffer and byte offset of one element, with the sum that leads there.

    >>> from gk_core.kv_spec import KVDtype
    >>> l = KVLayout(num_layers=36, num_blocks=36175, num_kv_heads=1, block_size=128, head_size=64,
    ...              dtype=KVDtype.FP8_E4M3FN, k_byte_order=KByteOrder.PAIR_PACKED)
    >>> a = byte_address(l, layer=5, half=KVHalf.V, block=3, head=0, token=2, dim=7)
    >>> a.buffer_index, a.byte_offset
    (2, 296370311)

    Raises:
        LayoutError: a coordinate outside the layout, naming it and its limit.
    """
    for name, value, limit in (
        ("layer", layer, layout.num_layers),
        ("block", block, layout.num_blocks),
        ("head", head, layout.num_kv_heads),
    ):
        _require_below(name, value, limit)
    size = layout.dtype.itemsize
    within = offset_in_head(layout, half, token, dim)
    packed = half is KVHalf.K and layout.k_byte_order is KByteOrder.PAIR_PACKED
    inner: tuple[tuple[str, int, int], ...]
    if packed:
        inner = (
            ("token pair", token // 2, 2 * layout.head_size * size),
            ("dim", dim, 2 * size),
            ("token in pair", token % 2, size),
        )
    else:
        inner = (("token", token, layout.head_size * size), ("dim", dim, size))
    terms = (
        ("half", half.value, layout.half_bytes),
        ("block", block, layout.block_bytes),
        ("head", head, layout.head_bytes),
        *inner,
    )
    offset = half.value * layout.half_bytes + block * layout.block_bytes + head * layout.head_bytes + within * size
    return ByteAddress(buffer_index=buffer_of_layer(layer), byte_offset=offset, terms=terms)


def max_dma_offset(layout: KVLayout) -> int:
    """Bytes that a block-indexed DMA spans from a half's base: num_blocks * block_bytes.

    36175 * 8192 = 296345600 for the 120B target.
    """
    return layout.half_bytes


def require_dma_reach(layout: KVLayout, *, unit: OffsetUnit = OffsetUnit.BYTES) -> None:
    """Refuse a layout whose halves are too large for a uint32 offset.

    Raises:
        LayoutError: naming blocks, limit and remedy.
    """
    span = max_dma_offset(layout) * unit.value
    if span >= DMA_OFFSET_LIMIT:
        most = (DMA_OFFSET_LIMIT - 1) // (layout.block_bytes * unit.value)
        raise LayoutError(
            f"block DMA offset spans {span} {unit.name.lower()} per half, limit {DMA_OFFSET_LIMIT - 1}; "
            f"use at most {most} blocks (got {layout.num_blocks})"
        )


def stacked_cap_blocks(layout: KVLayout, *, unit: OffsetUnit = OffsetUnit.BYTES, k_and_v_together: bool = False) -> int:
    """Blocks at which a cache stacked over all buffers would reach 2^32: what base-0 buffers avoid.

    29127 for 18 buffers of 8192-byte blocks counted in bytes; 14563 when K and V share the range, or in two-byte units.
    """
    per_block = layout.num_buffers * layout.block_bytes * unit.value * (2 if k_and_v_together else 1)
    return DMA_OFFSET_LIMIT // per_block


def _require_below(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise LayoutError(f"{name} {value} is outside 0..{limit - 1}")
