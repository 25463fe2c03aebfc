"""Wire forms of what peers say: handshakes, hand-offs and notices as msgpack, layouts also as JSON.

Every byte is hostile. Sizes are checked before anything is decoded, types are strict, unknown keys are refused, and
only typed errors come out. A hello has two parts: an envelope with fingerprint and contract fields, and a body that is
decoded only where the fingerprints are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from gk_core.disaggregation import Role
from gk_core.errors import GkError, LayoutError, Mismatch, PeerLostError, PeerMismatchError, RequestError
from gk_core.hand_off import (
    MAX_BLOCKS_PER_GROUP,
    MAX_CHECKSUMS_PER_GROUP,
    MAX_GROUPS,
    MAX_ID_LENGTH,
    HandOff,
    parse_kv_transfer_params,
    to_kv_transfer_params,
)
from gk_core.handshake import PeerHello, compare_fields, contract_fields, fingerprint, require_identity
from gk_core.kv_layout import KByteOrder, KVHalf
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import AttentionKind, YarnRope
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, PeerNotice, ProducerFailure, Reader, Release, ReleaseKind
from gk_core.peer_layout import BlockOrder, PeerLayout, ScaleGranularity, TransferMode
from gk_core.ports import PeerKey
from gk_core.region import KVRegion

__all__ = [
    "MAX_HAND_OFF_BYTES",
    "MAX_HELLO_BYTES",
    "MAX_LAYOUT_JSON_BYTES",
    "MAX_NOTICE_BYTES",
    "decode_hand_off",
    "decode_hello",
    "decode_layout_json",
    "decode_notice",
    "encode_hand_off",
    "encode_hello",
    "encode_layout_json",
    "encode_notice",
]

MAX_HELLO_BYTES = 4 * 1024 * 1024
MAX_HAND_OFF_BYTES = 4 * 1024 * 1024
MAX_NOTICE_BYTES = 4096
MAX_LAYOUT_JSON_BYTES = 1024 * 1024

_MAX_LAYERS = 4096
_MAX_RANKS = 4096
_MAX_REASON = 512

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Ranks = Annotated[int, Meta(ge=0, le=_MAX_RANKS)]
Address = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Checksum = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Name = Annotated[str, Meta(max_length=MAX_ID_LENGTH)]
Kinds = Annotated[tuple[AttentionKind, ...], Meta(max_length=_MAX_LAYERS)]


class _Wire(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the wire forms: named fields, none unknown, none left out."""


class _Rope(_Wire):
    theta: float
    factor: float
    original_max_position: Count
    beta_fast: float
    beta_slow: float
    truncate: bool


class _Layout(_Wire):
    schema_version: Count
    engine_id: Name
    role: Role
    weights_id: Name
    num_layers: Annotated[int, Meta(ge=0, le=_MAX_LAYERS)]
    hidden_size: Count
    num_q_heads: Count
    num_kv_heads: Annotated[int, Meta(ge=0, le=65_536)]
    head_size: Count
    vocab_size: Count
    sliding_window: Count
    attention_kinds: Kinds
    rope: _Rope
    kernel_block_size: Count
    kv_dtype: Name
    k_byte_order: KByteOrder
    block_order: BlockOrder
    k_scale: float
    v_scale: float
    scale_granularity: ScaleGranularity
    buffer_layers: Annotated[
        tuple[Annotated[tuple[Count, ...], Meta(max_length=_MAX_LAYERS)], ...], Meta(max_length=_MAX_LAYERS)
    ]
    group_kinds: Annotated[tuple[AttentionKind, ...], Meta(max_length=MAX_GROUPS)]
    group_block_sizes: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)]
    num_blocks: Count
    block_bytes: Annotated[tuple[Count, ...], Meta(max_length=2 * _MAX_LAYERS)]
    tp_size: Ranks
    tp_rank: Ranks
    dcp_size: Ranks
    dcp_rank: Ranks
    interleave_size: Count
    transfer_mode: TransferMode
    num_speculative_tokens: Count


class _Region(Struct, array_like=True, forbid_unknown_fields=True):
    base_address: Address
    block_stride_bytes: Count
    device_id: Count


class _HelloBody(_Wire):
    layout: _Layout
    agent_metadata: bytes
    regions: Annotated[tuple[_Region, ...], Meta(max_length=2 * _MAX_LAYERS)]


class _HelloEnvelope(_Wire, tag="hello"):
    fingerprint: Annotated[str, Meta(max_length=64)]
    fields: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=65_536)]], Meta(max_length=64)
    ]
    body: bytes


class _HandOff(_Wire, tag="hand_off"):
    do_remote_prefill: bool
    do_remote_decode: bool
    remote_engine_id: Name
    remote_request_id: Name
    remote_generation: Address
    remote_num_tokens: Count
    remote_block_ids: Annotated[
        list[Annotated[list[Count], Meta(max_length=MAX_BLOCKS_PER_GROUP)]], Meta(max_length=MAX_GROUPS)
    ]
    remote_first_blocks: Annotated[list[Count], Meta(max_length=MAX_GROUPS)]
    remote_group_kinds: Annotated[list[Name], Meta(max_length=MAX_GROUPS)]
    remote_host: Name
    remote_port: Count
    remote_block_size: Count
    tp_size: Ranks
    remote_dcp_size: Ranks
    remote_checksums: Annotated[
        list[Annotated[list[Checksum], Meta(max_length=MAX_CHECKSUMS_PER_GROUP)]], Meta(max_length=MAX_GROUPS)
    ]


class _Reader(_Wire):
    engine_id: Name
    rank: Ranks
    pull_id: Name
    num_readers: Ranks


class _Lease(_Wire):
    """What every notice names: whose lease, of which request, which one."""

    engine_id: Name
    request_id: Name
    generation: Address


class _Claim(_Lease, tag="claim"):
    reader: _Reader
    sequence: Address
    digest: Name


class _ClaimReply(_Lease, tag="claim_reply"):
    pull_id: Name
    sequence: Address
    rank: Ranks
    verdict: ClaimVerdict
    valid_seconds: float


class _Release(_Lease, tag="release"):
    reader: _Reader
    kind: ReleaseKind


class _ProducerFailure(_Lease, tag="producer_failure"):
    pull_id: Name
    rank: Ranks
    reason: Annotated[str, Meta(max_length=_MAX_REASON)]


_AnyNotice = _Claim | _ClaimReply | _Release | _ProducerFailure

_encoder = msgspec.msgpack.Encoder()
_layout_json = msgspec.json.Decoder(_Layout)
_body = msgspec.msgpack.Decoder(_HelloBody)
_envelope = msgspec.msgpack.Decoder(_HelloEnvelope)
_hand_off = msgspec.msgpack.Decoder(_HandOff)
_notice = msgspec.msgpack.Decoder(_AnyNotice)

W = TypeVar("W")


def encode_hello(hello: PeerHello) -> bytes:
    """A handshake answer.

    Raises:
        LayoutError: more than MAX_HELLO_BYTES; the transport's metadata is too large.
    """
    body = _HelloBody(
        layout=_wire_layout(hello.layout),
        agent_metadata=hello.agent_metadata,
        regions=tuple(
            _Region(base_address=r.base_address, block_stride_bytes=r.block_stride_bytes, device_id=r.device_id)
            for r in hello.regions
        ),
    )
    data = _encoder.encode(
        _HelloEnvelope(
            fingerprint=fingerprint(hello.layout), fields=contract_fields(hello.layout), body=_encoder.encode(body)
        )
    )
    return _sized(data, MAX_HELLO_BYTES, "hello")


def decode_hello(data: bytes, *, ours: PeerLayout, expected: PeerKey | None = None) -> PeerHello:
    """Read a peer's hello; `check_peer` comes next.

    Args:
        data: untrusted.
        ours: our layout; unequal fingerprints end the reading.
        expected: who must have answered.

    Raises:
        PeerMismatchError: contract fields differ, or somebody else answered; names each with both values.
        PeerLostError: bytes that are no hello, or that describe no cache.
    """
    envelope = _decoded(_envelope.decode, data, MAX_HELLO_BYTES, PeerLostError, "hello")
    wanted = fingerprint(ours)
    if envelope.fingerprint != wanted:
        found = compare_fields(contract_fields(ours), envelope.fields)
        raise PeerMismatchError(found or (_fingerprint_mismatch(wanted, envelope.fingerprint),))
    body = _decoded(_body.decode, envelope.body, MAX_HELLO_BYTES, PeerLostError, "hello")
    try:
        layout = _layout_of(body.layout)
        hello = PeerHello(layout=layout, agent_metadata=body.agent_metadata, regions=_regions_of(body.regions, layout))
    except LayoutError as error:
        raise PeerLostError(f"the peer's hello describes no cache: {error}") from None
    if fingerprint(layout) != wanted:
        found = compare_fields(contract_fields(ours), contract_fields(layout))
        raise PeerMismatchError(found or (_fingerprint_mismatch(wanted, fingerprint(layout)),))
    if expected is not None:
        require_identity(layout, engine_id=expected.engine_id, tp_rank=expected.rank)
    return hello


def encode_layout_json(layout: PeerLayout) -> bytes:
    """One rank's layout as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(_wire_layout(layout)), indent=2)


def decode_layout_json(data: bytes) -> PeerLayout:
    """Read one rank's layout.

    Raises:
        LayoutError: no such layout, naming the path of the value that is wrong.
    """
    return _layout_of(_decoded(_layout_json.decode, data, MAX_LAYOUT_JSON_BYTES, LayoutError, "peer layout"))


def encode_hand_off(hand_off: HandOff) -> bytes:
    """A hand-off, for a channel that carries bytes.

    Raises:
        LayoutError: more than MAX_HAND_OFF_BYTES.
    """
    data = _encoder.encode({"type": "hand_off", **to_kv_transfer_params(hand_off)})
    return _sized(data, MAX_HAND_OFF_BYTES, "hand-off")


def decode_hand_off(data: bytes) -> HandOff:
    """Read a hand-off.

    Raises:
        RequestError: bytes that are no hand-off, or values out of range.
    """
    wire = _decoded(_hand_off.decode, data, MAX_HAND_OFF_BYTES, RequestError, "hand-off")
    return parse_kv_transfer_params(msgspec.structs.asdict(wire))


def encode_notice(notice: PeerNotice) -> bytes:
    """A notice; a failure's reason is cut to 512 characters.

    Raises:
        LayoutError: more than MAX_NOTICE_BYTES; ids are too long.
    """
    lease: dict[str, Any] = {
        "engine_id": notice.engine_id,
        "request_id": notice.request_id,
        "generation": notice.generation,
    }
    wire: _AnyNotice
    match notice:
        case Claim():
            wire = _Claim(**lease, reader=_wire_reader(notice.reader), sequence=notice.sequence, digest=notice.digest)
        case Release():
            wire = _Release(**lease, reader=_wire_reader(notice.reader), kind=notice.kind)
        case ClaimReply():
            wire = _ClaimReply(
                **lease,
                pull_id=notice.pull_id,
                sequence=notice.sequence,
                rank=notice.rank,
                verdict=notice.verdict,
                valid_seconds=float(notice.valid_seconds),
            )
        case ProducerFailure():
            reason = notice.reason[:_MAX_REASON]
            wire = _ProducerFailure(**lease, pull_id=notice.pull_id, rank=notice.rank, reason=reason)
    return _sized(_encoder.encode(wire), MAX_NOTICE_BYTES, "notice")


def decode_notice(data: bytes) -> PeerNotice:
    """Read a notice.

    Raises:
        RequestError: bytes that are no notice, or values out of range.
    """
    wire = _decoded(_notice.decode, data, MAX_NOTICE_BYTES, RequestError, "notice")
    values = msgspec.structs.asdict(wire)
    match wire:
        case _Claim():
            return Claim(**{**values, "reader": _reader_of(wire.reader)})
        case _Release():
            return Release(**{**values, "reader": _reader_of(wire.reader)})
        case _ClaimReply():
            return ClaimReply(**values)
        case _ProducerFailure():
            return ProducerFailure(**values)


def _decoded(decode: Callable[[bytes], W], data: bytes, most: int, error: type[GkError], what: str) -> W:
    if len(data) > most:
        raise error(f"a {what} has at most {most} bytes, got {len(data)}")
    try:
        return decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as cause:
        # The message may quote the peer: keep it short, on one line and printable.
        raise error(f"not a {what}: {ascii(str(cause))[1:-1][:300]}") from None


def _sized(data: bytes, most: int, what: str) -> bytes:
    if len(data) > most:
        raise LayoutError(f"a {what} has at most {most} bytes, got {len(data)}")
    return data


def _fingerprint_mismatch(ours: str, theirs: str) -> Mismatch:
    return Mismatch(field="fingerprint", ours=ours, theirs=ascii(theirs)[1:-1])


def _wire_layout(layout: PeerLayout) -> _Layout:
    values: dict[str, Any] = {name: getattr(layout, name) for name in _Layout.__struct_fields__}
    values["rope"] = _Rope(**{name: getattr(layout.rope, name) for name in _Rope.__struct_fields__})
    values["kv_dtype"] = layout.kv_dtype.dtype_name
    return _Layout(**values)


def _layout_of(wire: _Layout) -> PeerLayout:
    values = msgspec.structs.asdict(wire)
    dtypes = {d.dtype_name: d for d in KVDtype}
    if wire.kv_dtype not in dtypes:
        raise LayoutError(f"kv_dtype must be one of {', '.join(dtypes)}, got {wire.kv_dtype!a}")
    values["kv_dtype"] = dtypes[wire.kv_dtype]
    values["rope"] = YarnRope(**msgspec.structs.asdict(wire.rope))
    return PeerLayout(**values)


def _regions_of(regions: tuple[_Region, ...], layout: PeerLayout) -> tuple[KVRegion, ...]:
    if len(regions) != layout.num_regions:
        raise LayoutError(f"need {layout.num_regions} regions as in block_bytes, got {len(regions)}")
    return tuple(
        KVRegion(
            buffer_index=i // 2,
            half=KVHalf(i % 2),
            base_address=r.base_address,
            num_blocks=layout.num_blocks,
            block_bytes=layout.block_bytes[i],
            block_stride_bytes=r.block_stride_bytes,
            device_id=r.device_id,
        )
        for i, r in enumerate(regions)
    )


def _wire_reader(reader: Reader) -> _Reader:
    key = reader.key
    return _Reader(engine_id=key.engine_id, rank=key.rank, pull_id=reader.pull_id, num_readers=reader.num_readers)


def _reader_of(wire: _Reader) -> Reader:
    key = PeerKey(engine_id=wire.engine_id, rank=wire.rank)
    return Reader(key=key, pull_id=wire.pull_id, num_readers=wire.num_readers)
