"""Roles, deployments, and the one-token-short rule with its traps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from gk_core.disaggregation import (
    Deployment,
    Role,
    cap_prefix_hit,
    deployment_faults,
    matched_tokens,
    needed_blocks,
    needed_range,
    require_deployment,
    require_truncated_once,
    stock_rule_loses_a_block,
    strip_leading_nulls,
    tokens_to_drop,
    transfer_tokens,
)
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.model_geometry import AttentionKind, alternating_kinds

S, F = AttentionKind.SLIDING, AttentionKind.FULL

GOOD = Deployment(
    role=Role.DECODE,
    gk_decode=True,
    lnc=1,
    hybrid_kv_cache=True,
    group_kinds=(S, F),
    buffer_layers=((0, 1), (2, 3), (4, 5)),
    attention_kinds=alternating_kinds(6),
)

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("producer", {"role": Role.PREFILL}, "decodes only"),
    ("fused", {"role": None}, "one engine for prefill and decode at lnc 1 does not compile"),
    ("lnc", {"lnc": 2}, "got lnc 2"),
    ("hma_off", {"hybrid_kv_cache": False}, "--no-disable-hybrid-kv-cache-manager"),
    ("one_group", {"group_kinds": (F,)}, "needs 2 KV cache groups, sliding_attention then full_attention, got 1"),
    ("groups_swapped", {"group_kinds": (F, S)}, "got 2: full_attention, sliding_attention"),
    ("three_groups", {"group_kinds": (S, F, F)}, "got 3"),
    ("pairs", {"buffer_layers": ((0, 1), (2, 5), (4, 3))}, "buffer 1 shared by [2, 5]"),
    ("buffers", {"buffer_layers": ((0, 1), (2, 3))}, "got 2 buffers"),
    ("parity", {"attention_kinds": (F, S) * 3}, "layer 0 is full_attention, must be sliding_attention"),
    ("draft_tokens", {"num_speculative_tokens": 3}, "got 3 draft tokens"),
    ("dcp", {"dcp_size": 2}, "dcp_size 1, got 2"),
]


@pytest.mark.parametrize(("change", "reason"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_each_wrong_deployment_is_refused_with_its_own_reason(change: dict[str, Any], reason: str) -> None:
    """One setting at a time, one reason each."""
    deployment = evolve(GOOD, **change)
    assert len(deployment_faults(deployment)) == 1
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        require_deployment(deployment)


def test_a_good_deployment_starts() -> None:
    """A decode engine at lnc 1 with two groups."""
    require_deployment(GOOD)


def test_all_reasons_are_given_at_once() -> None:
    """Not only the first."""
    everything: dict[str, Any] = {}
    for name, change, _ in FAULTS:
        if name in ("producer", "lnc", "hma_off", "one_group", "pairs", "parity", "draft_tokens", "dcp"):
            everything |= change
    assert len(deployment_faults(evolve(GOOD, **everything))) == 8


def test_an_engine_without_the_giga_kernel_is_not_held_to_its_rules() -> None:
    """A native prefill engine may have DCP, lnc 2 and any role."""
    require_deployment(evolve(GOOD, gk_decode=False, role=Role.PREFILL, lnc=2, dcp_size=4))


def test_roles_pair_up() -> None:
    """Prefill with decode."""
    assert (Role.PREFILL.other, Role.DECODE.other) == (Role.DECODE, Role.PREFILL)


NEEDED = [  # block size, N, sliding blocks that the last token's query reads, whether the stock rule loses one
    (128, 127, {0}, False),
    (128, 254, {0, 1}, False),
    (128, 255, {0, 1}, True),
    (128, 256, {1}, False),
    (128, 383, {1, 2}, True),
    (128, 10_240, {79}, False),
    (128, 10_239, {78, 79}, True),
    (16, 143, set(range(9)), True),
    (64, 191, {0, 1, 2}, True),
    (256, 383, {0, 1}, True),
    (256, 255, {0}, False),
    (256, 511, {1}, False),
    (128, 129, {0}, False),
    (128, 2, {0}, False),
    (128, 1, set(), False),
]


@pytest.mark.parametrize(("block_size", "n", "sliding", "lost"), NEEDED)
def test_needed_sliding_blocks_are_those_of_the_last_tokens_window(
    block_size: int, n: int, sliding: set[int], lost: bool
) -> None:
    """Worked by hand for a window of 128."""
    needed = needed_blocks(n, 128, block_size)
    assert set(needed.sliding) == sliding
    assert set(needed.full) == set(range(-(-(n - 1) // block_size)))
    assert stock_rule_loses_a_block(n, 128, block_size) is lost


@pytest.mark.parametrize(
    ("block_size", "lengths"),
    [(64, [191, 255, 319, 383, 447]), (128, [255, 383, 511, 639]), (256, [383, 639])],
)
def test_the_stock_rule_is_wrong_exactly_where_a_stock_server_was_seen_to_be(
    block_size: int, lengths: list[int]
) -> None:
    """Lengths at which two stock servers gave wrong log-probabilities; with block 256, not 255 and not 511."""
    assert [n for n in range(1, lengths[-1] + 1) if stock_rule_loses_a_block(n, 128, block_size)] == lengths


@given(n=st.integers(1, 3000), window=st.integers(1, 300), block_size=st.integers(1, 300))
def test_needed_blocks_hold_exactly_the_keys_that_are_read(n: int, window: int, block_size: int) -> None:
    """Token by token: every key of the last query but its own, and no block without one."""
    keys = [k for k in range(n - 1) if k > n - 1 - window]
    assert set(needed_blocks(n, window, block_size).sliding) == {k // block_size for k in keys}


@given(n=st.integers(1, 3000), window=st.integers(1, 300), block_size=st.integers(1, 300))
def test_the_stock_rule_loses_a_block_exactly_when_it_says(n: int, window: int, block_size: int) -> None:
    """Stock keeps blocks from floor((N - W + 1) / B) on; needed ones begin where the query's window does."""
    stock_first = max(n - window + 1, 0) // block_size
    needed_first = max(n - window, 0) // block_size
    assert stock_rule_loses_a_block(n, window, block_size) is (stock_first > needed_first)


@given(n=st.integers(1, 5000), multiple=st.integers(1, 8), block_size=st.integers(1, 64))
def test_where_blocks_divide_the_window_the_residue_is_the_blocks_last(n: int, multiple: int, block_size: int) -> None:
    """N mod B = B - 1, once the window is full."""
    window = multiple * block_size
    expected = n >= window and n % block_size == block_size - 1
    assert stock_rule_loses_a_block(n, window, block_size) is expected


def test_needed_range_is_empty_when_nothing_moves() -> None:
    """No tokens, or a window of one token at a block's edge."""
    assert list(needed_range(0, 128, 128)) == []
    assert list(needed_range(0, None, 128)) == []
    assert list(needed_range(256, 1, 128)) == []


def test_a_prompt_gives_all_tokens_but_the_last() -> None:
    """And an empty prompt none."""
    assert [transfer_tokens(n) for n in (1, 2, 128, 255)] == [0, 1, 127, 254]
    with pytest.raises(LayoutError, match="at least 1 token, got 0"):
        transfer_tokens(0)


@pytest.mark.parametrize(("window", "block_size", "name"), [(0, 128, "sliding_window"), (128, 0, "block_size")])
def test_needed_blocks_refuses_sizes_below_one(window: int, block_size: int, name: str) -> None:
    """Naming which."""
    with pytest.raises(LayoutError, match=f"{name} must be >= 1 token, got 0"):
        needed_blocks(5, window, block_size)


def test_truncating_twice_drops_one_token() -> None:
    """The marker makes the hook idempotent; N = 1, embeddings and full-attention models are left alone."""
    assert tokens_to_drop(255, marked=False) == 1
    assert tokens_to_drop(254, marked=True) == 0
    assert tokens_to_drop(1, marked=False) == 0
    assert tokens_to_drop(2, marked=False) == 1
    assert tokens_to_drop(255, marked=False, has_token_ids=False) == 0
    assert tokens_to_drop(255, marked=False, has_sliding_group=False) == 0


def test_a_prompt_that_something_else_cut_too_is_refused() -> None:
    """The tripwire for an engine that learns the rule itself."""
    require_truncated_once(truncated_len=254, now_len=254)
    with pytest.raises(UnsupportedError, match="cut to 254 tokens for transfer now has 253"):
        require_truncated_once(truncated_len=254, now_len=253)


@pytest.mark.parametrize(
    ("hit", "tokens", "block_size", "capped"),
    [
        (128, 128, 128, 0),  # N = 129: the one full block may not be taken whole
        (7680, 7680, 64, 7616),  # N = 7681
        (128, 129, 128, 128),
        (0, 5, 128, 0),
        (256, 200, 128, 128),
        (5, 0, 16, 0),
        (70, 100, 16, 64),
    ],
)
def test_a_prefix_hit_leaves_a_token_to_run(hit: int, tokens: int, block_size: int, capped: int) -> None:
    """Whole blocks, and never all tokens."""
    assert cap_prefix_hit(hit, tokens, block_size) == capped


@given(hit=st.integers(0, 2000), tokens=st.integers(1, 2000), block_size=st.integers(1, 300))
def test_a_capped_hit_is_the_longest_allowed(hit: int, tokens: int, block_size: int) -> None:
    """No longer whole-block prefix fits the hit and leaves a token."""
    capped = cap_prefix_hit(hit, tokens, block_size)
    assert capped % block_size == 0
    assert capped <= hit
    assert capped < tokens
    assert capped + block_size > hit or capped + block_size >= tokens


@pytest.mark.parametrize(
    ("external", "computed", "prompt", "matched"),
    [
        (255, 0, 255, 254),
        (254, 0, 255, 254),  # already short: not cut again
        (1, 0, 1, 0),  # N = 1
        (127, 128, 255, 126),  # prefix hit of one block
        (100, 128, 255, 100),  # a partial pull is left alone
        (0, 255, 255, 0),
        (0, 254, 255, 0),  # fully cached
        (1, 254, 255, 0),
    ],
)
def test_a_consumer_never_counts_its_last_token_as_received(
    external: int, computed: int, prompt: int, matched: int
) -> None:
    """So at least one token is left to run."""
    assert matched_tokens(external, num_computed_tokens=computed, prompt_len=prompt) == matched


@pytest.mark.parametrize(
    ("ids", "stripped"),
    [
        ((0, 0, 57, 58), (2, (57, 58))),
        ((57, 0, 58), (0, (57, 0, 58))),
        ((0, 0), (2, ())),
        ((), (0, ())),
    ],
)
def test_leading_nulls_leave_their_count_behind(ids: tuple[int, ...], stripped: tuple[int, tuple[int, ...]]) -> None:
    """Only leading ones go, and the position of what is left is kept."""
    assert strip_leading_nulls(ids) == stripped
