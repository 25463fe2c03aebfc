"""The fake model: its sum is what the docstring says, and one wrong byte shows."""

from __future__ import annotations

import math

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.fakes import (
    FakeBlockPool,
    FakeCallBuilder,
    FakeClock,
    FakeKernel,
    FakeKVCache,
    FakeMemory,
    FakePrefill,
    FakeSampler,
    FakeTensor,
    greedy_tokens,
    next_token,
    stamp,
)
from gk_adapters.fakes.kernel import cell_view
from gk_core.block_table import BlockId
from gk_core.decode_step import ControlShape, DecodeRow, build_attention_control
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, StackedKV
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout, byte_address
from gk_core.kv_spec import KVDtype
from gk_core.ports import GroupTables
from tests.builders import make_tokens

LAYOUT = KVLayout(
    num_layers=3, num_blocks=23, num_kv_heads=2, block_size=16, head_size=4, dtype=KVDtype.FP8_E4M3FN,
    k_byte_order=KByteOrder.TOKEN_MAJOR,
)  # fmt: skip
SHAPE = ControlShape(num_rows=3, block_size=16, sliding_window=16, max_model_len=128)


class Setup:
    """One request of 40 tokens, 39 of them prefilled; the step feeds the last one."""

    def __init__(self, k_byte_order: KByteOrder = KByteOrder.TOKEN_MAJOR) -> None:
        self.layout = evolve(LAYOUT, k_byte_order=k_byte_order)
        self.cache = FakeKVCache(self.layout)
        self.prompt = make_tokens(40)
        pool = FakeBlockPool(num_blocks=23, block_size=16, sliding_window=16)
        pool.grow(request_id="other", num_computed_tokens=0, num_new_tokens=16)
        tables = pool.grow(request_id="r", num_computed_tokens=0, num_new_tokens=39)
        FakePrefill(self.cache).prefill(token_ids=self.prompt[:39], start_position=0, tables=tables)
        self.tables = pool.grow(request_id="r", num_computed_tokens=39, num_new_tokens=1)
        self.kernel = FakeKernel(self.layout, SHAPE)
        self.builder = FakeCallBuilder(self.cache, SHAPE)
        self.right = next_token(self.prompt, self.layout, sliding_window=16)

    def call(self, tables: GroupTables | None = None) -> DecodeCall[FakeTensor]:
        """The request in row 1, rows 0 and 2 inactive."""
        t = tables or self.tables
        row = DecodeRow(position=39, full_table=t.full, sliding_table=t.sliding)
        control = build_attention_control([None, row, None], SHAPE)
        return self.builder.build(token_ids=(7, self.prompt[39], 7), control=control)

    def token(self, tables: GroupTables | None = None) -> int:
        """What a step gives for row 1."""
        hidden = self.kernel.step(call=self.call(tables))
        return FakeSampler().sample(hidden=hidden, active=(False, True, False))[1]


class TestTheSum:
    """As worked out by hand."""

    def test_a_stamp_is_the_formula_of_the_docstring(self) -> None:
        """3*9 + 5*2 + 7*1 + 11*1 + 13*1 = 68, one more per byte; and modulo 256."""
        assert stamp(LAYOUT, token=9, position=2, layer=1, half=KVHalf.V, head=1) == bytes((68, 69, 70, 71))
        assert stamp(LAYOUT, token=85, position=0, layer=0, half=KVHalf.K, head=0) == bytes((255, 0, 1, 2))

    def test_two_tokens_by_hand(self) -> None:
        """1 * 196 + 2 * 260 = 716 = 2 * 251 + 214, as in the docstring; the window of 1 hides the first in layer 0."""
        two = evolve(LAYOUT, num_layers=2, num_kv_heads=1, head_size=2)
        assert next_token((5, 6), two, sliding_window=2) == 214
        assert next_token((5, 6), two, sliding_window=1) == (716 - 84) % 251
        assert greedy_tokens((5, 6), two, sliding_window=2, count=2) == (214, 204)

    @pytest.mark.parametrize("order", list(KByteOrder))
    def test_a_step_finds_the_formulas_token_in_the_blocks(self, order: KByteOrder) -> None:
        """And writes its own token's bytes first."""
        setup = Setup(order)
        assert setup.token() == setup.right

    @pytest.mark.parametrize("order", list(KByteOrder))
    def test_a_cell_is_where_the_layout_says(self, order: KByteOrder) -> None:
        """Each byte of a head's cell has the address of `byte_address`."""
        layout = evolve(LAYOUT, k_byte_order=order)
        cache = FakeKVCache(layout)
        for half in KVHalf:
            cell_view(cache.half(1, half), layout, half, slot=5 * 16 + 3, head=1)[:] = b"wxyz"
            for dim, wanted in enumerate(b"wxyz"):
                at = byte_address(layout, layer=2, half=half, block=5, head=1, token=3, dim=dim).byte_offset
                memory = cache.memories[1]
                assert memory.view(memory.base_address + at, 1)[0] == wanted


class TestOneWrongBlock:
    """It gives another token."""

    @pytest.mark.parametrize("group", ["full", "sliding"])
    @pytest.mark.parametrize("entry", [0, 1, 2])
    def test_any_block_in_the_place_of_a_visible_one(self, group: str, entry: int) -> None:
        """Blocks 1 and 2 are another request's, 9 is empty; the sliding block 0 is out of sight."""
        setup = Setup()
        table = getattr(setup.tables, group)
        for other in (1, 2, 9):
            ids = list(table.block_ids)
            ids[entry] = BlockId(other)
            changed = evolve(setup.tables, **{group: evolve(table, block_ids=tuple(ids))})
            visible = group == "full" or entry >= 1
            assert (Setup().token(changed) != setup.right) is visible, other

    def test_two_blocks_in_each_others_place(self) -> None:
        """Positions count."""
        setup = Setup()
        a, b, c = setup.tables.full.block_ids
        changed = evolve(setup.tables, full=evolve(setup.tables.full, block_ids=(b, a, c)))
        assert setup.token(changed) != setup.right

    @settings(max_examples=100, deadline=None)
    @given(st.integers(0, 38), st.sampled_from(list(KVHalf)), st.integers(0, 1), st.integers(0, 3))
    def test_one_changed_byte_in_a_full_layer(self, position: int, half: KVHalf, head: int, dim: int) -> None:
        """Any visible one; 251 is prime and the position's weight below it."""
        setup = Setup()
        slot = setup.tables.full.block_ids[position // 16] * 16 + position % 16
        cell = cell_view(setup.cache.half(0, half), setup.layout, half, slot=slot, head=head)
        cell[dim] = (cell[dim] + 1) % 256
        assert setup.token() != setup.right


class TestContract:
    """It holds to the kernel contract."""

    def test_inactive_rows_change_no_block_and_neither_does_the_null_block_matter(self) -> None:
        """Every byte but the 12 cells of the new token stays; block 0 is full of 0xFF."""
        setup = Setup()
        for buffer in range(2):
            for half in KVHalf:
                setup.cache.block(buffer, half, 0)[:] = b"\xff" * LAYOUT.block_bytes
        before = [bytes(m.view(m.base_address, m.size_bytes)) for m in setup.cache.memories]
        assert setup.token() == setup.right
        changed = sum(
            a != b
            for old, m in zip(before, setup.cache.memories, strict=True)
            for a, b in zip(old, m.view(m.base_address, m.size_bytes), strict=True)
        )
        assert 0 < changed <= 3 * 2 * 2 * 4

    def test_a_call_that_breaks_the_contract_is_refused_and_nothing_is_written(self) -> None:
        """Both KV forms, a wrong shape, a stacked cache."""
        setup = Setup()
        call = setup.call()
        before = bytes(setup.cache.half(0, KVHalf.K))
        kv = call.per_buffer_kv
        assert kv is not None
        stacked = StackedKV(
            k=FakeTensor((2, *LAYOUT.buffer_shape[1:]), "float8_e4m3fn", b""),
            v=FakeTensor((2, *LAYOUT.buffer_shape[1:]), "float8_e4m3fn", b""),
        )
        with pytest.raises(LayoutError, match="exactly one KV form"):
            setup.kernel.step(call=evolve(call, stacked_kv=stacked))
        bad = FakeTensor((2, 1), "float32", (0.0, 0.0))
        with pytest.raises(LayoutError, match="positions must have shape"):
            setup.kernel.step(call=evolve(call, control=evolve(call.control, positions=bad)))
        with pytest.raises(UnsupportedError, match="per-buffer KV only"):
            setup.kernel.step(call=evolve(call, per_buffer_kv=None, stacked_kv=stacked))
        no_view = evolve(kv, k=tuple(evolve(t, data=(0.0,)) for t in kv.k))
        with pytest.raises(LayoutError, match="holds a memoryview"):
            setup.kernel.step(call=evolve(call, per_buffer_kv=no_view))
        assert bytes(setup.cache.half(0, KVHalf.K)) == before

    def test_a_refused_token_stops_the_call_before_anything_is_written(self) -> None:
        """In an active row; in an inactive one it is nothing."""
        setup = Setup()
        before = bytes(setup.cache.half(0, KVHalf.V))
        with pytest.raises(LayoutError, match=f"row 1 holds token {setup.prompt[39]}"):
            FakeKernel(LAYOUT, SHAPE, refused_tokens=frozenset({setup.prompt[39]})).step(call=setup.call())
        assert bytes(setup.cache.half(0, KVHalf.V)) == before
        FakeKernel(LAYOUT, SHAPE, refused_tokens=frozenset({7})).step(call=setup.call())

    def test_nan_is_refused_by_the_sampler_in_an_active_row_only(self) -> None:
        """Naming the row."""
        hidden = FakeTensor((3, 1), "float32", (math.nan, 5.0, math.nan))
        assert FakeSampler().sample(hidden=hidden, active=(False, True, False)) == (0, 5, 0)
        with pytest.raises(LayoutError, match="row 2's logits hold NaN"):
            FakeSampler().sample(hidden=hidden, active=(False, True, True))


class TestPrefill:
    """The fake prefill."""

    def test_a_refused_token_leaves_no_byte(self) -> None:
        """Even those before it."""
        cache = FakeKVCache(LAYOUT)
        tables = FakeBlockPool(num_blocks=23, block_size=16, sliding_window=16).grow(
            request_id="r", num_computed_tokens=0, num_new_tokens=3
        )
        with pytest.raises(LayoutError, match="token 9"):
            FakePrefill(cache, refused_tokens=frozenset({9})).prefill(
                token_ids=(1, 9, 2), start_position=0, tables=tables
            )
        assert not any(cache.half(0, KVHalf.K))

    def test_a_rank_stamps_the_models_heads_and_not_its_own_numbers(self) -> None:
        """First head 2: its head 1 is the model's head 3."""
        cache = FakeKVCache(LAYOUT)
        tables = FakeBlockPool(num_blocks=23, block_size=16, sliding_window=16).grow(
            request_id="r", num_computed_tokens=0, num_new_tokens=1
        )
        FakePrefill(cache, first_head=2).prefill(token_ids=(5,), start_position=0, tables=tables)
        slot = tables.sliding.block_ids[0] * 16
        cell = cell_view(cache.half(0, KVHalf.K), LAYOUT, KVHalf.K, slot=slot, head=1)
        assert list(cell) == [54, 55, 56, 57]


class TestCacheAndClock:
    """The rest."""

    @pytest.mark.parametrize(("region", "block"), [(4, 0), (-1, 0), (0, 23), (0, -1)])
    def test_a_region_or_block_that_is_not_there_is_refused(self, region: int, block: int) -> None:
        """3 layers are 2 buffers are 4 regions; 23 blocks."""
        cache = FakeKVCache(LAYOUT)
        with pytest.raises(LayoutError):
            cache.block_bytes(region=region, block=block)

    def test_regions_and_block_bytes_name_the_same_bytes(self) -> None:
        """Region 3 is buffer 1's V."""
        cache = FakeKVCache.real(LAYOUT)
        cache.block_bytes(region=3, block=22)[:2] = b"hi"
        region = cache.regions[3]
        at = region.base_address + 22 * region.block_stride_bytes
        assert bytes(cache.memories[1].view(at, 2)) == b"hi"

    def test_memories_of_another_size_are_refused(self) -> None:
        """One too few."""
        memory = FakeMemory.synthetic(base_address=0, size_bytes=LAYOUT.buffer_bytes)
        with pytest.raises(LayoutError, match="need 2 memories"):
            FakeKVCache(LAYOUT, memories=(memory,))

    def test_a_clock_moves_on_and_never_back(self) -> None:
        """From where it was started."""
        clock = FakeClock(5.0)
        clock.advance(0.25)
        assert clock.now() == 5.25
        with pytest.raises(LayoutError, match="never goes back"):
            clock.advance(-0.1)
