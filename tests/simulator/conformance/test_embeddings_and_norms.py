"""rope, rope_hf, rmsnorm_tkg, output_projection_tkg and router_topk of the library, unmodified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gk_kernels.simulator import ConstraintError
from tests.simulator.conformance import references as ref
from tests.simulator.conformance.harness import Library, assert_within
from tests.simulator.conformance.references import BF16


@pytest.mark.parametrize(
    ("head", "tokens", "lnc", "contiguous", "in_sbuf"),
    [(128, 6, 1, True, False), (64, 10, 2, True, False), (128, 5, 1, False, False), (64, 7, 1, False, True)],
)
def test_rope_rotates_both_layouts(
    library: Library, head: int, tokens: int, lnc: int, contiguous: bool, in_sbuf: bool
) -> None:
    """Contiguous halves, or interleaved pairs by strided DMA or by a matmul in SBUF."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((head, 3, 4, tokens)).astype(BF16)
    angles = rng.uniform(-3, 3, (head // 2, 3, tokens))
    cos, sin = np.cos(angles).astype(BF16), np.sin(angles).astype(BF16)
    (out,) = library.run(
        "core.embeddings.rope:RoPE",
        x_in=x,
        cos=cos,
        sin=sin,
        lnc_shard=lnc == 2,
        contiguous_layout=contiguous,
        relayout_in_sbuf=in_sbuf,
        lnc=lnc,
    )
    assert_within(out, ref.rope(x, cos, sin, contiguous), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(("lnc", "backward", "cached"), [(1, False, False), (2, False, True), (1, True, False)])
def test_rope_hf_rotates_rows(library: Library, lnc: int, backward: bool, cached: bool) -> None:
    """[batch, heads, tokens, head size], forward and backward, angles apart or packed."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 3, 256, 64)).astype(np.float32)
    k = rng.standard_normal((2, 1, 256, 64)).astype(np.float32)
    half = rng.uniform(-3, 3, (2, 256, 32))
    angles = np.concatenate([half, half], axis=-1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    table = {"rope_cache": np.concatenate([cos, sin], axis=-1)} if cached else {"cos": cos, "sin": sin}
    q_out, k_out = library.run(
        "core.embeddings.rope_hf:rope_hf",
        q=q,
        k=k,
        q_out=np.zeros_like(q),
        k_out=np.zeros_like(k),
        backward=backward,
        lnc=lnc,
        **table,
    )
    assert_within(q_out, ref.rope_rows(q, cos, sin, backward), rtol=1e-6, atol=1e-6)
    assert_within(k_out, ref.rope_rows(k, cos, sin, backward), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("lnc", "batch", "tokens", "hidden", "actual", "turned", "on_h"),
    [
        (1, 1, 4, 2048, 1920, False, False),
        (1, 1, 1, 1024, None, False, False),
        (2, 2, 8, 3072, 2880, False, False),
        (2, 63, 3, 1024, None, False, False),
        (1, 1, 1, 4096, 3072, True, False),
        (2, 4, 1, 3072, None, False, True),
    ],
)
def test_rmsnorm_tkg_normalises_into_tiles(
    library: Library, lnc: int, batch: int, tokens: int, hidden: int, actual: int | None, turned: bool, on_h: bool
) -> None:
    """One and two cores, sharded over tokens or over hidden, padded hidden sizes."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((batch, tokens, hidden)).astype(np.float16)
    if actual is not None:
        x[..., actual:] = 0
    gamma = rng.standard_normal((1, hidden)).astype(np.float16)
    (out,) = library.run(
        "core.subkernels.rmsnorm_tkg:rmsnorm_tkg",
        input=x,
        gamma=gamma,
        output=np.zeros((128, batch * tokens, hidden // 128), np.float16),
        hidden_actual=actual,
        hidden_dim_tp=turned,
        shard_on_h=on_h,
        lnc=lnc,
    )
    want = ref.rmsnorm_tiles(x, gamma, lnc, actual, turned)
    assert_within(out, want, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
    ("lnc", "batch", "heads", "tokens", "head", "hidden", "with_bias", "turned"),
    [
        (1, 4, 8, 4, 64, 3072, True, False),
        (2, 4, 8, 4, 64, 3072, False, False),
        (1, 3, 2, 5, 128, 640, True, True),
        (2, 4, 8, 4, 32, 3072, True, True),
    ],
)
def test_output_projection_tkg_contracts_heads(
    library: Library,
    lnc: int,
    batch: int,
    heads: int,
    tokens: int,
    head: int,
    hidden: int,
    with_bias: bool,
    turned: bool,
) -> None:
    """Plain and transposed results, with and without bias."""
    rng = np.random.default_rng(4)
    attention = rng.standard_normal((head, batch, heads, tokens)).astype(BF16)
    weight = rng.standard_normal((heads * head, hidden)).astype(BF16)
    bias = (100 * rng.standard_normal((1, hidden))).astype(BF16) if with_bias else None
    (out,) = library.run(
        "core.output_projection.output_projection_tkg:output_projection_tkg",
        attention=attention,
        weight=weight,
        bias=bias,
        TRANSPOSE_OUT=turned,
        lnc=lnc,
    )
    want = ref.output_projection(attention, weight, bias)
    want = ref.transposed_output(want, lnc) if turned else want
    assert_within(out, want, rtol=2e-2, atol=1e-5)


ROUTER = "core.router_topk.router_topk:router_topk"


def make_router_arguments(library: Library, tokens: int, after: bool, scatter: bool, by_token: bool) -> dict[str, Any]:
    """Inputs of router_topk: hidden 256, 128 experts, top 4, tokens in rows."""
    rng = np.random.default_rng(5)
    hidden, experts, k = 256, 128, 4
    return {
        "x": rng.uniform(-1, 1, (tokens, hidden)).astype(BF16),
        "w": rng.uniform(-1, 1, (hidden, experts)).astype(BF16),
        "w_bias": rng.uniform(-1, 1, (1, experts)).astype(BF16),
        "router_logits": np.zeros((tokens, experts), np.float32),
        "expert_affinities": np.zeros((tokens, experts), np.float32),
        "expert_index": np.zeros((tokens, k), np.uint32),
        "act_fn": library.value("core.utils.common_types:RouterActFnType").SOFTMAX,
        "k": k,
        "x_hbm_layout": 1,
        "x_sb_layout": 0,
        "router_pre_norm": not after,
        "norm_topk_prob": not after,
        "use_indirect_dma_scatter": scatter,
        "shard_on_tokens": by_token,
    }


@pytest.mark.parametrize(
    ("lnc", "tokens", "after", "scatter", "by_token"),
    [
        (1, 16, True, True, False),
        (1, 128, False, True, False),
        (2, 8, False, False, False),
        (2, 5, True, False, False),
        (2, 64, True, False, True),
    ],
)
def test_router_topk_picks_four_of_128_experts(
    library: Library, lnc: int, tokens: int, after: bool, scatter: bool, by_token: bool
) -> None:
    """Softmax before or after the choice, one-hot or indirect scatter, tokens over two cores."""
    given = make_router_arguments(library, tokens, after, scatter, by_token)
    logits = ref.wide(given["x"]) @ ref.wide(given["w"]) + ref.wide(given["w_bias"])
    got_logits, got_index, got_affinities = library.run(ROUTER, lnc=lnc, **given)
    assert_within(got_logits, logits, rtol=2e-2, atol=1e-5)
    np.testing.assert_array_equal(got_index, ref.top_k(logits, 4))
    assert_within(got_affinities, ref.scatter_topk(logits, 4, after), rtol=2e-2, atol=1e-5)


def test_router_topk_by_one_hot_needs_two_cores(library: Library) -> None:
    """That path ends in core_barrier, which NKI documents for lnc 2 only."""
    with pytest.raises(ConstraintError, match="core_barrier"):
        library.run(ROUTER, lnc=1, **make_router_arguments(library, 8, False, False, False))
