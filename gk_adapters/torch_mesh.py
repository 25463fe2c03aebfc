"""DecodeKernel of one rank of a TP x DP x EP mesh, in torch: the arithmetic of the giga kernel between its collectives.

Dims: R rows of a replica, T = R / TP rows of this rank's shard, N rows of all replicas, H hidden, k experts per token.

Per layer: AllGather[TP] the shard, attend with this rank's heads on the replica's rows, ReduceScatter[TP] the partial
projections; then route the shard's own rows, AllGather[EP] rows, expert ids and shares, run this rank's experts on
everybody's rows, ReduceScatter[EP]. Five collectives a layer, in the order in which the giga kernel has them.
"""

from __future__ import annotations

import torch

from gk_adapters.torch_attention import attention_block
from gk_adapters.torch_collectives import Collectives
from gk_adapters.torch_decode import BoundCall, CallBinder, step_factors
from gk_adapters.torch_decode_plan import StepPlan, plan_step
from gk_adapters.torch_math import rms_norm
from gk_adapters.torch_moe import experts_forward, route
from gk_core.kernel_contract import DecodeCall, KernelContract
from gk_core.model_geometry import AttentionKind, ModelGeometry
from gk_core.ports import DecodeKernel

__all__ = ["TorchMeshKernel"]


class TorchMeshKernel(DecodeKernel[torch.Tensor]):
    """One rank's kernel; all ranks step together.

    Args:
        contract: of this rank's calls; hidden is its shard [T, H], control its replica's R rows.
        geometry: of the model.
        collectives: to the other ranks.

    Raises:
        UnsupportedError: layers that do not alternate.
        LayoutError: geometry and contract disagree.
    """

    def __init__(self, *, contract: KernelContract, geometry: ModelGeometry, collectives: Collectives) -> None:
        self.contract = contract
        self.geometry = geometry
        self._binder = CallBinder(contract, geometry)
        self._collectives = collectives

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """This rank's shard of the hidden states [T, H]; rows that are not active come back as zeros.

        Raises:
            LayoutError: the call is not what the contract allows; this rank wrote nothing.
            TransferError: another rank failed.
        """
        with torch.inference_mode():
            bound = self._binder.bind(call)
            plan = plan_step(call.control, self.contract.layout, call.hidden.dtype)
            place = self.contract.mesh.tp_rank(call.rank)
            rows = slice(place * self.contract.shard_rows, (place + 1) * self.contract.shard_rows)
            mine = call.control.active[rows] != 0
            x = torch.where(mine, call.hidden, 0.0)
            hidden = self._run(x, plan, bound, call, clean=False)
            # All ranks take the same turn, or their collectives would not meet.
            finite = torch.isfinite(hidden).all().view(1)
            everybody = self.contract.mesh.ep_groups[0]
            if not self._collectives.all_gather(finite, everybody).all():
                hidden = self._run(x, plan, bound, call, clean=True)
        return torch.where(mine, hidden, 0.0)

    def _run(
        self, x: torch.Tensor, plan: StepPlan | None, bound: BoundCall, call: DecodeCall[torch.Tensor], *, clean: bool
    ) -> torch.Tensor:
        geometry = self.geometry
        factors = None if plan is None else step_factors(call, plan)
        for layer_id, weights in enumerate(bound.layers):
            gathered = self._collectives.all_gather(x, self._tp_group(call.rank))
            partial = torch.zeros_like(gathered)
            if plan is not None and factors is not None:
                sliding = geometry.attention_kinds[layer_id] is AttentionKind.SLIDING
                normed = rms_norm(gathered.index_select(0, plan.active), weights.input_norm, geometry.rms_norm_eps)
                partial[plan.active] = attention_block(
                    normed,
                    weights,
                    plan.sliding if sliding else plan.full,
                    factors,
                    bound.kv[layer_id // 2],
                    bound.codec,
                    call.scales,
                    clean=clean,
                )
            x = x + self._collectives.reduce_scatter(partial, self._tp_group(call.rank))
            normed = rms_norm(x, weights.post_norm, geometry.rms_norm_eps)
            ids, shares = route(normed, weights.router, weights.router_bias, geometry.experts_per_token)
            everybody = self.contract.mesh.ep_groups[0]
            rows, ids, shares = (self._collectives.all_gather(t, everybody) for t in (normed, ids, shares))
            routed = experts_forward(
                rows, ids, shares, weights.experts, alpha=geometry.swiglu_alpha, limit=geometry.swiglu_limit
            )
            x = x + self._collectives.reduce_scatter(routed, everybody)
        return x

    def _tp_group(self, rank: int) -> tuple[int, ...]:
        return self.contract.mesh.tp_groups[self.contract.mesh.dp_rank(rank)]
