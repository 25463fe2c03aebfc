"""Ranks: who owns which heads, rows and experts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.decode_mesh import DecodeMesh, even_split, shard_range
from gk_core.errors import LayoutError, UnsupportedError

TARGET = DecodeMesh(tp_size=8, dp_size=16, ep_size=128)


def test_the_target_mesh_has_128_ranks() -> None:
    """TP8 x DP16, one expert group over all of them."""
    assert TARGET.world_size == 128
    assert TARGET.tp_groups[0] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert TARGET.tp_groups[1] == (8, 9, 10, 11, 12, 13, 14, 15)
    assert TARGET.tp_groups[15] == (120, 121, 122, 123, 124, 125, 126, 127)
    assert len(TARGET.tp_groups) == 16
    assert TARGET.ep_groups == (tuple(range(128)),)


def test_groups_are_tuples_of_tuples() -> None:
    """Collectives take them as they are; lists would not hash."""
    assert hash(TARGET.tp_groups) != hash(TARGET.ep_groups)


@pytest.mark.parametrize(
    ("rank", "tp", "dp", "expert", "kv", "q"),
    [(0, 0, 0, 0, 0, 0), (7, 7, 0, 7, 7, 56), (8, 0, 1, 8, 0, 0), (77, 5, 9, 77, 5, 40), (127, 7, 15, 127, 7, 56)],
)
def test_rank_r_is_replica_r_div_8_and_tp_rank_r_mod_8(
    rank: int, tp: int, dp: int, expert: int, kv: int, q: int
) -> None:
    """And expert r, one KV head, eight query heads."""
    assert (TARGET.tp_rank(rank), TARGET.dp_rank(rank)) == (tp, dp)
    assert TARGET.experts(rank, 128) == range(expert, expert + 1)
    assert TARGET.kv_heads(rank, 8) == range(kv, kv + 1)
    assert TARGET.q_heads(rank, 64) == range(q, q + 8)


@pytest.mark.parametrize("rank", [128, -1])
def test_ranks_outside_the_mesh_are_refused(rank: int) -> None:
    """127 is the last."""
    for ask in (
        TARGET.tp_rank, TARGET.dp_rank, lambda r: TARGET.experts(r, 128), lambda r: TARGET.q_heads(r, 64),
        lambda r: TARGET.kv_heads(r, 8), lambda r: TARGET.rows(r, 8),
    ):  # fmt: skip
        with pytest.raises(LayoutError, match=rf"rank {rank} is outside 0\.\.127"):
            ask(rank)


def test_uneven_experts_go_to_the_first_ranks() -> None:
    """128 over 3: 43, 43, 42."""
    mesh = DecodeMesh(tp_size=1, dp_size=3, ep_size=3)
    assert [len(mesh.experts(r, 128)) for r in range(3)] == [43, 43, 42]
    assert mesh.experts(2, 128) == range(86, 128)
    assert even_split(7, 5) == (2, 2, 1, 1, 1)
    assert shard_range(128, 128, 77) == range(77, 78)


def test_kv_heads_beyond_one_per_rank_are_replicas() -> None:
    """TP16 over 8 heads: ranks 2k and 2k+1 hold head k; TP2: four heads each."""
    wide = DecodeMesh(tp_size=16, ep_size=16)
    assert [wide.kv_heads(r, 8).start for r in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    narrow = DecodeMesh(tp_size=2, ep_size=2)
    assert (narrow.kv_heads(0, 8), narrow.kv_heads(1, 8)) == (range(4), range(4, 8))


def test_each_rank_keeps_its_rows_of_its_replica() -> None:
    """16 rows a replica over TP8: two rows a rank, counted over all replicas."""
    mesh = DecodeMesh(tp_size=8, dp_size=2, ep_size=16)
    assert mesh.rows(0, 16) == range(2)
    assert mesh.rows(9, 16) == range(18, 20)
    assert mesh.rows(15, 16) == range(30, 32)


def test_rows_that_do_not_divide_are_refused() -> None:
    """The remedy is a padded batch."""
    with pytest.raises(LayoutError, match="multiple of tp_size 8, got 12; pad the batch"):
        TARGET.rows(0, 12)


def test_query_heads_that_do_not_divide_are_refused() -> None:
    """64 over 3."""
    with pytest.raises(LayoutError, match="64 query heads do not divide over tp_size 3"):
        DecodeMesh(tp_size=3, ep_size=3).q_heads(0, 64)


def test_fewer_experts_than_ranks_are_refused() -> None:
    """127 experts leave one of 128 ranks with nothing to do."""
    with pytest.raises(UnsupportedError, match="127 experts over ep_size 128"):
        TARGET.experts(0, 127)


def test_experts_are_dealt_over_all_ranks_or_not_at_all() -> None:
    """EP that is not TP * DP is refused with the number that would do."""
    with pytest.raises(UnsupportedError, match="ep_size must be tp_size \\* dp_size = 16, got 8"):
        DecodeMesh(tp_size=8, dp_size=2, ep_size=8)


@pytest.mark.parametrize("name", ["tp_size", "dp_size", "ep_size"])
def test_sizes_below_one_are_refused(name: str) -> None:
    """Each by name."""
    with pytest.raises(LayoutError, match=f"{name} must be >= 1, got 0"):
        DecodeMesh(**({"tp_size": 1, "dp_size": 1, "ep_size": 1} | {name: 0}))


def test_shares_that_do_not_exist_are_refused() -> None:
    """Splitting into nothing, and the share past the last."""
    with pytest.raises(LayoutError, match="cannot split into 0 parts"):
        even_split(5, 0)
    for index in (3, -1):
        with pytest.raises(LayoutError, match=rf"share {index} is outside 0\.\.2"):
            shard_range(5, 3, index)


@given(tp=st.sampled_from([1, 2, 4, 8, 16, 32]), dp=st.integers(1, 5), rows_per_rank=st.integers(1, 3))
@settings(deadline=None)
def test_ranks_partition_rows_experts_and_heads(tp: int, dp: int, rows_per_rank: int) -> None:
    """Every row and expert has one owner; every head of a replica has one, or equally many replicas."""
    mesh = DecodeMesh(tp_size=tp, dp_size=dp, ep_size=tp * dp)
    ranks = range(mesh.world_size)
    rows = rows_per_rank * tp
    assert [r for rank in ranks for r in mesh.rows(rank, rows)] == list(range(rows * dp))
    assert [e for rank in ranks for e in mesh.experts(rank, 160)] == list(range(160))
    assert sorted(r for g in mesh.tp_groups for r in g) == list(ranks)
    for group in mesh.tp_groups:
        assert [h for r in group for h in mesh.q_heads(r, 64)] == list(range(64))
        owners = [h for r in group for h in mesh.kv_heads(r, 8)]
        assert all(owners.count(h) == max(1, tp // 8) for h in range(8))
        assert len(owners) == max(8, tp)
        for r in group:
            # A query head's KV head is on the same rank.
            assert {q // 8 for q in mesh.q_heads(r, 64)} == set(mesh.kv_heads(r, 8))


@given(total=st.integers(0, 500), parts=st.integers(1, 40))
def test_even_split_differs_by_at_most_one(total: int, parts: int) -> None:
    """Larger shares first, and nothing is lost."""
    sizes = even_split(total, parts)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
