"""One 120B rank's layer at full size in the simulator, inside the memories of its device, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.full_size import make_layer_case, reference_hidden, simulate_layer


def _relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(np.linalg.norm(a.astype(np.float32) - b) / np.linalg.norm(b))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "packed", "mx_terms", "target", "tolerance"),
    [
        pytest.param("float32", np.float32, False, 0, "trn3", 1e-5, id="float32"),
        pytest.param("bfloat16", ml_dtypes.float8_e4m3fn, True, 1, "trn3", 2e-2, id="trn3-mx-packed"),
        pytest.param("bfloat16", ml_dtypes.float8_e4m3fn, True, 2, "trn3", 2e-2, id="trn3-mx-two-terms-packed"),
        pytest.param("bfloat16", ml_dtypes.float8_e4m3, False, 0, "trn2", 2e-2, id="trn2-widened"),
    ],
)
def test_a_full_size_layer_is_right_and_fits_its_device(
    dtype: str, kv_dtype: Any, packed: bool, mx_terms: int, target: str, tolerance: float
) -> None:
    """Hidden 2880 padded to 3072, 8 query heads, 1 KV head, one MXFP4 expert; peaks are checked by the simulator."""
    ours, theirs = (make_layer_case(dtype=dtype, kv_dtype=kv_dtype, packed=packed, mx_terms=mx_terms) for _ in range(2))
    result = simulate_layer(ours, target=target)
    expected = reference_hidden(theirs, mx_terms=mx_terms)
    assert _relative(result.output, expected) <= tolerance
    sbuf, psum = result.peaks[0]
    assert sbuf.bytes_per_partition <= result.target.sbuf_usable_bytes
    assert psum.banks <= 8
    # K and V come out of bfloat16 products here: a rounding to FP8 may fall the other way, one step of at most 1 / 8.
    one_step = {"float32": 1e-5, "bfloat16": 0.13}[dtype]
    for mine, other in ((ours.k[:-1], theirs.k[:-1]), (ours.v[:-1], theirs.v[:-1])):  # the last block is scratch
        difference = np.abs(mine.astype(np.float32) - other.astype(np.float32))
        assert (difference <= one_step * np.abs(other.astype(np.float32)) + 1e-2).all()
        assert np.array_equal(mine[0].view(np.uint8), other[0].view(np.uint8))
