"""The accumulator registers of the Vector and Scalar engines: one fp32 per partition, kept between instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import PoisonError, UsageError, refuse
from gk_kernels.simulator.isa.check import column, column_values, put
from gk_kernels.simulator.isa.constants import reduce_cmd
from gk_kernels.simulator.ops import Op
from gk_kernels.simulator.tensor import NkiTensor, Tile

_cmd = reduce_cmd


def check(rule: str, engine: str, tile: Tile, command: Any, result: Any, initial: Any) -> None:
    """The command is a reduce_cmd, and `reduce_res` and the initial value fit it."""
    if not isinstance(command, reduce_cmd):
        refuse(f"{rule}: reduce_cmd", repr(command), "a member of nisa.reduce_cmd", UsageError)
    if result is not None:
        column(rule, "reduce_res", result, tile)
    if command is _cmd.load_reduce:
        if initial is None:
            refuse(f"{rule}: initial value", None, "a value when reduce_cmd is load_reduce", UsageError)
        column(rule, "initial value", initial, tile, ("float32",))
    elif initial is not None and (isinstance(initial, NkiTensor) or initial != 0):
        refuse(f"{rule}: initial value", repr(initial), "none unless reduce_cmd is load_reduce", UsageError)


def start(core: Core, engine: str, tile: Tile, op: Op, command: reduce_cmd, initial: Any) -> Array:
    """The registers before this instruction reduces into them."""
    if command in (_cmd.reset_reduce, _cmd.reset):
        return np.full(tile.partitions, op.identity, np.float32)
    if command is _cmd.load_reduce:
        return np.broadcast_to(np.ravel(column_values(initial, 2)), (tile.partitions,)).astype(np.float32)
    registers = core.registers.get(engine)
    if registers is None:
        refuse(
            f"{engine} accumulator registers",
            f"{command} before any reset",
            "reset_reduce or load_reduce first",
            PoisonError,
        )
    kept: Array = registers[tile.start : tile.start + tile.partitions]
    if np.isnan(kept).all():
        refuse(
            f"{engine} accumulator registers",
            "registers that this kernel never set",
            "reset_reduce or load_reduce first",
            PoisonError,
        )
    return kept


def store(core: Core, engine: str, tile: Tile, values: Array) -> None:
    """Keep the registers for the next instruction."""
    registers = core.registers.get(engine)
    if registers is None:
        registers = core.registers[engine] = np.full(128, np.nan, np.float32)
    registers[tile.start : tile.start + tile.partitions] = values


def run(
    core: Core,
    engine: str,
    tile: Tile,
    op: Op,
    values: Array,
    command: reduce_cmd,
    result: NkiTensor | None,
    initial: Any = None,
    negate: bool = False,
) -> None:
    """Reduce `values` over the free axes into the registers, and read them out if `result` is given."""
    if command is not _cmd.idle:
        registers = None if command is _cmd.reset_reduce else start(core, engine, tile, op, command, initial)
        if command is not _cmd.reset:
            assert op.alu is not None
            flat = values.reshape(tile.partitions, -1)
            if op.reduce is None:
                total = flat[:, 0]
                for i in range(1, flat.shape[1]):
                    total = op.alu(total, flat[:, i])
            else:
                total = op.reduce.reduce(flat, axis=1).astype(np.float32, copy=False)
            registers = total if registers is None else op.alu(registers, total).astype(np.float32, copy=False)
        assert registers is not None
        store(core, engine, tile, registers)
    if result is not None:
        kept = core.registers.get(engine)
        if kept is None:
            refuse(f"{engine} accumulator registers", "read before any reduction", "a reduce_cmd first", PoisonError)
        read = kept[tile.start : tile.start + tile.partitions]
        put(result, -read if negate else read)
