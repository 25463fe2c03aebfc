"""The launch: one argument per cache, caches returned, lnc 1, compile options by dialect; run in our simulator."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.neuron.flat_entry import cache_arguments, flat_entry, plain_function
from gk_adapters.neuron.graph_audit import GraphAudit
from gk_adapters.neuron.holder import GigaModelHolder, tensor_over
from gk_adapters.neuron.launch import NeuronDecodeKernel, compile_options, load_wrap_nki, scratch_slot_tensors
from gk_adapters.nki_kernel import giga_kernel
from gk_adapters.torch_giga import GigaBuild, scratch_slots
from gk_adapters.torch_model import load_torch_model
from gk_adapters.weight_stacks import build_stacks
from gk_core.errors import LayoutError, MissingDependencyError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, PerBufferKV, StackedKV
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import WeightLayout
from gk_kernels.simulator.install import real_nki_present
from tests.hf_models import make_hf_checkpoint
from tests.neuron.stand_ins import WrapNki, control_of
from tests.torch_engines import TorchEngines, make_engines, make_tables

LNC1 = {"NEURON_LOGICAL_NC_CONFIG": "1"}


class World:
    """A random two-layer model, its torch engines, and the launch over stacks of the NKI layout."""

    def __init__(self, path: Path, wrap: Any = WrapNki, environ: dict[str, str] = LNC1) -> None:
        make_hf_checkpoint(path, num_hidden_layers=2)
        model = load_torch_model(path)
        self.engines: TorchEngines = make_engines(
            model, dtype=KVDtype.FP8_E4M3FN, k_byte_order=KByteOrder.PAIR_PACKED, max_model_len=256, num_blocks=9
        )
        source = HFCheckpoint(path)
        specs = build_stacked_weight_specs(
            model.config.geometry, model.mesh, 0, WeightLayout.NKI, source.config.expert_format, "float32"
        )
        self.contract = evolve(self.engines.kernel.contract, weights=tuple(s.tensor_spec for s in specs))
        self.stacks = {n: tensor_over(a) for n, a in build_stacks(source, specs).items()}
        self.tables = make_tables(self.engines, 1, 256)
        self.engines.prefill_logits([3 + i % 90 for i in range(140)], 0, self.tables[0])
        self.kernel = NeuronDecodeKernel(
            contract=self.contract, geometry=model.config.geometry, build=GigaBuild(), wrap_nki=wrap, environ=environ
        )

    def call(self) -> DecodeCall[torch.Tensor]:
        """One active row at position 140, three idle ones."""
        control = self.engines.control([(140, self.tables[0]), None, None, None])
        return self.engines.builder.build(token_ids=(9, 0, 0, 0), control=control)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    if real_nki_present():
        pytest.skip("the kernel is bound to the real nki here; test_device.py launches it")
    return World(tmp_path_factory.mktemp("model"))


def test_a_launched_step_equals_the_torch_kernels(world: World) -> None:
    """Through the holder, the flat entry and the stand-in's refusals: hidden states to 1e-5, same bytes written."""
    specs = honest_specs(world.kernel.geometry, tp_size=1, block_size=128, dtype=KVDtype.FP8_E4M3FN)
    holder = GigaModelHolder(contract=world.contract, specs=specs, kernel=world.kernel)
    holder.load_weights(world.stacks.items())
    mine = [b.clone() for b in world.engines.buffers]
    holder.set_kv_cache_buffers(mine)
    call = world.call()
    wanted = world.engines.kernel.step(call=call)[0]
    with GraphAudit(holder.held()) as audit:
        found = holder(call.hidden, **{n: getattr(call.control, n) for n in control_of(world.contract)})[0]
    # The stand-in runs the kernel inside the audit; all that it reads by torch is bytes, by detach and view.
    audit.require_clean()
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-5
    for a, b in zip(mine, world.engines.buffers, strict=True):
        assert float((a.float() - b.float()).abs().max()) <= 0.07 * float(b.float().abs().max())


def test_stacked_caches_are_refused(world: World) -> None:
    """Each buffer is an argument of its own."""
    call = world.call()
    kv = call.per_buffer_kv
    assert kv is not None
    stacked = evolve(
        call, weights=world.stacks, per_buffer_kv=None, stacked_kv=StackedKV(k=kv.k[0][None], v=kv.v[0][None])
    )
    with pytest.raises(LayoutError, match="per-buffer"):
        world.kernel.step(call=stacked)


def test_arguments_are_in_the_entrys_order(world: World) -> None:
    """x, 15 weights (scales None), 1 + 1 caches, 9 control tensors, 2 tables, first expert, constants."""
    arguments = world.kernel.arguments(evolve(world.call(), weights=world.stacks))
    names = list(inspect.signature(flat_entry(giga_kernel(), 1)).parameters)
    assert len(arguments) == len(names) == 31
    by_name = dict(zip(names, arguments, strict=True))
    assert by_name["expert_gate_up_weights_scale"] is None
    assert by_name["W_qkv" if "W_qkv" in by_name else "w_qkv"] is world.stacks["W_qkv"]
    assert by_name["writes"][:, 0].tolist() == [1, 0, 0, 0]
    assert tuple(by_name["x"].shape) == (4, 512)
    assert hash(by_name["config"])


@pytest.mark.parametrize(("index", "block"), [([[300], [-1], [-1]], 128), ([[-1], [5], [-1], [6]], 2), ([[-1]], 16)])
@pytest.mark.parametrize("scratch_slot", [0, 640])
def test_idle_rows_get_valid_slots_of_their_own(index: list[list[int]], block: int, scratch_slot: int) -> None:
    """The same as the host's rule, so that valid and skipped indices never mix."""
    slots, writes = scratch_slot_tensors(torch.tensor(index, dtype=torch.int32), block, scratch_slot)
    wanted = scratch_slots(torch.tensor(index).numpy(), block, scratch_slot)
    assert (slots.tolist(), writes.tolist()) == (wanted[0].tolist(), wanted[1].tolist())
    assert (slots.dtype, writes.dtype, int(slots.min()) >= 0) == (torch.int32, torch.uint8, True)


# ---- the entry


def body(x: Any, k_buffers: Any, v_buffers: Any, config: Any) -> Any:
    """What a kernel looks like."""
    return (x, k_buffers, v_buffers, config)


def test_the_flat_entry_has_one_parameter_per_cache_and_returns_them() -> None:
    """Three buffers: x, K0..2, V0..2, config; the result first, then the six caches."""
    entry = flat_entry(body, 3)
    assert list(inspect.signature(entry).parameters) == ["x", *cache_arguments(3), "config"]
    result, *caches = entry(0, 1, 2, 3, 4, 5, 6, 7)
    assert (result, caches) == ((0, (1, 2, 3), (4, 5, 6), 7), [1, 2, 3, 4, 5, 6])


def test_one_buffer_is_still_a_tuple() -> None:
    """The kernel indexes it."""
    assert flat_entry(body, 1)(0, 1, 2, 3)[0] == (0, (1,), (2,), 3)


def test_the_entrys_source_can_be_read() -> None:
    """Releases that parse a kernel ask `inspect` for it."""
    assert inspect.getsource(flat_entry(body, 2)).startswith(
        "def body_2(x, K_cache_buf_0, K_cache_buf_1, V_cache_buf_0"
    )


def test_the_function_inside_a_kernel_is_found() -> None:
    """A kernel may not call another marked one."""
    assert plain_function(giga_kernel()).__name__ == "giga_decode"
    with pytest.raises(LayoutError, match="no Python function"):
        plain_function(3)


@pytest.mark.parametrize("count", [0, -1])
def test_an_entry_needs_buffers(count: int) -> None:
    """At least one; and a kernel that takes them."""
    with pytest.raises(LayoutError, match="at least one buffer"):
        flat_entry(body, count)
    with pytest.raises(LayoutError, match="k_buffers"):
        flat_entry(lambda x: x, 2)


# ---- the stand-in's refusals


def test_tuples_and_lists_of_tensors_do_not_reach_a_device(world: World) -> None:
    """What the kernel's own signature would be passed: a tuple is a constant, a list is nothing."""
    arguments = list(world.kernel.arguments(evolve(world.call(), weights=world.stacks)))
    arguments[16:18] = [(arguments[16],), (arguments[17],)]
    with pytest.raises(TypeError, match="k_buffers: a tensor inside a tuple"):
        WrapNki(giga_kernel())[1](*arguments)
    arguments[16] = list(arguments[16])
    with pytest.raises(TypeError, match="no list arguments"):
        WrapNki(giga_kernel())[1](*arguments)


def test_a_degree_that_is_not_the_graphs_is_refused(world: World) -> None:
    """Grid 2 in a graph of lnc 1."""
    with pytest.raises(RuntimeError, match="degree 2 in a graph of degree 1"):
        WrapNki(giga_kernel())[2]()


def test_a_cache_that_is_written_but_not_returned_is_refused(world: World) -> None:
    """The graph would drop the write; this is why the entry returns its caches."""
    entry = flat_entry(giga_kernel(), 1)

    @functools.wraps(entry)
    def forgetful(*args: Any) -> Any:
        return entry(*args)[0]

    call = world.call()
    kv = call.per_buffer_kv
    assert kv is not None
    empty = PerBufferKV(k=tuple(map(torch.zeros_like, kv.k)), v=tuple(map(torch.zeros_like, kv.v)))
    call = evolve(call, weights=world.stacks, per_buffer_kv=empty)
    with pytest.raises(RuntimeError, match="operand K_cache_buf_0 is written but is no output"):
        WrapNki(forgetful)[1](*world.kernel.arguments(call))


# ---- options and environment


def test_compile_options_follow_target_and_dialect() -> None:
    """trn3 needs none for e4m3fn; trn2 reads e4m3fn bytes as e4m3."""
    plain = ("--target", "trn3", "--lnc", "1", "--auto-cast=none")
    assert compile_options("trn3", KVDtype.FP8_E4M3FN, 1) == plain
    assert compile_options("trn3", KVDtype.BF16, 1) == plain
    trn2 = compile_options("trn2", KVDtype.FP8_E4M3, 1)
    assert trn2[1] == "trn2"
    assert trn2[-1] == "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
    assert len(compile_options("trn2", KVDtype.BF16, 1)) == 5


@pytest.mark.parametrize(
    ("target", "dtype", "lnc", "words"),
    [
        ("trn2", KVDtype.FP8_E4M3FN, 1, "maximum 240"),
        ("trn1", KVDtype.BF16, 1, "trn1"),
        ("inf2", KVDtype.BF16, 1, "inf2"),
        ("trn3", KVDtype.BF16, 2, "lnc 1"),
    ],
)
def test_other_targets_dialects_and_lncs_are_refused(target: str, dtype: KVDtype, lnc: int, words: str) -> None:
    """Before anything is compiled."""
    with pytest.raises(UnsupportedError, match=words):
        compile_options(target, dtype, lnc)


@pytest.mark.parametrize("environ", [{}, {"NEURON_LOGICAL_NC_CONFIG": "2"}])
def test_a_launch_needs_lnc_one_said(world: World, environ: dict[str, str]) -> None:
    """Unset may mean 2."""
    with pytest.raises(UnsupportedError, match="export NEURON_LOGICAL_NC_CONFIG=1"):
        NeuronDecodeKernel(
            contract=world.contract,
            geometry=world.kernel.geometry,
            build=GigaBuild(),
            wrap_nki=WrapNki,
            environ=environ,
        )


def test_without_torch_neuronx_the_error_says_so() -> None:
    """Here it is absent."""
    with pytest.raises(MissingDependencyError, match="torch-neuronx is not installed"):
        load_wrap_nki()


def test_a_placeholder_of_torch_neuronx_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only module raises ImportError, as PyPI's does."""
    (tmp_path / "torch_neuronx").mkdir()
    (tmp_path / "torch_neuronx" / "__init__.py").write_text('raise ImportError("WRONG PACKAGE")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependencyError, match="placeholder"):
        load_wrap_nki()
