"""DecodeKernel on PyTorch's CPU: the whole decoder stack as one call, on the contract's own inputs.

Dims: R rows of the call, a active rows, L layers, H hidden, q / h query and KV heads of this rank, g = q / h,
d head size, S keys of a row.

Strategy:
- Check, then plan (torch_decode_plan): all indices, masks and refusals of a step come before the first write.
- Inactive rows are dropped at the door and come back as zeros.
- Per layer: write the new K and V, gather only the blocks that a row reads, attend, route, run routed experts only.
- Slots of a gathered block that hold no key of the row are masked. Were one of them NaN, weight 0 times NaN would
  still be NaN; so a step whose result is not finite is run once more with those slots zeroed. The second run writes the
  same slots. What is then still not finite comes from the request itself, and is handed on.
- Weights are only ever viewed. The views are made once per set of stacks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from attrs import evolve

from gk_adapters.torch_attention import attention_block
from gk_adapters.torch_decode_plan import StepPlan, plan_step
from gk_adapters.torch_kv import KVCodec
from gk_adapters.torch_layers import views_of_layers
from gk_adapters.torch_math import rms_norm, rope_factors
from gk_adapters.torch_moe import experts_forward, route
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KernelContract, KVScales, check_decode_call
from gk_core.kv_layout import KVHalf
from gk_core.kv_spec import KVDtype, kv_heads_per_rank
from gk_core.model_geometry import AttentionKind, ModelGeometry, require_gk_geometry
from gk_core.ports import DecodeKernel

__all__ = ["BoundCall", "CallBinder", "TorchDecodeKernel", "step_factors"]


class CallBinder:
    """Checks a rank's calls, and holds views of its weights and cache from call to call.

    Raises:
        UnsupportedError: layers that do not alternate.
        LayoutError: geometry and contract disagree.
    """

    def __init__(self, contract: KernelContract, geometry: ModelGeometry, *, prepack: bool = False) -> None:
        require_gk_geometry(geometry)
        _require_agreement(contract, geometry)
        self._prepack = prepack
        self.contract = contract
        self.geometry = geometry
        # torch stores the e4m3 dialect as e4m3fn (see torch_dtypes): the check must ask for what is stored.
        stored = contract.layout
        if stored.dtype is KVDtype.FP8_E4M3:
            stored = evolve(stored, dtype=KVDtype.FP8_E4M3FN)
        self._checked_contract = evolve(contract, layout=stored)
        self._seen: tuple[object, ...] | None = None
        self._bound: BoundCall | None = None
        self._lock = threading.Lock()

    def bind(self, call: DecodeCall[torch.Tensor]) -> BoundCall:
        """Check a call where it differs in shape, or in weights and cache, from the last one.

        Raises:
            LayoutError: it is not what the contract allows.
        """
        seen = _signature(call)
        with self._lock:
            if self._bound is None or seen != self._seen:
                check_decode_call(call, self._checked_contract)
                self._bound = BoundCall(call, self.contract, self.geometry, prepack=self._prepack)
                self._seen = seen
            return self._bound


class TorchDecodeKernel(DecodeKernel[torch.Tensor]):
    """The kernel of a decode engine of one rank; `TorchMeshKernel` is that of one rank of many.

    Not for two threads at once over one cache; the kernel itself keeps nothing of a step.

    Args:
        contract: what calls must look like; its weights are those of `WeightLayout.PLAIN`.
        geometry: of the model.
        prepack: at the first call, copy the matrices into oneDNN's own order, and multiply those: in bfloat16 about
            1.4 times as fast for several rows, for twice the memory.

    Raises:
        UnsupportedError: layers that do not alternate, or a mesh of more than one rank; at the first call, prepack with
            another dtype than bfloat16.
        LayoutError: geometry and contract disagree.
    """

    def __init__(self, *, contract: KernelContract, geometry: ModelGeometry, prepack: bool = False) -> None:
        if contract.mesh.world_size != 1:
            raise UnsupportedError(
                f"this kernel runs one rank, got a mesh of {contract.mesh.world_size}; use TorchMeshKernel"
            )
        self.contract = contract
        self.geometry = geometry
        self._binder = CallBinder(contract, geometry, prepack=prepack)

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """Run all layers for one token per row; rows that are not active come back as zeros.

        Raises:
            LayoutError: the call is not what the contract allows; nothing was written.
        """
        with torch.inference_mode():
            bound = self._binder.bind(call)
            dtype = call.hidden.dtype
            plan = plan_step(call.control, self.contract.layout, dtype)
            if plan is not None:
                x = call.hidden.index_select(0, plan.active)
                factors = step_factors(call, plan)
                hidden = self._run(x, plan, factors, bound, call.scales, clean=False)
                if not torch.isfinite(hidden).all():
                    hidden = self._run(x, plan, factors, bound, call.scales, clean=True)
        # Made outside inference mode, so that callers may use it like any tensor.
        result = torch.zeros(call.hidden.shape, dtype=dtype)
        if plan is not None:
            result[plan.active] = hidden
        return result

    def _run(
        self,
        x: torch.Tensor,
        plan: StepPlan,
        factors: tuple[torch.Tensor, torch.Tensor],
        bound: BoundCall,
        scales: KVScales,
        *,
        clean: bool,
    ) -> torch.Tensor:
        geometry = self.geometry
        for layer_id, weights in enumerate(bound.layers):
            kind = plan.sliding if geometry.attention_kinds[layer_id] is AttentionKind.SLIDING else plan.full
            kv = bound.kv[layer_id // 2]
            normed = rms_norm(x, weights.input_norm, geometry.rms_norm_eps)
            x = x + attention_block(normed, weights, kind, factors, kv, bound.codec, scales, clean=clean)
            normed = rms_norm(x, weights.post_norm, geometry.rms_norm_eps)
            ids, shares = route(normed, weights.router, weights.router_bias, geometry.experts_per_token)
            x = x + experts_forward(
                normed, ids, shares, weights.experts, alpha=geometry.swiglu_alpha, limit=geometry.swiglu_limit
            )
        return x


class BoundCall:
    """Views of the weights and the cache, and the tensors themselves so that their ids stay theirs."""

    def __init__(
        self, call: DecodeCall[torch.Tensor], contract: KernelContract, geometry: ModelGeometry, *, prepack: bool
    ) -> None:
        self.keep = _tensors(call.weights, call)
        self.layers = views_of_layers(call.weights, geometry, contract.mesh, call.rank, prepack=prepack)
        self.codec = KVCodec(contract.layout, call.hidden.dtype)
        kv = call.per_buffer_kv or call.stacked_kv
        assert kv is not None  # check_decode_call demands one of the two
        self.kv = [
            (self.codec.bind(k, KVHalf.K), self.codec.bind(v, KVHalf.V)) for k, v in zip(kv.k, kv.v, strict=True)
        ]


def _tensors(weights: Mapping[str, torch.Tensor], call: DecodeCall[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    kv: tuple[torch.Tensor, ...] = ()
    if call.per_buffer_kv is not None:
        kv += (*call.per_buffer_kv.k, *call.per_buffer_kv.v)
    if call.stacked_kv is not None:
        kv += (call.stacked_kv.k, call.stacked_kv.v)
    return (*weights.values(), *kv)


def _signature(call: DecodeCall[torch.Tensor]) -> tuple[object, ...]:
    c = call.control
    small = (
        call.hidden, c.block_table, c.block_table_swa, c.positions, c.positions_swa, c.swa_start, c.update_index,
        c.update_index_swa, c.active, c.cos, c.sin,
    )  # fmt: skip
    return (
        tuple(call.weights),
        tuple(map(id, _tensors(call.weights, call))),
        call.per_buffer_kv is None,
        call.rank,
        *((t.shape, t.dtype) for t in small),
    )


def step_factors(call: DecodeCall[torch.Tensor], plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary factors of the active rows."""
    cos, sin = (t.index_select(1, plan.active) for t in (call.control.cos, call.control.sin))
    return rope_factors(cos, sin)


def _require_agreement(contract: KernelContract, geometry: ModelGeometry) -> None:
    layout = contract.layout
    for name, ours, theirs in (
        ("num_layers", geometry.num_layers, layout.num_layers),
        ("num_kv_heads", kv_heads_per_rank(geometry.num_kv_heads, contract.mesh.tp_size), layout.num_kv_heads),
        ("head_size", geometry.head_size, layout.head_size),
        ("hidden_size", geometry.hidden_size, contract.hidden_size),
        ("sliding_window", geometry.sliding_window, contract.shape.sliding_window),
    ):
        if ours != theirs:
            raise LayoutError(f"{name} of the model is {ours}, the contract has {theirs}")
