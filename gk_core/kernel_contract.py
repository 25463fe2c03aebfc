"""Kernel contract: one decode call as a typed value, and every reason to refuse it.

Dims: R rows of this replica (padded batch), T rows of this rank's shard (R / TP), H hidden, F and S table widths,
L layers, g group buffers.

The core holds no arrays: it describes tensors by name, shape and dtype and checks anything that has those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar, cast

from attrs import frozen

from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import ControlShape
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_layout import KByteOrder, KVLayout

__all__ = [
    "ControlTensors",
    "DecodeCall",
    "KVScales",
    "KernelContract",
    "PerBufferKV",
    "StackedKV",
    "TensorLike",
    "TensorSpec",
    "check_decode_call",
    "check_tensor",
    "dtype_name",
    "is_packed",
]


class TensorLike(Protocol):
    """What the core needs of a tensor; torch, NumPy and NKI tensors all have it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each axis."""
        ...

    @property
    def dtype(self) -> object:
        """Element type; `dtype_name` reads it."""
        ...


T = TypeVar("T", bound=TensorLike)


def dtype_name(tensor: TensorLike) -> str:
    """Element type without its library: 'torch.bfloat16' and ml_dtypes' bfloat16 both give 'bfloat16'."""
    dtype = tensor.dtype
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


@frozen(kw_only=True)
class TensorSpec:
    """Name, shape and permitted dtypes of one tensor of the contract."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def check_tensor(tensor: TensorLike, spec: TensorSpec) -> None:
    """Refuse a tensor that is not what its spec says.

    Raises:
        LayoutError: wrong shape or dtype, naming tensor, got and wanted.
    """
    shape = tuple(tensor.shape)
    if shape != spec.shape:
        raise LayoutError(f"{spec.name} must have shape {list(spec.shape)}, got {list(shape)}")
    name = dtype_name(tensor)
    if name not in spec.dtypes:
        raise LayoutError(f"{spec.name} must be {' or '.join(spec.dtypes)}, got {name}")


@frozen(kw_only=True)
class PerBufferKV(Generic[T]):
    """One K and one V tensor per group buffer, each indexed from its own base.

    Attributes:
        k: g tensors [num_blocks, kv, block, d], or packed [num_blocks, kv, block // 2, d, 2].
        v: g tensors [num_blocks, kv, block, d].
    """

    k: tuple[T, ...]
    v: tuple[T, ...]


@frozen(kw_only=True)
class StackedKV(Generic[T]):
    """One K and one V tensor with a leading axis of g buffers.

    Attributes:
        k: [g, num_blocks, kv, block, d], or packed with [block // 2, d, 2] at the end.
        v: [g, num_blocks, kv, block, d].
    """

    k: T
    v: T


@frozen(kw_only=True)
class KVScales:
    """FP8 scales of the cache, one for all layers: stored = x / scale, read = stored * scale.

    A missing scale is exactly 1.0, not a skipped multiplication. K 3.0 with k = 2.0 is stored as 1.5 and read as 3.0.
    """

    k: float = 1.0
    v: float = 1.0

    def __attrs_post_init__(self) -> None:
        for name in ("k", "v"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise LayoutError(f"{name}_scale must be a positive finite number, got {value}")


@frozen(kw_only=True)
class ControlTensors(Generic[T]):
    """`AttentionControl` as a kernel takes it, with this step's rotary tables.

    Attributes:
        block_table: int32 [R, F], full layers.
        block_table_swa: int32 [R, S], sliding layers, trimmed.
        positions, positions_swa, swa_start: float32 [R, 1].
        update_index, update_index_swa: [R, 1] slots; what stands for PAD_SLOT_ID is the adapter's affair.
        active: uint8 [R, 1]; 1 where the row holds a request.
        cos, sin: [d / 2, R, 1], half-split rotary tables times the YaRN concentration, absolute positions.
    """

    block_table: T
    block_table_swa: T
    positions: T
    positions_swa: T
    swa_start: T
    update_index: T
    update_index_swa: T
    active: T
    cos: T
    sin: T


@frozen(kw_only=True)
class DecodeCall(Generic[T]):
    """Everything that one kernel call for all layers takes.

    Attributes:
        hidden: [T, H] this rank's rows of the embedded tokens.
        weights: stacked weights by name, leading axis L or 1.
        kv: per-buffer or stacked, exactly one of them.
        control: attention control.
        scales: KV scales.
        rank: this rank in the mesh; also its expert share.
    """

    hidden: T
    weights: Mapping[str, T]
    per_buffer_kv: PerBufferKV[T] | None
    stacked_kv: StackedKV[T] | None
    control: ControlTensors[T]
    scales: KVScales
    rank: int


@frozen(kw_only=True)
class KernelContract:
    """What a kernel was built for; a call is checked against it.

    Attributes:
        layout: KV layout of this rank.
        shape: rows, block size, window and longest context.
        mesh: ranks.
        hidden_size: H as the kernel holds it (padded where it pads).
        model_dtypes: permitted dtypes of hidden states and rotary tables.
        weights: one spec per stacked weight; a leading axis of 1 is accepted in place of L.
        lnc: logical NeuronCore config.
    """

    layout: KVLayout
    shape: ControlShape
    mesh: DecodeMesh
    hidden_size: int
    model_dtypes: tuple[str, ...]
    weights: tuple[TensorSpec, ...]
    lnc: int = 1

    def __attrs_post_init__(self) -> None:
        if self.lnc != 1:
            raise UnsupportedError(f"the giga kernel is built for logical NeuronCore config 1, got lnc {self.lnc}")
        if self.shape.num_rows % self.mesh.tp_size:
            raise LayoutError(
                f"rows per replica must be a multiple of tp_size {self.mesh.tp_size}, got {self.shape.num_rows}; "
                "pad the batch"
            )
        if self.shape.block_size != self.layout.block_size:
            raise LayoutError(
                f"control has block_size {self.shape.block_size}, the layout has {self.layout.block_size}"
            )

    @property
    def shard_rows(self) -> int:
        """T: rows whose hidden state this rank keeps."""
        return self.shape.num_rows // self.mesh.tp_size


def is_packed(k: TensorLike, v: TensorLike) -> bool:
    """Whether K is packed: its rank is one more than V's.

    Raises:
        LayoutError: the ranks are neither equal nor one apart.
    """
    k_rank, v_rank = len(k.shape), len(v.shape)
    if k_rank not in (v_rank, v_rank + 1):
        raise LayoutError(f"K has rank {k_rank} and V rank {v_rank}; K must have V's rank, or one more when packed")
    return k_rank == v_rank + 1


_INDEX = ("int32", "int64", "uint32")


def check_decode_call(call: DecodeCall[T], contract: KernelContract) -> bool:
    """Refuse a call that the contract does not allow; return whether K is packed.

    Raises:
        LayoutError: a tensor is missing, unknown, or has the wrong shape or dtype; both KV forms or none; packed K that
            the layout does not have, or the reverse; a rank outside the mesh.
    """
    contract.mesh.tp_rank(call.rank)
    packed = _check_kv(call, contract.layout)
    check_tensor(
        call.hidden,
        TensorSpec(name="hidden", shape=(contract.shard_rows, contract.hidden_size), dtypes=contract.model_dtypes),
    )
    for spec in _control_specs(contract):
        check_tensor(getattr(call.control, spec.name), spec)
    _check_weights(call.weights, contract)
    return packed


def _check_kv(call: DecodeCall[T], layout: KVLayout) -> bool:
    if (call.per_buffer_kv is None) is (call.stacked_kv is None):
        which = "none" if call.stacked_kv is None else "both"
        raise LayoutError(f"exactly one KV form is needed, per-buffer or stacked; got {which}")
    dtype = (layout.dtype.dtype_name,)
    v_shape = layout.buffer_shape[1:]
    g = layout.num_buffers
    if call.per_buffer_kv is not None:
        ks, vs = call.per_buffer_kv.k, call.per_buffer_kv.v
        if len(ks) != g or len(vs) != g:
            raise LayoutError(f"per-buffer KV needs {g} K and {g} V tensors, got {len(ks)} and {len(vs)}")
        pairs = list(zip(ks, vs, strict=True))
        lead: tuple[int, ...] = ()
    else:
        stacked = cast("StackedKV[T]", call.stacked_kv)
        pairs, lead = [(stacked.k, stacked.v)], (g,)
    packed_flags = {is_packed(k, v) for k, v in pairs}
    wanted = layout.k_byte_order is KByteOrder.PAIR_PACKED
    if packed_flags != {wanted}:
        raise LayoutError(
            f"the layout's K is {layout.k_byte_order.value}, but the K tensors' rank says "
            f"{'packed' if True in packed_flags else 'not packed'}"
        )
    k_shape = layout.packed_k_shape if wanted else v_shape
    for i, (k, v) in enumerate(pairs):
        check_tensor(k, TensorSpec(name=f"K[{i}]", shape=(*lead, *k_shape), dtypes=dtype))
        check_tensor(v, TensorSpec(name=f"V[{i}]", shape=(*lead, *v_shape), dtypes=dtype))
    return wanted


def _control_specs(contract: KernelContract) -> tuple[TensorSpec, ...]:
    shape, layout = contract.shape, contract.layout
    rows = shape.num_rows
    table = {"block_table": shape.full_width, "block_table_swa": shape.sliding_width}
    return (
        *(TensorSpec(name=n, shape=(rows, w), dtypes=("int32",)) for n, w in table.items()),
        *(
            TensorSpec(name=n, shape=(rows, 1), dtypes=("float32",))
            for n in ("positions", "positions_swa", "swa_start")
        ),
        *(TensorSpec(name=n, shape=(rows, 1), dtypes=_INDEX) for n in ("update_index", "update_index_swa")),
        TensorSpec(name="active", shape=(rows, 1), dtypes=("uint8",)),
        *(
            TensorSpec(name=n, shape=(layout.head_size // 2, rows, 1), dtypes=contract.model_dtypes)
            for n in ("cos", "sin")
        ),
    )


def _check_weights(weights: Mapping[str, T], contract: KernelContract) -> None:
    wanted = {spec.name: spec for spec in contract.weights}
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if missing or unknown:
        raise LayoutError(f"stacked weights differ from the contract: missing {missing}, unknown {unknown}")
    for name, spec in wanted.items():
        tensor = weights[name]
        shared = tuple(tensor.shape[:1]) == (1,)
        check_tensor(
            tensor,
            TensorSpec(name=name, shape=(1, *spec.shape[1:]) if shared else spec.shape, dtypes=spec.dtypes),
        )
