"""What every block pool has to do, whatever ids it hands out. Subclass and give `make_pool`."""

from __future__ import annotations

import random

import pytest

from gk_core.block_table import NULL_BLOCK_ID, first_window_block
from gk_core.errors import CapacityError, LayoutError
from gk_core.ports import BlockPool, GroupTables


def held(tables: GroupTables) -> list[int]:
    return [b for t in (tables.sliding, tables.full) for b in t.block_ids if b != NULL_BLOCK_ID]


def nulls(tables: GroupTables) -> int:
    """Leading evicted entries; there are none elsewhere."""
    ids = tables.sliding.block_ids
    count = sum(b == NULL_BLOCK_ID for b in ids)
    assert all(b == NULL_BLOCK_ID for b in ids[:count])
    return count


class BlockPoolContract:
    """Blocks of 4 tokens, a window of 6, unless a test says otherwise."""

    def make_pool(self, *, num_blocks: int, block_size: int = 4, sliding_window: int = 6) -> BlockPool:
        raise NotImplementedError

    def test_all_blocks_but_the_null_block_are_free_at_first(self) -> None:
        """Block 0 is never handed out."""
        assert self.make_pool(num_blocks=9).num_free_blocks() == 8

    def test_both_groups_get_blocks_for_every_token(self) -> None:
        """9 tokens are 3 blocks in each group, all different."""
        pool = self.make_pool(num_blocks=9)
        tables = pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=9)
        assert len(tables.full.block_ids) == len(tables.sliding.block_ids) == 3
        assert tables.full.block_size == tables.sliding.block_size == 4
        assert len(set(held(tables))) == 6
        assert set(held(tables)) <= set(range(1, 9))
        assert pool.num_free_blocks() == 2
        assert pool.tables(request_id="a") == tables

    def test_tokens_that_fit_take_no_new_block(self) -> None:
        """Tokens 5..7 live in the second block; the ninth token needs a third."""
        pool = self.make_pool(num_blocks=9)
        first = pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=5)
        for computed in (5, 6, 7):
            assert pool.grow(request_id="a", num_computed_tokens=computed, num_new_tokens=1) == first
        grown = pool.grow(request_id="a", num_computed_tokens=8, num_new_tokens=1)
        assert grown.full.block_ids[:2] == first.full.block_ids
        assert len(grown.full.block_ids) == 3

    @pytest.mark.parametrize(("computed", "evicted"), [(5, 0), (8, 0), (9, 1), (12, 1), (13, 2)])
    def test_blocks_behind_the_window_are_given_back(self, computed: int, evicted: int) -> None:
        """A query at 9 reads 4..9 and no longer block 0; a query at 8 reads 3..8."""
        pool = self.make_pool(num_blocks=20)
        before = pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=16)
        after = pool.grow(request_id="a", num_computed_tokens=computed, num_new_tokens=1)
        assert nulls(after) == evicted
        assert after.sliding.block_ids[evicted:] == before.sliding.block_ids[evicted:]
        assert after.full == before.full
        assert pool.num_free_blocks() == 19 - 8 + evicted

    def test_eviction_makes_room_for_the_growth_that_follows(self) -> None:
        """With nothing else free, the block that the window left serves the next token."""
        pool = self.make_pool(num_blocks=8, sliding_window=4)
        pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=12)
        assert pool.num_free_blocks() == 1
        tables = pool.grow(request_id="a", num_computed_tokens=12, num_new_tokens=1)
        assert nulls(tables) == 2
        assert len(tables.full.block_ids) == 4
        assert pool.num_free_blocks() == 1

    @pytest.mark.parametrize(("arrived", "null", "blocks"), [(5, 0, 2), (8, 0, 2), (9, 1, 3), (13, 2, 4), (16, 2, 4)])
    def test_tokens_that_arrive_get_blocks_unless_the_window_has_left_them(
        self, arrived: int, null: int, blocks: int
    ) -> None:
        """Null entries from the start, never allocated and never given back."""
        pool = self.make_pool(num_blocks=20)
        tables = pool.grow(request_id="a", num_computed_tokens=arrived, num_new_tokens=0)
        assert nulls(tables) == null
        assert len(tables.sliding.block_ids) == len(tables.full.block_ids) == blocks
        assert pool.num_free_blocks() == 19 - 2 * blocks + null

    def test_an_arrival_needs_room_only_for_blocks_that_it_gets(self) -> None:
        """13 tokens: four full blocks and the two sliding ones inside the window; six free blocks do, five do not."""
        full = self.make_pool(num_blocks=7)
        full.grow(request_id="a", num_computed_tokens=13, num_new_tokens=0)
        assert full.num_free_blocks() == 0
        short = self.make_pool(num_blocks=6)
        with pytest.raises(CapacityError, match="13 tokens, 5 of 5 are free"):
            short.grow(request_id="a", num_computed_tokens=13, num_new_tokens=0)

    def test_the_token_after_an_arrival_goes_into_its_last_block(self) -> None:
        """13 arrived, the 14th is new: no new block; the 17th takes one in each group."""
        pool = self.make_pool(num_blocks=20)
        first = pool.grow(request_id="a", num_computed_tokens=13, num_new_tokens=0)
        assert pool.grow(request_id="a", num_computed_tokens=13, num_new_tokens=1) == first
        grown = pool.grow(request_id="a", num_computed_tokens=16, num_new_tokens=1)
        assert len(grown.full.block_ids) == 5
        assert nulls(grown) == 2

    def test_growth_that_does_not_fit_takes_nothing(self) -> None:
        """The request keeps what it had, the others too, and the same call succeeds once there is room."""
        pool = self.make_pool(num_blocks=9)
        a = pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=5)
        b = pool.grow(request_id="b", num_computed_tokens=0, num_new_tokens=4)
        assert pool.num_free_blocks() == 2
        with pytest.raises(CapacityError, match=r"request 'a' .* 13 tokens, 2 of 8 are free"):
            pool.grow(request_id="a", num_computed_tokens=5, num_new_tokens=8)
        assert (pool.tables(request_id="a"), pool.tables(request_id="b")) == (a, b)
        assert pool.num_free_blocks() == 2
        pool.free(request_id="b")
        grown = pool.grow(request_id="a", num_computed_tokens=5, num_new_tokens=8)
        assert grown.full.block_ids[:2] == a.full.block_ids
        assert pool.num_free_blocks() == 0

    def test_an_admission_that_does_not_fit_leaves_no_trace(self) -> None:
        """The request holds nothing afterwards."""
        pool = self.make_pool(num_blocks=5)
        with pytest.raises(CapacityError):
            pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=9)
        assert pool.num_free_blocks() == 4
        with pytest.raises(LayoutError, match="request 'a' holds no blocks"):
            pool.tables(request_id="a")

    def test_a_failed_growth_still_gives_back_what_the_window_left(self) -> None:
        """Nobody reads those blocks again, and a retry needs the room."""
        pool = self.make_pool(num_blocks=9)
        pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=16)
        with pytest.raises(CapacityError):
            pool.grow(request_id="a", num_computed_tokens=13, num_new_tokens=20)
        assert nulls(pool.tables(request_id="a")) == 2
        assert pool.num_free_blocks() == 2

    def test_freeing_gives_everything_back_and_twice_is_harmless(self) -> None:
        """So is freeing a request that never was."""
        pool = self.make_pool(num_blocks=20)
        pool.grow(request_id="a", num_computed_tokens=13, num_new_tokens=4)
        for _ in range(2):
            pool.free(request_id="a")
            assert pool.num_free_blocks() == 19
        pool.free(request_id="nobody")
        with pytest.raises(LayoutError, match="request 'a' holds no blocks"):
            pool.tables(request_id="a")
        assert nulls(pool.grow(request_id="a", num_computed_tokens=0, num_new_tokens=1)) == 0

    @pytest.mark.parametrize(("computed", "new"), [(-1, 2), (3, -1), (0, 0)])
    def test_counts_below_zero_and_empty_requests_are_refused(self, computed: int, new: int) -> None:
        """Nothing is taken."""
        pool = self.make_pool(num_blocks=9)
        with pytest.raises(LayoutError, match=f"got {computed} computed and {new} new"):
            pool.grow(request_id="a", num_computed_tokens=computed, num_new_tokens=new)
        assert pool.num_free_blocks() == 8

    def test_computed_tokens_do_not_go_back(self) -> None:
        """The window may have moved on; the same count again is fine."""
        pool = self.make_pool(num_blocks=9)
        pool.grow(request_id="a", num_computed_tokens=5, num_new_tokens=1)
        pool.grow(request_id="a", num_computed_tokens=5, num_new_tokens=1)
        with pytest.raises(LayoutError, match="has 5 computed tokens and cannot go back to 4"):
            pool.grow(request_id="a", num_computed_tokens=4, num_new_tokens=1)

    @pytest.mark.parametrize(("block_size", "window"), [(4, 6), (3, 8), (5, 5), (2, 1), (7, 30)])
    def test_a_thousand_random_steps_lose_no_block(self, block_size: int, window: int) -> None:
        """Admit, arrive, advance, abort: used + free = total, each id once, and no window block is ever missing."""
        choose = random.Random(block_size * 100 + window)
        pool = self.make_pool(num_blocks=61, block_size=block_size, sliding_window=window)
        computed: dict[str, int] = {}
        refused = 0
        for step in range(1000):
            name = f"r{choose.randrange(9)}"
            if name in computed and choose.random() < 0.15:
                pool.free(request_id=name)
                del computed[name]
            else:
                at = computed.get(name, choose.choice([0, choose.randrange(60)]))
                new = choose.choice([1, 1, 1, choose.randrange(1, 20)])
                try:
                    tables = pool.grow(request_id=name, num_computed_tokens=at, num_new_tokens=new)
                except CapacityError:
                    refused += 1
                    if name in computed:
                        pool.free(request_id=name)
                        del computed[name]
                else:
                    computed[name] = at + new
                    assert nulls(tables) == first_window_block(at, window, block_size)
                    assert all(len(t.block_ids) * block_size >= at + new for t in (tables.full, tables.sliding))
            ids = [b for r in computed for b in held(pool.tables(request_id=r))]
            assert len(set(ids)) == len(ids), step
            assert len(ids) + pool.num_free_blocks() == 60
        assert refused > 10
        for name in computed:
            pool.free(request_id=name)
        assert pool.num_free_blocks() == 60
