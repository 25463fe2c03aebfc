"""Regions: registered memory as base, stride and block count, never as one object per block.

Dims: B blocks (num_blocks).

A group buffer gives two regions, its K half and its V half. 18 buffers of 36,175 blocks are 36 regions and 1,302,300
block addresses; the addresses exist only as arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from attrs import frozen

from gk_core.errors import LayoutError
from gk_core.kv_layout import KVHalf, KVLayout

__all__ = [
    "Descriptor",
    "KVRegion",
    "StridedRun",
    "block_descriptor",
    "descriptor_index",
    "regions_of_buffers",
    "strided_run",
]


@frozen(kw_only=True)
class Descriptor:
    """One contiguous piece of registered memory."""

    address: int
    length_bytes: int
    device_id: int = 0


@frozen(kw_only=True)
class KVRegion:
    """One half of one group buffer: num_blocks blocks at a fixed stride.

    Attributes:
        buffer_index: group buffer.
        half: K or V.
        base_address: bytes, address of block 0.
        num_blocks: blocks.
        block_bytes: bytes of one block that carry data.
        block_stride_bytes: bytes from one block's start to the next; >= block_bytes.
        device_id: memory device, 0 for host memory.

    Raises:
        LayoutError: blocks would overlap, or a number is out of range.
    """

    buffer_index: int
    half: KVHalf
    base_address: int
    num_blocks: int
    block_bytes: int
    block_stride_bytes: int
    device_id: int = 0

    def __attrs_post_init__(self) -> None:
        for name in ("num_blocks", "block_bytes"):
            if getattr(self, name) < 1:
                raise LayoutError(f"region {name} must be >= 1, got {getattr(self, name)}")
        for name in ("buffer_index", "base_address", "device_id"):
            if getattr(self, name) < 0:
                raise LayoutError(f"region {name} must be >= 0, got {getattr(self, name)}")
        if self.block_stride_bytes < self.block_bytes:
            raise LayoutError(
                f"blocks would overlap: stride {self.block_stride_bytes} bytes is below block length {self.block_bytes}"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes from block 0 to the end of the last block."""
        return (self.num_blocks - 1) * self.block_stride_bytes + self.block_bytes

    @property
    def end_address(self) -> int:
        """First byte past the region."""
        return self.base_address + self.size_bytes


@frozen(kw_only=True)
class StridedRun:
    """`count` descriptors of one length at a fixed stride: one row of NIXL's strided form.

    Attributes:
        address: bytes, of the first.
        length_bytes: of each.
        stride_bytes: from one start to the next.
        count: descriptors.
        device_id: memory device.
    """

    address: int
    length_bytes: int
    stride_bytes: int
    count: int
    device_id: int = 0


def block_descriptor(region: KVRegion, block: int, *, offset_bytes: int = 0, length_bytes: int = 0) -> Descriptor:
    """Address and length of (part of) one block; length 0 means the rest of the block.

    base + block * stride + offset

    >>> r = KVRegion(buffer_index=0, half=KVHalf.K, base_address=0x1000, num_blocks=4, block_bytes=8,
    ...              block_stride_bytes=16)
    >>> hex(block_descriptor(r, 3).address)
    '0x1030'

    Raises:
        LayoutError: the block, or the part of it, is outside the region.
    """
    if not 0 <= block < region.num_blocks:
        raise LayoutError(f"block {block} is outside the region's 0..{region.num_blocks - 1}")
    length = length_bytes or region.block_bytes - offset_bytes
    if offset_bytes < 0 or length < 1 or offset_bytes + length > region.block_bytes:
        raise LayoutError(
            f"bytes {offset_bytes}..{offset_bytes + length} are outside the block's {region.block_bytes} bytes"
        )
    return Descriptor(
        address=region.base_address + block * region.block_stride_bytes + offset_bytes,
        length_bytes=length,
        device_id=region.device_id,
    )


def strided_run(region: KVRegion, *, offset_bytes: int = 0, length_bytes: int = 0) -> StridedRun:
    """Every block of a region (or the same part of every block) as one row.

    Raises:
        LayoutError: the part is outside the block.
    """
    first = block_descriptor(region, 0, offset_bytes=offset_bytes, length_bytes=length_bytes)
    return StridedRun(
        address=first.address,
        length_bytes=first.length_bytes,
        stride_bytes=region.block_stride_bytes,
        count=region.num_blocks,
        device_id=region.device_id,
    )


def regions_of_buffers(layout: KVLayout, base_address_by_layer: Sequence[int]) -> tuple[KVRegion, ...]:
    """K and V regions of all group buffers, from the address at which each layer's buffer begins.

    Paired layers share a buffer, so their addresses agree and give one pair of regions. Order: K then V of buffer 0,
    K then V of buffer 1, ...; region index = 2 * buffer + half.

    Raises:
        LayoutError: the number of addresses is not the number of layers, paired layers disagree, or buffers overlap.
    """
    if len(base_address_by_layer) != layout.num_layers:
        raise LayoutError(f"need one base address per layer: got {len(base_address_by_layer)} for {layout.num_layers}")
    regions: list[KVRegion] = []
    for buffer_index in range(layout.num_buffers):
        bases = base_address_by_layer[2 * buffer_index : 2 * buffer_index + 2]
        if len(set(bases)) != 1:
            raise LayoutError(
                f"layers {2 * buffer_index} and {2 * buffer_index + 1} must share buffer {buffer_index}, "
                f"got base addresses {', '.join(hex(b) for b in bases)}"
            )
        regions += [
            KVRegion(
                buffer_index=buffer_index,
                half=half,
                base_address=bases[0] + half.value * layout.half_bytes,
                num_blocks=layout.num_blocks,
                block_bytes=layout.block_bytes,
                block_stride_bytes=layout.block_bytes,
            )
            for half in KVHalf
        ]
    ordered = sorted(regions, key=lambda r: r.base_address)
    for a, b in itertools.pairwise(ordered):
        if a.end_address > b.base_address:
            raise LayoutError(
                f"regions overlap: buffer {a.buffer_index} {a.half.name} ends at {hex(a.end_address)}, "
                f"buffer {b.buffer_index} {b.half.name} begins at {hex(b.base_address)}"
            )
    return tuple(regions)


def descriptor_index(*, region: int, block: int, num_blocks: int) -> int:
    """Place of one block in a region-major list of all blocks: region * num_blocks + block.

    num_blocks is that of the rank whose list it is; ranks of one engine may differ.

    >>> [descriptor_index(region=1, block=5, num_blocks=n) for n in (111_680, 111_488)]
    [111685, 111493]

    Raises:
        LayoutError: a block that the region does not have.
    """
    if region < 0 or not 0 <= block < num_blocks:
        raise LayoutError(f"block {block} of region {region} is outside 0..{num_blocks - 1}")
    return region * num_blocks + block
