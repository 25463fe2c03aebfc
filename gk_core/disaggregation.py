"""Disaggregated inference: the two roles, what may be deployed, and the one-token-short rule.

N prompt tokens, W sliding window, B block size, T = N - 1 tokens that move.

The decode side recomputes the last prompt token to get its logits, so both sides work at T tokens and the next query is
at position T. It reads keys T - W + 1 .. T. A side that counts N tokens as computed gives up floor((N - W + 1) / B)
blocks of the sliding group; where B divides N - W + 1 > 0, the last of those blocks is still read, and it is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from attrs import frozen

from gk_core.block_table import NULL_BLOCK_ID, first_window_block
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.model_geometry import AttentionKind, kind_of_layer, layers_of_buffer

__all__ = [
    "TRUNCATION_MARKER",
    "Deployment",
    "NeededBlocks",
    "Role",
    "cap_prefix_hit",
    "deployment_faults",
    "matched_tokens",
    "needed_blocks",
    "needed_range",
    "require_deployment",
    "require_truncated_once",
    "stock_rule_loses_a_block",
    "strip_leading_nulls",
    "tokens_to_drop",
    "transfer_tokens",
]

TRUNCATION_MARKER = "_gk_one_token_short"
"""Key that a producer sets in a request's transfer parameters when it has shortened the prompt."""


class Role(Enum):
    """What an engine does with KV."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role of its peer."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@frozen(kw_only=True)
class Deployment:
    """One engine as it was configured.

    Attributes:
        role: prefill (producer) or decode (consumer); None when one engine does both.
        gk_decode: whether the giga kernel runs its decode steps.
        lnc: logical NeuronCore config.
        hybrid_kv_cache: whether the hybrid KV-cache manager (HMA) is on.
        group_kinds: attention kind of each KV cache group, in order.
        buffer_layers: layers that share each buffer.
        attention_kinds: one per layer.
        num_speculative_tokens: draft tokens per step.
        dcp_size: decode-context-parallel ranks.
    """

    role: Role | None
    gk_decode: bool
    lnc: int
    hybrid_kv_cache: bool
    group_kinds: tuple[AttentionKind, ...]
    buffer_layers: tuple[tuple[int, ...], ...]
    attention_kinds: tuple[AttentionKind, ...]
    num_speculative_tokens: int = 0
    dcp_size: int = 1


def deployment_faults(deployment: Deployment) -> tuple[str, ...]:
    """Every reason why this engine cannot run giga-kernel decode; none for an engine without it."""
    d = deployment
    if not d.gk_decode:
        return ()
    faults: list[str] = []
    if d.role is Role.PREFILL:
        faults.append("the giga kernel decodes only: run prefill on the native per-layer model, without gk_decode")
    if d.role is None:
        faults.append(
            f"one engine for prefill and decode at lnc {d.lnc} does not compile (NCC_IBTN243): split them into a "
            "prefill engine and a decode engine"
        )
    if d.lnc != 1:
        faults.append(f"the giga kernel is built for logical NeuronCore config 1, got lnc {d.lnc}")
    if not d.hybrid_kv_cache:
        faults.append(
            "the hybrid KV-cache manager is off, which gives every layer its own buffer: turn it on "
            "(--no-disable-hybrid-kv-cache-manager)"
        )
    wanted_groups = (AttentionKind.SLIDING, AttentionKind.FULL)
    if d.group_kinds != wanted_groups:
        faults.append(
            "the giga kernel needs 2 KV cache groups, sliding_attention then full_attention, got "
            f"{len(d.group_kinds)}: {', '.join(k.value for k in d.group_kinds) or 'none'}"
        )
    num_layers = len(d.attention_kinds)
    pairs = tuple(layers_of_buffer(j, num_layers) for j in range((num_layers + 1) // 2))
    if d.buffer_layers != pairs:
        at = next((j for j, (a, b) in enumerate(zip(d.buffer_layers, pairs, strict=False)) if a != b), None)
        faults.append(
            f"{len(pairs)} buffers shared by layers [2j, 2j+1] are needed, got {len(d.buffer_layers)} buffers"
            + ("" if at is None else f", buffer {at} shared by {list(d.buffer_layers[at])}")
        )
    wrong = next((i for i, kind in enumerate(d.attention_kinds) if kind is not kind_of_layer(i)), None)
    if wrong is not None:
        faults.append(
            f"even layers must slide and odd layers be full: layer {wrong} is {d.attention_kinds[wrong].value}, "
            f"must be {kind_of_layer(wrong).value}"
        )
    if d.num_speculative_tokens:
        faults.append(f"speculative decoding is not served, got {d.num_speculative_tokens} draft tokens")
    if d.dcp_size != 1:
        faults.append(f"giga-kernel decode needs dcp_size 1, got {d.dcp_size}; only the prefill side may use DCP")
    return tuple(faults)


def require_deployment(deployment: Deployment) -> None:
    """Refuse a deployment at start-up.

    Raises:
        UnsupportedError: with every reason, not only the first.
    """
    faults = deployment_faults(deployment)
    if faults:
        raise UnsupportedError("cannot start: " + "; ".join(faults))


def transfer_tokens(prompt_len: int) -> int:
    """Tokens whose KV moves: all but the last, which the decode side recomputes.

    >>> [transfer_tokens(n) for n in (1, 2, 255)]
    [0, 1, 254]

    Raises:
        LayoutError: an empty prompt.
    """
    if prompt_len < 1:
        raise LayoutError(f"a prompt has at least 1 token, got {prompt_len}")
    return prompt_len - 1


def needed_range(num_tokens: int, sliding_window: int | None, block_size: int) -> range:
    """Logical blocks of the first `num_tokens` tokens that the query at position `num_tokens` reads.

    max(T - W + 1, 0) // B up to, but not including, ceil(T / B); from 0 for full attention (window None). None at all
    for a window of one token, which sees only itself.

    >>> needed_range(254, 128, 128), needed_range(255, 128, 128), needed_range(382, 128, 256)
    (range(0, 2), range(1, 2), range(0, 2))
    """
    if sliding_window == 1:
        return range(0)
    first = 0 if sliding_window is None else first_window_block(num_tokens, sliding_window, block_size)
    return range(first, max(first, -(-num_tokens // block_size)))


@frozen(kw_only=True)
class NeededBlocks:
    """Logical blocks that the decode side must receive, per group."""

    sliding: range
    full: range


def needed_blocks(prompt_len: int, sliding_window: int, block_size: int) -> NeededBlocks:
    """What a prompt of N tokens has to move so that its last token can be recomputed.

    >>> needed_blocks(255, 128, 128).sliding, needed_blocks(256, 128, 128).sliding, needed_blocks(256, 128, 128).full
    (range(0, 2), range(1, 2), range(0, 2))

    Raises:
        LayoutError: a number below 1.
    """
    for name, value in (("sliding_window", sliding_window), ("block_size", block_size)):
        if value < 1:
            raise LayoutError(f"{name} must be >= 1 token, got {value}")
    tokens = transfer_tokens(prompt_len)
    return NeededBlocks(
        sliding=needed_range(tokens, sliding_window, block_size), full=needed_range(tokens, None, block_size)
    )


def stock_rule_loses_a_block(prompt_len: int, sliding_window: int, block_size: int) -> bool:
    """Whether counting N tokens as computed drops a sliding block that the last token's query still reads.

    N - W + 1 > 0 and (N - W + 1) % B == 0; for B that divides W that is N % B == B - 1.

    >>> [n for n in range(1, 700) if stock_rule_loses_a_block(n, 128, 128)]
    [255, 383, 511, 639]
    """
    behind = prompt_len - sliding_window + 1
    return behind > 0 and behind % block_size == 0


def tokens_to_drop(prompt_len: int, *, marked: bool, has_sliding_group: bool = True, has_token_ids: bool = True) -> int:
    """Tokens that a producer takes off the end of a new request's prompt: 1 or 0.

    Call it when the request is added, before the prefix cache is asked: a cut after a hit leaves no token to run.

    Args:
        prompt_len: tokens.
        marked: TRUNCATION_MARKER is set already; the same request added again is not cut twice.
        has_sliding_group: without one, nothing is ever lost.
        has_token_ids: a prompt given as embeddings is left alone.
    """
    return int(prompt_len > 1 and not marked and has_sliding_group and has_token_ids)


def require_truncated_once(*, truncated_len: int, now_len: int) -> None:
    """Refuse a prompt that something else shortened too, after `tokens_to_drop`.

    Raises:
        UnsupportedError: naming both lengths.
    """
    if now_len != truncated_len:
        raise UnsupportedError(
            f"a prompt cut to {truncated_len} tokens for transfer now has {now_len}: the engine cuts it as well; "
            "turn one of the two off"
        )


def cap_prefix_hit(hit_tokens: int, num_tokens: int, block_size: int) -> int:
    """Prefix-cache hit, in whole blocks, that leaves at least one token to run.

    >>> cap_prefix_hit(128, 128, 128), cap_prefix_hit(7680, 7680, 64), cap_prefix_hit(128, 200, 128)
    (0, 7616, 128)
    """
    most = max(num_tokens - 1, 0)
    return max(min(hit_tokens, most), 0) // block_size * block_size


def matched_tokens(external_tokens: int, *, num_computed_tokens: int, prompt_len: int) -> int:
    """Tokens that a consumer counts as coming from its peer: never the last one; 0 means nothing is pulled.

    >>> matched_tokens(255, num_computed_tokens=0, prompt_len=255), matched_tokens(
    ...     1, num_computed_tokens=0, prompt_len=1), matched_tokens(100, num_computed_tokens=128, prompt_len=255)
    (254, 0, 100)
    """
    return max(min(external_tokens, prompt_len - 1 - num_computed_tokens), 0)


def strip_leading_nulls(block_ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How many leading null blocks a table has, and the rest of it.

    The count is the logical position of the first block that is left; dropping the nulls without it would move every
    block.

    >>> strip_leading_nulls((0, 0, 57, 58))
    (2, (57, 58))
    """
    nulls = next((i for i, b in enumerate(block_ids) if b != NULL_BLOCK_ID), len(block_ids))
    return nulls, tuple(block_ids[nulls:])
