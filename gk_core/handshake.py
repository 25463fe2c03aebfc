"""Handshake: what a peer says of its cache, and every reason why two peers cannot exchange blocks.

Strategy. What must be equal on both sides is `contract_fields`, names and printable values; `fingerprint` hashes them.
A hello carries fingerprint, fields and the rest apart. Equal fingerprints let the rest be decoded; unequal ones are
explained by name from the fields alone, without decoding more of an untrusted message. `check_peer` then compares what
may differ but must fit: ranks, block lengths, roles.

A K byte order that differs is refused, not converted: packed and token-major blocks have equal lengths, and converting
would need every block rewritten on arrival.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping

from attrs import frozen

from gk_core.errors import LayoutError, Mismatch, PeerMismatchError
from gk_core.model_geometry import AttentionKind
from gk_core.peer_layout import (
    SCHEMA_VERSION,
    BlockOrder,
    PeerLayout,
    ScaleGranularity,
    TransferMode,
    describe_rank,
)
from gk_core.region import KVRegion

__all__ = [
    "SCHEMA_VERSION",
    "BlockOrder",
    "PeerHello",
    "PeerLayout",
    "ScaleGranularity",
    "TransferMode",
    "check_peer",
    "compare_fields",
    "contract_fields",
    "describe_rank",
    "fingerprint",
    "require_identity",
]


def contract_fields(layout: PeerLayout) -> dict[str, str]:
    """What must be equal on both sides, by field name, printable."""
    rope = layout.rope
    return {
        "schema_version": str(layout.schema_version),
        "weights_id": layout.weights_id,
        "num_layers": str(layout.num_layers),
        "hidden_size": str(layout.hidden_size),
        "num_q_heads": str(layout.num_q_heads),
        "num_kv_heads": str(layout.num_kv_heads),
        "head_size": str(layout.head_size),
        "vocab_size": str(layout.vocab_size),
        "sliding_window": str(layout.sliding_window),
        "attention_kinds": _short_kinds(layout.attention_kinds),
        "rope.theta": repr(float(rope.theta)),
        "rope.factor": repr(float(rope.factor)),
        "rope.original_max_position": str(rope.original_max_position),
        "rope.beta_fast": repr(float(rope.beta_fast)),
        "rope.beta_slow": repr(float(rope.beta_slow)),
        "rope.truncate": str(rope.truncate),
        "kernel_block_size": str(layout.kernel_block_size),
        "kv_dtype": layout.kv_dtype.dtype_name,
        "k_byte_order": layout.k_byte_order.value,
        "block_order": layout.block_order.value,
        "k_scale": repr(float(layout.k_scale)),
        "v_scale": repr(float(layout.v_scale)),
        "scale_granularity": layout.scale_granularity.value,
        "buffer_layers": "/".join(",".join(map(str, layers)) for layers in layout.buffer_layers),
        "group_kinds": ",".join(k.value for k in layout.group_kinds),
        "num_regions": str(layout.num_regions),
        "transfer_mode": layout.transfer_mode.value,
        "num_speculative_tokens": str(layout.num_speculative_tokens),
    }


def _short_kinds(kinds: tuple[AttentionKind, ...]) -> str:
    """One letter per layer: S slides, F is full."""
    return "".join("S" if k is AttentionKind.SLIDING else "F" for k in kinds)


def fingerprint(layout: PeerLayout) -> str:
    """SHA-256, in hex, over `contract_fields`. Paths, ranks and sizes that are mapped do not enter."""
    text = "\n".join(f"{name}={value!r}" for name, value in contract_fields(layout).items())
    return hashlib.sha256(text.encode()).hexdigest()


def compare_fields(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[Mismatch, ...]:
    """Every field that differs, or that only one side has; the peer's strings are shown escaped and cut."""
    return tuple(
        Mismatch(field=_shown(name), ours=ours.get(name, "absent"), theirs=_shown(theirs.get(name, "absent")))
        for name in (*ours, *(n for n in theirs if n not in ours))
        if ours.get(name) != theirs.get(name)
    )


def _shown(text: str) -> str:
    return text[:512].encode("unicode_escape").decode("ascii")


def check_peer(ours: PeerLayout, theirs: PeerLayout) -> tuple[Mismatch, ...]:
    """Every reason why these two ranks cannot exchange blocks, with both values; empty when they can.

    Sizes that may differ (TP, DCP, num_blocks, block lengths, block sizes over equal kernel blocks) are checked to fit.
    A block length is judged only where all that it follows from agrees, so that one changed field is reported once.
    """
    found = compare_fields(contract_fields(ours), contract_fields(theirs))
    names = {m.field for m in found}
    found += _refused_values(ours, theirs, names) + _context_parallel(ours, theirs)
    if not names & {"num_kv_heads", "head_size", "kernel_block_size", "kv_dtype", "num_regions"}:
        found += _block_lengths(ours, theirs)
    return found


def _differ(field: str, ours: object, theirs: object, why: str) -> Mismatch:
    return Mismatch(field=field, ours=str(ours), theirs=f"{theirs} ({why})")


def _refused_values(ours: PeerLayout, theirs: PeerLayout, named: set[str]) -> tuple[Mismatch, ...]:
    """Who the peer is, and values that are refused even where both sides have them."""
    found = []
    if ours.engine_id == theirs.engine_id:
        found.append(_differ("engine_id", ours.engine_id, theirs.engine_id, "an engine cannot be its own peer"))
    if theirs.role is not ours.role.other:
        found.append(_differ("role", ours.role.value, theirs.role.value, "prefill pairs with decode"))
    split = ours.grid.heads_per_rank != theirs.grid.heads_per_rank
    for field, refused, why in (
        ("scale_granularity", ScaleGranularity.PER_BLOCK, "only per-tensor scales are served"),
        ("transfer_mode", TransferMode.PUSH, "only pull is served"),
        ("block_order", BlockOrder.TOKEN_MAJOR if split else None, "only head-major blocks can be split by head"),
    ):
        if getattr(ours, field) is refused and field not in named:
            found.append(_differ(field, refused.value, refused.value, why))
    return tuple(found)


def _context_parallel(ours: PeerLayout, theirs: PeerLayout) -> tuple[Mismatch, ...]:
    """Blocks are dealt out the same way on both sides, in whole multiples."""
    found = []
    if any(len(set(p.group_block_sizes)) > 1 for p in (ours, theirs)):
        why = "groups that share buffers need one block size"
        found.append(_differ("group_block_sizes", ours.group_block_sizes, theirs.group_block_sizes, why))
    if any(p.dcp_rank != p.tp_rank % p.dcp_size for p in (ours, theirs)):
        why = "dcp_rank must be tp_rank % dcp_size: DCP is the innermost index of a rank"
        found.append(_differ("dcp_rank", ours.dcp_rank, theirs.dcp_rank, why))
    if ours.dcp_size % theirs.dcp_size and theirs.dcp_size % ours.dcp_size:
        found.append(_differ("dcp_size", ours.dcp_size, theirs.dcp_size, "neither is a multiple of the other"))
    if max(ours.dcp_size, theirs.dcp_size) == 1 or found:
        return tuple(found)
    if ours.group_block_sizes != theirs.group_block_sizes:
        why = "must be equal where a side has DCP"
        found.append(_differ("group_block_sizes", ours.group_block_sizes, theirs.group_block_sizes, why))
    elif {ours.interleave_size, theirs.interleave_size} != {ours.block_size}:
        why = f"both must be the block size, {ours.block_size}, where a side has DCP"
        found.append(_differ("interleave_size", ours.interleave_size, theirs.interleave_size, why))
    return tuple(found)


def _block_lengths(ours: PeerLayout, theirs: PeerLayout) -> tuple[Mismatch, ...]:
    """Block lengths are what each side's own heads, tokens and dtype make them, in a whole ratio."""
    a, b = _length_shown(ours), _length_shown(theirs)
    if {*ours.block_bytes} != {ours.expected_block_bytes} or {*theirs.block_bytes} != {theirs.expected_block_bytes}:
        why = f"by their own numbers {ours.expected_block_bytes} and {theirs.expected_block_bytes} in every region"
        return (_differ("block_bytes", a, b, why),)
    small, large = sorted((ours.expected_block_bytes, theirs.expected_block_bytes))
    if large % small:
        return (_differ("block_bytes", a, b, "neither is a multiple of the other"),)
    return ()


def _length_shown(layout: PeerLayout) -> str:
    return ", ".join(map(str, sorted(set(layout.block_bytes))))


def require_identity(layout: PeerLayout, *, engine_id: str, tp_rank: int) -> None:
    """Refuse an answer from somebody else: a restarted peer, a wrong address, or ourselves.

    Raises:
        PeerMismatchError: naming engine_id or tp_rank, what was expected as ours and what answered as theirs.
    """
    found = tuple(
        Mismatch(field=field, ours=str(wanted), theirs=_shown(str(got)))
        for field, wanted, got in (("engine_id", engine_id, layout.engine_id), ("tp_rank", tp_rank, layout.tp_rank))
        if wanted != got
    )
    if found:
        raise PeerMismatchError(found)


@frozen(kw_only=True)
class PeerHello:
    """What one rank sends in a handshake.

    Attributes:
        layout: its layout.
        agent_metadata: its transport's blob, opaque.
        regions: its registered regions, K then V of each buffer.

    Raises:
        LayoutError: regions that are not what the layout says, overlap, or leave the address space.
    """

    layout: PeerLayout
    agent_metadata: bytes
    regions: tuple[KVRegion, ...]

    def __attrs_post_init__(self) -> None:
        layout = self.layout
        if len(self.regions) != layout.num_regions:
            raise LayoutError(f"need {layout.num_regions} regions as in block_bytes, got {len(self.regions)}")
        for i, region in enumerate(self.regions):
            wanted = (i // 2, i % 2, layout.num_blocks, layout.block_bytes[i])
            got = (region.buffer_index, region.half.value, region.num_blocks, region.block_bytes)
            if got != wanted:
                raise LayoutError(f"region {i} must be (buffer, half, num_blocks, block_bytes) {wanted}, got {got}")
            if region.end_address > _ADDRESS_LIMIT:
                raise LayoutError(f"region {i} ends at {hex(region.end_address)}, past the 64-bit address space")
        ordered = sorted(self.regions, key=lambda r: (r.device_id, r.base_address))
        for a, b in itertools.pairwise(ordered):
            if a.device_id == b.device_id and a.end_address > b.base_address:
                raise LayoutError(
                    f"regions overlap: one ends at {hex(a.end_address)}, the next begins at {hex(b.base_address)}"
                )


_ADDRESS_LIMIT = 2**64
