"""How long one simulated instruction takes on small operands: the simulator's own overhead.

>>> sorted(overhead(repeats=1, calls=1))[:2]
['activation', 'dma_copy']
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from gk_kernels.simulator.api import simulate

SHAPE = (32, 16)


def _cases() -> dict[str, Callable[[], Any]]:
    """One call of each common instruction on small operands, slicing included where kernels slice."""
    shape = SHAPE
    a, b, c = (nl.ndarray(shape, nl.float32) for _ in range(3))
    half = nl.ndarray(shape, nl.bfloat16)
    column = nl.ndarray((shape[0], 1), nl.float32)
    mask = nl.ndarray(shape, nl.uint8)
    index = nl.ndarray((shape[0], 8), nl.uint32)
    best = nl.ndarray((shape[0], 8), nl.float32)
    rows = nl.ndarray((shape[0], 1), nl.int32)
    table = nl.ndarray((64, shape[1]), nl.float32, nl.private_hbm)
    weights = nl.ndarray((shape[0], 32), nl.bfloat16)
    psum = nl.ndarray((32, shape[1]), nl.float32, nl.psum)
    turned = nl.ndarray((shape[1], shape[0]), nl.float32, nl.psum)
    for tile in (a, b, c, column):
        nisa.memset(tile, 1.0)
    nisa.memset(half, 1.0)
    nisa.memset(mask, 1)
    nisa.memset(weights, 1.0)
    nisa.memset(best, 1.0)
    nisa.iota(rows, [[1, 1]], 0, 1)
    big = nl.ndarray((64, shape[1]), nl.float32)
    nisa.memset(big, 2.0)
    nisa.dma_copy(table, big)
    shuffle = [0] * 32
    return {
        "dma_copy": lambda: nisa.dma_copy(dst=c, src=table[0 : shape[0]]),
        "dma_gather": lambda: nisa.dma_copy(dst=c, src=table.vector_select(0, rows)),
        "tensor_copy": lambda: nisa.tensor_copy(dst=half, src=a),
        "tensor_copy_slice": lambda: nisa.tensor_copy(dst=c[:, 0:8], src=a[:, 8:16]),
        "memset": lambda: nisa.memset(c, 0.0),
        "tensor_tensor": lambda: nisa.tensor_tensor(dst=c, data1=a, data2=b, op=nl.add),
        "tensor_tensor_bf16": lambda: nisa.tensor_tensor(dst=half, data1=half, data2=half, op=nl.multiply),
        "tensor_scalar": lambda: nisa.tensor_scalar(c, a, nl.multiply, column, op1=nl.add, operand1=1.0),
        "scalar_tensor_tensor": lambda: nisa.scalar_tensor_tensor(c, a, nl.multiply, 2.0, nl.add, b),
        "tensor_reduce": lambda: nisa.tensor_reduce(column, nl.maximum, a, axis=1),
        "activation": lambda: nisa.activation(dst=c, op=nl.exp, data=a, scale=0.5),
        "activation_sum": lambda: nisa.activation(
            c, nl.exp, a, scale=0.5, reduce_op=nl.add, reduce_res=column, reduce_cmd=nisa.reduce_cmd.reset_reduce
        ),
        "reciprocal": lambda: nisa.reciprocal(c, a),
        "iota": lambda: nisa.iota(c, [[1, shape[1]]], 0, 0),
        "tensor_copy_predicated": lambda: nisa.tensor_copy_predicated(c, a, mask),
        "max8": lambda: nisa.max8(best, a),
        "nc_find_index8": lambda: nisa.nc_find_index8(index, a, best),
        "nc_stream_shuffle": lambda: nisa.nc_stream_shuffle(c, a, shuffle),
        "nc_matmul": lambda: nisa.nc_matmul(psum, weights, half, accumulate=False),
        "nc_transpose": lambda: nisa.nc_transpose(turned, a),
    }


def overhead(repeats: int = 30, calls: int = 20) -> dict[str, float]:
    """Microseconds of one call of each instruction: the best of `repeats` averages over `calls`.

    Short batches, so that other work on the machine spoils few of them.
    """
    times: dict[str, float] = {}

    def kernel() -> None:
        for name, call in _cases().items():
            call()
            best = float("inf")
            for _ in range(repeats):
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                best = min(best, time.perf_counter() - start)
            times[name] = best / calls * 1e6

    simulate(kernel)
    return times


def median_overhead(repeats: int = 30, calls: int = 20) -> float:
    """Median over the instructions, in microseconds."""
    return statistics.median(overhead(repeats, calls).values())


def main() -> None:
    """Print the table."""
    times = overhead()
    for name, microseconds in sorted(times.items(), key=lambda item: item[1]):
        print(f"{name:24} {microseconds:7.1f} us")
    print(f"{'median':24} {statistics.median(times.values()):7.1f} us")


if __name__ == "__main__":
    main()
