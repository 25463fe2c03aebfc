"""FakePrefill: fills blocks with bytes stamped by token, position, layer, half and head, as `FakeKernel` would.

    >>> from gk_adapters.fakes.block_pool import FakeBlockPool
    >>> from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout
    >>> from gk_core.kv_spec import KVDtype
    >>> layout = KVLayout(num_layers=2, num_blocks=8, num_kv_heads=1, block_size=16, head_size=2,
    ...                   dtype=KVDtype.FP8_E4M3FN, k_byte_order=KByteOrder.TOKEN_MAJOR)
    >>> cache, pool = FakeKVCache(layout), FakeBlockPool(num_blocks=8, block_size=16, sliding_window=128)
    >>> tables = pool.grow(request_id="r", num_computed_tokens=0, num_new_tokens=2)
    >>> FakePrefill(cache).prefill(token_ids=(5, 6), start_position=0, tables=tables)
    >>> tables.full.block_ids, bytes(cache.block(0, KVHalf.V, tables.full.block_ids[0])[:4]).hex(" ")
    ((2,), '21 22 29 2a')

0x21 is 33 = 3*5 + 7*1 + 11*1: token 5 at position 0, layer 1, V.
"""

from __future__ import annotations

from collections.abc import Sequence

from gk_adapters.fakes.kernel import cell_view, stamp
from gk_adapters.fakes.memory import FakeKVCache
from gk_core.block_table import slot_mapping
from gk_core.errors import LayoutError
from gk_core.kv_layout import KVHalf
from gk_core.model_geometry import AttentionKind, buffer_of_layer, kind_of_layer
from gk_core.ports import GroupTables, PrefillModel

__all__ = ["FakePrefill"]


class FakePrefill(PrefillModel):
    """A prefill model that writes stamps.

    Args:
        cache: the prefill side's cache.
        refused_tokens: a chunk with one of these is refused, as a broken request would be.
        first_head: model's KV head that this rank's first one is.

    Attributes:
        chunks: (start position, tokens) of every call that was computed.
    """

    def __init__(
        self, cache: FakeKVCache, *, refused_tokens: frozenset[int] = frozenset(), first_head: int = 0
    ) -> None:
        self._cache = cache
        self._refused = refused_tokens
        self._first_head = first_head
        self.chunks: list[tuple[int, int]] = []

    def prefill(self, *, token_ids: Sequence[int], start_position: int, tables: GroupTables) -> None:
        """See `PrefillModel.prefill`.

        Raises:
            LayoutError: a token that this model refuses, or a position without a block; nothing was written.
        """
        for token in token_ids:
            if token in self._refused:
                raise LayoutError(f"token {token} is one that this model was told to refuse")
        layout = self._cache.layout
        positions = range(start_position, start_position + len(token_ids))
        slots = {
            AttentionKind.FULL: slot_mapping(tables.full, positions),
            AttentionKind.SLIDING: slot_mapping(tables.sliding, positions),
        }
        for layer in range(layout.num_layers):
            for half in KVHalf:
                data = self._cache.half(buffer_of_layer(layer), half)
                for token, position, slot in zip(token_ids, positions, slots[kind_of_layer(layer)], strict=True):
                    for head in range(layout.num_kv_heads):
                        cell_view(data, layout, half, slot=slot, head=head)[:] = stamp(
                            layout,
                            token=token,
                            position=position,
                            layer=layer,
                            half=half,
                            head=self._first_head + head,
                        )
        self.chunks.append((start_position, len(token_ids)))
