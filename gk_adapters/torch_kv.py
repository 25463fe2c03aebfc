"""Group buffers in torch memory, and the one place that turns K and V into stored bytes and back.

Dims: B blocks, h KV heads, n tokens per block, d head size, r rows of a step, m blocks gathered per row.

FP8 is decoded two bytes at a time through a table of 65536 entries, which is several times faster than torch's own
cast on a CPU and keeps NaN as NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.torch_dtypes import array_of, kv_torch_dtype
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import PerBufferKV, StackedKV
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout

__all__ = ["BoundHalf", "KVCodec", "allocate_group_buffers", "per_buffer_kv", "stacked_kv"]

_ITEM_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def allocate_group_buffers(layout: KVLayout, *, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """One separate zeroed allocation [2, B, h, n, d] per group buffer."""
    dtype = kv_torch_dtype(layout.dtype)
    return tuple(torch.zeros(layout.buffer_shape, dtype=dtype, device=device) for _ in range(layout.num_buffers))


def per_buffer_kv(buffers: tuple[torch.Tensor, ...], layout: KVLayout) -> PerBufferKV[torch.Tensor]:
    """K and V views of the buffers; K is the packed view [B, h, n // 2, d, 2] where the layout packs."""
    return PerBufferKV(k=tuple(_k_view(b[0], layout) for b in buffers), v=tuple(b[1] for b in buffers))


def stacked_kv(layout: KVLayout) -> StackedKV[torch.Tensor]:
    """A zeroed stacked cache: K and V with a leading axis of buffers."""
    shape = (layout.num_buffers, *layout.buffer_shape[1:])
    k, v = (torch.zeros(shape, dtype=kv_torch_dtype(layout.dtype)) for _ in range(2))
    if layout.k_byte_order is KByteOrder.PAIR_PACKED:
        k = k.view(layout.num_buffers, *layout.packed_k_shape)
    return StackedKV(k=k, v=v)


def _k_view(half: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    return half.view(layout.packed_k_shape) if layout.k_byte_order is KByteOrder.PAIR_PACKED else half


@frozen(kw_only=True, eq=False)
class BoundHalf:
    """A K or V tensor as rows of integers of its item size.

    Attributes:
        head_blocks: [B * h, n * d].
        tokens: [B * h * n, d], or pairs [B * h * n / 2, d, 2] of packed K.
        packed: whether it is packed K.
    """

    head_blocks: torch.Tensor
    tokens: torch.Tensor
    packed: bool


class KVCodec:
    """Stores and reads K and V of one layout.

    stored = x / scale, clamped to the dtype's largest finite value, then rounded; read = stored. The scale comes back
    in the attention arithmetic, once per score and once per output, not once per element.

    Args:
        layout: of the cache.
        compute_dtype: what reads give.
    """

    def __init__(self, layout: KVLayout, compute_dtype: torch.dtype) -> None:
        if compute_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedError(f"attention computes in float32, bfloat16 or float16, got {compute_dtype}")
        self.layout = layout
        self.compute_dtype = compute_dtype
        self._storage_dtype = kv_torch_dtype(layout.dtype)
        self._item = _ITEM_VIEWS[layout.dtype.itemsize]
        self._packed = layout.k_byte_order is KByteOrder.PAIR_PACKED
        self._fp8 = _fp8_tables(compute_dtype) if layout.dtype.is_fp8 else None

    def encode(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """Stored elements of x, same shape. Past the largest finite value they saturate; NaN stays NaN."""
        if scale != 1.0:
            x = x.float() / scale
        if x.dtype == self._storage_dtype:
            return x
        limit = self.layout.dtype.max_finite
        return x.float().clamp(-limit, limit).to(self._storage_dtype)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Stored elements in the compute dtype, not yet times the scale."""
        if self._fp8 is None:
            return stored.to(self.compute_dtype)
        pairs = array_of(stored.contiguous().view(torch.uint8)).view(np.uint16)
        return _from_array(np.take(self._fp8.both, pairs), self.compute_dtype).view(stored.shape)

    def bind(self, buffer: torch.Tensor, half: KVHalf) -> BoundHalf:
        """Views of one K or V tensor for `write` and `gather`, made once.

        Raises:
            LayoutError: the tensor is not contiguous.
        """
        if not buffer.is_contiguous():
            raise LayoutError("K and V of a buffer must each be contiguous; pass the halves of a group buffer")
        layout = self.layout
        raw = buffer.view(self._item)
        packed = half is KVHalf.K and self._packed
        return BoundHalf(
            head_blocks=raw.view(layout.num_blocks * layout.num_kv_heads, -1),
            tokens=raw.view(-1, layout.head_size, 2) if packed else raw.view(-1, layout.head_size),
            packed=packed,
        )

    def write(self, bound: BoundHalf, places: torch.Tensor, stored: torch.Tensor) -> None:
        """Put tokens [r, h, d] at their places; every other byte stays as it is.

        In packed K the neighbour of a pair keeps its lane.

        Args:
            places: [r * h] indices (block * h + head) * n + offset, by row, then head.
        """
        value = stored.view(self._item).reshape(-1, self.layout.head_size)
        if bound.packed:
            bound.tokens[places // 2, :, places % 2] = value
        else:
            bound.tokens.index_copy_(0, places, value)

    def gather(self, bound: BoundHalf, head_blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """Whole blocks in token order and the compute dtype: [rows * h, num_blocks * n, d].

        Args:
            head_blocks: [rows * h * num_blocks] indices block * h + head, by row, then head, then logical block.
        """
        shape = (-1, num_blocks * self.layout.block_size, self.layout.head_size)
        taken = bound.head_blocks.index_select(0, head_blocks)
        if bound.packed:
            return self._decode_packed(taken).view(shape)
        return self.decode(taken.view(self._storage_dtype)).view(shape)

    def _decode_packed(self, taken: torch.Tensor) -> torch.Tensor:
        """A pair's low byte is its even token, the high byte its odd one."""
        pairs = array_of(taken).view(np.uint16).reshape(-1, self.layout.head_size)
        out = torch.empty(pairs.shape[0], 2, self.layout.head_size, dtype=self.compute_dtype)
        assert self._fp8 is not None  # KVLayout packs FP8 only
        for lane, table in enumerate((self._fp8.low, self._fp8.high)):
            out[:, lane] = _from_array(np.take(table, pairs), self.compute_dtype)
        return out


def _from_array(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)


@frozen(kw_only=True, eq=False)
class _FP8Tables:
    """By two stored bytes: both values, the low byte's, the high byte's; as integers of their width."""

    both: NDArray[Any]
    low: NDArray[Any]
    high: NDArray[Any]


def _fp8_tables(dtype: torch.dtype) -> _FP8Tables:
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    narrow, wide = {2: (np.int16, np.int32), 4: (np.int32, np.int64)}[values.itemsize]
    bits = values.view(_ITEM_VIEWS[values.itemsize]).numpy().astype(narrow)
    index = np.arange(65536)
    low, high = bits[index & 255], bits[index >> 8]
    pairs = np.ascontiguousarray(np.stack([low, high], axis=-1)).view(wide).reshape(-1)
    return _FP8Tables(both=pairs, low=low, high=high)
