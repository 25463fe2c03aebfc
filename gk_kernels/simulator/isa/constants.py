"""Engines, modes and versions (also importable as nki.isa.constants, the older spelling)."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

from gk_kernels.simulator import context as cx


class engine(Enum):
    """Engines of a NeuronCore."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What happens to the accumulator registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """Who generates DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What an out-of-range dynamic index does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Double-rate FP8."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):
    """NeuronCore generation; ordered."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):
    """How sendrecv moves its data."""

    dma = 1
    gpsimd_dma = 2


tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown


class NkiInstruction:
    """What an instruction returns. Execution is in program order, so dependencies hold already."""

    __slots__ = ()

    def depends_on(self, *producers: Any) -> NkiInstruction:
        """Note a dependency; returns self."""
        return self


def get_nc_version() -> nc_version:
    """The generation of the simulated device."""
    return nc_version(cx.current("get_nc_version").target.generation)


def get_nc_sub_version() -> int:
    """The silicon revision within the generation: the first."""
    return 0
