"""Transfer plan: which bytes of which remote blocks land in which local blocks.

Dims: T tokens that move, K kernel block size (tokens of one registered block).

Strategy. `map_peer` has answered, once per peer, which remote ranks hold our heads and tokens and which bytes of their
blocks; `plan_pull` answers, per request, which blocks. Blocks are paired by logical position, never by count from an
end: unit u of a request (a block, or a kernel block where the sides' block sizes differ) lies on dcp rank u % dcp_size,
in entry u // dcp_size of that side's block table. Anything that does not pair is refused before an address is formed.
Planning is pure: adapters execute a plan without knowing models, heads or ranks.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from functools import cached_property
from typing import overload

from attrs import field, frozen

from gk_core.block_table import NULL_BLOCK_ID
from gk_core.disaggregation import needed_range
from gk_core.errors import LayoutError, RequestError
from gk_core.model_geometry import AttentionKind
from gk_core.peer_map import HeadSlice, PeerMap
from gk_core.untrusted import shown

__all__ = [
    "BlockPairs",
    "BlockRun",
    "GroupBlocks",
    "HeadSlice",
    "RankRead",
    "TransferPlan",
    "plan_pull",
]


@frozen(kw_only=True)
class BlockRun:
    """`count` consecutive block ids on both sides.

    Attributes:
        local_start, remote_start: first block id here and there.
        count: blocks.
    """

    local_start: int
    remote_start: int
    count: int

    def __attrs_post_init__(self) -> None:
        if self.local_start < 0 or self.remote_start < 0 or self.count < 1:
            raise LayoutError(f"a block run needs ids >= 0 and count >= 1, got {self}")


@frozen(kw_only=True, slots=False, eq=False, repr=False)
class BlockPairs(Sequence[BlockRun]):
    """Paired block ids that are runs to whoever reads them as such: no object per block until one is asked for.

    Equal to the tuple of its runs, which ascend by local block id and are coalesced.

    >>> list(BlockPairs.of(local_ids=(9, 4, 5), remote_ids=(3, 7, 8)))
    [BlockRun(local_start=4, remote_start=7, count=2), BlockRun(local_start=9, remote_start=3, count=1)]

    Attributes:
        packed_local, packed_remote: block ids, pair by pair, in no particular order, as `GroupBlocks.packed` has them.
        local_bound, remote_bound: no id is greater.

    Raises:
        LayoutError: not as many ids there as here.
    """

    packed_local: bytes
    packed_remote: bytes
    local_bound: int = field(init=False)
    remote_bound: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        here, there = len(self.packed_local), len(self.packed_remote)
        if here != there or here % _ID_BYTES:
            raise LayoutError(
                f"{here / _ID_BYTES:g} blocks here cannot come from {there / _ID_BYTES:g} there; pair ids one by one"
            )
        object.__setattr__(self, "local_bound", max(self.local_ids, default=-1))
        object.__setattr__(self, "remote_bound", max(self.remote_ids, default=-1))

    @classmethod
    def of(cls, *, local_ids: Sequence[int], remote_ids: Sequence[int]) -> BlockPairs:
        """From ids, pair by pair.

        Raises:
            LayoutError: a number that is no block id, or not as many there as here.
        """
        try:
            return cls(packed_local=_pack(local_ids), packed_remote=_pack(remote_ids))
        except struct.error as error:
            raise LayoutError(f"block ids must be ints 0..{_MOST_IDS - 1}: {error}") from error

    @classmethod
    def _of_lists(cls, ours: list[_Part], theirs: list[_Part]) -> BlockPairs:
        """From lists of equally many ids, of which the greatest is known: no look at an id."""
        pairs = cls.__new__(cls)
        pairs.__dict__.update(
            packed_local=b"".join([blocks.packed_entries(at, end) for blocks, at, end in ours]),
            packed_remote=b"".join([blocks.packed_entries(at, end) for blocks, at, end in theirs]),
            local_bound=max([blocks.highest for blocks, _, _ in ours]),
            remote_bound=max([blocks.highest for blocks, _, _ in theirs]),
        )
        return pairs

    @cached_property
    def local_ids(self) -> tuple[int, ...]:
        """Block ids here."""
        return _unpack(self.packed_local)

    @cached_property
    def remote_ids(self) -> tuple[int, ...]:
        """Block ids there, pair by pair."""
        return _unpack(self.packed_remote)

    @cached_property
    def _runs(self) -> tuple[BlockRun, ...]:
        columns: list[list[int]] = []
        last_local = last_remote = -2
        for local, remote in sorted(zip(self.local_ids, self.remote_ids, strict=True)):
            if local == last_local + 1 and remote == last_remote + 1:
                columns[-1][2] += 1
            else:
                columns.append([local, remote, 1])
            last_local, last_remote = local, remote
        return tuple(BlockRun(local_start=a, remote_start=b, count=n) for a, b, n in columns)

    @overload
    def __getitem__(self, index: int) -> BlockRun: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BlockRun, ...]: ...
    def __getitem__(self, index: int | slice) -> BlockRun | tuple[BlockRun, ...]:
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __bool__(self) -> bool:
        return bool(self.packed_local)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (BlockPairs, tuple)) and self._runs == tuple(other)

    def __hash__(self) -> int:
        return hash(self._runs)

    def __repr__(self) -> str:
        return repr(self._runs)


@frozen(kw_only=True)
class RankRead:
    """What one local rank reads from one remote rank, in every region.

    Attributes:
        remote_rank: TP rank of the peer.
        head_slice: bytes of each block.
        runs: ascending by local block id, coalesced, never overlapping; empty means notify only.
    """

    remote_rank: int
    head_slice: HeadSlice
    runs: Sequence[BlockRun]

    @property
    def num_blocks(self) -> int:
        """Blocks read in each region."""
        runs = self.runs
        return len(runs.packed_local) // _ID_BYTES if isinstance(runs, BlockPairs) else sum(run.count for run in runs)

    @property
    def local_ids(self) -> tuple[int, ...]:
        """Block ids here, one per block, paired with `remote_ids`."""
        if isinstance(self.runs, BlockPairs):
            return self.runs.local_ids
        return tuple(itertools.chain(*(range(r.local_start, r.local_start + r.count) for r in self.runs)))

    @property
    def remote_ids(self) -> tuple[int, ...]:
        """Block ids there."""
        if isinstance(self.runs, BlockPairs):
            return self.runs.remote_ids
        return tuple(itertools.chain(*(range(r.remote_start, r.remote_start + r.count) for r in self.runs)))


@frozen(kw_only=True)
class TransferPlan:
    """All reads of one pull by one local rank.

    Attributes:
        reads: one or more per remote rank.
        num_regions: regions that each read touches, K and V.
    """

    reads: tuple[RankRead, ...]
    num_regions: int

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.num_regions * sum(r.num_blocks * r.head_slice.length_bytes for r in self.reads)


@frozen(kw_only=True)
class GroupBlocks:
    """One request's blocks in one KV cache group, with their place in the request.

    Attributes:
        kind: attention kind of the group; a sliding id never stands for a full one.
        first_logical: logical block of the first id: entry of the request's block table, from 0.
        block_ids: consecutive entries; NULL_BLOCK_ID where nothing is.
        is_run: whether the ids are neighbours in ascending order, so that their ends say everything.
        highest: the greatest id; -1 where there is none.
        distinct: the ids of what is no run, where each fits an index and none is the null block or comes twice; else
            None.
        packed: the distinct ids as native unsigned 32-bit numbers: a plan copies them without a look at each.

    Raises:
        RequestError: a value that is no count or id; clients send these.
    """

    kind: AttentionKind
    first_logical: int
    block_ids: tuple[int, ...]
    is_run: bool = field(init=False, eq=False, repr=False)
    highest: int = field(init=False, eq=False, repr=False)
    distinct: frozenset[int] | None = field(init=False, eq=False, repr=False)
    packed: bytes = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        ids = self.block_ids
        # type() and not isinstance: True is an int, and an id of True would be block 1.
        if type(self.first_logical) is not int or not 0 <= self.first_logical <= _MOST_TOKENS:
            raise RequestError(f"first_logical must be an int 0..{_MOST_TOKENS}, got {shown(self.first_logical)}")
        put = object.__setattr__
        if _is_run(ids):
            put(self, "is_run", True)
            put(self, "highest", ids[-1])
            put(self, "distinct", None)
            put(self, "packed", b"")
            return
        if ids and (set(map(type, ids)) != _INT or min(ids) < 0):
            at, bad = next((i, b) for i, b in enumerate(ids) if type(b) is not int or b < 0)
            raise RequestError(
                f"block id must be an int >= 0, got {shown(bad)} at entry {at} of group {self.kind.value}"
            )
        unique, highest = frozenset(ids), max(ids, default=-1)
        is_good = len(unique) == len(ids) and NULL_BLOCK_ID not in unique and highest < _MOST_IDS
        put(self, "is_run", False)
        put(self, "highest", highest)
        put(self, "distinct", unique if is_good else None)
        put(self, "packed", _pack(ids) if is_good else b"")

    def packed_entries(self, at: int, end: int) -> bytes:
        """Entries at..end-1 as native unsigned 32-bit numbers."""
        if self.is_run:
            return _pack(self.block_ids[at:end])
        return self.packed[at * _ID_BYTES : end * _ID_BYTES]


def _is_run(ids: tuple[int, ...]) -> bool:
    """Whether ids are neighbours, ascending, and block ids every one.

    What equals an int without being one shows: a float in the type of the sum, and True below 2, where no run begins.
    """
    if not ids or type(ids[0]) is not int or type(ids[-1]) is not int:
        return False
    first, count = ids[0], len(ids)
    return (
        1 < first <= _MOST_IDS - count
        and ids[-1] - first == count - 1
        and ids == tuple(range(first, first + count))
        and type(sum(ids)) is int
    )


def _pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"{len(ids)}I", *ids)


def _unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(packed) // _ID_BYTES}I", packed)


_INT = {int}
_ID_BYTES = 4
_MOST_IDS = 2**31
"""NIXL's descriptor indices are int32, and no block id exceeds its descriptor's index."""
_MOST_TOKENS = 2**32
"""Above any request; keeps a client's number out of arithmetic and messages."""


def plan_pull(
    peers: PeerMap,
    *,
    local: tuple[GroupBlocks, ...],
    remote: tuple[GroupBlocks, ...],
    num_tokens: int,
    num_cached_tokens: int = 0,
) -> TransferPlan:
    """Pair every block that the query at position `num_tokens` reads and that is not here yet.

    Args:
        peers: from `map_peer`.
        local: our blocks per group; entries that the plan does not need are ignored.
        remote: the peer's blocks per group; null, evicted and lookahead entries that are not needed are ignored.
        num_tokens: T, tokens of the request that the peer offers.
        num_cached_tokens: tokens at the front that are here already.

    Raises:
        RequestError: groups that are not ours, a needed block that one side lacks, a null, doubled or unknown block;
            nothing was planned.
    """
    if not _is_count(num_tokens) or not _is_count(num_cached_tokens):
        name, value = ("num_cached_tokens", num_cached_tokens) if _is_count(num_tokens) else ("num_tokens", num_tokens)
        raise RequestError(f"{name} must be an int 0..{_MOST_TOKENS}, got {shown(value)}")
    if not len(local) == len(remote) == len(peers.group_kinds):
        _require_groups(peers, local, "local")
        _require_groups(peers, remote, "remote")
    spans = _needed_spans(peers, local, remote, num_tokens, num_cached_tokens)
    # The two common cases cost little: ids that are runs, and ids that were found good when their lists were made.
    whole: Sequence[BlockRun] | None = None
    if spans and peers.is_one_to_one and peers.kernel_blocks_per_unit == 1:
        whole = _whole_runs(spans, peers) or _whole_pairs(spans, peers)
    if whole:
        of_ranks = [
            RankRead(remote_rank=r.tp_rank, head_slice=r.head_slice, runs=() if r.notify_only else whole)
            for r in peers.ranks
        ]
        return TransferPlan(reads=tuple(of_ranks), num_regions=peers.num_regions)
    local_ids = _checked_ids([span[2] for span in spans], peers.local_num_ids, "local")
    remote_ids = _checked_ids([span[3] for span in spans], peers.remote_num_ids, "remote")
    reads = []
    for rank in peers.ranks:
        pairs = (local_ids, remote_ids) if peers.is_one_to_one else _pairs_of_share(peers, rank.dcp_rank, spans)
        runs = () if rank.notify_only or not pairs[0] else _kernel_pairs(pairs, peers.kernel_blocks_per_unit)
        reads.append(RankRead(remote_rank=rank.tp_rank, head_slice=rank.head_slice, runs=runs))
    return TransferPlan(reads=tuple(reads), num_regions=peers.num_regions)


_Part = tuple[GroupBlocks, int, int]
"""A group's list, and the first and one past the last of its entries that are needed."""

_Span = tuple[int, int, _Part, _Part]
"""First needed unit of a group, the one after the last, and the entries that hold them, ours and theirs."""

_Pairs = tuple[list[int], list[int]]
"""Ids here and there, pair by pair."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_TOKENS


def _require_groups(peers: PeerMap, groups: tuple[GroupBlocks, ...], side: str) -> None:
    kinds = tuple([g.kind for g in groups])
    if len(kinds) != len(peers.group_kinds):
        raise RequestError(
            f"need one list of blocks per KV cache group: {len(peers.group_kinds)} groups, "
            f"got {len(kinds)} {side} lists"
        )
    if kinds != peers.group_kinds:
        raise RequestError(
            f"{side} lists must be of groups {', '.join(k.value for k in peers.group_kinds)} in this order, "
            f"got {', '.join(k.value for k in kinds)}"
        )


def _needed_spans(
    peers: PeerMap,
    local: tuple[GroupBlocks, ...],
    remote: tuple[GroupBlocks, ...],
    num_tokens: int,
    num_cached_tokens: int,
) -> list[_Span]:
    """Per group that needs anything."""
    unit, sl, sr = peers.unit_tokens, peers.local_dcp_size, peers.remote_dcp_size
    cached = num_cached_tokens // (unit * sl) * sl
    spans: list[_Span] = []
    for kind, ours, theirs in zip(peers.group_kinds, local, remote, strict=True):
        if ours.kind is not kind or theirs.kind is not kind:
            _require_groups(peers, local, "local")
            _require_groups(peers, remote, "remote")
        needed = needed_range(num_tokens, peers.sliding_window if kind is AttentionKind.SLIDING else None, unit)
        start, stop = needed.start, needed.stop
        if start < cached:
            start = cached
        if start < stop:
            a = _needed_part(ours, start, stop, sl * peers.local_units_per_id, "local")
            b = _needed_part(theirs, start, stop, sr * peers.remote_units_per_id, "remote")
            spans.append((start, stop, a, b))
    return spans


def _needed_part(blocks: GroupBlocks, start: int, stop: int, units_per_entry: int, side: str) -> _Part:
    """The entries that hold units start..stop-1."""
    at = start // units_per_entry - blocks.first_logical
    end = (stop - 1) // units_per_entry + 1 - blocks.first_logical
    if at < 0 or end > len(blocks.block_ids):
        have = range(blocks.first_logical, blocks.first_logical + len(blocks.block_ids))
        raise RequestError(
            f"logical blocks {at + have.start}..{end + have.start - 1} of the {blocks.kind.value} group are needed, "
            f"the {side} list holds {f'{have.start}..{have.stop - 1}' if have else 'none'}; recompute the request"
        )
    return blocks, at, end


def _checked_ids(parts: list[_Part], num_ids: int, side: str) -> list[int]:
    """All ids; refuses the null block, ids that do not exist, and one id for two places: groups share one pool."""
    ids: list[int] = []
    for blocks, at, end in parts:
        ids += blocks.block_ids[at:end]
    unique = set(ids)
    if NULL_BLOCK_ID in unique:
        raise RequestError(f"a needed {side} block is the null block: it was evicted or never filled")
    if ids and max(ids) >= num_ids:
        raise RequestError(f"{side} block id {shown(max(ids))} does not exist; ids are below {num_ids}")
    if len(unique) != len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise RequestError(f"{side} block {twice} is named twice; a block has one place in one group")
    return ids


def _whole_pairs(spans: list[_Span], peers: PeerMap) -> BlockPairs | None:
    """All pairs as bytes, where the lists as a whole are good; None where `_checked_ids` must look closer."""
    ours, theirs = [span[2] for span in spans], [span[3] for span in spans]
    if not (_are_good(ours, peers.local_num_ids) and _are_good(theirs, peers.remote_num_ids)):
        return None
    return BlockPairs._of_lists(ours, theirs)


def _are_good(parts: list[_Part], num_ids: int) -> bool:
    """Whether the lists, needed or not, name existing blocks, each once and none of them the null block."""
    lists = [part[0] for part in parts]
    for blocks in lists:
        if blocks.highest >= num_ids or (blocks.distinct is None and not blocks.is_run):
            return False
    for a, b in itertools.combinations(lists, 2):
        more, fewer = (a, b) if len(a.block_ids) > len(b.block_ids) else (b, a)
        if not (more.distinct or frozenset(more.block_ids)).isdisjoint(fewer.block_ids):
            return False
    return True


def _whole_runs(spans: list[_Span], peers: PeerMap) -> tuple[BlockRun, ...]:
    """One run per group of runs, or one for all where they are neighbours; empty where somebody must look closer.

    The common case, and the cheap one: the ends of a run say everything about its ids.
    """
    runs: list[tuple[int, int, int]] = []
    for _, _, (ours, at, end), (theirs, there, _) in spans:
        if not (ours.is_run and theirs.is_run):
            return ()
        count, local, remote = end - at, ours.block_ids[at], theirs.block_ids[there]
        if local + count > peers.local_num_ids or remote + count > peers.remote_num_ids:
            return ()
        runs.append((local, remote, count))
    runs.sort()
    merged: list[BlockRun] = []
    before = beyond = length = 0
    for local, remote, count in runs:
        if length and local == before + length and remote == beyond + length:
            length += count
            continue
        if length:
            if local < before + length:
                return ()
            merged.append(BlockRun(local_start=before, remote_start=beyond, count=length))
        before, beyond, length = local, remote, count
    merged.append(BlockRun(local_start=before, remote_start=beyond, count=length))
    if len(merged) > 1 and not _are_apart([(run.remote_start, run.count) for run in merged]):
        return ()
    return tuple(merged)


def _are_apart(runs: list[tuple[int, int]]) -> bool:
    """Whether no two runs of (start, count) share an id."""
    runs.sort()
    return all(a + n <= b for (a, n), (b, _) in itertools.pairwise(runs))


def _pairs_of_share(peers: PeerMap, remote_dcp_rank: int, spans: list[_Span]) -> _Pairs:
    """Units that lie both on our rank and on one remote DCP rank: every max(sl, sr)-th, from the larger side's on."""
    sl, sr = peers.local_dcp_size, peers.remote_dcp_size
    period = max(sl, sr)
    share = peers.local_dcp_rank if sl >= sr else remote_dcp_rank
    local_ids: list[int] = []
    remote_ids: list[int] = []
    for start, stop, (ours, at, end), (theirs, there, beyond) in spans:
        first = start + (share - start) % period
        which = (start, first, len(range(first, stop, period)), period)
        local_ids += _units_of_rank(ours.block_ids[at:end], peers.local_units_per_id, sl, which)
        remote_ids += _units_of_rank(theirs.block_ids[there:beyond], peers.remote_units_per_id, sr, which)
    return local_ids, remote_ids


def _units_of_rank(
    ids: Sequence[int], units_per_id: int, dcp_size: int, which: tuple[int, int, int, int]
) -> Sequence[int]:
    """Ids of `count` units from `first` on, every `period`-th, out of the entries that begin with unit `start`'s."""
    start, first, count, period = which
    if not count:
        return ()
    units = _expand(ids, units_per_id)
    at = first // dcp_size - start // (dcp_size * units_per_id) * units_per_id
    step = period // dcp_size
    return units[at : at + (count - 1) * step + 1 : step]


def _kernel_pairs(pairs: _Pairs, factor: int) -> BlockPairs:
    local_ids, remote_ids = (_expand(ids, factor) for ids in pairs)
    return BlockPairs.of(local_ids=local_ids, remote_ids=remote_ids)


def _expand(ids: Sequence[int], factor: int) -> Sequence[int]:
    """Ids of the `factor` smaller blocks behind each id, in order.

    >>> _expand([3], 2)
    [6, 7]
    """
    return ids if factor == 1 else [i * factor + part for i in ids for part in range(factor)]
