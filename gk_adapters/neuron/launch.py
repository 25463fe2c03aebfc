"""The giga kernel launched from torch at lnc 1: arguments one by one, caches as aliases, nothing copied on the way.

Dims: T rows of the rank, R of the replica, H hidden, Hp padded hidden, g group buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from gk_adapters.neuron.environment import require_gk_lnc
from gk_adapters.neuron.flat_entry import flat_entry
from gk_adapters.nki_kernel import giga_kernel
from gk_adapters.torch_giga import (
    GigaBuild,
    checked_contract,
    giga_config,
    giga_weight_names,
    require_kernel_limits,
    uses_mx,
)
from gk_core.block_table import PAD_SLOT_ID
from gk_core.errors import LayoutError, MissingDependencyError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KernelContract, check_decode_call
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import ModelGeometry, require_gk_geometry
from gk_core.ports import DecodeKernel
from gk_core.weight_layouts import PADDING, hidden_order

__all__ = ["NeuronDecodeKernel", "compile_options", "load_wrap_nki", "scratch_slot_tensors"]

WrapNki = Callable[[Callable[..., Any]], Any]
_FP8_AS_E4M3 = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
_SCALES = "_scale"


def compile_options(target: str, kv_dtype: KVDtype, lnc: int) -> tuple[str, ...]:
    """neuronx-cc's options for the decode graph.

    torch has no e4m3 of maximum 240, so such bytes travel as e4m3fn. On trn2 the compiler refuses that type by name
    (NCC_EVRF051) unless it is told to read it as e4m3; up to 240, where our writers clamp, the bytes are the same.

    Raises:
        UnsupportedError: a target other than trn2 and trn3; an lnc other than 1; e4m3fn (maximum 448) on trn2.
    """
    if target not in ("trn2", "trn3"):
        raise UnsupportedError(f"the giga kernel is built for trn2 and trn3, got target {target!r}")
    if lnc != 1:
        raise UnsupportedError(f"the giga kernel is built for lnc 1, got {lnc}")
    if target == "trn2" and kv_dtype is KVDtype.FP8_E4M3FN:
        raise UnsupportedError("trn2 has no float8_e4m3fn; use an FP8 cache of float8_e4m3 (maximum 240) there")
    fp8 = (_FP8_AS_E4M3,) if target == "trn2" and kv_dtype is KVDtype.FP8_E4M3 else ()
    # The router must see the values that it was given: no silent narrowing of float32.
    return ("--target", target, "--lnc", str(lnc), "--auto-cast=none", *fp8)


def load_wrap_nki() -> WrapNki:
    """torch_neuronx's wrapper that makes an NKI kernel callable in a torch graph.

    Raises:
        MissingDependencyError: torch-neuronx is not installed, or only a placeholder of its name.
        UnsupportedError: this release has no such wrapper.
    """
    try:
        package = import_module("torch_neuronx")
    except ImportError as error:
        raise MissingDependencyError(
            "torch-neuronx is not installed (a placeholder of its name does not count); see gk doctor"
        ) from error
    found = getattr(package, "wrap_nki", None)
    if found is None:
        try:
            found = getattr(import_module("torch_neuronx.nki_hop"), "wrap_nki", None)
        except ImportError:
            found = None
    if found is None:
        raise UnsupportedError("this torch-neuronx has no wrap_nki; see docs/on-neuron.md for releases that have it")
    wrap: WrapNki = found
    return wrap


def scratch_slot_tensors(
    update_index: torch.Tensor, block_size: int, scratch_slot: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`torch_giga.scratch_slots` in the graph: valid, distinct slots (int32 [R, 1]), and which rows write (uint8)."""
    writes = update_index != PAD_SLOT_ID
    rows = torch.arange(update_index.shape[0], device=update_index.device).view(-1, 1)
    own = scratch_slot + 2 * rows if scratch_slot else rows % block_size
    return torch.where(writes, update_index, own).to(torch.int32), writes.to(torch.uint8)


class NeuronDecodeKernel(DecodeKernel[torch.Tensor]):
    """One rank's giga kernel in a torch graph.

    Args:
        contract: of the calls; weights are the stacks of the NKI layout, and the layout counts the scratch blocks.
        geometry: of the model.
        build: target, scratch blocks and options.
        wrap_nki: see `load_wrap_nki`.
        environ: environment variables; lnc is read from them.

    Raises:
        UnsupportedError: lnc is not said or not 1; a target or a cache dtype that do not fit; or see
            `require_kernel_limits`.
    """

    def __init__(
        self,
        *,
        contract: KernelContract,
        geometry: ModelGeometry,
        build: GigaBuild,
        wrap_nki: WrapNki,
        environ: Mapping[str, str],
    ) -> None:
        require_gk_geometry(geometry)
        require_kernel_limits(contract, build)
        self.lnc = require_gk_lnc(environ)
        if self.lnc != contract.lnc:
            raise LayoutError(f"the contract is for lnc {contract.lnc}, this process runs at {self.lnc}")
        self.options = compile_options(build.target, contract.layout.dtype, self.lnc)
        self.contract = contract
        self._checked_contract = checked_contract(contract)
        self.geometry = geometry
        self.build = build
        from gk_kernels.simulator import simulated_nki

        entry = flat_entry(giga_kernel(), contract.layout.num_buffers)
        with simulated_nki() as nki:  # the real nki where that is installed
            self._kernel = wrap_nki(nki.jit(entry))
        order = hidden_order(geometry.hidden_size)
        self._to_stored = [geometry.hidden_size if i == PADDING else i for i in order]
        places = {feature: place for place, feature in enumerate(order) if feature != PADDING}
        self._to_model = [places[i] for i in range(geometry.hidden_size)]

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """Run all layers for one token per row. Rows that are not active come back with anything.

        Raises:
            LayoutError: the call is not what the contract allows, or has its caches stacked; nothing was launched.
        """
        self.check(call)
        if call.per_buffer_kv is None:
            raise LayoutError("on a device each buffer is an argument of its own; pass per-buffer KV")
        out = self._kernel[self.lnc](*self.arguments(call))
        hidden: torch.Tensor = out[0]
        return hidden.index_select(1, torch.tensor(self._to_model, device=hidden.device))

    def check(self, call: DecodeCall[torch.Tensor]) -> None:
        """Refuse a call that the contract does not allow.

        Raises:
            LayoutError: see `check_decode_call`.
        """
        check_decode_call(call, self._checked_contract)

    def arguments(self, call: DecodeCall[torch.Tensor]) -> tuple[Any, ...]:
        """The entry's arguments: tensors, None for absent scales, and the build's constants last."""
        assert call.per_buffer_kv is not None
        c, kv, device = call.control, call.per_buffer_kv, call.hidden.device
        block_size, mesh = self.contract.layout.block_size, self.contract.mesh
        scratch = self.build.scratch_slot(self.contract.layout)
        slots, writes = scratch_slot_tensors(c.update_index, block_size, scratch)
        slots_swa, writes_swa = scratch_slot_tensors(c.update_index_swa, block_size, scratch)
        padded = torch.nn.functional.pad(call.hidden, (0, 1))
        x = padded.index_select(1, torch.tensor(self._to_stored, device=device))
        names = giga_weight_names()
        weights = [call.weights.get(n) if n.endswith(_SCALES) else call.weights[n] for n in names]
        first = mesh.experts(call.rank, self.geometry.num_experts).start
        mx_matmul = uses_mx(call.weights, self.build.target, call.hidden.dtype)
        return (
            x, *weights, *kv.k, *kv.v,
            c.block_table, c.block_table_swa, c.positions, c.positions_swa, c.swa_start,
            slots, slots_swa, writes, writes_swa, c.cos, c.sin,
            torch.full((1, 1), first, dtype=torch.int32, device=device),
            giga_config(self.geometry, self.contract, call.rank, call.scales, self.build, mx_matmul=mx_matmul),
        )  # fmt: skip
