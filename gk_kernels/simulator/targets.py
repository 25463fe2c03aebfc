"""What trn2 and trn3 have: sizes that are checked, and clocks that turn counts into cycles.

Source: the NKI architecture guides of SDK 2.32; the usable SBUF sizes are the physical ones less the
16 KiB per partition that run-time code keeps for DMA descriptors.
"""

from __future__ import annotations

from dataclasses import dataclass

from gk_kernels.simulator.errors import UsageError

PARTITIONS = 128
PSUM_BANK_BYTES = 2048
PSUM_BANKS = 8
KIB = 1024


@dataclass(frozen=True)
class Target:
    """One NeuronCore generation.

    Attributes:
        generation: 3 for trn2, 4 for trn3.
        sbuf_bytes: physical SBUF bytes per partition.
        sbuf_usable_bytes: bytes per partition that a kernel can have.
        moving_bytes: largest matmul result per partition in bytes (one bank on trn2, all of PSUM on trn3).
        hbm_bytes_per_second: of one physical core, a fair share of the chip.
        dma_bytes_per_second: of one core's 16 DMA engines.
    """

    name: str
    generation: int
    sbuf_bytes: int
    sbuf_usable_bytes: int
    moving_bytes: int
    pe_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    hbm_bytes_per_second: float
    dma_bytes_per_second: float

    @property
    def has_mx(self) -> bool:
        """Whether MX quantisation and matmul exist."""
        return self.generation >= 4


TRN2 = Target("trn2", 3, 224 * KIB, 208 * KIB, PSUM_BANK_BYTES, 2.4, 0.96, 1.2, 1.2, 2.9e12 / 8, 368e9)
TRN3 = Target("trn3", 4, 256 * KIB, 240 * KIB, PSUM_BANK_BYTES * PSUM_BANKS, 2.4, 1.2, 1.2, 1.2, 4.9e12 / 8, 528e9)
TARGETS = {"trn2": TRN2, "gen3": TRN2, "trn3": TRN3, "gen4": TRN3}


def as_target(value: str | Target) -> Target:
    """The target of a name, or the target itself (a changed copy is welcome)."""
    if isinstance(value, Target):
        return value
    if value not in TARGETS:
        raise UsageError("target must be a known device", repr(value), ", ".join(TARGETS))
    return TARGETS[value]
