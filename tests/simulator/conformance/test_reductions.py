"""cascaded_max, cumsum and depthwise_conv1d of the library, unmodified."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.simulator.conformance import references as ref
from tests.simulator.conformance.harness import Library, assert_within
from tests.simulator.conformance.references import BF16


@pytest.mark.parametrize(("lnc", "batch", "tokens", "vocab"), [(1, 4, 5, 4058), (2, 5, 5, 4058), (2, 1, 1, 3168)])
def test_cascaded_max_finds_the_largest_and_its_index(
    library: Library, lnc: int, batch: int, tokens: int, vocab: int
) -> None:
    """Exact, as no value is rounded."""
    x = np.random.default_rng(6).standard_normal((batch, tokens, vocab)).astype(np.float32)
    values, index = library.run("core.max.cascaded_max:cascaded_max", input_tensor=x, lnc=lnc)
    np.testing.assert_array_equal(values.reshape(batch, tokens), x.max(axis=-1))
    np.testing.assert_array_equal(index.reshape(batch, tokens), x.argmax(axis=-1))


@pytest.mark.parametrize(
    ("shape", "dtype", "rtol"),
    [((1, 256), np.float32, 1e-3), ((33, 3, 700), BF16, 1e-2), ((140, 2048), np.float32, 1e-3)],
)
def test_cumsum_adds_along_the_last_axis(library: Library, shape: tuple[int, ...], dtype: Any, rtol: float) -> None:
    """Two and three dimensions, more rows than partitions, more columns than one tile."""
    x = np.random.default_rng(7).standard_normal(shape).astype(dtype)
    (out,) = library.run("core.cumsum.cumsum:cumsum", x=x)
    assert_within(out, np.cumsum(ref.wide(x), axis=-1), rtol=rtol, atol=1e-3)


@pytest.mark.parametrize(
    ("batch", "channels", "width", "size", "stride", "pad"),
    [(1, 16, 200, 64, 1, 0), (2, 6, 150, 7, 1, 3), (1, 4, 300, 140, 2, 0), (1, 4, 130, 9, 3, 5)],
)
def test_depthwise_conv1d_slides_each_channel(
    library: Library, batch: int, channels: int, width: int, size: int, stride: int, pad: int
) -> None:
    """Small and large kernels, stride and padding, two cores over channels."""
    rng = np.random.default_rng(8)
    image = rng.standard_normal((batch, channels, 1, width)).astype(BF16)
    kernel = rng.standard_normal((channels, 1, 1, size)).astype(BF16)
    (out,) = library.run(
        "experimental.conv.depthwise_conv1d:depthwise_conv1d_implicit_gemm",
        img_ref=image,
        filter_ref=kernel,
        padding=((0, 0), (pad, pad)),
        stride=(1, stride),
        feature_group_count=channels,
        lnc=2,
    )
    assert_within(out, ref.depthwise_conv(image, kernel, pad, stride), rtol=1e-2, atol=1e-2)
