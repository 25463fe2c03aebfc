"""Hand-off: what a producer says of one request's KV, and what a client brings of it to the consumer.

It travels through a client as `kv_transfer_params`, so the consumer treats every key as hostile: type, range and count
are checked here, before any of it is compared with a table or becomes an address. Names are vLLM's where vLLM has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from gk_core.errors import RequestError
from gk_core.model_geometry import AttentionKind
from gk_core.peer_layout import PeerLayout
from gk_core.transfer_plan import GroupBlocks
from gk_core.untrusted import shown

__all__ = [
    "MAX_BLOCKS_PER_GROUP",
    "MAX_CHECKSUMS_PER_GROUP",
    "MAX_GROUPS",
    "MAX_ID_LENGTH",
    "MAX_TOKENS",
    "HandOff",
    "parse_kv_transfer_params",
    "require_offer",
    "to_kv_transfer_params",
]

MAX_GROUPS = 8
"""KV cache groups of one request; GPT-OSS has 2."""

MAX_BLOCKS_PER_GROUP = 65_536
"""Block ids of one group; a million tokens in blocks of 16."""

MAX_CHECKSUMS_PER_GROUP = 1_000_000
"""Checksums of one group: blocks * regions * heads."""

MAX_TOKENS = 2**24
"""Tokens of one request."""

MAX_ID_LENGTH = 256
"""Characters of an engine or request id, and of a host name."""

_MAX_RANKS = 4096
_MAX_BLOCK_SIZE = 65_536
_MAX_GENERATION = 2**63 - 1


@frozen(kw_only=True)
class HandOff:
    """One request's KV on offer.

    Attributes:
        engine_id: producer that holds it; a restarted producer has another id.
        request_id: the producer's own id of the request.
        generation: of the lease; blocks that were freed and taken again have another.
        num_tokens: tokens from the front whose KV is in the blocks.
        groups: blocks per KV cache group, by logical position.
        host, port: the producer's side channel.
        block_size: tokens of one block id on one rank.
        tp_size, dcp_size: of the producer.
        checksums: per group, in the order of `integrity.group_checksums`; empty when the producer sends none.
    """

    engine_id: str
    request_id: str
    generation: int
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    host: str
    port: int
    block_size: int
    tp_size: int
    dcp_size: int
    checksums: tuple[tuple[int, ...], ...] = ()


def to_kv_transfer_params(hand_off: HandOff) -> dict[str, object]:
    """The hand-off as plain values that survive JSON; `parse_kv_transfer_params` reads it back."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": hand_off.engine_id,
        "remote_request_id": hand_off.request_id,
        "remote_generation": hand_off.generation,
        "remote_num_tokens": hand_off.num_tokens,
        "remote_block_ids": [list(g.block_ids) for g in hand_off.groups],
        "remote_first_blocks": [g.first_logical for g in hand_off.groups],
        "remote_group_kinds": [g.kind.value for g in hand_off.groups],
        "remote_host": hand_off.host,
        "remote_port": hand_off.port,
        "remote_block_size": hand_off.block_size,
        "tp_size": hand_off.tp_size,
        "remote_dcp_size": hand_off.dcp_size,
        "remote_checksums": [list(sums) for sums in hand_off.checksums],
    }


def parse_kv_transfer_params(params: object) -> HandOff:
    """Read a client's transfer parameters. Keys that are not ours are ignored.

    Raises:
        RequestError: naming the key, what it must be and what it was.
    """
    if not isinstance(params, Mapping):
        raise RequestError(f"kv_transfer_params must be a mapping, got {type(params).__name__}")
    if params.get("do_remote_prefill") is not True:
        raise RequestError(f"do_remote_prefill must be true for a pull, got {shown(params.get('do_remote_prefill'))}")
    return HandOff(
        engine_id=_text(params, "remote_engine_id"),
        request_id=_text(params, "remote_request_id"),
        generation=_integer(params, "remote_generation", 0, _MAX_GENERATION),
        num_tokens=_integer(params, "remote_num_tokens", 0, MAX_TOKENS),
        groups=_groups(params),
        host=_text(params, "remote_host"),
        port=_integer(params, "remote_port", 1, 65_535),
        block_size=_integer(params, "remote_block_size", 1, _MAX_BLOCK_SIZE),
        tp_size=_integer(params, "tp_size", 1, _MAX_RANKS),
        dcp_size=_integer(params, "remote_dcp_size", 1, _MAX_RANKS),
        checksums=_checksums(params),
    )


def require_offer(hand_off: HandOff, producer: PeerLayout) -> None:
    """Refuse a hand-off that contradicts what its producer said in the handshake.

    Raises:
        RequestError: naming the key, the producer's value and the client's.
    """
    for key, wanted, got in (
        ("remote_engine_id", producer.engine_id, hand_off.engine_id),
        ("remote_block_size", producer.block_size, hand_off.block_size),
        ("tp_size", producer.tp_size, hand_off.tp_size),
        ("remote_dcp_size", producer.dcp_size, hand_off.dcp_size),
        ("remote_group_kinds", _names(producer.group_kinds), _names(g.kind for g in hand_off.groups)),
    ):
        if wanted != got:
            raise RequestError(f"{key} must be the producer's {shown(wanted)}, got {shown(got)}")


def _names(kinds: Iterable[AttentionKind]) -> str:
    return ", ".join(k.value for k in kinds)


def _groups(params: Mapping[object, object]) -> tuple[GroupBlocks, ...]:
    kinds = _items(params, "remote_group_kinds", MAX_GROUPS)
    firsts = _items(params, "remote_first_blocks", MAX_GROUPS)
    lists = _items(params, "remote_block_ids", MAX_GROUPS)
    if not len(kinds) == len(firsts) == len(lists) > 0:
        raise RequestError(
            "remote_block_ids, remote_first_blocks and remote_group_kinds must have one entry per group, "
            f"got {len(lists)}, {len(firsts)} and {len(kinds)}"
        )
    return tuple(_group(*parts) for parts in zip(kinds, firsts, lists, strict=True))


def _group(kind: object, first: object, ids: object) -> GroupBlocks:
    known = next((k for k in AttentionKind if k.value == kind), None)
    if known is None:
        raise RequestError(f"remote_group_kinds must be of {_names(AttentionKind)}, got {shown(kind)}")
    if type(first) is not int or not 0 <= first <= MAX_TOKENS:
        raise RequestError(f"remote_first_blocks must be ints 0..{MAX_TOKENS}, got {shown(first)}")
    if not isinstance(ids, (list, tuple)) or len(ids) > MAX_BLOCKS_PER_GROUP:
        what = f"{len(ids)} entries" if isinstance(ids, (list, tuple)) else shown(ids)
        raise RequestError(f"remote_block_ids must be lists of at most {MAX_BLOCKS_PER_GROUP} ids, got {what}")
    try:
        return GroupBlocks(kind=known, first_logical=first, block_ids=tuple(ids))
    except RequestError as error:
        raise RequestError(f"remote_block_ids: {error}") from None


def _checksums(params: Mapping[object, object]) -> tuple[tuple[int, ...], ...]:
    """CRC-32 sums; a producer that sends none, or an older one, leaves the key out or empty."""
    if params.get("remote_checksums") is None:
        return ()
    lists = _items(params, "remote_checksums", MAX_GROUPS)
    for sums in lists:
        if not isinstance(sums, (list, tuple)) or len(sums) > MAX_CHECKSUMS_PER_GROUP:
            raise RequestError(
                f"remote_checksums must be lists of at most {MAX_CHECKSUMS_PER_GROUP} sums, got {shown(sums)}"
            )
        bad = [s for s in sums if type(s) is not int or not 0 <= s < 2**32]
        if bad:
            raise RequestError(f"remote_checksums must be ints 0..{2**32 - 1}, got {shown(bad[0])}")
    return tuple(tuple(sums) for sums in lists if isinstance(sums, (list, tuple)))


def _items(params: Mapping[object, object], key: str, most: int) -> list[object] | tuple[object, ...]:
    value = _present(params, key)
    if not isinstance(value, (list, tuple)) or len(value) > most:
        what = f"{len(value)} entries" if isinstance(value, (list, tuple)) else shown(value)
        raise RequestError(f"{key} must be a list of at most {most} entries, got {what}")
    return value


def _integer(params: Mapping[object, object], key: str, least: int, most: int) -> int:
    value = _present(params, key)
    # type() and not isinstance: True is an int to Python, and not to us.
    if type(value) is not int or not least <= value <= most:
        raise RequestError(f"{key} must be an int {least}..{most}, got {shown(value)}")
    return value


def _text(params: Mapping[object, object], key: str) -> str:
    value = _present(params, key)
    if type(value) is not str or not 0 < len(value) <= MAX_ID_LENGTH:
        raise RequestError(f"{key} must be a string of 1..{MAX_ID_LENGTH} characters, got {shown(value)}")
    if not value.isprintable() or " " in value:
        raise RequestError(f"{key} must hold no blanks or control characters, got {shown(value)}")
    return value


def _present(params: Mapping[object, object], key: str) -> object:
    if params.get(key) is None:
        raise RequestError(f"{key} is missing from kv_transfer_params; the producer's answer must be passed on whole")
    return params[key]
