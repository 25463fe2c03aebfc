"""Greedy sampling over vocabulary shards: the lowest token id among the largest logits wins.

Each rank reports its shard's largest real logit and where it stands; the reduction below gives every rank the same
token whatever order the reports arrive in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import frozen

from gk_core.errors import LayoutError

__all__ = ["ShardMaximum", "local_maximum", "reduce_argmax", "vocab_shard"]


def vocab_shard(vocab_size: int, num_shards: int, index: int) -> range:
    """Token ids of one shard: ceil(vocab / shards) rows each, the last ones cut by the vocabulary's end.

    Rows are uniform so that every rank's lm_head has one shape; rows past the vocabulary are padding.

    >>> [vocab_shard(10, 4, i) for i in range(4)]
    [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    >>> vocab_shard(201088, 128, 127)
    range(199517, 201088)
    """
    if not 0 <= index < num_shards:
        raise LayoutError(f"shard {index} is outside 0..{num_shards - 1}")
    rows = -(-vocab_size // num_shards)
    return range(min(index * rows, vocab_size), min((index + 1) * rows, vocab_size))


@frozen(kw_only=True)
class ShardMaximum:
    """One shard's best logit of one row.

    Attributes:
        value: the logit; -inf for a shard without real tokens.
        token_id: global id of the lowest token that has it.
    """

    value: float
    token_id: int


def local_maximum(logits: Sequence[float], shard: range) -> ShardMaximum:
    """Best real logit of one shard's row; entries past the shard's tokens are padding and never chosen.

    Raises:
        LayoutError: a real logit is NaN, or the row is shorter than the shard.
    """
    if len(logits) < len(shard):
        raise LayoutError(f"shard of {len(shard)} tokens got {len(logits)} logits")
    best, best_id = -math.inf, shard.start
    for token_id, logit in zip(shard, logits, strict=False):
        if math.isnan(logit):
            raise LayoutError(f"logit of token {token_id} is NaN; no token can be chosen")
        if logit > best:
            best, best_id = logit, token_id
    return ShardMaximum(value=best, token_id=best_id)


def reduce_argmax(maxima: Sequence[ShardMaximum]) -> int:
    """The token id that every rank must take.

    >>> reduce_argmax([ShardMaximum(value=5.0, token_id=9), ShardMaximum(value=5.0, token_id=2)])
    2

    Raises:
        LayoutError: no shards, or a NaN.
    """
    if not maxima:
        raise LayoutError("cannot reduce over no shards")
    for m in maxima:
        if math.isnan(m.value):
            raise LayoutError(f"shard maximum at token {m.token_id} is NaN; no token can be chosen")
    return min(maxima, key=lambda m: (-m.value, m.token_id)).token_id
