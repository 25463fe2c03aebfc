"""MXFP4: 32 four-bit floats (E2M1) share one power-of-two scale (E8M0). NumPy in, NumPy out.

Dims: n blocks of 32 values along the last axis; blocks are [..., n, 16] bytes, scales [..., n] bytes.

A byte holds two values, the even one in its low nibble; bit 3 of a nibble is the sign; value = E2M1 * 2^(scale - 127);
scale byte 255 is NaN and never valid in a checkpoint.

Source: OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gk_core.errors import CheckpointError

__all__ = ["BLOCK_VALUES", "E2M1_VALUES", "NAN_SCALE", "decode_mxfp4", "encode_mxfp4", "require_scales"]

BLOCK_VALUES = 32
NAN_SCALE = 255
E2M1_VALUES: NDArray[np.float32] = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=np.float32
)
_MAX_EXPONENT = 2  # 6.0 = 1.5 * 2^2 is E2M1's largest value
_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
_BYTE_VALUES = np.stack([E2M1_VALUES[np.arange(256) & 15], E2M1_VALUES[np.arange(256) >> 4]], axis=-1)


def require_scales(scales: NDArray[np.uint8], name: str) -> None:
    """Refuse scale bytes that are NaN.

    Raises:
        CheckpointError: naming the tensor and the first bad place.
    """
    bad = scales == NAN_SCALE
    if bad.any():
        place = [int(i) for i in np.argwhere(bad)[0]]
        raise CheckpointError(
            f"{name}{place} has scale byte 255, which is NaN in E8M0; every block of 32 weights under it would be NaN"
        )


def decode_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8], name: str = "scales") -> NDArray[np.float32]:
    """Values [..., n * 32] of blocks [..., n, 16] and scales [..., n].

    >>> b = np.zeros((1, 16), np.uint8); b[0, :2] = 0x21, 0xF8
    >>> decode_mxfp4(b, np.array([128], np.uint8))[:4].tolist()
    [1.0, 2.0, -0.0, -12.0]

    Raises:
        CheckpointError: shapes that do not belong together, a NaN scale, or a value past float32's range.
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise CheckpointError(f"{name}: MXFP4 blocks and scales must be uint8, got {blocks.dtype} and {scales.dtype}")
    if blocks.ndim < 2 or blocks.shape != (*scales.shape, BLOCK_VALUES // 2):
        raise CheckpointError(
            f"{name}: MXFP4 blocks must have shape {[*scales.shape, 16]}, one 16-byte block per scale, "
            f"got {list(blocks.shape)}"
        )
    require_scales(scales, name)
    values = _BYTE_VALUES[blocks].reshape(*scales.shape, BLOCK_VALUES)
    with np.errstate(over="ignore"):
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
    if scales.size and scales.max() > 252 and not np.isfinite(values).all():
        raise CheckpointError(f"{name}: a scale byte above 252 takes a weight past float32's range")
    flat: NDArray[np.float32] = values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK_VALUES)
    return flat


def encode_mxfp4(values: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blocks and scales of values [..., n * 32]; ties round to the even nibble, values past 6 * scale saturate.

    scale = 2^(floor(log2(largest magnitude)) - 2). Values that are MXFP4 already come back exactly.

    Raises:
        CheckpointError: the last axis is not a multiple of 32, or a value is not finite.
    """
    if values.ndim < 1 or values.shape[-1] % BLOCK_VALUES:
        raise CheckpointError(f"MXFP4 needs a last axis that is a multiple of 32, got shape {list(values.shape)}")
    x = values.astype(np.float32).reshape(*values.shape[:-1], -1, BLOCK_VALUES)
    if not np.isfinite(x).all():
        raise CheckpointError("MXFP4 cannot hold values that are not finite")
    largest = np.abs(x).max(axis=-1)
    _, exponent = np.frexp(largest)  # largest = m * 2^exponent, 0.5 <= m < 1
    exponent = np.where(largest > 0, exponent - 1 - _MAX_EXPONENT, 0)
    exponent = np.clip(exponent, -127, 127)
    magnitude = np.ldexp(np.abs(x).astype(np.float64), -exponent[..., None])
    # side="left" sends a midpoint down, "right" up; ties go to the even code.
    low = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    high = np.searchsorted(_MIDPOINTS, magnitude, side="right")
    code = np.where(low % 2 == 0, low, high).astype(np.uint8)
    code |= np.signbit(x).astype(np.uint8) * np.uint8(8)
    blocks: NDArray[np.uint8] = code[..., 0::2] | (code[..., 1::2] << 4).astype(np.uint8)
    return blocks, (exponent + 127).astype(np.uint8)
