"""Wire forms of handshakes, hand-offs and notices; their bytes are hostile."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from gk_adapters.peer_codec import (
    MAX_HAND_OFF_BYTES,
    MAX_HELLO_BYTES,
    MAX_LAYOUT_JSON_BYTES,
    MAX_NOTICE_BYTES,
    decode_hand_off,
    decode_hello,
    decode_layout_json,
    decode_notice,
    encode_hand_off,
    encode_hello,
    encode_layout_json,
    encode_notice,
)
from gk_core.disaggregation import Role
from gk_core.errors import GkError, LayoutError, PeerLostError, PeerMismatchError, RequestError
from gk_core.handshake import PeerHello, contract_fields, fingerprint
from gk_core.kv_layout import KByteOrder, KVHalf
from gk_core.kv_spec import KVDtype
from gk_core.notices import Claim, ClaimReply, ClaimVerdict, PeerNotice, ProducerFailure, Reader, Release, ReleaseKind
from gk_core.peer_layout import PeerLayout
from gk_core.ports import PeerKey
from gk_core.region import KVRegion
from tests.core.peer_builders import make_groups, make_peer
from tests.core.test_hand_off import GOOD as HAND_OFF

OURS = make_peer(Role.DECODE)


def make_hello(layout: PeerLayout) -> PeerHello:
    size = layout.num_blocks * layout.block_bytes[0]
    regions = tuple(
        KVRegion(
            buffer_index=i // 2,
            half=KVHalf(i % 2),
            base_address=0x7F00_0000_0000 + i * size,
            num_blocks=layout.num_blocks,
            block_bytes=layout.block_bytes[0],
            block_stride_bytes=layout.block_bytes[0],
            device_id=2,
        )
        for i in range(36)
    )
    return PeerHello(layout=layout, agent_metadata=bytes(range(256)), regions=regions)


HELLO = make_hello(make_peer(Role.PREFILL, tp=4, rank=2, num_blocks=77))
READER = Reader(key=PeerKey(engine_id="D", rank=5), pull_id="pull-9", num_readers=2)
CLAIM = Claim(engine_id="P", request_id="r-bb", generation=7, reader=READER, sequence=3)
REPLY = ClaimReply(
    engine_id="P", request_id="r-bb", generation=7, pull_id="pull-9", sequence=3, rank=1, verdict=ClaimVerdict.HELD,
    valid_seconds=12.5,
)  # fmt: skip
FAILURE = ProducerFailure(
    engine_id="P", request_id="r-bb", generation=7, pull_id="pull-9", rank=1, reason="out of memory"
)
RELEASE = Release(engine_id="P", request_id="r-bb", generation=7, reader=READER, kind=ReleaseKind.FAILED)
NOTICES: list[PeerNotice] = [CLAIM, REPLY, RELEASE, FAILURE]


@pytest.mark.parametrize("dtype", list(KVDtype), ids=lambda d: d.dtype_name)
@pytest.mark.parametrize("order", list(KByteOrder), ids=lambda o: o.value)
def test_a_hello_comes_back_as_it_was(dtype: KVDtype, order: KByteOrder) -> None:
    """Layout, metadata and regions."""
    change: dict[str, Any] = {"kv_dtype": dtype, "k_byte_order": order, "k_scale": 0.375}
    hello = evolve(HELLO, layout=evolve(HELLO.layout, **change))
    assert decode_hello(encode_hello(hello), ours=evolve(OURS, **change)) == hello


def test_unequal_fingerprints_are_explained_without_decoding_the_rest() -> None:
    """The body is rubbish, and is never looked at."""
    theirs = evolve(HELLO.layout, kv_dtype=KVDtype.FP8_E4M3, sliding_window=4096)
    data = msgspec.msgpack.encode(
        {"type": "hello", "fingerprint": fingerprint(theirs), "fields": contract_fields(theirs), "body": b"\xc1"}
    )
    with pytest.raises(PeerMismatchError) as caught:
        decode_hello(data, ours=OURS)
    assert [str(m) for m in caught.value.mismatches] == [
        "sliding_window: ours 128, theirs 4096",
        "kv_dtype: ours float8_e4m3fn, theirs float8_e4m3",
    ]


def test_a_peer_of_another_version_is_refused_by_name() -> None:
    """With fields that we do not know, and without some that we do."""
    fields = {**contract_fields(HELLO.layout), "schema_version": "2", "colour": "red"}
    del fields["v_scale"]
    data = msgspec.msgpack.encode({"type": "hello", "fingerprint": "00", "fields": fields, "body": b""})
    with pytest.raises(PeerMismatchError) as caught:
        decode_hello(data, ours=OURS)
    assert [str(m) for m in caught.value.mismatches] == [
        "schema_version: ours 1, theirs 2",
        "v_scale: ours 1.0, theirs absent",
        "colour: ours absent, theirs red",
    ]


def test_equal_fields_under_another_fingerprint_are_refused() -> None:
    """Named as what it is."""
    envelope = msgspec.msgpack.decode(encode_hello(HELLO))
    data = msgspec.msgpack.encode({**envelope, "fingerprint": "00"})
    with pytest.raises(PeerMismatchError, match=f"fingerprint: ours {fingerprint(OURS)}, theirs 00"):
        decode_hello(data, ours=OURS)


def test_a_body_that_is_not_what_its_envelope_says_is_refused() -> None:
    """Our fingerprint outside, another layout inside."""
    lie = encode_hello(evolve(HELLO, layout=evolve(HELLO.layout, k_scale=2.0)))
    envelope = {**msgspec.msgpack.decode(lie), "fingerprint": fingerprint(OURS)}
    with pytest.raises(PeerMismatchError, match=r"k_scale: ours 1\.0, theirs 2\.0"):
        decode_hello(msgspec.msgpack.encode(envelope), ours=OURS)


def test_an_answer_from_somebody_else_is_refused() -> None:
    """Expected E1's rank 2, got P's."""
    data = encode_hello(HELLO)
    assert decode_hello(data, ours=OURS, expected=PeerKey(engine_id="P", rank=2)) == HELLO
    with pytest.raises(PeerMismatchError, match="engine_id: ours E1, theirs P"):
        decode_hello(data, ours=OURS, expected=PeerKey(engine_id="E1", rank=2))


def tampered(**change: Any) -> bytes:
    """A hello whose body has one layout value or the regions replaced."""
    envelope = msgspec.msgpack.decode(encode_hello(HELLO))
    body = msgspec.msgpack.decode(envelope["body"])
    if "regions" in change:
        body["regions"] = change.pop("regions")
    body["layout"].update(change)
    return msgspec.msgpack.encode({**envelope, "body": msgspec.msgpack.encode(body)})


REGIONS = msgspec.msgpack.decode(msgspec.msgpack.decode(encode_hello(HELLO))["body"])["regions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": "77"}, r"not a hello: Expected `int`, got `str` - at `\$\.layout\.num_blocks`"),
        ({"num_blocks": 77.0}, r"not a hello: Expected `int`, got `float`"),
        ({"num_blocks": True}, r"not a hello: Expected `int`, got `bool`"),
        ({"num_blocks": -1}, r"not a hello: Expected `int` >= 0"),
        ({"num_blocks": 2**31}, r"not a hello: Expected `int` <= 2147483647"),
        ({"tp_size": 4097}, r"not a hello: Expected `int` <= 4096"),
        ({"role": "both"}, r"not a hello: Invalid enum value 'both'"),
        ({"kv_dtype": "int8"}, r"describes no cache: kv_dtype must be one of float32"),
        ({"unknown": 1}, r"not a hello: Object contains unknown field `unknown`"),
        ({"num_blocks": 0}, r"describes no cache: num_blocks must be >= 1, got 0"),
        ({"k_scale": float("nan")}, r"describes no cache: k_scale must be a positive finite number"),
        ({"regions": REGIONS[:35]}, r"describes no cache: need 36 regions as in block_bytes, got 35"),
        ({"regions": [[0, 16_384, 0]] * 36}, r"describes no cache: regions overlap"),
        ({"regions": [[2**63, 16_384, 0]] * 36}, r"not a hello: "),
        ({"regions": [[0, 1, 0]] * 36}, r"describes no cache: blocks would overlap: stride 1 bytes"),
    ],
)
def test_a_hello_that_describes_no_cache_is_refused(change: dict[str, Any], message: str) -> None:
    """Types, ranges, unknown keys, and numbers that do not fit together."""
    with pytest.raises(PeerLostError, match=message):
        decode_hello(tampered(**change), ours=OURS)


def test_a_hello_does_not_grow_with_the_number_of_blocks() -> None:
    """36 regions of 36,175 blocks: under 4 kB, and a few digits more than for 11 blocks."""
    small, large = (len(encode_hello(make_hello(make_peer(Role.PREFILL, num_blocks=n)))) for n in (11, 36_175))
    assert small < large < small + 40
    assert large < 4096


def test_a_layout_is_readable_json() -> None:
    """Indented, one key per field, and back again."""
    data = encode_layout_json(HELLO.layout)
    assert b'\n  "kv_dtype": "float8_e4m3fn",\n' in data
    assert decode_layout_json(data) == HELLO.layout


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a peer layout: Input data was truncated"),
        (b"[]", "not a peer layout: Expected `object`, got `array`"),
        (b"{}", "not a peer layout: Object missing required field `schema_version`"),
        (b"\xff", "not a peer layout"),
        (b"[" * 100_000, "not a peer layout"),
        (b" " * (MAX_LAYOUT_JSON_BYTES + 1), "a peer layout has at most 1048576 bytes, got 1048577"),
    ],
    ids=["empty", "list", "no_fields", "not_text", "deep", "long"],
)
def test_a_file_that_is_no_layout_is_refused(data: bytes, message: str) -> None:
    """Naming what is wrong."""
    with pytest.raises(LayoutError, match=message):
        decode_layout_json(data)


def test_a_hand_off_comes_back_as_it_was() -> None:
    """All its keys."""
    assert decode_hand_off(encode_hand_off(HAND_OFF)) == HAND_OFF


def test_a_hand_off_is_parsed_like_a_clients_parameters() -> None:
    """A port that msgpack allows and the rule does not."""
    with pytest.raises(RequestError, match=r"remote_port must be an int 1\.\.65535, got 70000"):
        decode_hand_off(encode_hand_off(evolve(HAND_OFF, port=70_000)))


@pytest.mark.parametrize("notice", NOTICES, ids=lambda n: type(n).__name__)
def test_a_notice_comes_back_as_it_was(notice: PeerNotice) -> None:
    """All four."""
    assert decode_notice(encode_notice(notice)) == notice


@given(
    ids=st.tuples(*[st.text(max_size=256)] * 4),
    numbers=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    verdict=st.sampled_from(ClaimVerdict),
    valid=st.floats(0, 86_400),
)
def test_any_notice_comes_back_as_it_was(
    ids: tuple[str, str, str, str], numbers: tuple[int, int], verdict: ClaimVerdict, valid: float
) -> None:
    """Any text, any generation and sequence."""
    lease: dict[str, Any] = {"engine_id": ids[0], "request_id": ids[1], "generation": numbers[0]}
    reader = Reader(key=PeerKey(engine_id=ids[2], rank=1), pull_id=ids[3])
    reply = ClaimReply(**lease, pull_id=ids[3], sequence=numbers[1], rank=0, verdict=verdict, valid_seconds=valid)
    for notice in (Claim(**lease, reader=reader, sequence=numbers[1]), reply):
        assert decode_notice(encode_notice(notice)) == notice


def test_a_long_reason_is_cut() -> None:
    """A failure must get through."""
    notice = evolve(FAILURE, reason="x" * 5000)
    assert decode_notice(encode_notice(notice)) == evolve(FAILURE, reason="x" * 512)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a notice"),
        (b"\x00", "not a notice: Expected `object`, got `int`"),
        (msgspec.msgpack.encode({"type": "hello"}), "not a notice: Invalid value 'hello'"),
        (bytes(MAX_NOTICE_BYTES + 1), "a notice has at most 4096 bytes, got 4097"),
        (encode_notice(CLAIM) + b"\x00", "not a notice"),
        (encode_notice(REPLY).replace(b"held", b"HELD"), "not a notice: Invalid enum value 'HELD'"),
        (encode_notice(evolve(REPLY, valid_seconds=1.0)).replace(b"\x3f\xf0", b"\x7f\xf0"), "valid_seconds must"),
    ],
    ids=["empty", "one_byte", "other_tag", "long", "trailing", "enum", "infinite"],
)
def test_what_is_no_notice_is_refused(data: bytes, message: str) -> None:
    """And the reason fits on a line."""
    with pytest.raises(RequestError, match=message) as caught:
        decode_notice(data)
    assert len(str(caught.value)) < 400


def test_messages_beyond_the_limits_are_neither_sent_nor_read() -> None:
    """Sizes are checked before anything is decoded."""
    with pytest.raises(LayoutError, match="a hello has at most 4194304 bytes"):
        encode_hello(evolve(HELLO, agent_metadata=bytes(MAX_HELLO_BYTES)))
    with pytest.raises(PeerLostError, match="a hello has at most 4194304 bytes, got 4194305"):
        decode_hello(bytes(MAX_HELLO_BYTES + 1), ours=OURS)
    with pytest.raises(RequestError, match="a hand-off has at most 4194304 bytes, got 4194305"):
        decode_hand_off(bytes(MAX_HAND_OFF_BYTES + 1))
    with pytest.raises(LayoutError, match="a notice has at most 4096 bytes"):
        encode_notice(evolve(CLAIM, request_id="x" * 5000))
    with pytest.raises(LayoutError, match="a hand-off has at most 4194304 bytes"):
        encode_hand_off(evolve(HAND_OFF, groups=make_groups((), range(2**20, 2**21))))


CODECS: dict[str, tuple[bytes, Callable[[bytes], object], type[GkError] | tuple[type[GkError], ...]]] = {
    "hello": (encode_hello(HELLO), lambda d: decode_hello(d, ours=OURS), (PeerLostError, PeerMismatchError)),
    "hand_off": (encode_hand_off(HAND_OFF), decode_hand_off, RequestError),
    "layout_json": (encode_layout_json(HELLO.layout), decode_layout_json, LayoutError),
    **{type(n).__name__: (encode_notice(n), decode_notice, RequestError) for n in NOTICES},
}


@pytest.mark.parametrize("name", list(CODECS))
def test_every_cut_of_a_message_is_refused(name: str) -> None:
    """Whatever its length."""
    data, decode, errors = CODECS[name]
    for length in range(len(data)):
        with pytest.raises(errors):
            decode(data[:length])


BOMBS = {
    "array_of_4_billion": b"\xdd\xff\xff\xff\xff",
    "map_of_4_billion": b"\xdf\xff\xff\xff\xff",
    "string_of_4_billion": b"\xdb\xff\xff\xff\xff",
    "bytes_of_4_billion": b"\xc6\xff\xff\xff\xff",
    "deep_arrays": b"\x91" * 3000,
    "deep_maps": b"\x81\xa1a" * 1000,
    "reserved": b"\xc1",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_a_bomb_is_refused_without_its_memory(bomb: str) -> None:
    """Alone, and in place of the array of block ids or the body."""
    hand_off = encode_hand_off(HAND_OFF)
    at = hand_off.index(b"remote_block_ids") + len(b"remote_block_ids")
    tracemalloc.start()
    for data, (_, decode, errors) in [(BOMBS[bomb], c) for c in CODECS.values()]:
        with pytest.raises(errors):
            decode(data)
    with pytest.raises(RequestError):
        decode_hand_off(hand_off[:at] + BOMBS[bomb] + hand_off[at + 1 :])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: flip, set, insert, delete, double, swap, or a length byte made huge."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(out) + 1), rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice((0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xCA, 0xD9, 0xDC, 0xDD, 0xFF, rng.randrange(256)))
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3:
            del out[at : at + rng.randint(1, 30)]
        elif kind == 4:
            out[at:at] = out[at : at + rng.randint(1, 60)]
        elif kind == 5:
            other = rng.randrange(len(out) + 1)
            out[at : at + 8], out[other : other + 8] = out[other : other + 8], out[at : at + 8]
        else:
            out[at : at + 5] = rng.choice((b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xcf\xff\xff\xff\xff"))
    return bytes(out)


def fuzz(rounds: int, seed: int) -> int:
    """Mutations that were still accepted; anything but a typed error fails."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(rounds):
        for data, decode, errors in CODECS.values():
            bad = mutated(data, rng)
            try:
                decode(bad)
                accepted += 1
            except errors as error:
                message = str(error)
                if not message.isprintable() or len(message) > 100_000:
                    raise AssertionError(f"a refusal that cannot be shown: {message[:200]!r}") from error
    return accepted


def test_mutated_messages_give_typed_errors_only() -> None:
    """Some mutations are harmless, and most are not."""
    rounds = 2000
    assert 0 < fuzz(rounds, seed=5) < rounds * len(CODECS) // 2


@pytest.mark.slow
def test_a_hundred_thousand_mutated_messages_give_typed_errors_only() -> None:
    """The long run, of each kind."""
    fuzz(100_000, seed=6)
