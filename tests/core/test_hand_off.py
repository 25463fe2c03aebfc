"""Hand-offs through a client: every key hostile."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.disaggregation import Role
from gk_core.errors import RequestError
from gk_core.hand_off import (
    MAX_BLOCKS_PER_GROUP,
    HandOff,
    parse_kv_transfer_params,
    require_offer,
    to_kv_transfer_params,
)
from gk_core.model_geometry import AttentionKind
from gk_core.transfer_plan import GroupBlocks
from gk_core.untrusted import shown
from tests.core.peer_builders import make_groups, make_peer

GOOD = HandOff(
    engine_id="P",
    request_id="r-bb",
    generation=7,
    num_tokens=254,
    groups=make_groups((3, 4), (5, 6)),
    host="10.0.0.7",
    port=5557,
    block_size=128,
    tp_size=8,
    dcp_size=1,
)

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P",
    "remote_request_id": "r-bb",
    "remote_generation": 7,
    "remote_num_tokens": 254,
    "remote_block_ids": [[3, 4], [5, 6]],
    "remote_first_blocks": [0, 0],
    "remote_group_kinds": ["sliding_attention", "full_attention"],
    "remote_host": "10.0.0.7",
    "remote_port": 5557,
    "remote_block_size": 128,
    "tp_size": 8,
    "remote_dcp_size": 1,
    "remote_checksums": [],
}
OPTIONAL = ("do_remote_decode", "remote_checksums")


def test_a_hand_off_is_these_keys() -> None:
    """What a client passes on; through JSON and back it is the same."""
    assert to_kv_transfer_params(GOOD) == PARAMS
    assert parse_kv_transfer_params(json.loads(json.dumps(PARAMS))) == GOOD


def test_keys_that_are_not_ours_are_ignored() -> None:
    """A proxy may add its own."""
    assert parse_kv_transfer_params({**PARAMS, "remote_pull_threshold": object()}) == GOOD


@given(
    name=st.text(st.characters(codec="ascii", exclude_categories=("Z", "C")), min_size=1, max_size=256),
    numbers=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**24), st.integers(1, 65_535)),
    sliding=st.lists(st.integers(0, 2**40), max_size=20),
    full=st.lists(st.integers(0, 2**40), max_size=20),
    first=st.integers(0, 2**24),
)
def test_every_hand_off_survives_json(
    name: str, numbers: tuple[int, int, int], sliding: list[int], full: list[int], first: int
) -> None:
    """Ids, generations, positions and block lists."""
    generation, num_tokens, port = numbers
    hand_off = evolve(
        GOOD,
        engine_id=name,
        request_id=name[::-1],
        generation=generation,
        num_tokens=num_tokens,
        port=port,
        groups=make_groups(sliding, full, first_sliding=first),
    )
    assert parse_kv_transfer_params(json.loads(json.dumps(to_kv_transfer_params(hand_off)))) == hand_off


@pytest.mark.parametrize("key", [k for k in PARAMS if k not in OPTIONAL])
def test_a_missing_key_is_named(key: str) -> None:
    """Absent, and null."""
    for params in ({k: v for k, v in PARAMS.items() if k != key}, {**PARAMS, key: None}):
        with pytest.raises(RequestError, match=key):
            parse_kv_transfer_params(params)


def test_checksums_may_be_left_out() -> None:
    """By a producer that makes none."""
    assert parse_kv_transfer_params({k: v for k, v in PARAMS.items() if k != "remote_checksums"}) == GOOD
    sums = {**PARAMS, "remote_checksums": [[0, 2**32 - 1], []]}
    assert parse_kv_transfer_params(sums).checksums == ((0, 2**32 - 1), ())
    assert to_kv_transfer_params(parse_kv_transfer_params(sums)) == sums


@pytest.mark.parametrize("params", [[PARAMS], "params", None, 7, [("tp_size", 8)]], ids=lambda p: type(p).__name__)
def test_parameters_that_are_no_mapping_are_refused(params: object) -> None:
    """A list of parameter sets where one is meant."""
    with pytest.raises(RequestError, match=f"must be a mapping, got {type(params).__name__}"):
        parse_kv_transfer_params(params)


HOSTILE: list[tuple[str, Any, str]] = [
    ("do_remote_prefill", 1, "do_remote_prefill must be true for a pull, got 1"),
    ("do_remote_prefill", "true", "do_remote_prefill must be true"),
    ("remote_engine_id", "", "remote_engine_id must be a string of 1..256 characters, got ''"),
    ("remote_engine_id", "x" * 257, "remote_engine_id must be a string of 1..256 characters"),
    ("remote_engine_id", b"P", "remote_engine_id must be a string"),
    ("remote_request_id", 5, "remote_request_id must be a string of 1..256 characters, got 5"),
    ("remote_request_id", "a\nb", "remote_request_id must hold no blanks or control characters"),
    ("remote_host", "a b", "remote_host must hold no blanks"),
    ("remote_host", ["h"], "remote_host must be a string of 1..256 characters, got a list"),
    ("remote_port", "abc", "remote_port must be an int 1..65535, got 'abc'"),
    ("remote_port", "5557", "remote_port must be an int 1..65535, got '5557'"),
    ("remote_port", 0, "remote_port must be an int 1..65535, got 0"),
    ("remote_port", 65_536, "remote_port must be an int 1..65535, got 65536"),
    ("remote_port", True, "remote_port must be an int 1..65535, got True"),
    ("remote_port", 5557.0, "remote_port must be an int 1..65535, got 5557.0"),
    ("remote_generation", -1, "remote_generation must be an int 0.."),
    ("remote_generation", 2**63, "remote_generation must be an int 0.."),
    ("remote_generation", 1 << 20_000, "got an int of 20001 bits"),
    ("remote_num_tokens", -1, "remote_num_tokens must be an int 0..16777216, got -1"),
    ("remote_num_tokens", 2**24 + 1, "remote_num_tokens must be an int 0..16777216, got 16777217"),
    ("remote_block_size", 0, "remote_block_size must be an int 1..65536, got 0"),
    ("tp_size", 4097, "tp_size must be an int 1..4096, got 4097"),
    ("remote_dcp_size", 0, "remote_dcp_size must be an int 1..4096, got 0"),
    ("remote_block_ids", {"0": [1]}, "remote_block_ids must be a list of at most 8 entries, got a dict"),
    ("remote_block_ids", [[1]] * 9, "remote_block_ids must be a list of at most 8 entries, got 9 entries"),
    ("remote_block_ids", [[3, 4]], "one entry per group, got 1, 2 and 2"),
    ("remote_block_ids", [[3, 4], 5], "remote_block_ids must be lists of at most 65536 ids, got 5"),
    ("remote_block_ids", [[3, 4], "56"], "remote_block_ids must be lists of at most 65536 ids, got '56'"),
    ("remote_block_ids", [[3, 4], [0] * (MAX_BLOCKS_PER_GROUP + 1)], "at most 65536 ids, got 65537 entries"),
    ("remote_block_ids", [[3, 4], [5, -6]], "remote_block_ids: block id must be an int >= 0, got -6 at entry 1"),
    ("remote_block_ids", [[3, True], [5, 6]], "got True at entry 1 of group sliding_attention"),
    ("remote_block_ids", [[3, 4], [5, 6.0]], "got 6.0 at entry 1 of group full_attention"),
    ("remote_block_ids", [[3, 4], [[5], 6]], "got a list at entry 0"),
    ("remote_first_blocks", [0], "one entry per group, got 2, 1 and 2"),
    ("remote_first_blocks", [0, -1], "remote_first_blocks must be ints 0..16777216, got -1"),
    ("remote_first_blocks", [0, True], "remote_first_blocks must be ints 0..16777216, got True"),
    ("remote_group_kinds", ["sliding_attention", "mamba"], "remote_group_kinds must be of sliding_attention, full_"),
    ("remote_group_kinds", ["sliding_attention", ["x"]], "got a list"),
    ("remote_checksums", [[1], [2**32]], "remote_checksums must be ints 0..4294967295, got 4294967296"),
    ("remote_checksums", [[None], [1]], "remote_checksums must be ints 0..4294967295, got None"),
    ("remote_checksums", [[1], [-1]], "remote_checksums must be ints 0..4294967295, got -1"),
    ("remote_checksums", [7], "remote_checksums must be lists of at most 1000000 sums, got 7"),
    ("remote_group_kinds", "full_attention", "remote_group_kinds must be a list of at most 8 entries"),
]


@pytest.mark.parametrize(("key", "value", "message"), HOSTILE, ids=[f"{h[0]}_{i}" for i, h in enumerate(HOSTILE)])
def test_a_hostile_value_is_refused_by_its_key(key: str, value: object, message: str) -> None:
    """Type, range, count and size; the message is one short line."""
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        parse_kv_transfer_params({**PARAMS, key: value})
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_no_groups_at_all_are_refused() -> None:
    """Three empty lists agree with each other, and offer nothing."""
    empty: dict[str, Any] = {"remote_block_ids": [], "remote_first_blocks": [], "remote_group_kinds": []}
    with pytest.raises(RequestError, match="one entry per group, got 0, 0 and 0"):
        parse_kv_transfer_params({**PARAMS, **empty})


def test_an_empty_list_beside_a_full_one_is_legal() -> None:
    """Nothing of one group to offer."""
    assert parse_kv_transfer_params({**PARAMS, "remote_block_ids": [[], [5, 6]]}).groups[0].block_ids == ()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=50)
@given(key=st.sampled_from(sorted(PARAMS)), value=JUNK)
def test_any_junk_under_any_key_gives_a_hand_off_or_a_request_error(key: str, value: object) -> None:
    """Nothing else comes out, and what is accepted is what was sent."""
    try:
        hand_off = parse_kv_transfer_params({**PARAMS, key: value})
    except RequestError:
        return
    if key not in OPTIONAL or (key == "remote_checksums" and value):
        assert to_kv_transfer_params(hand_off)[key] == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine_id": "P0"}, "remote_engine_id must be the producer's 'P', got 'P0'"),
        ({"block_size": 64}, "remote_block_size must be the producer's 128, got 64"),
        ({"tp_size": 4}, "tp_size must be the producer's 8, got 4"),
        ({"dcp_size": 2}, "remote_dcp_size must be the producer's 1, got 2"),
        ({"groups": make_groups((3,), (5,))[::-1]}, "remote_group_kinds must be the producer's 'sliding_attention, "),
        ({"groups": make_groups((3,), (5,))[:1]}, "got 'sliding_attention'"),
    ],
)
def test_a_hand_off_that_contradicts_its_producer_is_refused(change: dict[str, Any], message: str) -> None:
    """A reference to an engine that has restarted, or altered on its way."""
    producer = make_peer(Role.PREFILL)
    require_offer(GOOD, producer)
    with pytest.raises(RequestError, match=re.escape(message)):
        require_offer(evolve(GOOD, **change), producer)


def test_hostile_values_are_shown_short_and_escaped() -> None:
    """One line of printable characters, whatever it was."""
    assert shown("a" * 65) == "'" + "a" * 64 + "'..."
    assert shown(b"\x00") == "b'\\x00'"
    assert shown("\x1b[31m") == "'\\x1b[31m'"
    assert shown(2**64 - 1) == "18446744073709551615"
    assert shown(2**64) == "an int of 65 bits"
    assert shown(None) == "None"
    assert shown({}) == "a dict"
    assert shown(GroupBlocks(kind=AttentionKind.FULL, first_logical=0, block_ids=())) == "a GroupBlocks"
