"""Two physical cores of one rank: shared HBM, sendrecv, core_barrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gk_kernels.simulator import DivergenceError, PoisonError, UsageError, simulate
from gk_kernels.simulator import collectives as ncc
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from gk_kernels.simulator.program import jit
from tests.simulator.support import Broken, RuleBook, check_refusal, empty, filled

breaks = RuleBook()


def test_each_core_writes_its_half_of_a_shared_tensor() -> None:
    """Matched by allocation line; program_id tells the cores apart."""

    def kernel(x: Any) -> Any:
        core, cores = nl.program_id(0), nl.num_programs(0)
        assert (cores, nl.program_ndim()) == (2, 1)
        rows = x.shape[0] // cores
        out = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
        tile = nl.load(x[core * rows : (core + 1) * rows])
        nisa.tensor_scalar(tile, tile, nl.add, float(core + 1))
        nisa.dma_copy(out[core * rows : (core + 1) * rows], tile)
        return out

    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    result = simulate(kernel, x, lnc=2)
    assert np.array_equal(result.output, x + np.array([[1], [1], [2], [2]]))
    assert result.counters[0].total(op="tensor_scalar").count == 2
    assert [c.total(op="tensor_scalar").count for c in result.core_counters[0]] == [1, 1]


def test_the_launch_bracket_sets_the_logical_core_size() -> None:
    """kernel[2](...), and the outputs alone."""

    @jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray((1, 1), nl.int32, nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.dma_copy(out, filled(1, 1, dtype=nl.int32, value=nl.num_programs()))
        return out

    x = np.zeros((1, 1), np.float32)
    assert kernel[2](x).tolist() == [[2]]
    assert kernel(x).tolist() == [[1]]
    with pytest.raises(UsageError, match="1 or 2"):
        kernel[3]


def test_sendrecv_swaps_tiles() -> None:
    """Each core receives the other's tile."""

    def kernel() -> Any:
        core = nl.program_id(0)
        mine, theirs = filled(2, 3, value=10.0 + core), empty(2, 3)
        nisa.sendrecv(mine, theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)
        out = nl.ndarray((2, 2, 3), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[core], theirs)
        return out

    out = simulate(kernel, lnc=2).output
    assert out[:, 0, 0].tolist() == [11.0, 10.0]


def test_sendrecv_sends_what_the_tile_held_then() -> None:
    """A core may overwrite its tile after sending."""

    def kernel() -> Any:
        core = nl.program_id(0)
        tile, got = filled(1, 2, value=float(core)), empty(1, 2)
        nisa.sendrecv(tile, got, 1 - core, 1 - core, 0, dma_engine=nisa.dma_engine.gpsimd_dma)
        nisa.memset(tile, -1.0)
        nisa.sendrecv(got, tile, 1 - core, 1 - core, 1)
        out = nl.ndarray((2, 1, 2), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[core], tile)
        return out

    assert simulate(kernel, lnc=2).output[:, 0, 0].tolist() == [0.0, 1.0]


def test_a_barrier_orders_writes_before_reads() -> None:
    """Core 0 reads what core 1 wrote; without the barrier it would read never-written bytes."""

    def make(barrier: bool) -> Any:
        def kernel() -> Any:
            core = nl.program_id(0)
            shared = nl.ndarray((2, 1, 3), nl.float32, nl.shared_hbm)
            nisa.dma_copy(shared[core], filled(1, 3, value=float(core)))
            if barrier:
                nisa.core_barrier(shared, (0, 1))
            tile = empty(1, 3)
            nisa.dma_copy(tile, shared[1 - core])
            out = nl.ndarray((2, 1, 3), nl.float32, nl.shared_hbm)
            nisa.dma_copy(out[core], tile)
            return out

        return kernel

    assert simulate(make(True), lnc=2).output[:, 0, 0].tolist() == [1.0, 0.0]
    with pytest.raises(PoisonError):
        simulate(make(False), lnc=2)


def test_a_core_that_skips_a_barrier_is_named() -> None:
    """Core 1 ends."""

    def kernel() -> None:
        shared = nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.core_barrier(shared, (0, 1))

    with pytest.raises(DivergenceError, match="one core waits in CoreBarrier, the other ended"):
        simulate(kernel, lnc=2)


def test_a_barrier_does_not_meet_a_sendrecv() -> None:
    """The kinds differ."""

    def kernel() -> None:
        shared = nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.core_barrier(shared, (0, 1))
        else:
            nisa.sendrecv(filled(1, 1), empty(1, 1), 0, 0, 0)

    with pytest.raises(DivergenceError, match="the other waits in SendRecv"):
        simulate(kernel, lnc=2)


@pytest.mark.parametrize(("pipes", "width"), [((0, 1), 3), ((0, 0), 4)])
def test_sendrecv_needs_equal_pipes_and_shapes(pipes: tuple[int, int], width: int) -> None:
    """Pipe 0 against pipe 1; (1, 3) against (1, 4)."""

    def kernel() -> None:
        core = nl.program_id(0)
        shape = (1, 3 if core == 0 else width)
        nisa.sendrecv(filled(*shape), empty(*shape), 1 - core, 1 - core, pipes[core])

    with pytest.raises(DivergenceError, match="equal pipe_id, shape and dtype"):
        simulate(kernel, lnc=2)


def test_sendrecv_directions_must_match() -> None:
    """Both send to core 0, core 0 receives from core 1, core 1 from core 0."""

    def kernel() -> None:
        core = nl.program_id(0)
        nisa.sendrecv(filled(1, 1), empty(1, 1), 0, 1 - core, 0)

    with pytest.raises(DivergenceError, match="core 1 receives from core 0, which sends to core 0"):
        simulate(kernel, lnc=2)


def test_shared_tensors_of_one_name_must_agree() -> None:
    """Two cores, two shapes."""

    def kernel() -> None:
        nl.ndarray((1 + nl.program_id(0), 2), nl.float32, nl.shared_hbm, name="partial")

    with pytest.raises(UsageError, match="shared_hbm on two cores"):
        simulate(kernel, lnc=2)


def test_shared_tensors_of_one_line_are_matched_by_turn() -> None:
    """Two tensors from one loop are two tensors, each shared."""

    def kernel() -> Any:
        core = nl.program_id(0)
        outs = [nl.ndarray((2, 1, 1), nl.float32, nl.shared_hbm) for _ in range(2)]
        for i, out in enumerate(outs):
            nisa.dma_copy(out[core], filled(1, 1, value=10.0 * i + core))
        return tuple(outs)

    first, second = simulate(kernel, lnc=2).output
    assert first.ravel().tolist() == [0.0, 1.0]
    assert second.ravel().tolist() == [10.0, 11.0]


def test_private_tensors_are_not_shared() -> None:
    """private_hbm of core 1 is not that of core 0."""

    def kernel() -> Any:
        core = nl.program_id(0)
        mine, out = nl.ndarray((1, 1), nl.float32, nl.private_hbm), nl.ndarray((2, 1, 1), nl.float32, nl.shared_hbm)
        nisa.dma_copy(mine, filled(1, 1, value=float(core)))
        nisa.core_barrier(out, (0, 1))
        nisa.dma_copy(out[core], mine)
        return out

    assert simulate(kernel, lnc=2).output.ravel().tolist() == [0.0, 1.0]


def test_collectives_run_between_ranks_of_two_cores() -> None:
    """Two ranks of two cores: shared operands are reduced once, and counted once."""
    group = ncc.ReplicaGroup(((0, 1),))

    def kernel(x: Any) -> Any:
        core = nl.program_id(0)
        src, dst = (nl.ndarray((2, 3), nl.float32, nl.shared_hbm) for _ in range(2))
        nisa.dma_copy(src[core : core + 1], nl.load(x[core : core + 1]))
        nisa.core_barrier(src, (0, 1))
        ncc.all_reduce([src], [dst], group, nl.add)
        return dst

    inputs = [(np.full((2, 3), 10.0**r, np.float32),) for r in range(2)]
    result = simulate(kernel, ranks=2, lnc=2, rank_args=inputs)
    assert [o[1, 2] for o in result.outputs] == [11.0, 11.0]
    assert result.counters[0].collectives == {"all_reduce": {"count": 1, "bytes": 24}}


@breaks("core_barrier: logical core size", "lnc 1", "NCC_IBTN243")
def a_barrier_at_lnc_1() -> None:
    nisa.core_barrier(nl.ndarray((1, 1), nl.float32, nl.shared_hbm), (0, 1))  # breaks


@breaks("sendrecv: logical core size", "lnc 1", "NCC_IBTN243")
def a_sendrecv_at_lnc_1() -> None:
    nisa.sendrecv(filled(1, 1), empty(1, 1), 0, 0, 0)  # breaks


@breaks("core_barrier: cores", "(0,)", "(0, 1)", lnc=2)
def a_barrier_of_one_core() -> None:
    nisa.core_barrier(nl.ndarray((1, 1), nl.float32, nl.shared_hbm), (0,))  # breaks


@breaks("core_barrier: data buffer", "private_hbm", "shared_hbm", lnc=2)
def a_barrier_on_private_memory() -> None:
    nisa.core_barrier(nl.ndarray((1, 1), nl.float32, nl.private_hbm), (0, 1))  # breaks


@breaks("sendrecv: dst buffer", "psum", "sbuf", lnc=2)
def a_sendrecv_into_psum() -> None:
    nisa.sendrecv(filled(1, 1), empty(1, 1, buffer=nl.psum), 1, 1, 0)  # breaks


@breaks("sendrecv: dtypes", "src float32, dst bfloat16", "equal dtypes", lnc=2)
def a_sendrecv_that_casts() -> None:
    nisa.sendrecv(filled(1, 1), empty(1, 1, dtype=nl.bfloat16), 1, 1, 0)  # breaks


@breaks("sendrecv: shapes", "src (2, 6), dst (2, 2, 3)", "equal shapes", lnc=2)
def a_sendrecv_that_reshapes() -> None:
    nisa.sendrecv(filled(2, 6), empty(2, 2, 3), 1, 1, 0)  # breaks


@breaks("sendrecv: send_to_rank", "2", "0 or 1", lnc=2)
def a_sendrecv_to_core_two() -> None:
    nisa.sendrecv(filled(1, 1), empty(1, 1), 2, 1, 0)  # breaks


@breaks("sendrecv: bytes per partition with gpsimd_dma", "1028", "1024", lnc=2)
def a_large_gpsimd_sendrecv() -> None:
    nisa.sendrecv(filled(1, 257), empty(1, 257), 1, 1, 0, dma_engine=nisa.dma_engine.gpsimd_dma)  # breaks


@pytest.mark.parametrize("case", breaks.cases, ids=breaks.ids)
def test_a_broken_rule_is_refused_with_its_numbers_and_line(case: Broken) -> None:
    """Message: rule, got, limit; site: the line that breaks it."""
    check_refusal(case)
    check_refusal(case, trace=True)
