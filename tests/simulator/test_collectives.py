"""Collectives over simulated ranks, and what happens when ranks do not agree."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gk_kernels.simulator import DivergenceError, SimulationError, UsageError, simulate
from gk_kernels.simulator import collectives as ncc
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import Broken, RuleBook, check_refusal, empty, filled

HBM, SBUF = nl.private_hbm, nl.sbuf
ONE = ncc.ReplicaGroup(((0,),))
breaks = RuleBook()


def ranks_of(shape: tuple[int, ...], count: int, dtype: Any = np.float32) -> list[tuple[Any]]:
    """One array per rank, stamped with rank and place."""
    size = int(np.prod(shape))
    return [((np.arange(size).reshape(shape) + 100 * r).astype(dtype),) for r in range(count)]


def moved(x: Any, shape: tuple[int, ...], collective: Any, buffer: Any = HBM) -> Any:
    """Copy x in, run collective([src], [dst]), and copy dst out."""
    src, dst = nl.ndarray(x.shape, x.dtype, buffer), nl.ndarray(shape, x.dtype, buffer)
    nisa.dma_copy(src, x)
    collective([src], [dst])
    out = nl.ndarray(shape, x.dtype, nl.shared_hbm)
    nisa.dma_copy(out, dst)
    return out


def test_all_gather_concatenates_in_the_order_of_the_group() -> None:
    """Eight ranks in two groups; the second is listed backwards."""
    group = ncc.ReplicaGroup(((0, 1, 2, 3), (7, 6, 5, 4)))

    def kernel(x: Any) -> Any:
        return moved(x, (8, 3), lambda s, d: ncc.all_gather(s, d, group, 0))

    inputs = ranks_of((2, 3), 8)
    outputs = simulate(kernel, ranks=8, rank_args=inputs).outputs
    first = np.concatenate([inputs[r][0] for r in (0, 1, 2, 3)])
    second = np.concatenate([inputs[r][0] for r in (7, 6, 5, 4)])
    for rank in range(8):
        assert np.array_equal(outputs[rank], first if rank < 4 else second)


def test_all_gather_in_sbuf_concatenates_along_either_dimension() -> None:
    """Dimension 1: columns side by side."""
    group = ncc.ReplicaGroup(((0, 1),))

    def kernel(x: Any) -> Any:
        side = moved(x, (2, 6), lambda s, d: ncc.all_gather(s, d, group, 1), SBUF)
        below = moved(x, (4, 3), lambda s, d: ncc.all_gather(s, d, group, 0), SBUF)
        return side, below

    inputs = ranks_of((2, 3), 2)
    side, below = simulate(kernel, ranks=2, rank_args=inputs).outputs[1]
    assert np.array_equal(side, np.concatenate([x for (x,) in inputs], axis=1))
    assert np.array_equal(below, np.concatenate([x for (x,) in inputs], axis=0))


@pytest.mark.parametrize(("op", "function"), [("add", np.sum), ("maximum", np.max), ("minimum", np.min)])
def test_all_reduce_and_reduce_scatter_reduce_over_the_group(op: str, function: Any) -> None:
    """Four ranks; rank r keeps part r of its group's order."""
    group = ncc.ReplicaGroup(((2, 0, 3, 1),))

    def kernel(x: Any) -> Any:
        whole = moved(x, (4, 3), lambda s, d: ncc.all_reduce(s, d, group, getattr(nl, op)))
        part = moved(x, (1, 3), lambda s, d: ncc.reduce_scatter(s, d, group, 0, getattr(nl, op)))
        return whole, part

    inputs = ranks_of((4, 3), 4)
    want = function(np.stack([x for (x,) in inputs]), axis=0)
    outputs = simulate(kernel, ranks=4, rank_args=inputs).outputs
    for rank, (whole, part) in enumerate(outputs):
        position = (2, 0, 3, 1).index(rank)
        assert np.array_equal(whole, want)
        assert np.array_equal(part, want[position : position + 1])


def test_one_rank_is_a_group_of_one() -> None:
    """A collective over itself."""

    def kernel(x: Any) -> Any:
        return moved(x, (2, 3), lambda s, d: ncc.all_reduce(s, d, ONE, nl.add))

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(simulate(kernel, x).output, x)


def test_integers_reduce_exactly() -> None:
    """2^24 + 1 in int32."""
    group = ncc.ReplicaGroup([[0, 1]])

    def kernel(x: Any) -> Any:
        return moved(x, (1, 1), lambda s, d: ncc.all_reduce(s, d, group, nl.add))

    inputs = [(np.array([[v]], np.int32),) for v in (2**24, 1)]
    assert simulate(kernel, ranks=2, rank_args=inputs).output.tolist() == [[16777217]]


def test_reductions_add_in_fp32_and_round_once() -> None:
    """bfloat16: 256 + 1 + 1 + 1 is 260 (259 rounds to even), not 256."""
    group = ncc.ReplicaGroup(((0, 1, 2, 3),))

    def kernel(x: Any) -> Any:
        return moved(x, (1, 1), lambda s, d: ncc.all_reduce(s, d, group, nl.add))

    inputs = [(np.array([[v]], ml_dtypes.bfloat16),) for v in (256.0, 1.0, 1.0, 1.0)]
    assert float(simulate(kernel, ranks=4, rank_args=inputs).output[0, 0]) == 260.0


def test_all_to_all_transposes_parts() -> None:
    """Part j of rank i becomes part i of rank j."""
    group = ncc.ReplicaGroup(((0, 1, 2),))

    def kernel(x: Any) -> Any:
        return moved(x, (3, 2), lambda s, d: ncc.all_to_all(s, d, group, 0))

    inputs = ranks_of((3, 2), 3)
    outputs = simulate(kernel, ranks=3, rank_args=inputs).outputs
    for j in range(3):
        for i in range(3):
            assert np.array_equal(outputs[j][i], inputs[i][0][j])


def test_coalesced_tensors_move_together_in_hbm() -> None:
    """Two tensors of different shapes in one call count once."""
    group = ncc.ReplicaGroup(((0, 1),))

    def kernel(x: Any) -> Any:
        sources = [nl.ndarray(s, nl.float32, HBM) for s in ((2, 3), (1, 5))]
        targets = [nl.ndarray(s, nl.float32, nl.shared_hbm) for s in ((4, 3), (2, 5))]
        nisa.dma_copy(sources[0], x)
        nisa.dma_copy(sources[1], x[0:1].reshape((3,))[0:1].broadcast(0, 5))
        ncc.all_gather(sources, targets, group, 0)
        return tuple(targets)

    inputs = ranks_of((2, 3), 2)
    result = simulate(kernel, ranks=2, rank_args=inputs)
    assert result.output[1].tolist() == [[0.0] * 5, [100.0] * 5]
    assert result.counters[0].collectives == {"all_gather": {"count": 1, "bytes": 24 + 20}}


def test_permutations_send_along_pairs_and_rings() -> None:
    """Explicit pairs leave a rank without a source as it was; the ring sends to the successor."""
    ring = ncc.ReplicaGroup(((0, 1, 2),))

    def kernel(x: Any) -> Any:
        src, dst = nl.ndarray((1, 2), nl.float32, HBM), nl.ndarray((1, 2), nl.float32, HBM)
        nisa.dma_copy(src, x)
        nisa.dma_copy(dst, filled(1, 2, value=-1.0))
        ncc.collective_permute([src], [dst], [(0, 2), (2, 0)])
        around = moved(x, (1, 2), lambda s, d: ncc.collective_permute_implicit([s], [d], ring))
        doubled = moved(x, (1, 2), lambda s, d: ncc.collective_permute_implicit_reduce([s], [s], [d], ring, nl.add))
        source = nl.ndarray((1, 1), nl.int32)
        register = ncc.collective_permute_implicit_current_processing_rank_id(1, ring)
        nisa.register_store(source, register)
        out, who = nl.ndarray((1, 2), nl.float32, nl.shared_hbm), nl.ndarray((1, 1), nl.int32, nl.shared_hbm)
        nisa.dma_copy(out, dst)
        nisa.dma_copy(who, source)
        return out, around, doubled, who

    inputs = ranks_of((1, 2), 3)
    outputs = simulate(kernel, ranks=3, rank_args=inputs).outputs
    assert [o[0][0, 0] for o in outputs] == [200.0, -1.0, 0.0]
    assert [o[1][0, 0] for o in outputs] == [200.0, 0.0, 100.0]
    assert [o[2][0, 0] for o in outputs] == [400.0, 0.0, 200.0]
    assert [o[3][0, 0] for o in outputs] == [2, 0, 1]


def test_rank_id_is_a_register_that_selects() -> None:
    """Each rank reads its own row of a shared table."""
    table = np.arange(8, dtype=np.float32).reshape(4, 2)

    def kernel(table: Any) -> Any:
        out = nl.ndarray((2,), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, table.select(0, ncc.rank_id()))
        return out

    outputs = simulate(kernel, table, ranks=4).outputs
    assert [o.tolist() for o in outputs] == table.tolist()


def test_a_shared_argument_is_private_to_each_rank_once_written() -> None:
    """Ranks write different rows; the caller's array stays."""
    cache = np.zeros((2, 2), np.float32)

    def kernel(cache: Any) -> Any:
        nisa.dma_copy(cache.select(0, ncc.rank_id()), filled(1, 2, value=3.0))
        return cache

    outputs = simulate(kernel, cache, ranks=2).outputs
    assert [o[:, 0].tolist() for o in outputs] == [[3.0, 0.0], [0.0, 3.0]]
    assert not cache.any()


def test_a_trace_counts_collectives_without_data() -> None:
    """128 ranks cost nothing but counts."""
    group = ncc.ReplicaGroup((tuple(range(128)),))

    def kernel() -> None:
        src, dst = nl.ndarray((1, 2880), nl.bfloat16, HBM), nl.ndarray((128, 2880), nl.bfloat16, HBM)
        ncc.all_gather([src], [dst], group, 0)

    result = simulate(kernel, ranks=128, trace=True)
    assert result.counters[127].collectives == {"all_gather": {"count": 1, "bytes": 5760}}
    assert result.total.collectives["all_gather"]["bytes"] == 128 * 5760


def test_one_rank_of_a_larger_mesh_can_be_traced_alone() -> None:
    """The groups name ranks that are not simulated; they must still be disjoint. With data it is refused."""

    def make(groups: Any) -> Any:
        def kernel() -> None:
            src, dst = filled(1, 4, buffer=HBM), nl.ndarray((8, 4), nl.float32, HBM)
            ncc.all_gather([src], [dst], ncc.ReplicaGroup(groups), 0)

        return kernel

    eights = (tuple(range(8)), tuple(range(8, 16)))
    assert simulate(make(eights), trace=True).counters[0].collectives == {"all_gather": {"count": 1, "bytes": 16}}
    with pytest.raises(DivergenceError, match="groups that do not overlap"):
        simulate(make((tuple(range(8)), tuple(range(7, 15)))), trace=True)
    with pytest.raises(DivergenceError, match="exactly the 1 simulated ranks"):
        simulate(make(eights))


def _tiny(ranks: int) -> Any:
    everyone = ncc.ReplicaGroup((tuple(range(ranks)),))
    eights = ncc.ReplicaGroup(tuple(tuple(range(r, r + 8)) for r in range(0, ranks, 8)))

    def kernel(x: Any) -> Any:
        total = moved(x, (8, 4), lambda s, d: ncc.all_reduce(s, d, eights, nl.add))
        part = moved(x, (1, 4), lambda s, d: ncc.reduce_scatter(s, d, eights, 0, nl.add))
        every = moved(x, (8 * ranks, 4), lambda s, d: ncc.all_gather(s, d, everyone, 0))
        return total, part, every

    return kernel


def _check_tiny(ranks: int) -> None:
    inputs = ranks_of((8, 4), ranks)
    outputs = simulate(_tiny(ranks), ranks=ranks, rank_args=inputs).outputs
    stacked = np.stack([x for (x,) in inputs])
    for rank, (total, part, every) in enumerate(outputs):
        want = stacked[rank // 8 * 8 : rank // 8 * 8 + 8].sum(0)
        assert np.array_equal(total, want)
        assert np.array_equal(part[0], want[rank % 8])
        assert np.array_equal(every, stacked.reshape(-1, 4))


def test_eight_ranks_run_a_program_of_collectives() -> None:
    """One tensor-parallel group."""
    _check_tiny(8)


@pytest.mark.slow
def test_128_ranks_run_in_less_than_8_gib() -> None:
    """Sixteen tensor-parallel groups and one group of all."""
    import resource

    _check_tiny(128)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 * 1024 * 1024


# Divergence -----------------------------------------------------------------------------------------------------------


def _gather(x: Any, group: Any, shape: tuple[int, int] = (4, 3)) -> None:
    src, dst = nl.ndarray((2, 3), nl.float32, HBM), nl.ndarray(shape, nl.float32, HBM)
    nisa.dma_copy(src, x)
    ncc.all_gather([src], [dst], group, 0)


PAIR = ncc.ReplicaGroup(((0, 1),))


def _diverge(kernel: Any, *words: str, ranks: tuple[int, ...]) -> None:
    """`kernel(x, rank)` runs on two ranks and is refused."""
    inputs = [(x, r) for r, (x,) in enumerate(ranks_of((2, 3), 2))]
    with pytest.raises(DivergenceError) as caught:
        simulate(kernel, ranks=2, rank_args=inputs)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.ranks == ranks


def test_a_rank_that_ends_early_is_named() -> None:
    """Rank 1 returns before the collective."""

    def kernel(x: Any, rank: int) -> None:
        if rank == 0:
            _gather(x, PAIR)

    _diverge(kernel, "rank 1 ended; rank 0 wait in all_gather", "test_collectives.py", ranks=(1,))


def test_different_collectives_are_named() -> None:
    """all_gather against all_reduce."""

    def kernel(x: Any, rank: int) -> None:
        if rank == 0:
            _gather(x, PAIR)
        else:
            moved(x, (2, 3), lambda s, d: ncc.all_reduce(s, d, PAIR, nl.add))

    _diverge(kernel, "ranks disagree about collectives", "rank 0: all_gather", "rank 1: all_reduce", ranks=(1,))


def test_the_same_collective_on_different_lines_is_a_divergence() -> None:
    """Two branches, two call sites."""

    def kernel(x: Any, rank: int) -> None:
        src, dst = nl.ndarray((2, 3), nl.float32, HBM), nl.ndarray((4, 3), nl.float32, HBM)
        nisa.dma_copy(src, x)
        if rank == 0:
            ncc.all_gather([src], [dst], PAIR, 0)
        else:
            ncc.all_gather([src], [dst], PAIR, 0)

    _diverge(kernel, "ranks disagree about kernel lines", ranks=(1,))


def test_different_groups_are_a_divergence() -> None:
    """(0, 1) against (1, 0)."""

    def kernel(x: Any, rank: int) -> None:
        _gather(x, PAIR if rank == 0 else ncc.ReplicaGroup(((1, 0),)))

    _diverge(kernel, "ranks disagree about replica groups", ranks=(1,))


def test_different_shapes_are_a_divergence() -> None:
    """The sources differ in shape."""

    def kernel(x: Any, rank: int) -> None:
        rows = 2 if rank == 0 else 1
        src, dst = nl.ndarray((rows, 3), nl.float32, HBM), nl.ndarray((2 * rows, 3), nl.float32, HBM)
        nisa.dma_copy(src, x[0:rows])
        ncc.all_gather([src], [dst], PAIR, 0)

    _diverge(kernel, "ranks disagree about operands", "(1, 3)", "(2, 3)", ranks=(1,))


@pytest.mark.parametrize(
    ("groups", "word"),
    [
        (((0, 1), (1, 2)), "groups that do not overlap"),
        (((0, 1),), "exactly the 3 simulated ranks"),
        (((0, 1), (2,)), "groups of one size"),
    ],
)
def test_wrong_groups_are_refused(groups: Any, word: str) -> None:
    """Overlap, a missing rank, unequal sizes."""

    def kernel() -> None:
        src, dst = filled(1, 2, buffer=HBM), nl.ndarray((1, 2), nl.float32, HBM)
        ncc.all_reduce([src], [dst], ncc.ReplicaGroup(groups), nl.add)

    with pytest.raises(SimulationError, match=word if word != "exactly the 3 simulated ranks" else "rank"):
        simulate(kernel, ranks=3)


def test_a_refusal_on_one_rank_names_the_rank_and_ends_the_others() -> None:
    """Rank 2 of 3 breaks a rule; the run ends with its error."""

    def kernel(rank: int) -> None:
        if rank == 2:
            nisa.tensor_copy(empty(2, 3), empty(2, 3))
        ncc.all_reduce([filled(1, 2, buffer=HBM)], [nl.ndarray((1, 2), nl.float32, HBM)],
                       ncc.ReplicaGroup(((0, 1, 2),)), nl.add)  # fmt: skip

    with pytest.raises(SimulationError, match=r"never-written bytes.*\(rank 2\)") as caught:
        simulate(kernel, ranks=3, rank_args=[(0,), (1,), (2,)])
    assert caught.value.ranks == (2,)


def test_an_exception_of_the_kernel_itself_comes_through() -> None:
    """A kernel's own assertion on rank 1."""

    def kernel(rank: int) -> None:
        assert rank == 0, "only rank 0"

    with pytest.raises(AssertionError, match="only rank 0"):
        simulate(kernel, ranks=2, rank_args=[(0,), (1,)])


# Rules ----------------------------------------------------------------------------------------------------------------


@breaks("all_reduce: memory", "HBM and SBUF operands", "all in HBM or all in SBUF")
def a_collective_from_hbm_into_sbuf() -> None:
    ncc.all_reduce([filled(2, 3, buffer=HBM)], [empty(2, 3)], ONE, nl.add)  # breaks


@breaks("all_to_all: memory", "sbuf", "HBM")
def an_all_to_all_in_sbuf() -> None:
    ncc.all_to_all([filled(2, 3)], [empty(2, 3)], ONE, 0)  # breaks


@breaks("all_reduce: coalesced tensors in SBUF", "2", "1")
def two_sbuf_tensors_in_one_call() -> None:
    ncc.all_reduce([filled(2, 3), filled(2, 3)], [empty(2, 3), empty(2, 3)], ONE, nl.add)  # breaks


@breaks("all_reduce: src dtype", "float8_e4m3", "view the bytes as bfloat16")
def an_fp8_collective() -> None:
    tile = filled(2, 4, dtype=nl.float8_e4m3)
    ncc.all_reduce([tile], [empty(2, 4, dtype=nl.float8_e4m3)], ONE, nl.maximum)  # breaks


@breaks("all_gather: src layout", "24 of 48 bytes", "a whole dense tensor")
def a_collective_on_a_slice() -> None:
    ncc.all_gather([filled(4, 3, buffer=HBM)[0:2]], [empty(2, 3, buffer=HBM)], ONE, 0)  # breaks


@breaks("all_gather: src layout", "8 of 16 bytes", "bit-cast or not")
def a_collective_on_a_bit_cast_slice() -> None:
    source = filled(2, 8, dtype=nl.uint8, buffer=HBM)[0:1].view(nl.bfloat16)
    ncc.all_gather([source], [empty(1, 4, dtype=nl.bfloat16, buffer=HBM)], ONE, 0)  # breaks


@breaks("all_gather: src layout", "strides (1, 3)", "a whole dense tensor")
def a_collective_on_a_transposed_view() -> None:
    ncc.all_gather([filled(4, 3, buffer=HBM).permute((1, 0))], [empty(3, 4, buffer=HBM)], ONE, 0)  # breaks


@breaks("all_gather: collective_dim", "1", "0 or 1 in SBUF, 0 in HBM")
def gather_columns_in_hbm() -> None:
    ncc.all_gather([filled(4, 3, buffer=HBM)], [empty(4, 3, buffer=HBM)], ONE, 1)  # breaks


@breaks("reduce_scatter: collective_dim", "1", "0")
def scatter_columns() -> None:
    ncc.reduce_scatter([filled(4, 3, buffer=HBM)], [empty(4, 3, buffer=HBM)], ONE, 1, nl.add)  # breaks


@breaks("all_reduce: op", "nl.multiply", "add, minimum, maximum")
def an_all_reduce_that_multiplies() -> None:
    ncc.all_reduce([filled(4, 3, buffer=HBM)], [empty(4, 3, buffer=HBM)], ONE, nl.multiply)  # breaks


@breaks("all_gather: dst shape", "(8, 3)", "(4, 3)")
def a_gather_into_too_large_a_tensor() -> None:
    ncc.all_gather([filled(4, 3, buffer=HBM)], [empty(8, 3, buffer=HBM)], ONE, 0)  # breaks


@breaks("all_reduce: dtypes", "src float32, dst bfloat16", "equal dtypes")
def a_collective_that_casts() -> None:
    ncc.all_reduce([filled(4, 3, buffer=HBM)], [empty(4, 3, dtype=nl.bfloat16, buffer=HBM)], ONE, nl.add)  # breaks


@breaks("all_reduce: srcs and dsts", "1 and 2 tensors", "equally many", UsageError)
def a_collective_with_too_many_destinations() -> None:
    target = empty(4, 3, buffer=HBM)
    ncc.all_reduce([filled(4, 3, buffer=HBM)], [target, target], ONE, nl.add)  # breaks


@breaks("all_reduce: srcs", "NkiTensor", "a list of tensors", UsageError)
def a_collective_on_a_bare_tensor() -> None:
    ncc.all_reduce(filled(4, 3, buffer=HBM), [empty(4, 3, buffer=HBM)], ONE, nl.add)  # breaks


@breaks("all_reduce: replica_group", "((0,),)", "a ReplicaGroup", UsageError)
def a_group_of_bare_tuples() -> None:
    source, target = filled(4, 3, buffer=HBM), empty(4, 3, buffer=HBM)
    ncc.all_reduce([source], [target], ((0,),), nl.add)  # type: ignore[arg-type]  # breaks


@breaks("all_gather: SBUF operand dimensions", "3", "2")
def an_sbuf_gather_of_three_dimensions() -> None:
    ncc.all_gather([filled(4, 3, 2)], [empty(4, 3, 2)], ONE, 0)  # breaks


@breaks("all_reduce: src buffer", "psum", "HBM or SBUF")
def a_collective_in_psum() -> None:
    tile = filled(4, 3, buffer=nl.psum)
    ncc.all_reduce([tile], [tile], ONE, nl.add)  # breaks


@breaks("all_gather: replica_group", "((1, 2),)", "a group that holds rank 0")
def a_group_without_this_rank() -> None:
    source, target = filled(4, 3, buffer=HBM), empty(8, 3, buffer=HBM)
    ncc.all_gather([source], [target], ncc.ReplicaGroup(((1, 2),)), 0)  # breaks


@breaks("all_reduce: place", "inside a device loop", "outside nl.fori_loop")
def a_collective_in_a_device_loop() -> None:
    source, target = filled(4, 3, buffer=HBM), empty(4, 3, buffer=HBM)
    for _ in nl.dynamic_range(1):
        ncc.all_reduce([source], [target], ONE, nl.add)  # breaks


@breaks("all_gather_v", "a call", "not simulated", UsageError)
def a_variable_length_collective() -> None:
    ncc.all_gather_v([filled(4, buffer=HBM)], [empty(4, buffer=HBM)], ONE, empty(3, 1, dtype=nl.uint32))  # breaks


@breaks("collective_permute: source_target_pairs", "((0, 0), (0, 0))", "distinct sources")
def a_rank_that_sends_twice() -> None:
    source, target = filled(4, buffer=HBM), empty(4, buffer=HBM)
    ncc.collective_permute([source], [target], [(0, 0), (0, 0)])  # breaks


@breaks("collective_permute_implicit: channel_ids", "[1]", "consecutive from 0")
def a_ring_on_channel_one() -> None:
    source, target = filled(4, buffer=HBM), empty(4, buffer=HBM)
    ncc.collective_permute_implicit([[source]], [[target]], ONE, [1])  # breaks


@pytest.mark.parametrize("case", breaks.cases, ids=breaks.ids)
def test_a_broken_rule_is_refused_with_its_numbers_and_line(case: Broken) -> None:
    """Message: rule, got, limit; site: the line that breaks it."""
    check_refusal(case)
    check_refusal(case, trace=True)
