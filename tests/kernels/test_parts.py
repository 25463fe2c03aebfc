"""Each part of the giga kernel, alone in the simulator: literal numbers, and its NumPy definition on random inputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from gk_kernels.reference.attention import attend
from gk_kernels.reference.experts import dequantise, experts_mxfp4, hidden_in_order, swiglu
from gk_kernels.reference.gather import gather_row
from gk_kernels.reference.norms import rms_norm
from gk_kernels.reference.qkv import as_stored, rotate
from gk_kernels.reference.router import route
from tests.kernels.parts import make_config, run_part

Array = NDArray[Any]
FP8, FP8_240 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def _relative(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a.astype(np.float32) - b) / np.linalg.norm(b))


def test_the_norm_divides_by_the_real_width_not_the_padded_one(rng: np.random.Generator) -> None:
    """One feature of 2.0 out of 4 real ones in 512: mean square 1; then random rows."""
    x = np.zeros((1, 512), np.float32)
    x[0, 7] = 2.0
    assert run_part("norm_kernel", x, np.full((1, 512), 3.0, np.float32), 4, 0.0)[0, 7] == pytest.approx(6.0)
    rows, gain = rng.standard_normal((5, 512), np.float32), rng.standard_normal((1, 512), np.float32)
    assert _relative(run_part("norm_kernel", rows, gain, 500, 1e-5), rms_norm(rows, gain, 500, 1e-5)) < 1e-6


@pytest.mark.parametrize("size", [10, 32, 64])
def test_rotation_turns_halves_not_neighbours(rng: np.random.Generator, size: int) -> None:
    """A quarter turn sends the first half to the second; any head size."""
    x = rng.standard_normal((7, 3, size), np.float32)
    zeros, ones = np.zeros((size // 2, 7, 1), np.float32), np.ones((size // 2, 7, 1), np.float32)
    quarter = run_part("rotate_kernel", x, zeros, ones)
    assert np.array_equal(quarter, np.concatenate([-x[:, :, size // 2 :], x[:, :, : size // 2]], axis=2))
    angles = rng.uniform(0, 6, (size // 2, 7, 1)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    assert _relative(run_part("rotate_kernel", x, cos, sin), rotate(x, cos[:, :, 0].T, sin[:, :, 0].T)) < 1e-6


@pytest.mark.parametrize(("dtype", "largest"), [(FP8, 448.0), (FP8_240, 240.0)])
def test_stored_values_are_divided_by_the_scale_and_saturate(dtype: Any, largest: float) -> None:
    """3.0 at scale 2 is 1.5; far values are the largest finite one, never NaN."""
    x = np.array([[3.0, 2000.0, -2000.0, 0.3]], np.float32)
    stored = run_part("stored_kernel", x, np.zeros((1, 1), dtype), 2.0)
    assert stored.dtype == dtype
    assert stored.astype(float)[0, :3].tolist() == [1.5, largest, -largest]
    assert np.array_equal(stored.view(np.uint8), as_stored(x, 2.0, dtype).view(np.uint8))


@pytest.mark.parametrize("experts", [5, 128])
def test_routing_is_a_softmax_over_the_winners_alone(rng: np.random.Generator, experts: int) -> None:
    """Two equal winners have half each; random rows agree; fewer than eight experts are no special case."""
    one = np.zeros((1, 512), np.float32)
    one[0, 0] = 1.0
    weight = np.zeros((512, experts), np.float32)
    weight[0, :4] = (0.0, 1.0, 1.0, -1.0)
    weight[0, 4:] = -5.0
    literal = run_part("route_kernel", one, weight, np.zeros((1, experts), np.float32), 2)
    assert literal[0, :4].tolist() == [0.0, 0.5, 0.5, 0.0]
    x = rng.standard_normal((6, 512), np.float32)
    half, bias = (rng.standard_normal(s).astype(np.float16) for s in ((512, experts), (1, experts)))
    found = run_part("route_kernel", x, half, bias, 4)
    assert _relative(found, route(x, half, bias, 4)) < 1e-5
    assert ((found > 0).sum(axis=1) == 4).all()


def test_four_bit_weights_widen_exactly(rng: np.random.Generator) -> None:
    """All sixteen codes, literally; then every word against the definition, bit for bit, in the stored order."""
    words = np.zeros((128, 1, 512), np.uint16)
    words[0, 0, :4] = (0x3210, 0x7654, 0xBA98, 0xFEDC)
    scale = np.full((16, 1, 512), 128, np.uint8)
    values = run_part("dequantise_kernel", words, scale)
    codes = values[0, :, :4].T.reshape(-1).tolist()
    assert codes == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0]
    words = rng.integers(0, 65536, (128, 2, 512), dtype=np.uint16)
    scale = rng.integers(100, 140, (16, 2, 512), dtype=np.uint8)
    found = run_part("dequantise_kernel", words, scale)
    stored = found.transpose(1, 0, 2).reshape(-1, 512).T  # chunk l * tiles + t, partition p
    assert np.array_equal(hidden_in_order(stored).T, dequantise(words, scale))


def _expert_inputs(rng: np.random.Generator, tokens: int, dtype: Any) -> dict[str, Array]:
    """Two experts, two contraction tiles of hidden, one of intermediate."""
    return {
        "x": rng.standard_normal((tokens, 1024), np.float32).astype(dtype),
        "affinity": rng.uniform(0, 1, (tokens, 2)).astype(np.float32),
        "gate_up": rng.integers(0, 65536, (2, 128, 2, 2, 512), dtype=np.uint16),
        "gate_up_scale": rng.integers(119, 123, (2, 16, 2, 2, 512), dtype=np.uint8),
        "gate_up_bias": rng.standard_normal((2, 128, 2, 1, 4), np.float32).astype(dtype),
        "down": rng.integers(0, 65536, (2, 128, 1, 1024), dtype=np.uint16),
        "down_scale": rng.integers(119, 123, (2, 16, 1, 1024), dtype=np.uint8),
        "down_bias": rng.standard_normal((2, 1024), np.float32).astype(dtype),
    }


def _expected(inputs: dict[str, Array], mx_terms: int) -> Array:
    values = {n: a if a.dtype.kind == "u" else a.astype(np.float32) for n, a in inputs.items()}
    return experts_mxfp4(*values.values(), alpha=1.702, limit=7.0, mx_terms=mx_terms)


@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_mxfp4_experts_are_right_widened_in_float32(rng: np.random.Generator, tokens: int) -> None:
    """Several token counts, odd ones too."""
    inputs = _expert_inputs(rng, tokens, np.float32)
    found = run_part("expert_kernel", *inputs.values(), make_config(), target="trn2")
    assert _relative(found, _expected(inputs, 0)) < 1e-5


@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_mxfp4_experts_are_right_through_mx_matmuls(rng: np.random.Generator, tokens: int) -> None:
    """Against the definition with the same quantisation: what is left is where bfloat16 rounds before it.

    One term costs 1 to 5 percent against float activations, two cost no more than bfloat16 does.
    """
    inputs = _expert_inputs(rng, tokens, ml_dtypes.bfloat16)
    errors = []
    for terms in (1, 2):
        found = run_part("expert_kernel", *inputs.values(), make_config(mx_matmul=True, mx_terms=terms))
        assert _relative(found, _expected(inputs, terms)) < 5e-3
        errors.append(_relative(found, _expected(inputs, 0)))
    assert 0.01 < errors[0] < 0.06
    assert errors[1] < 4e-3


@pytest.mark.parametrize(("terms", "wanted"), [(1, (1.25, 4608.0)), (2, (1.2421875, 4576.0))])
def test_two_terms_hold_all_eight_bits_of_an_activation(terms: int, wanted: tuple[float, float]) -> None:
    """1.0011111 in binary, alone and beside 1.0001111 * 2 ** 12 in its group, read through an identity of weights."""
    x = np.zeros((2, 512), ml_dtypes.bfloat16)
    x[:, 0], x[1, 1] = 1.2421875, 4576.0  # stored column 128 l + p is feature 4 p + l
    words = np.zeros((128, 1, 512), np.uint16)
    for feature in range(512):
        words[feature // 4, 0, feature] = 2 << 4 * (feature % 4)  # FP4's 1.0
    found = run_part("product_mx_kernel", x, words, np.full((16, 1, 512), 127, np.uint8), terms)
    assert found[:, 0].tolist() == [wanted[0], wanted[0]]
    assert found[1, 4] == wanted[1]
    assert np.count_nonzero(found) == 3


def test_a_token_that_was_not_routed_here_adds_exactly_zero(rng: np.random.Generator) -> None:
    """Affinity 0 beats any bias; the down bias is weighted by the affinity."""
    inputs = _expert_inputs(rng, 3, np.float32)
    inputs["affinity"][1] = 0.0
    found = run_part("expert_kernel", *inputs.values(), make_config())
    assert (found[1] == 0.0).all()
    assert (found[0] != 0.0).all()


def test_the_activation_clamps_as_gpt_oss_does() -> None:
    """Gate 10 to 7, gate -10 stays, up -9 to -6; biases only, weights zero; the answer read through a one in `down`."""
    gate, up = np.array([10.0, -10.0, 7.0, 1.0], np.float32), np.array([11.0, 1.0, -9.0, 2.0], np.float32)
    gate_up_bias = np.zeros((1, 128, 2, 4), np.float32)
    gate_up_bias[0, :4, 0, 0], gate_up_bias[0, :4, 1, 0] = gate, up
    down = np.zeros((1, 512, 512), np.float32)
    down[0, range(4), range(4)] = 1.0
    found = run_part(
        "expert_kernel", np.zeros((1, 512), np.float32), np.ones((1, 1), np.float32),
        np.zeros((1, 512, 2, 512), np.float32), None, gate_up_bias, down, None, np.zeros((1, 512), np.float32),
        make_config(),
    )  # fmt: skip
    assert found[0, :4].tolist() == pytest.approx([55.9996, -4.058e-7, -41.9997, 1.69159], rel=1e-4)
    assert found[0, :4] == pytest.approx(swiglu(gate, up, 1.702, 7.0), rel=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "block", "kv", "kv_dtype", "packed", "g", "d", "full"),
    [
        pytest.param(6, 3, 32, 1, np.float32, False, 5, 32, True, id="full-layer"),
        pytest.param(4, 2, 128, 1, np.float32, False, 3, 32, False, id="two-blocks"),
        pytest.param(3, 5, 16, 2, ml_dtypes.bfloat16, False, 8, 32, False, id="odd-rows-and-four-heads-in-a-column"),
        pytest.param(8, 16, 16, 1, FP8, False, 3, 40, False, id="small-blocks"),
        pytest.param(2, 131, 4, 2, np.float32, False, 1, 128, False, id="more-than-128-blocks"),
        pytest.param(4, 3, 128, 2, FP8, True, 6, 64, False, id="packed-and-two-heads-in-a-column"),
    ],
)
def test_attention_reads_exactly_the_keys_between_start_and_position(
    rng: np.random.Generator, rows: int, width: int, block: int, kv: int, kv_dtype: Any, packed: bool, g: int, d: int,
    full: bool,
) -> None:  # fmt: skip
    """Shuffled tables, positions on and off block borders, sinks, own tokens; unread blocks hold NaN.

    A full layer has no starts: it reads from the first key on.
    """
    num_blocks = rows * width + 2
    cache = rng.standard_normal((2, num_blocks, kv, block, d), np.float32).astype(kv_dtype)
    cache[:, 0] = np.nan
    table = (rng.permutation(num_blocks - 2)[: rows * width].reshape(rows, width) + 1).astype(np.int32)
    positions = rng.integers(1, width * block, (rows, 1)).astype(np.float32)
    positions[0], positions[-1] = 0, width * block - 1
    starts = np.floor(positions * rng.uniform(0, 1, (rows, 1))).astype(np.float32)
    starts *= not full
    table[np.arange(width) * block >= positions] = 0  # blocks past the position are null
    k = cache[0].reshape(num_blocks, kv, block // 2, 2, d).swapaxes(3, 4) if packed else cache[0]
    q, own_k, own_v = (rng.standard_normal((d, n, rows), np.float32) for n in (g * kv, kv, kv))
    sink = rng.standard_normal((g * kv, 1), np.float32)
    config = make_config(num_q_heads=g * kv, num_kv_heads=kv, head_size=d, v_scale=0.5)
    found = run_part(
        "attend_kernel", q, own_k, own_v, np.ascontiguousarray(k), cache[1], sink, table, positions,
        None if full else starts, config,
    )  # fmt: skip
    # Consecutive heads lie above one another in a column of the result.
    found = found.reshape(-1, d, found.shape[1], rows).transpose(1, 2, 0, 3).reshape(d, g * kv, rows)
    for row in range(rows):
        seen = slice(int(starts[row, 0]), int(positions[row, 0]))
        for head in range(kv):
            mine = slice(head * g, (head + 1) * g)
            expected = 0.5 * attend(
                q[:, mine, row].T, gather_row(cache[0], table[row], head)[seen],
                gather_row(cache[1], table[row], head)[seen], own_k[:, head, row], own_v[:, head, row], sink[mine, 0],
            )  # fmt: skip
            assert _relative(found[:, mine, row].T, expected) < 1e-5


def test_the_sink_takes_its_share_of_the_weight() -> None:
    """Own score 1 and sink 1: the own value counts half; the sink is not scaled."""
    d = 32
    q, own = np.full((d, 1, 1), 1 / d, np.float32), np.ones((d, 1, 1), np.float32)
    cache = np.zeros((2, 1, 4, d), np.float32)
    zero = np.zeros((1, 1), np.float32)
    found = run_part(
        "attend_kernel", q, own, 6 * own, cache, cache, np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32), zero,
        zero, make_config(num_q_heads=1),
    )  # fmt: skip
    assert found.reshape(-1).tolist() == pytest.approx([3.0] * d)
