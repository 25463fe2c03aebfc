"""FakeKernel: a decoder whose next token can be worked out by hand from the bytes that the block tables name.

In place of attention, every byte of the cache that a layer may see is added up, and the sum is the next token.

    a token t at position p writes, in layer l, half h (K 0, V 1), head k, the bytes
        stamp[c] = (3 t + 5 p + 7 l + 11 h + 13 k + c) mod 256        c = 0, 1, ... over the bytes of one head
    next token = sum of (p + 1) * (bytes found there) over layers, halves, heads and visible positions p, mod vocab_size

Visible are positions 0..p in odd layers, and the last W of them in even ones. The sum runs over bytes that are *found*,
so one block that is missing, stale, foreign or in the wrong place gives another token.

By hand: 2 layers, 1 head of 2 bytes, W = 2, tokens 5 and 6 at positions 0 and 1:

    position 0: 3*5 = 15          layer 0  K 15+16 = 31   V 26+27 = 53    layer 1  K 22+23 = 45   V 33+34 = 67   = 196
    position 1: 3*6 + 5*1 = 23    layer 0  K 23+24 = 47   V 34+35 = 69    layer 1  K 30+31 = 61   V 41+42 = 83   = 260
    1 * 196 + 2 * 260 = 716 = 2 * 251 + 214

    >>> from gk_core.kv_layout import KByteOrder, KVLayout
    >>> from gk_core.kv_spec import KVDtype
    >>> layout = KVLayout(num_layers=2, num_blocks=4, num_kv_heads=1, block_size=16, head_size=2,
    ...                   dtype=KVDtype.FP8_E4M3FN, k_byte_order=KByteOrder.TOKEN_MAJOR)
    >>> next_token((5, 6), layout, sliding_window=2)
    214
    >>> greedy_tokens((5, 6), layout, sliding_window=2, count=3)
    (214, 204, 191)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from gk_adapters.fakes.memory import FakeKVCache
from gk_core.block_table import PAD_SLOT_ID
from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import AttentionControl, ControlShape
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import (
    ControlTensors,
    DecodeCall,
    KernelContract,
    KVScales,
    PerBufferKV,
    check_decode_call,
)
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout
from gk_core.model_geometry import AttentionKind, buffer_of_layer, kind_of_layer
from gk_core.ports import CallBuilder, DecodeKernel, Sampler

__all__ = [
    "VOCAB_SIZE",
    "FakeCallBuilder",
    "FakeKernel",
    "FakeSampler",
    "FakeTensor",
    "cell_view",
    "greedy_tokens",
    "next_token",
    "stamp",
]

VOCAB_SIZE = 251
"""Tokens 0..250; prime, so that few wrong sums pass for right ones."""

_RAMP = bytes(c % 256 for c in range(256 + 1024))


@frozen(eq=False)
class FakeTensor:
    """What a fake kernel takes in place of an array.

    Attributes:
        shape, dtype: as the contract checks them.
        data: numbers, flat; or the bytes of a cache half.
    """

    shape: tuple[int, ...]
    dtype: str
    data: Sequence[float] | memoryview

    def ints(self) -> list[int]:
        """The numbers as integers."""
        return [int(x) for x in self.data]

    def row(self, index: int) -> list[int]:
        """One row of a matrix, as integers."""
        width = self.shape[1]
        return [int(x) for x in self.data[index * width : (index + 1) * width]]


def stamp(layout: KVLayout, *, token: int, position: int, layer: int, half: KVHalf, head: int) -> bytes:
    """What one token writes into one head of one half of one layer."""
    first = (3 * token + 5 * position + 7 * layer + 11 * half.value + 13 * head) % 256
    return _RAMP[first : first + layout.head_size * layout.dtype.itemsize]


def next_token(tokens: Sequence[int], layout: KVLayout, *, sliding_window: int, vocab_size: int = VOCAB_SIZE) -> int:
    """The formula of the module's docstring, from tokens alone: no tables, no blocks, no bytes of any cache."""
    total, last = 0, len(tokens) - 1
    for layer in range(layout.num_layers):
        oldest = max(last - sliding_window + 1, 0) if kind_of_layer(layer) is AttentionKind.SLIDING else 0
        for position in range(oldest, last + 1):
            for half in KVHalf:
                for head in range(layout.num_kv_heads):
                    cell = stamp(layout, token=tokens[position], position=position, layer=layer, half=half, head=head)
                    total += (position + 1) * sum(cell)
    return total % vocab_size


def greedy_tokens(
    prompt: Sequence[int], layout: KVLayout, *, sliding_window: int, count: int, vocab_size: int = VOCAB_SIZE
) -> tuple[int, ...]:
    """What a right engine generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, layout, sliding_window=sliding_window, vocab_size=vocab_size))
    return tuple(tokens[len(prompt) :])


def cell_view(half_bytes: memoryview, layout: KVLayout, half: KVHalf, *, slot: int, head: int) -> memoryview:
    """The bytes of one token's head in one half of a buffer, in the layout's byte order; writable."""
    block, offset = divmod(slot, layout.block_size)
    start = block * layout.block_bytes + head * layout.head_bytes
    row = layout.head_size * layout.dtype.itemsize
    if half is KVHalf.K and layout.k_byte_order is KByteOrder.PAIR_PACKED:
        pair = start + (offset // 2) * 2 * row
        return half_bytes[pair + offset % 2 : pair + 2 * row : 2]
    return half_bytes[start + offset * row : start + (offset + 1) * row]


class FakeCallBuilder(CallBuilder[FakeTensor]):
    """Builds calls over a `FakeKVCache`; the hidden state of a row is its token id.

    Args:
        cache: the decode side's cache.
        shape: rows, block size, window, longest context.
    """

    def __init__(self, cache: FakeKVCache, shape: ControlShape) -> None:
        layout = cache.layout
        self._shape = shape
        packed = layout.k_byte_order is KByteOrder.PAIR_PACKED
        k_shape = layout.packed_k_shape if packed else layout.buffer_shape[1:]
        dtype = layout.dtype.dtype_name
        buffers = range(layout.num_buffers)
        self._kv = PerBufferKV(
            k=tuple(FakeTensor(k_shape, dtype, cache.half(i, KVHalf.K)) for i in buffers),
            v=tuple(FakeTensor(layout.buffer_shape[1:], dtype, cache.half(i, KVHalf.V)) for i in buffers),
        )
        rotary = (layout.head_size // 2, shape.num_rows, 1)
        self._rotary = FakeTensor(rotary, "float32", (0.0,) * (rotary[0] * rotary[1]))

    def build(self, *, token_ids: tuple[int, ...], control: AttentionControl) -> DecodeCall[FakeTensor]:
        """See `CallBuilder.build`."""
        rows = self._shape.num_rows

        def column(values: Sequence[float], dtype: str) -> FakeTensor:
            return FakeTensor((rows, 1), dtype, tuple(values))

        def table(values: Sequence[Sequence[int]], width: int) -> FakeTensor:
            return FakeTensor((rows, width), "int32", tuple(b for line in values for b in line))

        return DecodeCall(
            hidden=column(token_ids, "float32"),
            weights={},
            per_buffer_kv=self._kv,
            stacked_kv=None,
            control=ControlTensors(
                block_table=table(control.block_table, self._shape.full_width),
                block_table_swa=table(control.block_table_swa, self._shape.sliding_width),
                positions=column(control.positions, "float32"),
                positions_swa=column(control.positions_swa, "float32"),
                swa_start=column(control.swa_start, "float32"),
                update_index=column(control.update_index, "int64"),
                update_index_swa=column(control.update_index_swa, "int64"),
                active=column(control.active, "uint8"),
                cos=self._rotary,
                sin=self._rotary,
            ),
            scales=KVScales(),
            rank=0,
        )


class FakeKernel(DecodeKernel[FakeTensor]):
    """The decoder of the module's docstring.

    Args:
        layout: KV layout.
        shape: rows, block size, window, longest context.
        vocab_size: modulus.
        nan_tokens: a row that is fed one of these gives NaN, as a broken request would.
        refused_tokens: a call with one of these in an active row is refused before anything is written.

    Attributes:
        num_steps: calls that ran.
    """

    def __init__(
        self,
        layout: KVLayout,
        shape: ControlShape,
        *,
        vocab_size: int = VOCAB_SIZE,
        nan_tokens: frozenset[int] = frozenset(),
        refused_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._layout, self._shape, self._vocab_size = layout, shape, vocab_size
        self._nan, self._refused = nan_tokens, refused_tokens
        self._contract = KernelContract(
            layout=layout,
            shape=shape,
            mesh=DecodeMesh(tp_size=1, dp_size=1, ep_size=1),
            hidden_size=1,
            model_dtypes=("float32",),
            weights=(),
        )
        self.num_steps = 0

    def step(self, *, call: DecodeCall[FakeTensor]) -> FakeTensor:
        """See `DecodeKernel.step`."""
        check_decode_call(call, self._contract)
        tokens, active = call.hidden.ints(), call.control.active.ints()
        rows = [r for r in range(self._shape.num_rows) if active[r]]
        for r in rows:
            if tokens[r] in self._refused:
                raise LayoutError(f"row {r} holds token {tokens[r]}, which this kernel was told to refuse")
        for r in rows:
            self._write(call, r, tokens[r])
        self.num_steps += 1
        out = [0.0] * self._shape.num_rows
        for r in rows:
            out[r] = math.nan if tokens[r] in self._nan else float(self._sum(call, r) % self._vocab_size)
        return FakeTensor((self._shape.num_rows, 1), "float32", tuple(out))

    def _halves(self, call: DecodeCall[FakeTensor], layer: int) -> tuple[tuple[KVHalf, memoryview], ...]:
        kv, buffer = call.per_buffer_kv, buffer_of_layer(layer)
        if kv is None:
            raise UnsupportedError("this kernel reads per-buffer KV only, as FakeCallBuilder gives it")
        k, v = kv.k[buffer].data, kv.v[buffer].data
        if not (isinstance(k, memoryview) and isinstance(v, memoryview)):
            raise LayoutError("a fake KV tensor holds a memoryview of one half of a buffer")
        return (KVHalf.K, k), (KVHalf.V, v)

    def _write(self, call: DecodeCall[FakeTensor], row: int, token: int) -> None:
        c, layout = call.control, self._layout
        position = int(c.positions.data[row])
        for layer in range(layout.num_layers):
            sliding = kind_of_layer(layer) is AttentionKind.SLIDING
            slot = int((c.update_index_swa if sliding else c.update_index).data[row])
            if slot == PAD_SLOT_ID:
                continue
            for half, data in self._halves(call, layer):
                for head in range(layout.num_kv_heads):
                    cell_view(data, layout, half, slot=slot, head=head)[:] = stamp(
                        layout, token=token, position=position, layer=layer, half=half, head=head
                    )

    def _sum(self, call: DecodeCall[FakeTensor], row: int) -> int:
        c, layout, n = call.control, self._layout, self._layout.block_size
        position, total = int(c.positions.data[row]), 0
        for layer in range(layout.num_layers):
            if kind_of_layer(layer) is AttentionKind.SLIDING:
                table = c.block_table_swa.row(row)
                first, last = int(c.swa_start.data[row]), int(c.positions_swa.data[row])
            else:
                table, first, last = c.block_table.row(row), 0, position
            # The frame's last key is the query's own position, whatever block the frame begins with.
            shift = position - last
            for half, data in self._halves(call, layer):
                for at in range(first, last + 1):
                    slot = table[at // n] * n + at % n
                    for head in range(layout.num_kv_heads):
                        total += (at + shift + 1) * sum(cell_view(data, layout, half, slot=slot, head=head))
        return total


class FakeSampler(Sampler[FakeTensor]):
    """Takes a row's hidden state for its token id."""

    def sample(self, *, hidden: FakeTensor, active: tuple[bool, ...]) -> tuple[int, ...]:
        """See `Sampler.sample`."""
        for row, is_active in enumerate(active):
            if is_active and math.isnan(hidden.data[row]):
                raise LayoutError(f"row {row}'s logits hold NaN; no token can be chosen")
        return tuple(0 if math.isnan(x) else int(x) for x in hidden.data)
