"""MXFP4 decode and encode: literal bytes, the format's edges, and agreement with transformers' public reader."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gk_adapters.mxfp4
from gk_adapters.mxfp4 import decode_mxfp4, encode_mxfp4
from gk_adapters.torch_moe import dequantise_rows
from gk_core.errors import CheckpointError


def _block(*first_bytes: int) -> np.ndarray:
    block = np.zeros((1, 16), np.uint8)
    block[0, : len(first_bytes)] = first_bytes
    return block


def _scale(byte: int) -> np.ndarray:
    return np.array([byte], np.uint8)


@pytest.mark.parametrize(
    ("byte", "wanted"),
    [(0x21, [0.5, 1.0]), (0xF8, [-0.0, -6.0]), (0x10, [0.0, 0.5]), (0x9A, [-1.0, -0.5]), (0x76, [4.0, 6.0])],
)
def test_the_low_nibble_is_the_even_element(byte: int, wanted: list[float]) -> None:
    """Scale byte 127 is 1."""
    got = decode_mxfp4(_block(byte), _scale(127))[:2]
    assert got.tolist() == wanted
    assert np.signbit(got).tolist() == np.signbit(wanted).tolist()


def test_all_sixteen_nibbles_have_their_values() -> None:
    """0, .5, 1, 1.5, 2, 3, 4, 6 and the negatives."""
    block = _block(*(low | (low + 1) << 4 for low in range(0, 16, 2)))
    wanted = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert decode_mxfp4(block, _scale(127))[:16].tolist() == wanted


@pytest.mark.parametrize(("scale", "wanted"), [(127, 1.0), (128, 2.0), (126, 0.5), (137, 1024.0), (0, 2.0**-127)])
def test_the_scale_bias_is_127(scale: int, wanted: float) -> None:
    """Nibble 2 is 1.0; byte 0 is 2^-127, small but finite and not zero."""
    assert decode_mxfp4(_block(0x02), _scale(scale))[0] == wanted


def test_scale_byte_255_is_refused_by_name_and_place() -> None:
    """It is NaN in E8M0."""
    scales = np.full((2, 3), 127, np.uint8)
    scales[1, 2] = 255
    with pytest.raises(CheckpointError, match=r"w_scales\[1, 2\] has scale byte 255"):
        decode_mxfp4(np.zeros((2, 3, 16), np.uint8), scales, "w_scales")


def test_a_value_past_float32_is_refused_and_the_largest_below_is_not() -> None:
    """3 * 2^126 fits, 4 * 2^126 does not; zeros under a huge scale are zeros."""
    assert decode_mxfp4(_block(0x05), _scale(253))[0] == 3 * 2.0**126
    with pytest.raises(CheckpointError, match="past float32's range"):
        decode_mxfp4(_block(0x06), _scale(253))
    assert decode_mxfp4(_block(0x00), _scale(254))[0] == 0.0


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (np.zeros((3, 16), np.uint8), np.zeros(2, np.uint8), r"shape \[2, 16\].*got \[3, 16\]"),
        (np.zeros((3, 15), np.uint8), np.zeros(3, np.uint8), "one 16-byte block per scale"),
        (np.zeros((3, 16), np.int8), np.zeros(3, np.uint8), "must be uint8, got int8"),
    ],
)
def test_shapes_and_dtypes_that_do_not_belong_together_are_refused(
    blocks: np.ndarray, scales: np.ndarray, message: str
) -> None:
    """One block of 16 bytes per scale byte."""
    with pytest.raises(CheckpointError, match=message):
        decode_mxfp4(blocks, scales)


def test_encoding_takes_the_hand_worked_bytes() -> None:
    """Largest 12 = 6 * 2^1: scale byte 128; 1 -> nibble 1, 12 -> 7, -2 -> 0xA, 1.5 ties between .5 and 1 units."""
    values = np.zeros(32)
    values[:6] = [1.0, 12.0, -2.0, 1.5, 0.5, 100.0 / 8]
    blocks, scales = encode_mxfp4(values)
    assert scales.tolist() == [128]
    # 1.5 / 2 = 0.75 lies midway between nibbles 1 and 2: the even one. 0.25 ties to 0. 6.25 saturates at 6.
    assert blocks[0, :3].tolist() == [0x71, 0x2A, 0x70]


nibbles = hnp.arrays(np.uint8, (3, 2, 16), elements=st.integers(0, 255))
scale_bytes = hnp.arrays(np.uint8, (3, 2), elements=st.integers(3, 252))


@given(blocks=nibbles, scales=scale_bytes)
def test_what_is_mxfp4_already_comes_back_exactly(blocks: np.ndarray, scales: np.ndarray) -> None:
    """decode -> encode -> decode is the identity, whatever scale the encoder chose."""
    values = decode_mxfp4(blocks, scales)
    assert np.array_equal(decode_mxfp4(*encode_mxfp4(values)), values)


@given(values=hnp.arrays(np.float32, (2, 64), elements=st.floats(-1e4, 1e4, width=32)))
def test_encoding_rounds_to_the_nearest_representable_value(values: np.ndarray) -> None:
    """Error at most half a step; a step is a sixth of the largest magnitude at worst, 2 units of the scale."""
    blocks, scales = encode_mxfp4(values)
    error = np.abs(decode_mxfp4(blocks, scales) - values).reshape(2, 2, 32)
    unit = np.exp2(scales.astype(np.float64) - 127)[..., None]
    saturated = np.abs(values).reshape(2, 2, 32) > 6 * unit
    assert (error[~saturated] <= np.broadcast_to(unit, error.shape)[~saturated]).all()
    assert (error <= 2 * unit).all()


@given(blocks=nibbles, scales=scale_bytes)
def test_the_torch_decoder_gives_the_same_numbers(blocks: np.ndarray, scales: np.ndarray) -> None:
    """float32 exactly; bfloat16 too, since a value has at most two significant bits."""
    wanted = torch.from_numpy(decode_mxfp4(blocks, scales))
    rows = torch.from_numpy(blocks).flatten(-2)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantise_rows(rows, torch.from_numpy(scales), dtype), wanted.to(dtype))


@pytest.mark.parametrize("bad", [np.zeros(31), np.array([np.nan] * 32), np.array([np.inf] * 32), np.zeros(())])
def test_values_that_cannot_be_encoded_are_refused(bad: np.ndarray) -> None:
    """Whole blocks of finite values."""
    with pytest.raises(CheckpointError, match="MXFP4"):
        encode_mxfp4(bad)


def test_the_decoder_imports_nothing_from_transformers() -> None:
    """Private helpers of other libraries come and go."""
    tree = ast.parse(Path(gk_adapters.mxfp4.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.partition(".")[0] for n in names} == {"__future__", "typing", "numpy", "gk_core"}
