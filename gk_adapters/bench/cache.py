"""A cache of the real shape to measure with: 18 group buffers, 36 regions, over memory that nobody touches."""

from __future__ import annotations

import ctypes
import mmap

from attrs import frozen

from gk_core.disaggregation import Role
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.model_geometry import GPT_OSS_120B
from gk_core.peer_layout import PeerLayout, describe_rank
from gk_core.region import KVRegion, regions_of_buffers

__all__ = ["BenchCache", "make_cache"]

_TP_SIZE = 8
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""0x4000: MAP_NORESERVE of Linux, which promises no memory for pages that nobody writes."""


@frozen(kw_only=True)
class BenchCache:
    """One engine's cache.

    Attributes:
        layout: 18 buffers.
        regions: 36.
        memory: what they lie in; keep it as long as anybody may read.
        peer_layout: what a handshake says of it.
    """

    layout: KVLayout
    regions: tuple[KVRegion, ...]
    memory: mmap.mmap
    peer_layout: PeerLayout

    @property
    def address(self) -> int:
        """Of the memory's first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def make_cache(*, engine_id: str, role: Role, num_blocks: int, block_size: int) -> BenchCache:
    """One rank of GPT-OSS-120B at TP8, FP8: blocks of 64 * block_size bytes; a page exists once it is written."""
    specs = honest_specs(GPT_OSS_120B, tp_size=_TP_SIZE, block_size=block_size, dtype=KVDtype.FP8_E4M3FN)
    layout = layout_for(specs, num_blocks=num_blocks, k_byte_order=KByteOrder.TOKEN_MAJOR)
    memory = mmap.mmap(-1, layout.num_buffers * 2 * layout.half_bytes, flags=_FLAGS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    bases = [base + layer // 2 * 2 * layout.half_bytes for layer in range(layout.num_layers)]
    peer_layout = describe_rank(GPT_OSS_120B, layout, engine_id=engine_id, role=role, tp_size=_TP_SIZE, tp_rank=0)
    return BenchCache(layout=layout, regions=regions_of_buffers(layout, bases), memory=memory, peer_layout=peer_layout)
