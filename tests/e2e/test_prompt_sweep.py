"""Every prompt length, every block size: the decode side has the producer's bytes in each block that the next step
reads, and the token that comes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from gk_adapters.fakes import FakeKVCache, stamp
from gk_adapters.fakes.kernel import cell_view
from gk_core.block_table import BlockTable
from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow, build_attention_control
from gk_core.disaggregation import needed_blocks
from gk_core.kv_layout import KByteOrder, KVHalf
from gk_core.model_geometry import AttentionKind, buffer_of_layer, kind_of_layer
from tests.builders import World, make_fake_layout, make_request, make_small_geometry, make_tokens

WINDOW = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)


def edges(block_size: int) -> set[int]:
    """Lengths at which a block or the window begins or ends, one to either side."""
    centres = {*range(0, 701, block_size), *(WINDOW + k * block_size for k in range(8)), 1, 700}
    return {n + d for n in centres for d in (-1, 0, 1) if 1 <= n + d <= 700}


class Watcher:
    """Builds control as ever, and before a request's first step compares the bytes that are here."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cache: FakeKVCache | None = None
        self.prompt: tuple[int, ...] = ()
        self.compared = 0

    def __call__(self, rows: Sequence[DecodeRow | None], shape: ControlShape) -> AttentionControl:
        """See `build_attention_control`."""
        (row,) = [r for r in rows if r is not None]
        assert self.cache is not None
        tables = {AttentionKind.FULL: row.full_table, AttentionKind.SLIDING: row.sliding_table}
        self.compared += require_bytes(self.cache, tables, self.prompt, self.block_size)
        return build_attention_control(rows, shape)


def check_lengths(block_size: int, lengths: Iterable[int], k_byte_order: KByteOrder) -> int:
    """One world for all lengths, so that blocks are used again and again; bytes are compared before the first step."""
    world = World(geometry=make_small_geometry(sliding_window=WINDOW))
    layout = make_fake_layout(block_size=block_size, num_blocks=2 * 700 // block_size + 12, k_byte_order=k_byte_order)
    watcher = Watcher(block_size)
    producer = world.producer(layout=layout)
    consumer = world.consumer(layout=layout, max_model_len=1024, build_control=watcher)
    watcher.cache = consumer.cache
    for n in lengths:
        watcher.prompt = prompt = make_tokens(n)
        hand_off = producer.engine.submit(request_id=f"p{n}", token_ids=prompt)
        consumer.engine.submit(make_request(hand_off, prompt, request_id=f"r{n}", max_new_tokens=1))
        world.run([producer], [consumer])
        assert consumer.emitted(f"r{n}") == world.expected(prompt, 1, layout), (block_size, n)
    producer.engine.poll()
    assert producer.pool.num_free_blocks() == producer.total
    assert consumer.pool.num_free_blocks() == consumer.total
    return watcher.compared


def require_bytes(
    cache: FakeKVCache, tables: dict[AttentionKind, BlockTable], prompt: tuple[int, ...], block_size: int
) -> int:
    """Compare every token of every needed block with what the producer must have written there."""
    n, layout, compared = len(prompt), cache.layout, 0
    needed = needed_blocks(n, WINDOW, block_size)
    for layer in range(layout.num_layers):
        kind = kind_of_layer(layer)
        blocks = needed.sliding if kind is AttentionKind.SLIDING else needed.full
        table = tables[kind]
        for position in range(blocks.start * block_size, min(blocks.stop * block_size, n - 1)):
            slot = table.block_ids[position // block_size] * block_size + position % block_size
            for half in KVHalf:
                found = cell_view(cache.half(buffer_of_layer(layer), half), layout, half, slot=slot, head=0)
                wanted = stamp(layout, token=prompt[position], position=position, layer=layer, half=half, head=0)
                assert bytes(found) == wanted, (n, layer, half, position)
                compared += 1
    return compared


@pytest.mark.parametrize("k_byte_order", list(KByteOrder))
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_lengths_at_every_edge_arrive_byte_for_byte(block_size: int, k_byte_order: KByteOrder) -> None:
    """Around multiples of the block size and the window, token-major and packed."""
    assert check_lengths(block_size, sorted(edges(block_size))[:: 3 if block_size == 16 else 1], k_byte_order) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_length_arrives_byte_for_byte(block_size: int) -> None:
    """1..700."""
    assert check_lengths(block_size, range(1, 701), KByteOrder.TOKEN_MAJOR) > 300_000
