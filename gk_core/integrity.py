"""Integrity: digests that tie a claim to an offer, and optional checksums of the bytes themselves.

Checksums catch a transport which reports success and moves nothing.

Dims: K registered (kernel) blocks per block id, R regions, h heads per rank.

A group's checksums are flat, block id by block id in the hand-off's order: [ids, K, R, h] CRC-32 sums, one for each
head of one half of one buffer, because heads are what is split and merged between ranks. CRC-32 finds every accident of
this kind; it is no protection against a peer that lies.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from gk_core.errors import RequestError
from gk_core.peer_layout import PeerLayout
from gk_core.transfer_plan import GroupBlocks, TransferPlan

__all__ = ["BlockBytes", "group_checksums", "offer_digest", "require_checksums", "wrong_bytes"]


class BlockBytes(Protocol):
    """Reads this rank's registered blocks."""

    def block_bytes(self, *, region: int, block: int) -> bytes | memoryview:
        """The bytes of one registered block; region index = 2 * buffer + half.

        Raises:
            LayoutError: no such region or block.
        """
        ...


def offer_digest(token_ids: Sequence[int], groups: Sequence[GroupBlocks]) -> str:
    """SHA-256, in hex, of whose KV lies in which blocks: what a producer offers and a reader claims.

    A hand-off passes through a client. With this, changing a block id, a position or the prompt on the way is a refusal
    by the producer and not an answer from another request's blocks.

    Args:
        token_ids: the tokens whose KV moves, N - 1 of them; empty on both sides where an engine does not know them.
        groups: as in the hand-off.

    Raises:
        RequestError: a block id of more than 63 bits.
    """
    digest = hashlib.sha256(array("q", token_ids).tobytes())
    for group in groups:
        digest.update(f"|{group.kind.value}|{group.first_logical}|{len(group.block_ids)}|".encode())
        try:
            digest.update(array("q", group.block_ids).tobytes())
        except OverflowError:
            raise RequestError(f"block ids of group {group.kind.value} must be below 2^63") from None
    return digest.hexdigest()


def group_checksums(group: GroupBlocks, layout: PeerLayout, cache: BlockBytes) -> tuple[int, ...]:
    """Sums of every block of one group, flat [ids, K, R, h]."""
    k = layout.kernel_blocks_per_block
    return tuple(
        checksum
        for block_id in group.block_ids
        for part in range(k)
        for region in range(layout.num_regions)
        for checksum in _head_sums(
            cache.block_bytes(region=region, block=block_id * k + part), layout.grid.heads_per_rank
        )
    )


def require_checksums(
    groups: Sequence[GroupBlocks], checksums: Sequence[Sequence[int]], producer: PeerLayout
) -> dict[int, tuple[int, ...]]:
    """Sums by the producer's registered block, flat [R, h], once their number is what the blocks need.

    Raises:
        RequestError: a number of lists or sums that the groups do not have, or a producer of more than one rank.
    """
    if producer.tp_size != 1:
        raise RequestError(f"checksums are of one rank's bytes, but the producer has tp_size {producer.tp_size}")
    if len(checksums) != len(groups):
        raise RequestError(f"need one list of checksums per group: {len(groups)}, got {len(checksums)}")
    k = producer.kernel_blocks_per_block
    each = producer.num_regions * producer.grid.heads_per_rank
    by_block: dict[int, tuple[int, ...]] = {}
    for group, sums in zip(groups, checksums, strict=True):
        if len(sums) != len(group.block_ids) * k * each:
            raise RequestError(
                f"group {group.kind.value} needs {len(group.block_ids) * k * each} checksums, got {len(sums)}"
            )
        for i, block_id in enumerate(group.block_ids):
            for part in range(k):
                at = (i * k + part) * each
                by_block[block_id * k + part] = tuple(sums[at : at + each])
    return by_block


def wrong_bytes(
    plan: TransferPlan, *, ours: PeerLayout, theirs: PeerLayout, sums: dict[int, tuple[int, ...]], cache: BlockBytes
) -> str:
    """What is wrong with the bytes that a plan brought, "" when nothing is."""
    head_bytes = ours.block_bytes[0] // ours.grid.heads_per_rank
    for read in plan.reads:
        cut = read.head_slice
        first, count = cut.remote_offset_bytes // head_bytes, cut.length_bytes // head_bytes
        for local, remote in zip(read.local_ids, read.remote_ids, strict=True):
            wanted = sums.get(remote)
            if wanted is None:
                return f"no checksum came for the producer's block {remote}"
            for region in range(plan.num_regions):
                data = cache.block_bytes(region=region, block=local)
                part = memoryview(data)[cut.local_offset_bytes : cut.local_offset_bytes + cut.length_bytes]
                at = region * theirs.grid.heads_per_rank + first
                if _head_sums(part, count) != wanted[at : at + count]:
                    return (
                        f"block {local} of region {region} does not have the checksum of the producer's block {remote}"
                    )
    return ""


def _head_sums(data: bytes | memoryview, heads: int) -> tuple[int, ...]:
    size = len(data) // heads
    return tuple(zlib.crc32(data[i * size : (i + 1) * size]) for i in range(heads))
