"""DecodeKernel over the giga kernel: a Neuron device where the real nki is installed, our simulator elsewhere.

Dims: R rows of the replica, T rows of the rank, H hidden, Hp padded hidden.

Calls are the contract's own, in torch tensors; arrays share the tensors' memory, so the kernel writes the caller's
cache. Hidden states go in and come out in the model's order; the shuffle and the padding of the NKI weight layout
stay in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.torch_decode_plan import plan_step
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_model import TorchModel
from gk_adapters.weight_stacks import build_stacks
from gk_core.block_table import PAD_SLOT_ID
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KernelContract, KVScales, check_decode_call
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import ModelGeometry, require_gk_geometry
from gk_core.ports import DecodeKernel
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import PADDING, WeightLayout, hidden_order, padded_features

__all__ = [
    "GigaArguments",
    "NkiDecodeKernel",
    "giga_config",
    "giga_kernel",
    "giga_weight_names",
    "nki_kernel_from_checkpoint",
    "scratch_slots",
    "simulate_mesh",
]

Array = NDArray[Any]
_SCALES = ("expert_gate_up_weights_scale", "expert_down_weights_scale")
_WEIGHTS = (
    "input_layernorm_weight", "W_qkv", "bias_qkv", "W_out", "bias_out", "sink", "post_attn_layernorm_weight",
    "router_weights", "router_bias", "expert_gate_up_weights", "expert_gate_up_weights_scale", "expert_gate_up_bias",
    "expert_down_weights", "expert_down_weights_scale", "expert_down_bias",
)  # fmt: skip


def giga_kernel() -> Any:
    """The kernel, loaded beside the real nki where that is installed, else inside the simulator."""
    from gk_kernels.simulator import simulated_nki

    with simulated_nki():
        from gk_kernels.giga_decode.entry import giga_decode
    return giga_decode


def giga_weight_names() -> tuple[str, ...]:
    """Stacks of the NKI weight layout, in the order in which the kernel takes them."""
    return _WEIGHTS


def scratch_slots(update_index: Array, block_size: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Slots that are all valid, and which rows write: [R, 1] each.

    An indirect DMA must not mix rows to write with rows to skip. A row that writes nothing gets a slot of its own in
    the null block, whose bytes the kernel puts back as it found them.

    >>> slots, writes = scratch_slots(np.array([[300], [-1], [-1]]), 128)
    >>> slots[:, 0].tolist(), writes[:, 0].tolist()
    ([300, 1, 2], [1, 0, 0])
    """
    writes = update_index != PAD_SLOT_ID
    own = np.arange(len(update_index)).reshape(-1, 1) % block_size
    return np.where(writes, update_index, own).astype(np.int32), writes.astype(np.uint8)


@frozen(kw_only=True, eq=False)
class GigaArguments:
    """One rank's arguments of the kernel, in its order, as arrays."""

    values: tuple[Any, ...]


class NkiDecodeKernel(DecodeKernel[torch.Tensor]):
    """One rank's decode kernel over the giga kernel.

    Args:
        contract: what calls must look like. Its weights are checked only where they are the kernel's own.
        geometry: of the model.
        stacks: this rank's stacks in the NKI weight layout.
        target: "trn2" or "trn3", what the simulator pretends to be.

    Raises:
        UnsupportedError: layers that do not alternate, more than one rank, more than 128 rows, a block size that is no
            power of two.
    """

    def __init__(
        self, *, contract: KernelContract, geometry: ModelGeometry, stacks: Mapping[str, Array], target: str = "trn3"
    ) -> None:
        require_gk_geometry(geometry)
        if contract.mesh.world_size != 1:
            raise UnsupportedError(
                f"this kernel runs one rank, got a mesh of {contract.mesh.world_size}; use tp_size 1, dp_size 1"
            )
        require_kernel_limits(contract)
        self.contract = contract
        self.geometry = geometry
        self.target = target
        stored = contract.layout
        if stored.dtype is KVDtype.FP8_E4M3:
            stored = evolve(stored, dtype=KVDtype.FP8_E4M3FN)
        self._checked_contract = evolve(contract, layout=stored)
        self._stacks = dict(stacks)
        self._kernel = giga_kernel()

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """Run all layers for one token per row; rows that are not active come back as zeros.

        Raises:
            LayoutError: the call is not what the contract allows; nothing was written.
        """
        check_decode_call(call, self._checked_contract)
        result = torch.zeros(call.hidden.shape, dtype=call.hidden.dtype)
        if plan_step(call.control, self.contract.layout, call.hidden.dtype) is None:
            return result
        arguments = giga_arguments(call, self._stacks, self.contract, self.geometry, self.target)
        hidden = run_kernel(self._kernel, [arguments], target=self.target)[0]
        active = call.control.active.numpy()[:, 0] != 0
        model_order = from_stored_order(hidden, self.geometry.hidden_size)
        array_of(result)[active] = model_order[active]
        return result


def require_kernel_limits(contract: KernelContract) -> None:
    """Refuse what the kernel was not built for.

    Raises:
        UnsupportedError: more than 128 rows per replica, or a block size that is no power of two.
    """
    if contract.shape.num_rows > 128:
        raise UnsupportedError(f"the giga kernel takes up to 128 rows per replica, got {contract.shape.num_rows}")
    block = contract.layout.block_size
    if block & (block - 1):
        raise UnsupportedError(f"the giga kernel takes block sizes that are powers of two, got {block}")


def giga_arguments(
    call: DecodeCall[torch.Tensor],
    stacks: Mapping[str, Array],
    contract: KernelContract,
    geometry: ModelGeometry,
    target: str,
    fp8_reduce_scatter: bool = False,
) -> GigaArguments:
    """A call as the kernel takes it.

    MXFP4 experts of bfloat16 models go through MX matmuls where the target has them; elsewhere the kernel widens them.
    """
    c, layout, mesh = call.control, contract.layout, contract.mesh
    slots, writes = scratch_slots(c.update_index.numpy(), layout.block_size)
    slots_swa, writes_swa = scratch_slots(c.update_index_swa.numpy(), layout.block_size)
    k, v = _kv_arrays(call, layout.dtype)
    experts = mesh.experts(call.rank, geometry.num_experts)
    weights = [stacks.get(name) if name in _SCALES else stacks[name] for name in _WEIGHTS]
    control = (c.block_table, c.block_table_swa, c.positions, c.positions_swa, c.swa_start)
    mx_matmul = _SCALES[0] in stacks and target == "trn3" and call.hidden.dtype == torch.bfloat16
    return GigaArguments(
        values=(
            to_stored_order(array_of(call.hidden), geometry.hidden_size),
            *weights,
            k,
            v,
            *(t.numpy() for t in control),
            slots,
            slots_swa,
            writes,
            writes_swa,
            array_of(c.cos),
            array_of(c.sin),
            np.array([[experts.start]], np.int32),
            giga_config(geometry, contract, call.rank, call.scales, mx_matmul, fp8_reduce_scatter),
        )
    )


def simulate_mesh(
    calls: Sequence[DecodeCall[torch.Tensor]],
    stacks: Sequence[Mapping[str, Array]],
    contract: KernelContract,
    geometry: ModelGeometry,
    *,
    target: str = "trn3",
    fp8_reduce_scatter: bool = False,
) -> list[Array]:
    """One step of all ranks of a mesh in our simulator: each rank's hidden shard [T, H].

    Args:
        calls, stacks: one per rank, in the order of ranks; every rank's cache is its own.
        fp8_reduce_scatter: send the experts' sums as FP8.

    Raises:
        LayoutError: not one call and one set of stacks per rank, or a call that the contract does not allow.
        UnsupportedError: see `NkiDecodeKernel`.
    """
    require_kernel_limits(contract)
    world = contract.mesh.world_size
    if len(calls) != world or len(stacks) != world or [c.rank for c in calls] != list(range(world)):
        raise LayoutError(f"a mesh of {world} ranks takes one call and one set of stacks per rank, in order")
    for call in calls:
        check_decode_call(call, contract)
    arguments = [
        giga_arguments(c, s, contract, geometry, target, fp8_reduce_scatter) for c, s in zip(calls, stacks, strict=True)
    ]
    hidden = run_kernel(giga_kernel(), arguments, target=target)
    return [from_stored_order(h, geometry.hidden_size) for h in hidden]


def giga_config(
    geometry: ModelGeometry,
    contract: KernelContract,
    rank: int,
    scales: KVScales,
    mx_matmul: bool = False,
    fp8_reduce_scatter: bool = False,
) -> Any:
    """The kernel's compile-time values, a `DecodeConfig`."""
    from gk_kernels.giga_decode.config import DecodeConfig

    mesh = contract.mesh
    return DecodeConfig(
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        num_q_heads=len(mesh.q_heads(rank, geometry.num_q_heads)),
        num_kv_heads=len(mesh.kv_heads(rank, geometry.num_kv_heads)),
        head_size=geometry.head_size,
        experts_per_token=geometry.experts_per_token,
        swiglu_alpha=geometry.swiglu_alpha,
        swiglu_limit=geometry.swiglu_limit,
        rms_norm_eps=geometry.rms_norm_eps,
        k_scale=scales.k,
        v_scale=scales.v,
        tp_groups=mesh.tp_groups,
        ep_groups=mesh.ep_groups,
        mx_matmul=mx_matmul,
        fp8_reduce_scatter=fp8_reduce_scatter,
    )


def run_kernel(kernel: Any, ranks: Sequence[GigaArguments], *, target: str) -> list[Array]:
    """Hidden states of every rank, in the stored order.

    Where the real nki is installed the kernel is launched as it is, one rank per process; that path has been run by
    nobody here, for want of a device. Elsewhere the simulator runs all ranks.

    Raises:
        UnsupportedError: several ranks in one process beside the real nki.
    """
    from gk_kernels.simulator import simulate
    from gk_kernels.simulator.install import real_nki_present

    if real_nki_present():
        if len(ranks) != 1:
            raise UnsupportedError(f"on a device each rank is a process of its own, got {len(ranks)} ranks in this one")
        return [np.asarray(kernel(*ranks[0].values))]
    result = simulate(kernel, ranks=len(ranks), rank_args=[r.values for r in ranks], target=target)
    return [np.asarray(output) for output in result.outputs]


def to_stored_order(hidden: Array, hidden_size: int) -> Array:
    """Rows [T, H] as the kernel holds them: [T, Hp], shuffled, padding zero."""
    order = np.array(hidden_order(hidden_size))
    stored = np.zeros((hidden.shape[0], padded_features(hidden_size)), hidden.dtype)
    real = order != PADDING
    stored[:, real] = hidden[:, order[real]]
    return stored


def from_stored_order(stored: Array, hidden_size: int) -> Array:
    """The reverse: [T, Hp] to [T, H]."""
    order = np.array(hidden_order(hidden_size))
    real = order != PADDING
    hidden = np.empty((stored.shape[0], hidden_size), stored.dtype)
    hidden[:, order[real]] = stored[:, real]
    return hidden


def _kv_arrays(call: DecodeCall[torch.Tensor], dtype: KVDtype) -> tuple[Any, Any]:
    """K and V over the caller's memory; the e4m3 dialect under its own name."""

    def array(tensor: torch.Tensor) -> Array:
        if not tensor.is_contiguous():
            raise LayoutError("K and V of a buffer must each be contiguous; pass the halves of a group buffer")
        found = array_of(tensor)
        return found.view(ml_dtypes.float8_e4m3) if dtype is KVDtype.FP8_E4M3 else found

    if call.per_buffer_kv is not None:
        return tuple(map(array, call.per_buffer_kv.k)), tuple(map(array, call.per_buffer_kv.v))
    assert call.stacked_kv is not None  # check_decode_call demands one of the two
    return array(call.stacked_kv.k), array(call.stacked_kv.v)


def nki_kernel_from_checkpoint(
    checkpoint: Path, *, target: str = "trn3"
) -> Callable[[KernelContract, TorchModel], DecodeKernel[torch.Tensor]]:
    """A factory of kernels whose stacks are built from a checkpoint directory, in the NKI layout.

    The torch model decides dtype and contract; its own stacks are not read.
    """

    def make(contract: KernelContract, model: TorchModel) -> DecodeKernel[torch.Tensor]:
        source = HFCheckpoint(checkpoint)
        name = str(model.dtype).rpartition(".")[2]
        specs = build_stacked_weight_specs(
            model.config.geometry, model.mesh, model.rank, WeightLayout.NKI, source.config.expert_format, name
        )
        return NkiDecodeKernel(
            contract=contract, geometry=model.config.geometry, stacks=build_stacks(source, specs), target=target
        )

    return make
