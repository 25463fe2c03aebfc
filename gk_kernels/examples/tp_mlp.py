"""A two-layer MLP over tensor-parallel ranks: all-gather the tokens, reduce-scatter the result."""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def tp_mlp(x: nl.NkiTensor, up: nl.NkiTensor, down: nl.NkiTensor, ranks: int = 4) -> nl.NkiTensor:
    """This rank's rows of relu(X @ Up) @ Down.

    x [tokens / ranks, hidden], up [hidden, inner / ranks], down [inner / ranks, hidden]: rank r
    holds rows r of X, columns r of Up and rows r of Down. All tokens, hidden and one rank's inner
    are at most 128. Collectives work on whole tensors in private HBM.
    """
    own, hidden = x.shape
    inner = up.shape[1]
    tokens = own * ranks
    everyone = []
    for rank in range(ranks):
        everyone.append(rank)
    group = ncc.ReplicaGroup((tuple(everyone),))
    out = nl.ndarray((own, hidden), dtype=nl.float32, buffer=nl.shared_hbm, name="out")

    mine = nl.ndarray((own, hidden), dtype=x.dtype, buffer=nl.private_hbm, name="mine")
    nisa.dma_copy(dst=mine, src=x)
    gathered = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.private_hbm, name="gathered")
    ncc.all_gather(srcs=[mine], dsts=[gathered], replica_group=group, collective_dim=0)

    # Both products contract on partitions: X^T and Up give (X @ Up)^T, which is what Down needs.
    x_tile = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.sbuf, name="x_tile")
    nisa.dma_copy(dst=x_tile, src=gathered)
    x_turned = nl.ndarray((hidden, tokens), dtype=x.dtype, buffer=nl.psum, name="x_turned")
    nisa.nc_transpose(dst=x_turned, data=x_tile)
    x_columns = nl.ndarray((hidden, tokens), dtype=x.dtype, buffer=nl.sbuf, name="x_columns")
    nisa.tensor_copy(dst=x_columns, src=x_turned)
    up_tile = nl.ndarray((hidden, inner), dtype=up.dtype, buffer=nl.sbuf, name="up_tile")
    nisa.dma_copy(dst=up_tile, src=up)
    down_tile = nl.ndarray((inner, hidden), dtype=down.dtype, buffer=nl.sbuf, name="down_tile")
    nisa.dma_copy(dst=down_tile, src=down)

    first = nl.ndarray((inner, tokens), dtype=nl.float32, buffer=nl.psum, name="first")
    nisa.nc_matmul(dst=first, stationary=up_tile, moving=x_columns)
    active = nl.ndarray((inner, tokens), dtype=x.dtype, buffer=nl.sbuf, name="active")
    nisa.activation(dst=active, op=nl.relu, data=first)
    second = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.psum, name="second")
    nisa.nc_matmul(dst=second, stationary=active, moving=down_tile)
    partial_tile = nl.ndarray((tokens, hidden), nl.float32, buffer=nl.sbuf, name="partial_tile")
    nisa.tensor_copy(dst=partial_tile, src=second)

    partial = nl.ndarray((tokens, hidden), nl.float32, buffer=nl.private_hbm, name="partial")
    nisa.dma_copy(dst=partial, src=partial_tile)
    total = nl.ndarray((own, hidden), nl.float32, buffer=nl.private_hbm, name="total")
    ncc.reduce_scatter(srcs=[partial], dsts=[total], replica_group=group, collective_dim=0, op=nl.add)
    nisa.dma_copy(dst=out, src=total)
    return out
