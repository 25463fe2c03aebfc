"""What peers must agree on: every field alone, what may differ, and hellos."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, fields

from gk_core.disaggregation import Role
from gk_core.errors import LayoutError, Mismatch, PeerMismatchError
from gk_core.handshake import (
    PeerHello,
    check_peer,
    compare_fields,
    contract_fields,
    fingerprint,
    require_identity,
)
from gk_core.kv_layout import KByteOrder, KVHalf
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import AttentionKind, YarnRope
from gk_core.peer_layout import BlockOrder, PeerLayout, ScaleGranularity, TransferMode
from gk_core.region import KVRegion
from tests.core.peer_builders import make_peer, make_rank

S, F = AttentionKind.SLIDING, AttentionKind.FULL
ROPE = YarnRope(theta=150_000.0, factor=32.0, original_max_position=4096)

CONTRACT: list[tuple[str, dict[str, Any], str, str]] = [  # field, change, value before, value after
    ("schema_version", {"schema_version": 2}, "1", "2"),
    ("weights_id", {"weights_id": "tuned"}, "", "tuned"),
    ("num_layers", {"num_layers": 24}, "36", "24"),
    ("hidden_size", {"hidden_size": 2048}, "2880", "2048"),
    ("num_q_heads", {"num_q_heads": 32}, "64", "32"),
    ("num_kv_heads", {"num_kv_heads": 4}, "8", "4"),
    ("head_size", {"head_size": 128}, "64", "128"),
    ("vocab_size", {"vocab_size": 201_089}, "201088", "201089"),
    ("sliding_window", {"sliding_window": 129}, "128", "129"),
    ("attention_kinds", {"attention_kinds": (F, S) * 18}, "SF" * 18, "FS" * 18),
    ("rope.theta", {"rope": evolve(ROPE, theta=10_000.0)}, "150000.0", "10000.0"),
    ("rope.factor", {"rope": evolve(ROPE, factor=16.0)}, "32.0", "16.0"),
    ("rope.original_max_position", {"rope": evolve(ROPE, original_max_position=8192)}, "4096", "8192"),
    ("rope.beta_fast", {"rope": evolve(ROPE, beta_fast=31.0)}, "32.0", "31.0"),
    ("rope.beta_slow", {"rope": evolve(ROPE, beta_slow=2.0)}, "1.0", "2.0"),
    ("rope.truncate", {"rope": evolve(ROPE, truncate=True)}, "False", "True"),
    ("kernel_block_size", {"kernel_block_size": 64}, "128", "64"),
    ("kv_dtype", {"kv_dtype": KVDtype.FP8_E4M3}, "float8_e4m3fn", "float8_e4m3"),
    ("kv_dtype", {"kv_dtype": KVDtype.BF16}, "float8_e4m3fn", "bfloat16"),
    ("k_byte_order", {"k_byte_order": KByteOrder.TOKEN_MAJOR}, "pair_packed", "token_major"),
    ("block_order", {"block_order": BlockOrder.TOKEN_MAJOR}, "kv,block,d", "block,kv,d"),
    ("k_scale", {"k_scale": 2.0}, "1.0", "2.0"),
    ("v_scale", {"v_scale": 0.5}, "1.0", "0.5"),
    ("scale_granularity", {"scale_granularity": ScaleGranularity.PER_BLOCK}, "per_tensor", "per_block"),
    ("buffer_layers", {"buffer_layers": ((0, 1), (2, 21), (3, 20))}, "0,1/2,3/4,5/", "0,1/2,21/3,20"),
    ("group_kinds", {"group_kinds": (F, S)}, "sliding_attention,full_attention", "full_attention,sliding_attention"),
    ("group_kinds", {"group_kinds": (F,), "group_block_sizes": (128,)}, "sliding_attention,", "full_attention"),
    ("num_regions", {"block_bytes": (8192,) * 18}, "36", "18"),
    ("transfer_mode", {"transfer_mode": TransferMode.PUSH}, "pull", "push"),
    ("num_speculative_tokens", {"num_speculative_tokens": 3}, "0", "3"),
]  # fmt: skip
IDS = [f"{c[0]}={next(iter(c[1].values()))}"[:40] for c in CONTRACT]

MAPPED: list[tuple[str, dict[str, Any]]] = [  # refused because they do not fit, not because they differ
    ("block_bytes", {"block_bytes": (16_384,) * 36}),
    ("block_bytes", {"block_bytes": (8192,) * 35 + (4096,)}),
    ("block_bytes", {"tp_size": 4}),
    ("engine_id", {"engine_id": "D"}),
]


@pytest.mark.parametrize("role", list(Role), ids=lambda r: f"ours_{r.value}")
@pytest.mark.parametrize("theirs_differs", [True, False], ids=["theirs", "ours"])
@pytest.mark.parametrize(("field", "change", "before", "after"), CONTRACT, ids=IDS)
def test_a_contract_field_changed_alone_is_refused_by_its_name_with_both_values(
    field: str, change: dict[str, Any], before: str, after: str, theirs_differs: bool, role: Role
) -> None:
    """Changed on either side, seen from either role."""
    ours, theirs = make_peer(role), make_peer(role.other)
    if theirs_differs:
        found = check_peer(ours, evolve(theirs, **change))
        shown = (found[0].ours, found[0].theirs)
    else:
        found = check_peer(evolve(ours, **change), theirs)
        shown = (found[0].theirs, found[0].ours)
    assert [m.field for m in found] == [field]
    assert shown[0].startswith(before)
    assert shown[1] == after


@pytest.mark.parametrize(("field", "change", "before", "after"), CONTRACT, ids=IDS)
def test_each_contract_field_changes_the_fingerprint(
    field: str, change: dict[str, Any], before: str, after: str
) -> None:
    """And only contract fields do."""
    peer = make_peer(Role.DECODE)
    assert fingerprint(evolve(peer, **change)) != fingerprint(peer)


def test_every_contract_field_is_tried() -> None:
    """The table above has no gap; 28 fields."""
    assert {c[0] for c in CONTRACT} == set(contract_fields(make_peer(Role.DECODE)))
    assert len(contract_fields(make_peer(Role.DECODE))) == 28


def test_every_field_of_a_layout_is_compared_or_mapped() -> None:
    """A new field of PeerLayout has to find its place."""
    mapped = {
        "engine_id", "role", "group_block_sizes", "num_blocks", "block_bytes", "tp_size", "tp_rank", "dcp_size",
        "dcp_rank", "interleave_size",
    }  # fmt: skip
    contract = {n.partition(".")[0] for n in contract_fields(make_peer(Role.DECODE))} - {"num_regions"}
    names = {a.name for a in fields(PeerLayout)}
    assert contract | mapped == names
    assert contract & mapped == set()


@pytest.mark.parametrize("ours_differs", [True, False])
@pytest.mark.parametrize(("field", "change"), MAPPED, ids=["doubled", "uneven", "tp", "own_engine"])
def test_a_mapped_field_that_does_not_fit_is_refused_by_its_name(
    field: str, change: dict[str, Any], ours_differs: bool
) -> None:
    """A peer with 16384-byte blocks at TP8 holds two heads, another dtype, or K and V together."""
    ours, theirs = make_peer(Role.DECODE), make_peer(Role.PREFILL)
    if ours_differs:
        change = {"engine_id": "P"} if field == "engine_id" else change
        found = check_peer(evolve(ours, **change), theirs)
    else:
        found = check_peer(ours, evolve(theirs, **change))
    assert [m.field for m in found] == [field]


def test_a_block_length_that_both_sides_share_must_still_be_their_own() -> None:
    """K and V joined on both sides: equal lengths, and both wrong."""
    joined = (16_384,) * 36
    found = check_peer(
        evolve(make_peer(Role.DECODE), block_bytes=joined), evolve(make_peer(Role.PREFILL), block_bytes=joined)
    )
    assert [str(m) for m in found] == [
        "block_bytes: ours 16384, theirs 16384 (by their own numbers 8192 and 8192 in every region)"
    ]


def test_heads_that_overlap_in_no_whole_ratio_are_refused() -> None:
    """6 heads: 3 per rank at TP2 against 2 per rank at TP3."""

    def peer(role: Role, tp: int) -> PeerLayout:
        per_rank = 6 // tp
        return evolve(make_peer(role), num_kv_heads=6, tp_size=tp, block_bytes=(per_rank * 8192,) * 36)

    assert [str(m) for m in check_peer(peer(Role.DECODE, 3), peer(Role.PREFILL, 2))] == [
        "block_bytes: ours 16384, theirs 24576 (neither is a multiple of the other)"
    ]
    assert check_peer(peer(Role.DECODE, 6), peer(Role.PREFILL, 2)) == ()


def test_a_producer_pairs_with_a_consumer_only() -> None:
    """Two prefill engines, two decode engines."""
    for role in Role:
        found = check_peer(make_peer(role), evolve(make_peer(role), engine_id="other"))
        assert [(m.field, m.ours) for m in found] == [("role", role.value)]


def test_values_that_are_never_served_are_refused_on_equal_peers() -> None:
    """Per-block scales and push, even where both sides agree."""
    both: list[tuple[str, dict[str, Any]]] = [
        ("scale_granularity", {"scale_granularity": ScaleGranularity.PER_BLOCK}),
        ("transfer_mode", {"transfer_mode": TransferMode.PUSH}),
    ]
    for field, change in both:
        found = check_peer(evolve(make_peer(Role.DECODE), **change), evolve(make_peer(Role.PREFILL), **change))
        assert [m.field for m in found] == [field]


def test_token_major_blocks_match_but_cannot_be_split() -> None:
    """A head of such a block is not one run of bytes."""
    change: dict[str, Any] = {"block_order": BlockOrder.TOKEN_MAJOR}
    ours = evolve(make_peer(Role.DECODE), **change)
    assert check_peer(ours, evolve(make_peer(Role.PREFILL), **change)) == ()
    found = check_peer(ours, evolve(make_peer(Role.PREFILL, tp=4), **change))
    assert [m.field for m in found] == ["block_order"]


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_sizes_that_fit_are_accepted(tp: int) -> None:
    """TP sizes, block lengths, block counts and engine names may differ."""
    theirs = make_peer(Role.PREFILL, tp=tp, rank=tp - 1, num_blocks=77)
    assert check_peer(make_peer(Role.DECODE, num_blocks=20_000), theirs) == ()
    assert fingerprint(theirs) == fingerprint(make_peer(Role.DECODE, num_blocks=20_000))


@pytest.mark.parametrize(
    ("block", "kernel", "theirs_block", "refused"),
    [
        (64, 64, 128, []),
        (64, 64, 256, []),
        (64, 128, 128, ["kernel_block_size"]),
        (16, 16, 32, []),
        (16, 32, 32, ["kernel_block_size"]),
    ],
)
def test_block_sizes_may_differ_over_equal_kernel_blocks(
    block: int, kernel: int, theirs_block: int, refused: list[str]
) -> None:
    """Ours 64 over 64; theirs 128 over 64 is mapped, 128 over 128 is refused at connect time. So with 16 and 32."""
    ours = evolve(
        make_peer(Role.DECODE), kernel_block_size=block, group_block_sizes=(block,) * 2, block_bytes=(block * 64,) * 36
    )
    theirs = evolve(
        make_peer(Role.PREFILL),
        kernel_block_size=kernel,
        group_block_sizes=(theirs_block,) * 2,
        block_bytes=(kernel * 64,) * 36,
    )
    assert [m.field for m in check_peer(ours, theirs)] == refused


def test_48_against_32_tokens_per_block_is_refused() -> None:
    """By name, with both values."""

    def peer(role: Role, size: int) -> PeerLayout:
        return evolve(
            make_peer(role), kernel_block_size=size, group_block_sizes=(size, size), block_bytes=(size * 64,) * 36
        )

    assert [str(m) for m in check_peer(peer(Role.DECODE, 48), peer(Role.PREFILL, 32))] == [
        "kernel_block_size: ours 48, theirs 32"
    ]


@pytest.mark.parametrize(("kernel", "sizes"), [(64, (64, 128)), (16, (128, 16))])
def test_groups_of_one_side_need_one_block_size(kernel: int, sizes: tuple[int, int]) -> None:
    """They draw from one pool and share buffers: the smaller size is never taken for both."""
    block_bytes = (kernel * 64,) * 36
    theirs = evolve(make_peer(Role.PREFILL), kernel_block_size=kernel, group_block_sizes=sizes, block_bytes=block_bytes)
    ours = evolve(
        make_peer(Role.DECODE), kernel_block_size=kernel, group_block_sizes=(kernel,) * 2, block_bytes=block_bytes
    )
    assert [(m.field, m.ours) for m in check_peer(ours, theirs)] == [("group_block_sizes", f"({kernel}, {kernel})")]
    assert [m.field for m in check_peer(theirs, ours)] == ["group_block_sizes"]


DCP: list[tuple[str, int, dict[str, Any]]] = [  # field, dcp of the peer, change
    ("dcp_rank", 2, {"dcp_rank": 1}),
    ("interleave_size", 2, {"interleave_size": 64}),
    ("group_block_sizes", 2, {"group_block_sizes": (256, 256), "interleave_size": 256}),
]


@pytest.mark.parametrize("ours_differs", [True, False])
@pytest.mark.parametrize(("field", "dcp", "change"), DCP, ids=[d[0] for d in DCP])
def test_context_parallel_fields_must_fit(field: str, dcp: int, change: dict[str, Any], ours_differs: bool) -> None:
    """Where a side has DCP, both deal out whole blocks, dcp innermost."""
    a, b = make_peer(Role.DECODE, tp=16, dcp=2), make_peer(Role.PREFILL, tp=16, dcp=dcp)
    assert check_peer(a, b) == ()
    pair = (evolve(a, **change), b) if ours_differs else (a, evolve(b, **change))
    assert [m.field for m in check_peer(*pair)] == [field]


def test_an_interleave_that_both_sides_share_must_still_be_the_block_size() -> None:
    """Half a block each, dealt out alike: not the dealing that plans pair by."""
    a, b = (evolve(make_peer(r, tp=16, dcp=2), interleave_size=64) for r in Role)
    assert [m.field for m in check_peer(a, b)] == ["interleave_size"]


def test_an_interleave_without_context_parallelism_means_nothing() -> None:
    """It is not compared where neither side has DCP."""
    assert check_peer(evolve(make_peer(Role.DECODE), interleave_size=1), make_peer(Role.PREFILL)) == ()


@pytest.mark.parametrize(("p", "d"), [(3, 2), (2, 3)])
def test_context_parallel_sizes_in_no_whole_ratio_are_refused(p: int, d: int) -> None:
    """Never truncated: 3 to 2 and 2 to 3."""
    found = check_peer(make_peer(Role.DECODE, tp=8 * d, dcp=d), make_peer(Role.PREFILL, tp=8 * p, dcp=p))
    assert [str(m) for m in found] == [f"dcp_size: ours {d}, theirs {p} (neither is a multiple of the other)"]


def test_all_mismatches_are_reported_at_once() -> None:
    """A 20B peer without HMA and with another dtype: every field, each once."""
    theirs = evolve(
        make_peer(Role.PREFILL),
        num_layers=24,
        attention_kinds=(S, F) * 12,
        kv_dtype=KVDtype.BF16,
        group_kinds=(F,),
        group_block_sizes=(128,),
    )
    names = [m.field for m in check_peer(make_peer(Role.DECODE), theirs)]
    assert names == ["num_layers", "attention_kinds", "kv_dtype", "group_kinds"]


def test_the_fingerprint_is_fixed_by_the_schema() -> None:
    """A change of this value needs a new SCHEMA_VERSION."""
    assert fingerprint(make_peer(Role.DECODE)) == PINNED
    assert fingerprint(make_rank(make_peer(Role.PREFILL, tp=16, dcp=2), 7)) == PINNED


PINNED = "3a3f47db2d4bf619de503657718ea02fdcdec43decae8f20dba1a39b0fa0de23"


def test_fields_that_only_one_side_has_are_named() -> None:
    """A peer of another version, and hostile text shown escaped and cut."""
    found = compare_fields({"a": "1", "b": "2"}, {"a": "1", "c\n": "x" * 5000})
    assert found[0] == Mismatch(field="b", ours="2", theirs="absent")
    assert (found[1].field, found[1].ours) == ("c\\n", "absent")
    assert found[1].theirs == "x" * 512


def test_an_answer_from_somebody_else_is_refused_with_both_ids() -> None:
    """Expected E1, got E2; expected rank 3, got rank 0."""
    peer = evolve(make_peer(Role.PREFILL), engine_id="E2")
    require_identity(peer, engine_id="E2", tp_rank=0)
    with pytest.raises(PeerMismatchError, match="engine_id: ours E1, theirs E2; tp_rank: ours 3, theirs 0") as caught:
        require_identity(peer, engine_id="E1", tp_rank=3)
    assert [m.field for m in caught.value.mismatches] == ["engine_id", "tp_rank"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be >= 1, got 0"),
        ({"engine_id": ""}, "engine_id must not be empty"),
        ({"k_scale": float("nan")}, "k_scale must be a positive finite number, got nan"),
        ({"v_scale": 0.0}, "v_scale must be a positive finite number, got 0.0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be >= 0"),
        ({"block_bytes": ()}, "block_bytes must have one entry >= 1 per region"),
        ({"block_bytes": (0,)}, "block_bytes must have one entry >= 1 per region"),
        ({"group_block_sizes": (128,)}, "need one block size per KV cache group: got 1 for 2"),
        ({"group_block_sizes": (128, 64)}, "multiples of kernel_block_size 128, got 64"),
        ({"group_block_sizes": (128, 256), "num_blocks": 3}, "multiple of the 2 kernel blocks of one block, got 3"),
        ({"tp_rank": 8}, "tp_rank 8 of 8"),
        ({"dcp_rank": 1}, "dcp_rank 1 of 1"),
        ({"dcp_size": 3}, "dcp_size must divide tp_size, got dcp_size 3 and tp_size 8"),
        ({"tp_size": 12}, "12 ranks must divide num_kv_heads 8 or be a multiple of it"),
    ],
)
def test_numbers_that_describe_no_cache_are_refused(change: dict[str, Any], message: str) -> None:
    """Naming the field."""
    with pytest.raises(LayoutError, match=message):
        evolve(make_peer(Role.DECODE), **change)


def make_regions(layout: PeerLayout, base: int = 0x1000) -> tuple[KVRegion, ...]:
    size = layout.num_blocks * 8192
    return tuple(
        KVRegion(
            buffer_index=i // 2,
            half=KVHalf(i % 2),
            base_address=base + i * size,
            num_blocks=layout.num_blocks,
            block_bytes=8192,
            block_stride_bytes=8192,
        )
        for i in range(36)
    )


def test_a_hello_holds_the_regions_that_its_layout_promises() -> None:
    """36 of them, in order, inside the address space, apart."""
    layout = make_peer(Role.PREFILL, num_blocks=11)
    good = make_regions(layout)
    PeerHello(layout=layout, agent_metadata=b"x", regions=good)
    bad: list[tuple[tuple[KVRegion, ...], str]] = [
        (good[:35], "need 36 regions as in block_bytes, got 35"),
        ((good[1], good[0], *good[2:]), r"region 0 must be \(buffer, half"),
        ((evolve(good[0], num_blocks=12), *good[1:]), "region 0 must be"),
        ((*good[:35], evolve(good[35], block_bytes=4096)), "region 35 must be"),
        ((*good[:35], evolve(good[35], base_address=2**64 - 8192)), "past the 64-bit address space"),
        ((*good[:35], evolve(good[35], base_address=0x1001)), "regions overlap"),
        ((*good[:35], evolve(good[35], base_address=good[34].end_address - 1)), "regions overlap"),
    ]
    for regions, message in bad:
        with pytest.raises(LayoutError, match=message):
            PeerHello(layout=layout, agent_metadata=b"x", regions=regions)


def test_regions_of_different_devices_may_have_equal_addresses() -> None:
    """An address means something on one device only."""
    layout = make_peer(Role.PREFILL, num_blocks=11)
    good = make_regions(layout)
    moved = (*good[:35], evolve(good[0], buffer_index=17, half=KVHalf.V, device_id=1))
    PeerHello(layout=layout, agent_metadata=b"x", regions=moved)
