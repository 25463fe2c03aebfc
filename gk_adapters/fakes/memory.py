"""FakeMemory: bytes with an address, made up or real; FakeKVCache: one rank's group buffers over such memory.

A made-up address space makes a wrong address an error instead of a crash:

    >>> memory = FakeMemory.synthetic(base_address=0x1000, size_bytes=16)
    >>> memory.view(0x1004, 2)[:] = b"hi"
    >>> bytes(memory.view(0x1003, 4))
    b'\\x00hi\\x00'
    >>> memory.view(0x1010, 1)
    Traceback (most recent call last):
    ...
    gk_core.errors.LayoutError: bytes 0x1010..0x1011 are outside the memory's 0x1000..0x1010

`FakeMemory.at` stands on memory that a torch tensor or NumPy array owns, at its real address.
"""

from __future__ import annotations

import ctypes

from gk_core.errors import LayoutError
from gk_core.integrity import BlockBytes
from gk_core.kv_layout import KVHalf, KVLayout
from gk_core.region import KVRegion, regions_of_buffers

__all__ = ["FakeKVCache", "FakeMemory"]


class FakeMemory:
    """One stretch of bytes.

    Args:
        base_address: address of its first byte.
        data: writable bytes.
        owner: kept alive as long as this is.
    """

    def __init__(self, *, base_address: int, data: memoryview, owner: object = None) -> None:
        self.base_address = base_address
        self._data = data.cast("B")
        self._owner = owner

    @classmethod
    def synthetic(cls, *, base_address: int, size_bytes: int) -> FakeMemory:
        """Zeroed bytes at an address that means nothing outside the fakes."""
        return cls(base_address=base_address, data=memoryview(bytearray(size_bytes)))

    @classmethod
    def at(cls, *, address: int, size_bytes: int, owner: object) -> FakeMemory:
        """Memory that `owner` holds, at its real address: `tensor.data_ptr()`, `array.ctypes.data`."""
        data = (ctypes.c_ubyte * size_bytes).from_address(address)
        return cls(base_address=address, data=memoryview(data), owner=owner)

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return len(self._data)

    def view(self, address: int, length_bytes: int) -> memoryview:
        """The bytes themselves, writable.

        Raises:
            LayoutError: any of them is outside.
        """
        start = address - self.base_address
        if start < 0 or length_bytes < 0 or start + length_bytes > len(self._data):
            raise LayoutError(
                f"bytes {address:#x}..{address + length_bytes:#x} are outside the memory's "
                f"{self.base_address:#x}..{self.base_address + len(self._data):#x}"
            )
        return self._data[start : start + length_bytes]


class FakeKVCache(BlockBytes):
    """Group buffers of one rank in made-up memory, with a gap after each so that running over an end is noticed.

    Args:
        layout: KV layout.
        base_address: of buffer 0.
        memories: one per buffer, to use instead of made-up memory; `real` gives some.

    Raises:
        LayoutError: memories that are not as many and as large as the layout's buffers.
    """

    _GAP_BYTES = 64

    def __init__(
        self, layout: KVLayout, *, base_address: int = 0x10_0000, memories: tuple[FakeMemory, ...] | None = None
    ) -> None:
        self.layout = layout
        step = layout.buffer_bytes + self._GAP_BYTES
        self.memories = memories or tuple(
            FakeMemory.synthetic(base_address=base_address + i * step, size_bytes=layout.buffer_bytes)
            for i in range(layout.num_buffers)
        )
        if [m.size_bytes for m in self.memories] != [layout.buffer_bytes] * layout.num_buffers:
            raise LayoutError(f"need {layout.num_buffers} memories of {layout.buffer_bytes} bytes")
        self.regions: tuple[KVRegion, ...] = regions_of_buffers(
            layout, [self.memories[layer // 2].base_address for layer in range(layout.num_layers)]
        )
        self._halves = {
            (i, half): memory.view(memory.base_address + half.value * layout.half_bytes, layout.half_bytes)
            for i, memory in enumerate(self.memories)
            for half in KVHalf
        }

    @classmethod
    def real(cls, layout: KVLayout) -> FakeKVCache:
        """Buffers at real addresses, for transports that move bytes outside Python."""
        owners = [(ctypes.c_ubyte * layout.buffer_bytes)() for _ in range(layout.num_buffers)]
        return cls(
            layout,
            memories=tuple(
                FakeMemory.at(address=ctypes.addressof(o), size_bytes=layout.buffer_bytes, owner=o) for o in owners
            ),
        )

    def half(self, buffer_index: int, half: KVHalf) -> memoryview:
        """All blocks of one half of one buffer."""
        return self._halves[buffer_index, half]

    def block_bytes(self, *, region: int, block: int) -> memoryview:
        """See `BlockBytes.block_bytes`."""
        if not 0 <= region < len(self.regions):
            raise LayoutError(f"region {region} is outside 0..{len(self.regions) - 1}")
        return self.block(region // 2, KVHalf(region % 2), block)

    def block(self, buffer_index: int, half: KVHalf, block: int) -> memoryview:
        """One block's bytes.

        Raises:
            LayoutError: no such block.
        """
        if not 0 <= block < self.layout.num_blocks:
            raise LayoutError(f"block {block} is outside 0..{self.layout.num_blocks - 1}")
        size = self.layout.block_bytes
        return self._halves[buffer_index, half][block * size : (block + 1) * size]
