"""The library's MXFP4 projections of an MLP, unmodified: trn3, one and two cores."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.simulator.conformance import references as ref
from tests.simulator.conformance.harness import Library, assert_within
from tests.simulator.conformance.references import BF16, Array


def make_weights(rng: np.random.Generator, rows: int, tiles: int, columns: int) -> tuple[Array, Array]:
    """Random fp4 x4 words [rows, tiles, columns] and scales [rows / 8, tiles, columns]."""
    words = rng.integers(0, 2**16, (rows, tiles, columns), dtype=np.uint16)
    return words, rng.integers(118, 124, (rows // 8, tiles, columns), dtype=np.uint8)


def tile_values(lanes: Array, scale: Array) -> Array:
    """Matrix [tiles * 512, columns] of `lanes` [P, tiles, columns, 4] under `scale` [P/8, tiles, columns]."""
    parts = [ref.mx_values(lanes[:, t], scale[:, t]) for t in range(lanes.shape[1])]
    return np.concatenate(parts)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(4, 3072, 192), (6, 1024, 512), (4, 1024, 768)])
def test_gate_up_projection_mx_contracts_hidden(
    library: Library, lnc: int, tokens: int, hidden: int, inner: int
) -> None:
    """MXFP4 weights times MXFP8 (e5m2) activations, in the layout that the next quantisation wants."""
    rng = np.random.default_rng(10)
    tiles = hidden // 512
    x = rng.standard_normal((128, tiles, tokens, 4)).astype(ml_dtypes.float8_e5m2)
    x_scale = rng.integers(122, 128, (16, tiles, tokens), dtype=np.uint8)
    weight, scale = make_weights(rng, 128, tiles, inner)
    rows = 128 if inner >= 512 else inner // 4
    inner_tiles = -(-inner // 512)
    bias = rng.standard_normal((rows, inner_tiles, 4)).astype(BF16)
    if inner > 512 and inner % 512:
        bias[(inner % 512) // 4 :, -1] = 0
    (out,) = library.run(
        library.wrapper("run_gate_up"),
        hidden=x.view(np.uint32)[..., 0],
        hidden_scale=x_scale,
        weight=weight,
        weight_scale=scale,
        bias=bias,
        outer=hidden,
        inner=inner,
        tokens=tokens,
        lnc=lnc,
        poison="nan",  # rows past the inner size are exchanged and copied, never used
    )
    product = tile_values(ref.unpack_fp4(weight), scale).T @ tile_values(ref.wide(x), x_scale)
    for tile in range(inner_tiles):
        part = product[512 * tile : 512 * tile + 512]
        filled = len(part) // 4
        want = part.reshape(4, filled, tokens).transpose(1, 2, 0) + ref.wide(bias)[:filled, tile, None]
        assert_within(out[:filled, tile], want, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(4, 3072, 192), (6, 1024, 1024)])
def test_down_projection_mx_quantises_and_contracts_inner(
    library: Library, lnc: int, tokens: int, hidden: int, inner: int, shuffle: bool
) -> None:
    """Activations quantised on the device to MXFP8 (e4m3fn), bias by shuffle or by a matmul."""
    rng = np.random.default_rng(11)
    tiles = -(-inner // 512)
    rows = 128 if inner >= 512 else inner // 4
    x = rng.standard_normal((128, tiles, tokens, 4)).astype(BF16)
    weight, scale = make_weights(rng, rows, tiles, hidden)
    bias = rng.standard_normal((1, hidden)).astype(BF16)
    (out,) = library.run(
        library.wrapper("run_down"),
        inter=x,
        weight=weight,
        weight_scale=scale,
        bias=bias,
        outer=hidden,
        inner=inner,
        tokens=tokens,
        shuffle=shuffle,
        lnc=lnc,
        poison="nan" if lnc == 2 else "error",  # all partitions are exchanged, the tokens' are used
    )
    want = np.zeros((tokens, hidden), np.float32)
    for tile in range(tiles):
        values = ref.quantise_mx(x[:rows, tile]).transpose(0, 2, 1).reshape(-1, tokens)
        want += values.T @ ref.mx_values(ref.unpack_fp4(weight[:, tile]), scale[:, tile])
    assert_within(out, want + ref.wide(bias), rtol=2e-2, atol=1e-5)


def test_gate_up_projection_mx_of_an_expert_activates_and_quantises(library: Library) -> None:
    """GPT-OSS's expert: two MXFP4 products, clamps, x * sigmoid(1.702 x) times up, MXFP8 out."""
    rng = np.random.default_rng(12)
    tokens, hidden, inner, limit = 6, 1024, 1024, 7.0
    tiles, inner_tiles = hidden // 512, inner // 512
    x = rng.standard_normal((128, tiles, tokens, 4)).astype(ml_dtypes.float8_e4m3fn)
    x_scale = rng.integers(124, 128, (16, tiles, tokens), dtype=np.uint8)
    gate, gate_scale = make_weights(rng, 128, tiles, inner)
    up, up_scale = make_weights(rng, 128, tiles, inner)
    biases = [rng.standard_normal((128, inner_tiles, 4)).astype(BF16) for _ in range(2)]
    out, scale = library.run(
        library.wrapper("run_moe_gate_up"),
        hidden=x.view(np.uint32)[..., 0],
        hidden_scale=x_scale,
        gate=gate,
        gate_scale=gate_scale,
        up=up,
        up_scale=up_scale,
        gate_bias=biases[0],
        up_bias=biases[1],
        limit=limit,
    )

    def project(weight: Array, weight_scale: Array, bias: Array, tile: int) -> Array:
        columns = slice(512 * tile, 512 * tile + 512)
        total = np.zeros((512, tokens), np.float32)
        for k in range(tiles):  # PSUM holds bfloat16 here, so every pass over 512 rounds
            left = ref.mx_values(ref.unpack_fp4(weight[:, k, columns]), weight_scale[:, k, columns])
            total += left.T @ ref.mx_values(ref.wide(x)[:, k], x_scale[:, k])
            total = ref.wide(total.astype(BF16))
        part = total.reshape(4, 128, tokens).transpose(1, 2, 0)
        return ref.wide((part + ref.wide(bias)[:, tile, None]).astype(BF16))

    for tile in range(inner_tiles):
        glu = np.minimum(project(gate, gate_scale, biases[0], tile), limit)
        glu = ref.wide((glu / (1 + np.exp(-1.702 * glu))).astype(BF16))
        linear = np.clip(project(up, up_scale, biases[1], tile), -limit, limit)
        want = ref.quantise_mx((glu * linear).astype(BF16))
        lanes = ref.unpack_fp8(out[:, tile], ml_dtypes.float8_e4m3fn)
        got = lanes * np.repeat(2.0 ** (scale[:, tile].astype(np.float32) - 127), 8, axis=0)[:, :, None]
        # A bfloat16 result beside a rounding edge may fall to the neighbouring fp8 value.
        assert np.mean(got != want) < 5e-3
        assert_within(got, want, rtol=7.2e-2, atol=1e-5)
