"""A decode call as the giga kernel takes it: arrays over the call's memory, scratch slots, stored order, constants.

Dims: R rows of the replica, T rows of the rank, H hidden, Hp padded hidden, B blocks, n tokens per block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray

from gk_adapters.torch_dtypes import array_of
from gk_core.block_table import PAD_SLOT_ID
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KernelContract, KVScales
from gk_core.kv_layout import KVLayout
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import ModelGeometry
from gk_core.weight_layouts import PADDING, hidden_order, padded_features

__all__ = [
    "GigaArguments",
    "GigaBuild",
    "checked_contract",
    "engine_layout",
    "from_stored_order",
    "giga_arguments",
    "giga_config",
    "giga_weight_names",
    "require_kernel_limits",
    "scratch_blocks",
    "scratch_slots",
    "to_stored_order",
    "uses_mx",
]

Array = NDArray[Any]
_SCALES = ("expert_gate_up_weights_scale", "expert_down_weights_scale")
_WEIGHTS = (
    "input_layernorm_weight", "W_qkv", "bias_qkv", "W_out", "bias_out", "sink", "post_attn_layernorm_weight",
    "router_weights", "router_bias", "expert_gate_up_weights", "expert_gate_up_weights_scale", "expert_gate_up_bias",
    "expert_down_weights", "expert_down_weights_scale", "expert_down_bias",
)  # fmt: skip


@frozen(kw_only=True)
class GigaBuild:
    """What a build of the kernel decides beside its contract.

    Attributes:
        target: "trn2" or "trn3".
        scratch_blocks: how many of the contract's blocks, its last ones, are scratch: see `scratch_blocks`. The engine,
            its pool and its registered regions know only those before. 0: the caches come without any.
        mx_terms: MXFP8 terms that an activation is split into for MX matmuls, 1 or 2.
        fp8_reduce_scatter: send the experts' sums as FP8.
    """

    target: str = "trn3"
    scratch_blocks: int = 0
    mx_terms: int = 2
    fp8_reduce_scatter: bool = False

    def __attrs_post_init__(self) -> None:
        if self.target not in ("trn2", "trn3"):
            raise UnsupportedError(f"the giga kernel is built for trn2 and trn3, got target {self.target!r}")
        if self.mx_terms not in (1, 2):
            raise UnsupportedError(f"activations are split into 1 or 2 MXFP8 terms, got {self.mx_terms}")

    def scratch_slot(self, layout: KVLayout) -> int:
        """First scratch slot of a contract's layout; 0 where it has none."""
        return engine_layout(layout, self).num_blocks * layout.block_size if self.scratch_blocks else 0


@frozen(kw_only=True, eq=False)
class GigaArguments:
    """One rank's arguments of the kernel, in its order, as arrays."""

    values: tuple[Any, ...]


def giga_weight_names() -> tuple[str, ...]:
    """Stacks of the NKI weight layout, in the order in which the kernel takes them."""
    return _WEIGHTS


def scratch_blocks(num_rows: int, block_size: int) -> int:
    """Blocks that rows which write nothing need: two slots for each row, since packed K is written in pairs.

    >>> [scratch_blocks(rows, block) for rows, block in ((8, 128), (128, 128), (8, 16), (1, 1))]
    [1, 2, 1, 2]
    """
    return -(-2 * num_rows // block_size)


def scratch_slots(
    update_index: Array, block_size: int, scratch_slot: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Slots that are all valid and distinct, and which rows write: [R, 1] each.

    An indirect DMA must not mix rows to write with rows to skip. Row r, if it writes nothing, gets scratch slot 2 r:
    a pair of its own. Without scratch blocks it gets a slot of the null block, whose bytes the kernel puts back.

    >>> slots, writes = scratch_slots(np.array([[300], [-1], [-1]]), 128, 512)
    >>> slots[:, 0].tolist(), writes[:, 0].tolist()
    ([300, 514, 516], [1, 0, 0])
    >>> scratch_slots(np.array([[300], [-1], [-1]]), 128)[0][:, 0].tolist()
    [300, 1, 2]

    Args:
        scratch_slot: first scratch slot, 0 for none.
    """
    writes = update_index != PAD_SLOT_ID
    rows = np.arange(len(update_index)).reshape(-1, 1)
    own = scratch_slot + 2 * rows if scratch_slot else rows % block_size
    return np.where(writes, update_index, own).astype(np.int32), writes.astype(np.uint8)


def engine_layout(layout: KVLayout, build: GigaBuild) -> KVLayout:
    """The layout without its scratch blocks: what tables and slots may name.

    Raises:
        LayoutError: as many scratch blocks as blocks, or more.
    """
    return evolve(layout, num_blocks=layout.num_blocks - build.scratch_blocks) if build.scratch_blocks else layout


def checked_contract(contract: KernelContract) -> KernelContract:
    """The contract with what torch stores: it has no e4m3 of maximum 240, such bytes travel as e4m3fn."""
    layout = contract.layout
    if layout.dtype is KVDtype.FP8_E4M3:
        layout = evolve(layout, dtype=KVDtype.FP8_E4M3FN)
    return evolve(contract, layout=layout)


def require_kernel_limits(contract: KernelContract, build: GigaBuild) -> None:
    """Refuse what the kernel was not built for.

    Raises:
        UnsupportedError: more than 128 rows per replica, or a block size that is no power of two.
        LayoutError: scratch blocks that are too few for the rows.
    """
    rows, block = contract.shape.num_rows, contract.layout.block_size
    if rows > 128:
        raise UnsupportedError(f"the giga kernel takes up to 128 rows per replica, got {rows}")
    if block & (block - 1):
        raise UnsupportedError(f"the giga kernel takes block sizes that are powers of two, got {block}")
    needed = scratch_blocks(rows, block)
    if 0 != build.scratch_blocks < needed:
        raise LayoutError(f"{rows} rows need {needed} scratch blocks of {block} tokens, got {build.scratch_blocks}")


def uses_mx(stacks: Mapping[str, object], target: str, dtype: torch.dtype) -> bool:
    """MXFP4 experts of bfloat16 models go through MX matmuls where the target has them; elsewhere they are widened."""
    return _SCALES[0] in stacks and target == "trn3" and dtype == torch.bfloat16


def giga_arguments(
    call: DecodeCall[torch.Tensor],
    stacks: Mapping[str, Array],
    contract: KernelContract,
    geometry: ModelGeometry,
    build: GigaBuild,
) -> GigaArguments:
    """A call as the kernel takes it."""
    c, layout, mesh = call.control, contract.layout, contract.mesh
    first = build.scratch_slot(layout)
    slots, writes = scratch_slots(c.update_index.numpy(), layout.block_size, first)
    slots_swa, writes_swa = scratch_slots(c.update_index_swa.numpy(), layout.block_size, first)
    k, v = _kv_arrays(call, layout.dtype)
    experts = mesh.experts(call.rank, geometry.num_experts)
    weights = [stacks.get(name) if name in _SCALES else stacks[name] for name in _WEIGHTS]
    control = (c.block_table, c.block_table_swa, c.positions, c.positions_swa, c.swa_start)
    mx_matmul = uses_mx(stacks, build.target, call.hidden.dtype)
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
            giga_config(geometry, contract, call.rank, call.scales, build, mx_matmul=mx_matmul),
        )
    )


def giga_config(
    geometry: ModelGeometry, contract: KernelContract, rank: int, scales: KVScales, build: GigaBuild, *, mx_matmul: bool
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
        mx_terms=build.mx_terms,
        fp8_reduce_scatter=build.fp8_reduce_scatter,
        scratch_slot=build.scratch_slot(contract.layout),
    )


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
