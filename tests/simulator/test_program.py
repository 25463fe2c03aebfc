"""simulate(): arguments, outputs, options, sections, registers and loops; and the nki modules."""

from __future__ import annotations

import importlib
import linecache
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gk_kernels.simulator import HbmInput, SimulationError, UsageError, input_bytes, simulate, simulated_nki
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from gk_kernels.simulator.bench import _cases as bench_cases
from gk_kernels.simulator.bench import overhead
from gk_kernels.simulator.program import jit
from gk_kernels.simulator.targets import TRN3, Target
from tests.simulator.support import empty, filled


@jit
def add_one(a: Any) -> Any:
    """a + 1."""
    out, tile = nl.ndarray(a.shape, a.dtype, nl.shared_hbm), nl.ndarray(a.shape, a.dtype)
    nisa.dma_copy(tile, a)
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)
    nisa.dma_copy(out, tile)
    return out


def test_a_kernel_returns_arrays() -> None:
    """Called directly, through simulate, and in the structure it returned."""
    x = np.zeros((2, 3), np.float32)
    assert add_one(x).tolist() == [[1.0] * 3] * 2
    result = simulate(add_one, x)
    assert result.output.tolist() == [[1.0] * 3] * 2
    assert result.target is TRN3

    def pair(a: Any) -> Any:
        return add_one.function(a), (a, 7)

    assert simulate(pair, x).output[1][1] == 7


def test_arguments_pass_as_what_they_are() -> None:
    """Numbers, strings, dtypes, None, tuples and dicts of tensors; a tensor given twice is one tensor."""
    x = np.zeros((2, 3), ml_dtypes.bfloat16)

    def kernel(a: Any, n: int, text: str, dtype: Any, nothing: None, many: Any, named: Any, scale: Any = None) -> None:
        assert (n, text, dtype, nothing, scale) == (3, "x", nl.float16, None, 0.5)
        assert a.buffer is nl.hbm
        assert a.dtype == nl.bfloat16 == many[0].dtype == named["k"].dtype
        assert type(n) is int

    simulate(kernel, x, np.int64(3), "x", nl.float16, None, (x, 1), {"k": x}, scale=np.float32(0.5))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ([1, 2], "a list; limit: a tuple"),
        ((np.zeros(2, np.float32), [1]), "kernel argument 0[1]: got a list"),
        (np.zeros((2, 3)), "float64"),
        (np.float32, "an nki.language dtype"),
        (np.zeros((0, 3), np.float32), "no empty ones"),
        (HbmInput(dtype="float32", shape=(2, 3)), "a shape without data"),
        (HbmInput(dtype="float32"), "shape and dtype"),
        (HbmInput(np.zeros((2, 3), np.uint8), "float4_e2m1fn_x4"), "elements of 2 bytes"),
    ],
)
def test_an_argument_that_is_no_kernel_argument_is_refused(argument: Any, words: str) -> None:
    """With the kernel's line."""
    with pytest.raises(UsageError) as caught:
        simulate(add_one, argument)
    assert words in str(caught.value)
    path, line = caught.value.site.split(" in ")[0].rsplit(":", 1)
    assert "@jit" in linecache.getline(path, int(line))


def test_a_packed_input_has_its_dtype() -> None:
    """uint16 bytes as fp4 x4."""

    def kernel(w: Any) -> None:
        assert (w.dtype, w.shape, w.name) == (nl.float4_e2m1fn_x4, (2, 3), "weights")

    simulate(kernel, HbmInput(np.zeros((2, 3), np.uint16), "float4_e2m1fn_x4", name="weights"))


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum, nl.private_hbm])
def test_an_output_must_lie_in_shared_hbm(buffer: Any) -> None:
    """Inputs may be returned too."""

    def kernel(a: Any) -> Any:
        return (a, filled(2, 3, buffer=buffer))

    with pytest.raises(UsageError, match="kernel output buffer") as caught:
        simulate(kernel, np.zeros((2, 3), np.float32))
    assert "in kernel" in caught.value.site


def test_a_kernel_does_not_call_a_kernel() -> None:
    """A sub-kernel is a plain function."""

    def outer(a: Any) -> Any:
        return add_one(a)

    with pytest.raises(UsageError, match=r"add_one has its own nki\.jit"):
        simulate(outer, np.zeros((2, 3), np.float32))


def test_nki_calls_outside_a_kernel_are_refused() -> None:
    """There is no device to allocate on."""
    with pytest.raises(UsageError, match="a call outside a kernel"):
        nl.ndarray((2, 3), nl.float32)


@pytest.mark.parametrize(
    "options",
    [{"lnc": 3}, {"poison": "zero"}, {"domain": "off"}, {"capacity": 1}, {"reach_unit": "rows"}, {"ranks": 0},
     {"target": "trn1"}, {"rank_args": [(1,), (2,)]}],
)  # fmt: skip
def test_unknown_options_are_refused(options: dict[str, Any]) -> None:
    """Each names what is allowed."""
    with pytest.raises(UsageError):
        simulate(lambda: None, **options)


def test_a_target_can_be_changed() -> None:
    """A copy with less memory."""
    small = Target(**{**TRN3.__dict__, "sbuf_usable_bytes": 1024})

    def kernel() -> None:
        nisa.memset(empty(2, 257), 0.0)
        assert nl.tile_size.sbuf_fmax_bytes == 1024

    with pytest.raises(SimulationError, match="1024 usable bytes"):
        simulate(kernel, target=small)


@pytest.mark.parametrize(("target", "version", "usable"), [("trn2", 3, 212992), ("gen4", 4, 245760)])
def test_the_device_is_visible_to_the_kernel(target: str, version: int, usable: int) -> None:
    """nc_version is ordered; tile sizes follow."""

    def kernel() -> None:
        assert nisa.get_nc_version() == nisa.nc_version(version) >= nisa.nc_version.gen3
        assert nisa.get_nc_sub_version() == 0
        assert nl.tile_size.sbuf_fmax_bytes == usable == nl.tile_size.total_available_sbuf_size
        assert nl.tile_size.sbuf_fmax * 4 == usable
        assert nl.tile_size.sbuf_size_bytes == 128 * (224 if version == 3 else 256) * 1024
        assert (nl.tile_size.pmax, nl.tile_size.psum_bank_fmax, nl.tile_size.psum_num_banks) == (128, 512, 8)

    simulate(kernel, target=target)


def test_a_trace_runs_without_data() -> None:
    """16 GiB of inputs, and the same counts as a run of a small one would have."""

    def kernel(table: Any) -> Any:
        out, tile = nl.ndarray((128, 64), table.dtype, nl.shared_hbm), nl.ndarray((128, 64), table.dtype)
        nisa.dma_copy(tile, table[0:128])
        nisa.dma_copy(out, tile)
        return out

    big = HbmInput(dtype="bfloat16", shape=(1 << 27, 64))
    result = simulate(kernel, big, trace=True, hbm_tensor_limit_bytes=None)
    assert result.output == HbmInput(dtype="bfloat16", shape=(128, 64))
    assert result.counters[0].hbm_read_bytes == 128 * 64 * 2
    small = simulate(kernel, np.zeros((128, 64), ml_dtypes.bfloat16))
    assert small.counters[0].to_json() == result.counters[0].to_json()


def test_a_trace_counts_what_a_run_counts() -> None:
    """One call of every common instruction, and of the rest, with and without data."""

    def kernel() -> None:
        for call in bench_cases().values():
            call()
        tile, half = filled(32, 8), filled(32, 8, dtype=nl.bfloat16)
        keep, bits = filled(32, 8, dtype=nl.uint8), filled(32, 8, dtype=nl.uint32, value=0)
        out, total, one = empty(32, 8), empty(32, 1), filled(32, 1)
        nisa.tensor_scalar_reduce(out, tile, nl.add, 0.0, nl.add, total)
        nisa.tensor_scalar_cumulative(out, tile, nl.add, nl.add, 0.0)
        nisa.tensor_tensor_scan(out, tile, tile, 0.0, nl.multiply, nl.add)
        nisa.activate2(out, nl.exp, tile, 1.0, 0.0, nl.multiply, nl.add)
        nisa.exponential(out, tile)
        nisa.affine_select(out, [[1, 8]], 0, tile, 0.0)
        nisa.range_select(out, tile, nl.greater, nl.less, one, one, reduce_res=total)
        nisa.select_reduce(out, keep, tile, 0.0)
        nisa.nc_match_replace8(out, tile, tile, 0.0)
        nisa.sequence_bounds(empty(1, 2, 8), filled(1, 8))
        nisa.nc_n_gather(out, tile, bits)
        nisa.local_gather(empty(32, 16), tile, filled(32, 1, dtype=nl.uint16, value=0))
        nisa.tensor_partition_reduce(empty(1, 8), nl.maximum, tile)
        nisa.tensor_partition_reduce(empty(1, 8, dtype=nl.uint32), nl.bitwise_or, bits)
        nisa.nonzero_with_count(empty(32, 9, dtype=nl.int32), tile)
        nisa.topk(empty(32, 2, dtype=nl.bfloat16), empty(32, 2, dtype=nl.uint32), half, 20)
        nisa.bn_stats(empty(32, 6), tile)
        nisa.bn_aggr(empty(32, 2), filled(32, 6))
        nisa.rand_set_state(one)
        nisa.rng(empty(32, 8, dtype=nl.uint8))
        nisa.rand2(out, 0.0, 1.0)
        nisa.dropout(out, tile, 0.5)
        nisa.dma_transpose(empty(8, 32), tile)
        nisa.dma_compute(out, [tile, tile], nl.add)
        nisa.nc_transpose(empty(8, 32), tile, engine=nisa.engine.vector)
        packed, scale = empty(32, 2, dtype=nl.float8_e4m3fn_x4), empty(4, 2, dtype=nl.uint8)
        nisa.quantize_mx(packed, half, scale)
        nisa.nc_matmul_mx(empty(2, 2, buffer=nl.psum), packed, packed, scale, scale)
        nl.device_print("tile", tile)
        nl.shared_constant(np.zeros((2, 3), np.float32))

    traced, run = simulate(kernel, trace=True), simulate(kernel)
    assert traced.counters[0].to_json() == run.counters[0].to_json()
    assert {op for _, op, _ in run.counters[0].stats} >= {"topk", "quantize_mx", "nc_matmul_mx", "dma_compute"}


def test_a_register_loaded_in_a_trace_holds_zero_and_says_so() -> None:
    """There is no data to load; a while loop cannot be traced at all."""

    def kernel() -> None:
        register = nisa.register_alloc(filled(1, 1, dtype=nl.int32, value=5))
        for _ in nl.dynamic_range(register):
            nisa.memset(empty(1, 1), 0.0)

    assert simulate(kernel).counters[0].total(op="memset").count == 1 + 5
    traced = simulate(kernel, trace=True)
    assert traced.counters[0].total(op="memset").count == 1
    assert "the register holds 0" in traced.warnings[0]
    with pytest.raises(UsageError, match="a condition that depends on data"):
        simulate(lambda: nl.while_loop(nisa.register_alloc(1), lambda r: r), trace=True)


def test_an_input_of_4_gib_is_refused() -> None:
    """Declared, not allocated."""
    big = HbmInput(dtype="uint8", shape=(4, 1 << 30))
    with pytest.raises(SimulationError, match="HBM tensor size"):
        simulate(lambda a: None, big, trace=True)
    simulate(lambda a: None, big, trace=True, hbm_tensor_limit_bytes=None)


def test_jit_of_a_kernel_is_the_kernel() -> None:
    """Twice is once."""
    assert jit(add_one) is add_one


def test_input_bytes_sums_what_a_kernel_could_read() -> None:
    """Arrays, packed inputs, shapes, nested."""
    values = (np.zeros((2, 3), np.float32), (HbmInput(np.zeros(5, np.uint16), "float4_e2m1fn_x4"), 4))
    assert input_bytes(*values, HbmInput(dtype="bfloat16", shape=(7,))) == 24 + 10 + 14


def _norm(tile: Any) -> None:
    nisa.activation(tile, nl.square, tile)
    _helper(tile)


def _helper(tile: Any) -> None:
    nisa.reciprocal(tile, tile)


def _layer(tile: Any) -> None:
    _norm(tile)
    nisa.tensor_copy(tile, tile)


def _model() -> None:
    tile = filled(2, 3)
    _layer(tile)
    _layer(tile)


def test_instructions_are_counted_by_the_function_that_issues_them() -> None:
    """By default the innermost; with `sections`, the innermost of those named, else "other"."""
    counters = simulate(_model).counters[0]
    assert counters.total(section="_norm").count == 2
    assert counters.total(section="_helper", engine="vector").count == 2
    assert counters.total(section="_layer", op="tensor_copy").count == 2
    named = simulate(_model, sections=("_norm", "_layer")).counters[0]
    assert named.total(section="_norm").count == 4
    assert named.total(section="_layer").count == 2
    assert named.total(section="other").count == 1
    assert named.sections == ("other", "_norm", "_layer")


def test_cycles_follow_the_model() -> None:
    """At least 64; two fp32 operands take 2N; reciprocal 8N; fp32 matmul four passes."""

    def kernel() -> None:
        a, b, c = filled(2, 100), filled(2, 100), empty(2, 100)
        h = filled(2, 100, dtype=nl.bfloat16)
        nisa.tensor_tensor(c, a, b, nl.add)
        nisa.tensor_tensor(h, h, h, nl.add)
        nisa.reciprocal(c, a)
        nisa.activation(c[:, 0:5], nl.exp, a[:, 0:5])
        psum = nl.ndarray((100, 100), nl.float32, nl.psum)
        nisa.nc_matmul(psum, a, b, accumulate=False)
        nisa.nc_matmul(psum, h, h, accumulate=False)

    counters = simulate(kernel).counters[0]
    memsets = 3 * 100
    assert counters.engine_cycles["vector"] == memsets + 200 + 100 + 800
    assert counters.engine_cycles["scalar"] == 64
    assert counters.engine_cycles["tensor"] == 400 + 100
    assert counters.matmul_macs == 2 * 2 * 100 * 100
    assert counters.total(op="tensor_tensor").elements == 200


def test_matmul_work_counts_every_multiply() -> None:
    """K M N; twice that with double_row, four times with MX."""

    def kernel() -> None:
        a, b = filled(32, 2, 6, dtype=nl.float8_e4m3), filled(32, 2, 5, dtype=nl.float8_e4m3)
        nisa.nc_matmul(empty(6, 5, buffer=nl.psum), a, b, perf_mode=nisa.matmul_perf_mode.double_row)
        x, s = filled(32, 4, dtype=nl.float8_e4m3fn_x4), filled(4, 4, dtype=nl.uint8, value=127)
        nisa.nc_matmul_mx(empty(4, 4, buffer=nl.psum), x, x, s, s)
        nisa.nc_transpose(empty(4, 32, buffer=nl.psum), filled(32, 4))

    counters = simulate(kernel).counters[0]
    assert counters.total(op="nc_matmul").macs == 2 * 32 * 6 * 5
    assert counters.total(op="nc_matmul_mx").macs == 4 * 32 * 4 * 4
    assert counters.matmul_macs == 2 * 32 * 6 * 5 + 4 * 32 * 4 * 4


def test_loops_run_with_registers() -> None:
    """fori_loop, while_loop, dynamic_range: bounds and conditions from data."""
    data = np.arange(5, dtype=np.float32)[None]

    def kernel(data: Any, bound: Any) -> Any:
        at, upper = nl.load(bound), nisa.register_alloc()
        nisa.register_load(upper, at)
        out = nl.ndarray((1, 5), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, filled(1, 5, value=-1.0))
        tile = empty(1, 1)

        def body(i: Any) -> None:
            nisa.dma_copy(tile, data.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
            nisa.dma_copy(out.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1), tile)

        nl.fori_loop(1, upper, body)
        total, step = filled(1, 1, value=0.0), filled(1, 1, dtype=nl.int32)

        def countdown(r: Any) -> Any:
            nisa.tensor_scalar(total, total, nl.add, 1.0)
            nisa.tensor_tensor(at, at, step, nl.subtract)
            nisa.register_load(r, at)
            return r

        nl.while_loop(upper, countdown)
        for _ in nl.dynamic_range(upper):
            nisa.tensor_scalar(total, total, nl.add, 10.0)
        result = nl.ndarray((1, 1), nl.float32, nl.shared_hbm)
        nisa.dma_copy(result, total)
        return out, result

    out, total = simulate(kernel, data, np.array([[3]], np.int32)).output
    assert out.tolist() == [[-1.0, 1.0, 2.0, -1.0, -1.0]]
    assert total.tolist() == [[33.0]]


def test_static_ranges_are_pythons() -> None:
    """start, stop, step."""

    def kernel() -> None:
        assert (
            list(nl.affine_range(3)) == list(nl.static_range(0, 3)) == list(nl.sequential_range(0, 3, 1)) == [0, 1, 2]
        )
        with nl.no_reorder():
            nisa.memset(empty(1, 1), 0.0).depends_on(nisa.memset(empty(1, 1), 1.0))

    simulate(kernel)


def test_registers_move_and_store() -> None:
    """A constant, a copy, and the bytes in memory."""

    def kernel() -> Any:
        a, b = nisa.register_alloc(), nisa.register_alloc(5)
        nisa.register_move(a, b)
        nisa.register_move(b, 9)
        tile, out = empty(1, 1, dtype=nl.int32), nl.ndarray((1, 1), nl.int32, nl.shared_hbm)
        nisa.register_store(tile, a)
        nisa.dma_copy(out, tile)
        return out

    assert simulate(kernel).output.tolist() == [[5]]


KERNEL_MODULE = """
import nki
import nki.isa as nisa
import nki.language as nl
import nki.collectives as ncc
from nki.isa.constants import oob_mode, dge_mode
from nki.language import NKIObject

@nki.jit(mode="trace")
def double(a):
    tile = nl.load(a)
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
    nl.store(out, tile)
    return out
"""


def test_nki_is_importable_inside_the_block_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module works after the block; sys.modules is as before."""
    (tmp_path / "doubling_kernel.py").write_text(KERNEL_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name for name in sys.modules if name.split(".")[0] in ("nki", "neuronxcc")}
    with simulated_nki() as nki:
        module = importlib.import_module("doubling_kernel")
        assert sys.modules["nki"] is nki
    assert {name for name in sys.modules if name.split(".")[0] in ("nki", "neuronxcc")} == before
    assert module.double(np.ones((1, 2), np.float32)).tolist() == [[2.0, 2.0]]
    assert nki.simulate(module.double)(np.ones((1, 2), np.float32)).tolist() == [[2.0, 2.0]]


def test_the_fixture_gives_the_modules(nki: Any) -> None:
    """Four spellings of an import."""
    module = importlib.import_module("nki.collectives")
    assert nki.collectives is module
    assert importlib.import_module("nki.isa").engine.vector is nisa.engine.vector
    assert importlib.import_module("nki.isa.constants").oob_mode is nisa.oob_mode
    assert importlib.import_module("neuronxcc.nki.typing").tensor is nl.NkiTensor


def test_a_real_nki_is_left_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nki.language is installed, the block yields that package."""
    package = tmp_path / "nki"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    (package / "language.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with simulated_nki() as nki:
            assert nki.real
    finally:
        for name in ("nki", "nki.language"):
            sys.modules.pop(name, None)


def test_an_empty_package_of_the_same_name_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placeholder without nki.language gives way."""
    package = tmp_path / "nki"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with simulated_nki() as nki:
        assert nki.language is nl
    sys.modules.pop("nki", None)


def test_the_benchmark_measures_every_common_instruction() -> None:
    """Times are positive; how large they are is for the benchmark to say."""
    times = overhead(repeats=1, calls=1)
    assert len(times) >= 20
    assert all(t > 0 for t in times.values())


def test_device_print_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Immediately."""
    simulate(lambda: nl.device_print("tile", filled(1, 2, value=3.0)))
    assert capsys.readouterr().out.startswith("tile [[3. 3.]]")
