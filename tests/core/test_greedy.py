"""Argmax over vocabulary shards."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.errors import LayoutError
from gk_core.greedy import ShardMaximum, local_maximum, reduce_argmax, vocab_shard

SHARDS = [vocab_shard(10, 4, i) for i in range(4)]
PAD = math.inf
"""The worst padding there can be."""


def reduce(rows: list[list[float]], order: tuple[int, ...] = (0, 1, 2, 3)) -> int:
    maxima = [local_maximum(row, shard) for row, shard in zip(rows, SHARDS, strict=True)]
    return reduce_argmax([maxima[i] for i in order])


def test_ten_tokens_on_four_ranks_are_three_three_three_one() -> None:
    """Uniform rows, the last shard padded."""
    assert [range(3), range(3, 6), range(6, 9), range(9, 10)] == SHARDS


def test_the_target_vocabulary_divides_into_1571_rows() -> None:
    """201088 / 128 exactly."""
    assert {len(vocab_shard(201_088, 128, i)) for i in range(128)} == {1571}
    assert vocab_shard(201_088, 128, 127) == range(199_517, 201_088)


def test_shards_past_the_vocabulary_are_empty() -> None:
    """5 tokens on 4 ranks: 2, 2, 1 and none."""
    assert [len(vocab_shard(5, 4, i)) for i in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_tie_goes_to_the_lowest_token_id_in_any_gather_order(order: tuple[int, ...]) -> None:
    """5.0 at tokens 2, 4 and 9."""
    assert reduce([[0.0, 1.0, 5.0], [2.0, 5.0, 4.0], [0.0, 0.0, 0.0], [5.0, PAD, PAD]], order) == 2


def test_the_padded_shard_can_win_with_its_real_token() -> None:
    """Token 9 is rank 3's only one."""
    assert reduce([[0.0] * 3, [1.0] * 3, [2.0] * 3, [3.0, PAD, PAD]]) == 9


def test_padding_is_never_chosen() -> None:
    """Padding of +inf, real logits of -1000."""
    assert reduce([[-1000.0] * 3, [-1000.0] * 3, [-1000.0, -999.0, -1000.0], [-1000.0, PAD, PAD]]) == 7


def test_a_local_tie_goes_to_the_first() -> None:
    """Global ids, not local ones."""
    assert local_maximum([4.0, 4.0, 3.0], range(6, 9)) == ShardMaximum(value=4.0, token_id=6)


def test_a_row_of_minus_infinity_is_token_0() -> None:
    """Defined, and inside the vocabulary."""
    assert reduce([[-math.inf] * 3] * 3 + [[-math.inf, PAD, PAD]]) == 0


def test_an_empty_shard_never_wins_against_a_real_one() -> None:
    """Its maximum is -inf at an id past the vocabulary's end."""
    empty = local_maximum([PAD, PAD], vocab_shard(5, 4, 3))
    assert empty == ShardMaximum(value=-math.inf, token_id=5)
    assert reduce_argmax([empty, ShardMaximum(value=-math.inf, token_id=0)]) == 0


def test_nan_is_an_error_and_not_token_0() -> None:
    """The first NaN is named; NaN in padding does not matter."""
    with pytest.raises(LayoutError, match="logit of token 4 is NaN"):
        reduce([[0.0] * 3, [0.0, math.nan, 0.0], [0.0] * 3, [0.0, PAD, PAD]])
    with pytest.raises(LayoutError, match="shard maximum at token 7 is NaN"):
        reduce_argmax([ShardMaximum(value=1.0, token_id=2), ShardMaximum(value=math.nan, token_id=7)])
    assert reduce([[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0, math.nan, math.nan]]) == 3


def test_nothing_to_reduce_is_an_error() -> None:
    """No shards; a row shorter than its shard; a shard that does not exist."""
    with pytest.raises(LayoutError, match="cannot reduce over no shards"):
        reduce_argmax([])
    with pytest.raises(LayoutError, match="shard of 3 tokens got 2 logits"):
        local_maximum([1.0, 2.0], range(3, 6))
    for index in (4, -1):
        with pytest.raises(LayoutError, match=rf"shard {index} is outside 0\.\.3"):
            vocab_shard(10, 4, index)


@given(
    vocab=st.integers(1, 60),
    shards=st.integers(1, 9),
    data=st.data(),
)
@settings(deadline=None)
def test_reduction_equals_the_first_argmax_of_the_whole_row(vocab: int, shards: int, data: st.DataObject) -> None:
    """For any vocabulary, number of shards, ties and gather order."""
    row = data.draw(st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 2.5]), min_size=vocab, max_size=vocab))
    width = -(-vocab // shards)
    maxima = []
    for i in range(shards):
        shard = vocab_shard(vocab, shards, i)
        local = row[shard.start : shard.stop] + [PAD] * (width - len(shard))
        maxima.append(local_maximum(local, shard))
    assert reduce_argmax(data.draw(st.permutations(maxima))) == row.index(max(row))
