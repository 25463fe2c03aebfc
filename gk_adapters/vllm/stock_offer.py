"""What a stock producer writes into a client's transfer parameters and into notices, checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from gk_core.block_table import NULL_BLOCK_ID
from gk_core.disaggregation import needed_range
from gk_core.errors import RequestError
from gk_core.untrusted import shown

__all__ = ["BlockIds", "StockOffer", "is_notice", "pair_blocks", "parse_stock_offer"]

_MOST_BLOCKS = 65_536

BlockIds = tuple[tuple[int, ...], ...]


@frozen(kw_only=True)
class StockOffer:
    """A producer's offer, checked.

    Attributes:
        num_tokens: tokens from the front whose KV is there.
        groups: block ids per group.
        firsts: logical block of each group's first id.
    """

    num_tokens: int
    groups: BlockIds
    firsts: tuple[int, ...]


def parse_stock_offer(params: Mapping[str, Any], block_sizes: Sequence[int]) -> StockOffer:
    """Read a client's transfer parameters as a stock producer writes them, or one of ours over a stock cache.

    A stock producer does not say where its lists begin; it lists the last blocks of what it computed. One that lists
    more than it computed has begun another block, and where its lists begin is not known.

    Raises:
        RequestError: naming the key, what it must be and what it was.
    """
    for key in ("remote_engine_id", "remote_request_id", "remote_host"):
        if type(params.get(key)) is not str or not params[key]:
            raise RequestError(f"{key} must be a string, got {shown(params.get(key))}")
    for key, most in (("remote_port", 65_535), ("tp_size", 4096), ("remote_num_tokens", 2**24)):
        value = params.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise RequestError(f"{key} must be an int 1..{most}, got {shown(value)}")
    expiry = params.get("remote_blocks_expiry_time")
    if expiry is not None and (type(expiry) not in (int, float) or not math.isfinite(expiry)):
        raise RequestError(f"remote_blocks_expiry_time must be a number, got {shown(expiry)}")
    lists, firsts = params.get("remote_block_ids"), params.get("remote_first_blocks")
    if not isinstance(lists, list | tuple) or len(lists) != len(block_sizes):
        raise RequestError(f"remote_block_ids must be one list per group, {len(block_sizes)}, got {shown(lists)}")
    groups = tuple(_ids(ids) for ids in lists)
    num_tokens: int = params["remote_num_tokens"]
    if firsts is None:
        counts = [-(-num_tokens // size) for size in block_sizes]
        if any(len(ids) > count for count, ids in zip(counts, groups, strict=True)):
            raise RequestError(
                f"remote_block_ids lists {[len(ids) for ids in groups]} blocks, {num_tokens} tokens have {counts}"
            )
        firsts = [count - len(ids) for count, ids in zip(counts, groups, strict=True)]
    if not isinstance(firsts, list | tuple) or len(firsts) != len(groups):
        raise RequestError(f"remote_first_blocks must be one number per group, got {shown(firsts)}")
    if any(type(first) is not int or not 0 <= first <= _MOST_BLOCKS for first in firsts):
        raise RequestError(f"remote_first_blocks must be ints 0..{_MOST_BLOCKS}")
    return StockOffer(num_tokens=num_tokens, groups=groups, firsts=tuple(firsts))


def _ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple) or len(ids) > _MOST_BLOCKS:
        raise RequestError(f"remote_block_ids must be lists of at most {_MOST_BLOCKS} ids, got {shown(ids)}")
    for block in ids:
        if type(block) is not int or not 0 <= block < 2**31:
            raise RequestError(f"a block id must be an int 0..{2**31 - 1}, got {shown(block)}")
    return tuple(ids)


def pair_blocks(
    offer: StockOffer,
    local: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_cached_tokens: int,
    block_sizes: Sequence[int],
    windows: Sequence[int | None],
) -> tuple[BlockIds, BlockIds]:
    """(our ids, the producer's ids) per group, pair by pair, of every block that the next query reads and lacks.

    Raises:
        RequestError: a block that one side does not have; nothing may be read then.
    """
    if num_tokens > offer.num_tokens:
        raise RequestError(f"{num_tokens} tokens are wanted, {offer.num_tokens} are on offer")
    ours, theirs = [], []
    for group, table in enumerate(local):
        size = block_sizes[group]
        needed = needed_range(num_tokens, windows[group], size)
        start = max(needed.start, num_cached_tokens // size)
        stop = max(needed.stop, start)
        at = start - offer.firsts[group]
        remote = offer.groups[group][at : at + stop - start] if at >= 0 else ()
        mine = tuple(table[start:stop])
        if not len(mine) == len(remote) == stop - start or NULL_BLOCK_ID in mine or NULL_BLOCK_ID in remote:
            raise RequestError(
                f"logical blocks {start}..{stop - 1} of group {group} are needed and the producer does not offer all "
                "of them"
            )
        ours.append(mine)
        theirs.append(tuple(remote))
    return tuple(ours), tuple(theirs)


def is_notice(notice: bytes, world_size: int) -> bool:
    """Whether vLLM's own code can read a notice, on an engine of `world_size` ranks.

    >>> [is_notice(n, 2) for n in (b"HB:a,b", b"r:1", b"r:4", b"r:3", b"r:", b"r", bytes([255]), b"r:0")]
    [True, True, True, False, False, False, False, False]
    """
    try:
        text = notice.decode()
    except UnicodeDecodeError:
        return False
    if text.startswith("HB:"):
        return True
    request_id, _, readers = text.rpartition(":")
    if not (request_id and readers.isascii() and readers.isdecimal() and len(readers) <= 4 and int(readers) > 0):
        return False
    return int(readers) % world_size == 0 or world_size % int(readers) == 0
