"""MXFP4 weights times activations quantised to MXFP8 on the way: trn3 only."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def mx_matmul(x: nl.NkiTensor, weights: nl.NkiTensor, weight_scales: nl.NkiTensor) -> nl.NkiTensor:
    """Product [tokens, features] in float32 of `x` [512, tokens] and MXFP4 weights.

    One tile contracts 512: k = 4 * partition + lane, so that 8 partitions of 4 lanes are 32
    consecutive k, which is how checkpoints group them.

    x: bfloat16. weights: [128, features] uint16, four fp4 values of consecutive k each.
    weight_scales: [16, features] uint8, one power of two for each 32 values of k.
    """
    tokens = x.shape[1]
    features = weights.shape[1]
    lanes = 4
    rows = nl.tile_size.pmax
    out = nl.ndarray((tokens, features), dtype=nl.float32, buffer=nl.shared_hbm, name="out")

    # Row 4p + lane of x goes to partition p, lane innermost.
    tile = nl.ndarray((rows, tokens, lanes), dtype=x.dtype, buffer=nl.sbuf, name="tile")
    for lane in range(lanes):
        nisa.dma_copy(
            dst=tile[:, :, lane],
            src=x.ap(pattern=[[lanes * tokens, rows], [1, tokens]], offset=lane * tokens),
        )
    moving = nl.ndarray((rows, tokens), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf, name="moving")
    moving_scale = nl.ndarray((rows, tokens), dtype=nl.uint8, buffer=nl.sbuf, name="moving_scale")
    nisa.quantize_mx(dst=moving, src=tile.reshape((rows, tokens * lanes)), dst_scale=moving_scale)

    packed = nl.ndarray((rows, features), dtype=nl.float4_e2m1fn_x4, buffer=nl.sbuf, name="packed")
    nisa.dma_copy(dst=packed, src=weights.view(nl.float4_e2m1fn_x4))
    # The scales of a quadrant's 32 partitions are its first four rows.
    scale = nl.ndarray((rows, features), dtype=nl.uint8, buffer=nl.sbuf, name="scale")
    for quadrant in range(4):
        nisa.dma_copy(
            dst=scale[32 * quadrant : 32 * quadrant + 4, :],
            src=weight_scales[4 * quadrant : 4 * quadrant + 4, :],
        )

    sums = nl.ndarray((tokens, features), dtype=nl.float32, buffer=nl.psum, name="sums")
    nisa.nc_matmul_mx(
        dst=sums,
        stationary=moving,
        moving=packed,
        stationary_scale=moving_scale,
        moving_scale=scale,
    )
    result = nl.ndarray((tokens, features), dtype=nl.float32, buffer=nl.sbuf, name="result")
    nisa.tensor_copy(dst=result, src=sums)
    nisa.dma_copy(dst=out, src=result)
    return out
