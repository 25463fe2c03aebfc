"""The model holder: one attribute per tensor, views of one base, weights stack by stack, no copy in the graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from gk_adapters.neuron.aliases import root_of, same_memory
from gk_adapters.neuron.graph_audit import GraphAudit
from gk_adapters.neuron.holder import GigaModelHolder, NeuronLayerSpec, layer_name, tensor_over
from gk_adapters.torch_kv import allocate_group_buffers, stacked_kv
from gk_adapters.torch_model import load_torch_model, torch_contract
from gk_adapters.weight_stacks import drain
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import honest_specs
from tests.neuron.stand_ins import MetaKernel, control_of, small_contract, small_stacks
from tests.torch_engines import make_engines, make_tables

TINY = Path(__file__).parents[2] / "models" / "tiny-recall"


def make_holder(*, order: KByteOrder = KByteOrder.PAIR_PACKED, stacked: bool = False) -> GigaModelHolder:
    """A holder with weights, without a cache."""
    contract, specs = small_contract(k_byte_order=order)
    holder = GigaModelHolder(contract=contract, specs=specs, kernel=MetaKernel(contract), use_stacked_kv_cache=stacked)
    holder.load_weights(small_stacks().items())
    return holder


def bound_holder() -> GigaModelHolder:
    holder = make_holder()
    holder.set_kv_cache_buffers(allocate_group_buffers(holder.contract.layout))
    return holder


def halves(holder: GigaModelHolder) -> dict[str, list[torch.Tensor]]:
    """What a runner binds: one dtype view per raw int8 buffer, K packed, shared by two layers."""
    layout = holder.contract.layout
    out: dict[str, list[torch.Tensor]] = {}
    for j in range(layout.num_buffers):
        raw = torch.zeros(layout.buffer_bytes, dtype=torch.int8)
        whole = raw.view(torch.float8_e4m3fn).view(layout.buffer_shape)
        for i in (2 * j, 2 * j + 1):
            out[layer_name(i)] = [whole[0].view(layout.packed_k_shape), whole[1]]
    return out


def test_each_buffer_is_one_attribute_and_both_halves_share_its_base() -> None:
    """K_cache_buf_i [9, 1, 8, 2, 2] packed and V_cache_buf_i [9, 1, 16, 2] over buffer i."""
    holder = make_holder()
    buffers = allocate_group_buffers(holder.contract.layout)
    holder.set_kv_cache_buffers(buffers)
    for i, buffer in enumerate(buffers):
        k, v = holder.__dict__[f"K_cache_buf_{i}"], holder.__dict__[f"V_cache_buf_{i}"]
        assert (tuple(k.shape), tuple(v.shape)) == ((9, 1, 8, 2, 2), (9, 1, 16, 2))
        assert root_of(k) is root_of(v)
        assert (k.data_ptr(), v.data_ptr() - k.data_ptr()) == (buffer.data_ptr(), 288)
    assert len([n for n in holder.__dict__ if "_cache_buf_" in n]) == 4


def test_specs_are_honest_and_in_layer_order() -> None:
    """Even layers name their window of 16, odd ones none; FP8 as torch stores it."""
    specs = make_holder().get_kv_spec()
    assert [s.sliding_window_size for s in specs] == [16, None, 16, None]
    assert specs[1] == NeuronLayerSpec(
        name="layers.1.self_attn",
        num_kv_heads=1,
        head_size=2,
        dtype=torch.float8_e4m3fn,
        sliding_window_size=None,
    )


def test_binding_by_layer_takes_the_shared_buffers() -> None:
    """What a runner binds ends as the same attributes."""
    holder = make_holder()
    caches = halves(holder)
    holder.bind_kv_cache(caches)
    assert same_memory(holder.__dict__["K_cache_buf_1"], caches["layers.3.self_attn"][0])
    assert same_memory(holder.__dict__["V_cache_buf_1"], caches["layers.2.self_attn"][1])


def test_equal_views_are_the_same_memory_and_others_are_not() -> None:
    """By base, offset, shape and stride."""
    base = torch.zeros(4, 6)
    assert same_memory(base[1], base[1])
    assert not same_memory(base[1], base[2])
    assert not same_memory(base.view(6, 4)[0], base[0, :4].view(2, 2))
    assert not same_memory(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("broken", ["missing", "unknown", "apart", "unpacked", "three"])
def test_a_binding_that_is_not_the_layouts_is_refused_whole(broken: str) -> None:
    """Nothing is bound after a refusal."""
    holder = make_holder()
    caches = halves(holder)
    if broken == "missing":
        del caches["layers.1.self_attn"]
    elif broken == "unknown":
        caches["layers.4.self_attn"] = caches["layers.3.self_attn"]
    elif broken == "apart":
        caches["layers.3.self_attn"] = [t.clone() for t in caches["layers.3.self_attn"]]
    elif broken == "unpacked":
        for i in (2, 3):
            v = caches[layer_name(2)][1]
            caches[layer_name(i)] = [v, v]
    else:
        caches["layers.3.self_attn"] *= 2
    words = {
        "missing": "layers.1",
        "unknown": "layers.4",
        "apart": "buffer 1",
        "unpacked": "packed",
        "three": "4 tensors",
    }
    with pytest.raises(LayoutError, match=words[broken]):
        holder.bind_kv_cache(caches)
    assert not [n for n in holder.__dict__ if "_cache_buf_" in n]


def test_buffers_of_another_number_or_shape_are_refused() -> None:
    """Two buffers of the layout's shape, or nothing."""
    holder = make_holder()
    buffers = allocate_group_buffers(holder.contract.layout)
    with pytest.raises(LayoutError, match="share 2 buffers, got 1"):
        holder.set_kv_cache_buffers(buffers[:1])
    with pytest.raises(LayoutError, match="KV buffer must have shape"):
        holder.set_kv_cache_buffers([buffers[0], buffers[1][:, :5]])
    with pytest.raises(LayoutError, match="float8_e4m3fn"):
        holder.set_kv_cache_buffers([b.view(torch.uint8) for b in buffers])


def test_the_stacked_form_is_the_other_one() -> None:
    """A holder takes exactly the form that it was made for, and hands it on."""
    holder = make_holder(stacked=True)
    kv = stacked_kv(holder.contract.layout)
    with pytest.raises(LayoutError, match="stacked"):
        holder.set_kv_cache_buffers(allocate_group_buffers(holder.contract.layout))
    with pytest.raises(LayoutError, match="use_stacked_kv_cache"):
        make_holder().set_stacked_kv_cache(kv.k, kv.v)
    holder.set_stacked_kv_cache(kv.k, kv.v)
    holder(torch.zeros(3, 6), **control_of(holder.contract))
    kernel = holder.kernel
    assert isinstance(kernel, MetaKernel)
    assert kernel.calls[0].stacked_kv is not None
    assert kernel.calls[0].stacked_kv.k is kv.k


def test_weights_are_loaded_stack_by_stack() -> None:
    """When the next stack is asked for, the one before is in place and forgotten by its source."""
    contract, specs = small_contract()
    holder = GigaModelHolder(contract=contract, specs=specs, kernel=MetaKernel(contract))
    source = {name: tensor.numpy() for name, tensor in small_stacks().items()}
    seen: list[tuple[int, int]] = []

    def watched() -> Iterator[tuple[str, np.ndarray]]:
        for item in drain(source):
            seen.append((len(dict(holder.named_buffers())), len(source)))
            yield item

    holder.load_weights(watched())
    assert seen == [(0, 2), (1, 1), (2, 0)]
    assert torch.equal(dict(holder.named_buffers())["sink"], small_stacks()["sink"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"W_out": (4, 2)}, "unknown"),
        ({"sink": None}, "missing"),
        ({"sink": (4, 9)}, "sink must have shape"),
    ],
)
def test_weights_that_are_not_the_contracts_are_refused(change: dict[str, tuple[int, ...] | None], words: str) -> None:
    """Unknown, missing, or of another shape."""
    contract, specs = small_contract()
    holder = GigaModelHolder(contract=contract, specs=specs, kernel=MetaKernel(contract))
    stacks: dict[str, torch.Tensor | None] = {**small_stacks()}
    stacks.update({n: None if s is None else torch.zeros(s) for n, s in change.items()})
    with pytest.raises(LayoutError, match=words):
        holder.load_weights((n, t) for n, t in stacks.items() if t is not None)


def test_arrays_become_tensors_over_the_same_memory() -> None:
    """bfloat16, FP8 and uint16 too."""
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.uint16, np.float32):
        array = np.array([1, 2, 3]).astype(dtype)
        tensor = tensor_over(array)
        assert tensor.float().tolist() == [1, 2, 3]
        assert tensor.data_ptr() == array.ctypes.data


def test_a_step_needs_cache_and_weights() -> None:
    """Each is asked for by name."""
    holder = make_holder()
    with pytest.raises(LayoutError, match="no KV cache"):
        holder(torch.zeros(3, 6), **control_of(holder.contract))
    contract, specs = small_contract()
    empty = GigaModelHolder(contract=contract, specs=specs, kernel=MetaKernel(contract))
    empty.set_kv_cache_buffers(allocate_group_buffers(contract.layout))
    with pytest.raises(LayoutError, match="weights are not loaded"):
        empty(torch.zeros(3, 6), **control_of(contract))


def test_a_holder_of_real_weights_decodes_as_the_engine_does() -> None:
    """The shipped model, one request of 150 tokens: same hidden states and the same bytes in the cache."""
    model = load_torch_model(TINY)
    engines = make_engines(model)
    tables = make_tables(engines, 1, 256)
    engines.prefill.prefill(token_ids=[5 + i % 90 for i in range(149)], start_position=0, tables=tables[0])
    before = [b.clone() for b in engines.buffers]
    specs = honest_specs(model.config.geometry, tp_size=1, block_size=128, dtype=engines.layout.dtype)
    contract = torch_contract(model, layout=engines.layout, shape=engines.shape)
    holder = GigaModelHolder(contract=contract, specs=specs, kernel=engines.kernel, scales=model.scales)
    holder.load_weights(model.stacks.items())
    holder.set_kv_cache_buffers(before)
    row = (7, 149, tables[0])
    wanted = engines.step([row])
    call: DecodeCall[torch.Tensor] = engines.builder.build(
        token_ids=(7, 0, 0, 0), control=engines.control([row[1:], None, None, None])
    )
    control = {n: getattr(call.control, n) for n in control_of(contract)}
    assert torch.equal(holder(call.hidden, **control), wanted)
    assert wanted.abs().sum() > 0
    assert all(torch.equal(a, b) for a, b in zip(before, engines.buffers, strict=True))


# ---- the graph


def test_the_holders_graph_copies_nothing_that_it_holds() -> None:
    """Weights and caches reach the kernel as they are."""
    holder = bound_holder()
    with GraphAudit(holder.held()) as audit:
        holder(torch.zeros(3, 6), **control_of(holder.contract))
    audit.require_clean()
    kernel = holder.kernel
    assert isinstance(kernel, MetaKernel)
    assert kernel.calls[0].weights["W_qkv"] is holder.W_qkv


class RestackingHolder(GigaModelHolder):
    """What must not pass: layers stacked again on every step."""

    def forward(self, hidden: torch.Tensor, **control: torch.Tensor) -> torch.Tensor:
        """Stack, then step."""
        stack = self.get_buffer("W_qkv")
        self.W_qkv = torch.stack([stack[i] for i in range(4)])
        return super().forward(hidden, **control)


class CopyingHolder(GigaModelHolder):
    """What must not pass either: a cache made contiguous in another order."""

    def forward(self, hidden: torch.Tensor, **control: torch.Tensor) -> torch.Tensor:
        """Copy, then step."""
        cache: torch.Tensor = self.__dict__["V_cache_buf_1"]
        cache.transpose(2, 3).contiguous()
        return super().forward(hidden, **control)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "words"), [(RestackingHolder, "aten.stack.default on W_qkv|aten.cat.default on W_qkv"),
                        (CopyingHolder, "aten.clone.default on V_cache_buf_1")],
)  # fmt: skip
def test_a_graph_that_restacks_or_copies_is_caught(kind: type[GigaModelHolder], words: str, device: str) -> None:
    """On the CPU and on meta, where graphs are captured."""
    contract, specs = small_contract()
    holder = kind(contract=contract, specs=specs, kernel=MetaKernel(contract))
    holder.load_weights(small_stacks().items(), device=device)
    holder.set_kv_cache_buffers([b.to(device) for b in allocate_group_buffers(contract.layout)])
    with GraphAudit(holder.held()) as audit:
        holder(torch.zeros(3, 6, device=device), **control_of(contract, device))
    with pytest.raises(UnsupportedError, match=words):
        audit.require_clean()
