"""One decode call, and every refusal."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import ControlShape
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import (
    ControlTensors,
    DecodeCall,
    KernelContract,
    KVScales,
    PerBufferKV,
    StackedKV,
    TensorSpec,
    check_decode_call,
    check_tensor,
    dtype_name,
    is_packed,
)
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype

from .layout_builders import SpecTensor, make_layout

Call = DecodeCall[SpecTensor]

# 5 layers in 3 buffers, 7 blocks, 2 heads, 32 tokens, 10 dims; 6 rows over TP2; H 48; F 11, S 8.
LAYOUT = make_layout(num_kv_heads=2, block_size=32, head_size=10, dtype=KVDtype.FP8_E4M3FN)
PACKED = attrs.evolve(LAYOUT, k_byte_order=KByteOrder.PAIR_PACKED)
WEIGHTS = (
    TensorSpec(name="qkv", shape=(5, 48, 70), dtypes=("bfloat16",)),
    TensorSpec(name="sinks", shape=(5, 14, 1), dtypes=("float32", "bfloat16")),
)
CONTRACT = KernelContract(
    layout=LAYOUT,
    shape=ControlShape(num_rows=6, block_size=32, sliding_window=100, max_model_len=340),
    mesh=DecodeMesh(tp_size=2, dp_size=2, ep_size=4),
    hidden_size=48,
    model_dtypes=("bfloat16", "float32"),
    weights=WEIGHTS,
)
K_SHAPE, PACKED_K_SHAPE = (7, 2, 32, 10), (7, 2, 16, 10, 2)


def fp8(*shape: int) -> SpecTensor:
    return SpecTensor(shape, "float8_e4m3fn")


CONTROL = ControlTensors(
    block_table=SpecTensor((6, 11), "int32"),
    block_table_swa=SpecTensor((6, 8), "int32"),
    positions=SpecTensor((6, 1), "float32"),
    positions_swa=SpecTensor((6, 1), "float32"),
    swa_start=SpecTensor((6, 1), "float32"),
    update_index=SpecTensor((6, 1), "int64"),
    update_index_swa=SpecTensor((6, 1), "uint32"),
    active=SpecTensor((6, 1), "uint8"),
    cos=SpecTensor((5, 6, 1), "bfloat16"),
    sin=SpecTensor((5, 6, 1), "float32"),
)
CALL: Call = DecodeCall(
    hidden=SpecTensor((3, 48), "bfloat16"),
    weights={"qkv": SpecTensor((5, 48, 70), "bfloat16"), "sinks": SpecTensor((5, 14, 1), "float32")},
    per_buffer_kv=PerBufferKV(k=(fp8(*K_SHAPE),) * 3, v=(fp8(*K_SHAPE),) * 3),
    stacked_kv=None,
    control=CONTROL,
    scales=KVScales(),
    rank=3,
)


def with_kv(per_buffer: PerBufferKV[SpecTensor] | None = None, stacked: StackedKV[SpecTensor] | None = None) -> Call:
    return attrs.evolve(CALL, per_buffer_kv=per_buffer, stacked_kv=stacked)


PACKED_CALL = with_kv(PerBufferKV(k=(fp8(*PACKED_K_SHAPE),) * 3, v=(fp8(*K_SHAPE),) * 3))
STACKED_CALL = with_kv(stacked=StackedKV(k=fp8(3, *K_SHAPE), v=fp8(3, *K_SHAPE)))
PACKED_CONTRACT = attrs.evolve(CONTRACT, layout=PACKED)


def test_a_right_call_passes_and_tells_that_k_is_not_packed() -> None:
    """Per-buffer and stacked alike."""
    assert check_decode_call(CALL, CONTRACT) is False
    assert check_decode_call(STACKED_CALL, CONTRACT) is False


def test_packed_is_inferred_from_the_rank_of_k() -> None:
    """K has one axis more than V; V is never packed."""
    assert check_decode_call(PACKED_CALL, PACKED_CONTRACT) is True
    stacked = with_kv(stacked=StackedKV(k=fp8(3, *PACKED_K_SHAPE), v=fp8(3, *K_SHAPE)))
    assert check_decode_call(stacked, PACKED_CONTRACT) is True
    assert is_packed(fp8(1, 2, 3, 4, 2), fp8(1, 2, 6, 4)) is True
    assert is_packed(fp8(1, 2, 6, 4), fp8(1, 2, 6, 4)) is False


@pytest.mark.parametrize(("k_rank", "v_rank"), [(4, 5), (6, 4), (3, 4)])
def test_other_ranks_of_k_and_v_are_refused(k_rank: int, v_rank: int) -> None:
    """Neither equal nor one apart in the right direction."""
    with pytest.raises(LayoutError, match=f"K has rank {k_rank} and V rank {v_rank}"):
        is_packed(fp8(*range(1, k_rank + 1)), fp8(*range(1, v_rank + 1)))


def test_a_rank_keeps_its_share_of_the_rows() -> None:
    """6 rows over TP2."""
    assert CONTRACT.shard_rows == 3


@pytest.mark.parametrize(
    ("call", "which"),
    [(with_kv(), "none"), (with_kv(CALL.per_buffer_kv, STACKED_CALL.stacked_kv), "both")],
)
def test_exactly_one_kv_form_is_needed(call: Call, which: str) -> None:
    """Neither, or both."""
    with pytest.raises(LayoutError, match=f"exactly one KV form is needed, per-buffer or stacked; got {which}"):
        check_decode_call(call, CONTRACT)


def test_packed_tensors_for_a_token_major_layout_are_refused_and_the_reverse() -> None:
    """Equal bytes, other content: it would run and be wrong."""
    with pytest.raises(LayoutError, match="layout's K is token_major, but the K tensors' rank says packed"):
        check_decode_call(PACKED_CALL, CONTRACT)
    with pytest.raises(LayoutError, match="layout's K is pair_packed, but the K tensors' rank says not packed"):
        check_decode_call(CALL, PACKED_CONTRACT)


def test_a_mixture_of_packed_and_plain_buffers_is_refused() -> None:
    """All buffers are of one kind."""
    mixed = with_kv(PerBufferKV(k=(fp8(*PACKED_K_SHAPE), fp8(*K_SHAPE), fp8(*K_SHAPE)), v=(fp8(*K_SHAPE),) * 3))
    for contract in (CONTRACT, PACKED_CONTRACT):
        with pytest.raises(LayoutError, match="the K tensors' rank says packed"):
            check_decode_call(mixed, contract)


@pytest.mark.parametrize(("k", "v"), [(2, 3), (3, 4), (5, 5)])
def test_one_k_and_one_v_per_buffer(k: int, v: int) -> None:
    """3 buffers for 5 layers, not one per layer."""
    call = with_kv(PerBufferKV(k=(fp8(*K_SHAPE),) * k, v=(fp8(*K_SHAPE),) * v))
    with pytest.raises(LayoutError, match=f"needs 3 K and 3 V tensors, got {k} and {v}"):
        check_decode_call(call, CONTRACT)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (
            PerBufferKV(k=(fp8(*K_SHAPE), fp8(8, 2, 32, 10), fp8(*K_SHAPE)), v=(fp8(*K_SHAPE),) * 3),
            r"K\[1\] must have shape \[7, 2, 32, 10\], got \[8, 2, 32, 10\]",
        ),
        (
            PerBufferKV(k=(fp8(*K_SHAPE),) * 3, v=(fp8(*K_SHAPE), fp8(*K_SHAPE), fp8(7, 32, 2, 10))),
            r"V\[2\] must have shape \[7, 2, 32, 10\], got \[7, 32, 2, 10\]",
        ),
        (
            PerBufferKV(k=(SpecTensor(K_SHAPE, "bfloat16"),) * 3, v=(fp8(*K_SHAPE),) * 3),
            r"K\[0\] must be float8_e4m3fn, got bfloat16",
        ),
        (
            PerBufferKV(k=(fp8(*K_SHAPE),) * 3, v=(SpecTensor(K_SHAPE, "float8_e4m3"),) * 3),
            r"V\[0\] must be float8_e4m3fn, got float8_e4m3$",
        ),
    ],
)
def test_a_wrong_buffer_is_refused_by_name(kv: PerBufferKV[SpecTensor], message: str) -> None:
    """Shape and dtype, dialect included."""
    with pytest.raises(LayoutError, match=message):
        check_decode_call(with_kv(kv), CONTRACT)


def test_a_stack_of_layers_in_place_of_buffers_is_refused() -> None:
    """The leading axis counts buffers."""
    call = with_kv(stacked=StackedKV(k=fp8(5, *K_SHAPE), v=fp8(5, *K_SHAPE)))
    with pytest.raises(LayoutError, match=r"K\[0\] must have shape \[3, 7, 2, 32, 10\], got \[5, 7, 2, 32, 10\]"):
        check_decode_call(call, CONTRACT)


def test_hidden_is_this_ranks_shard() -> None:
    """All 6 rows, the wrong width, an index dtype."""
    for tensor, message in (
        (SpecTensor((6, 48), "bfloat16"), r"hidden must have shape \[3, 48\], got \[6, 48\]"),
        (SpecTensor((3, 64), "bfloat16"), r"hidden must have shape \[3, 48\], got \[3, 64\]"),
        (SpecTensor((3, 48), "int32"), "hidden must be bfloat16 or float32, got int32"),
    ):
        with pytest.raises(LayoutError, match=message):
            check_decode_call(attrs.evolve(CALL, hidden=tensor), CONTRACT)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("block_table", "int32"),
        ("block_table_swa", "int32"),
        ("positions", "float32"),
        ("positions_swa", "float32"),
        ("swa_start", "float32"),
        ("update_index", "int32 or int64 or uint32"),
        ("update_index_swa", "int32 or int64 or uint32"),
        ("active", "uint8"),
        ("cos", "bfloat16 or float32"),
        ("sin", "bfloat16 or float32"),
    ],
)
def test_each_control_tensor_is_checked_by_name(name: str, dtype: str) -> None:
    """One row too many, and a dtype that it never has."""
    right: SpecTensor = getattr(CONTROL, name)
    longer = SpecTensor((*right.shape[:-2], right.shape[-2] + 1, right.shape[-1]), right.dtype)
    for tensor, message in (
        (longer, rf"^{name} must have shape \[{', '.join(map(str, right.shape))}\]"),
        (SpecTensor(right.shape, "complex64"), rf"^{name} must be {dtype}, got complex64"),
    ):
        control: Any = attrs.evolve(CONTROL, **{name: tensor})
        with pytest.raises(LayoutError, match=message):
            check_decode_call(attrs.evolve(CALL, control=control), CONTRACT)


def test_the_two_tables_may_not_be_exchanged() -> None:
    """11 full columns, 8 trimmed ones."""
    swapped = attrs.evolve(CONTROL, block_table=CONTROL.block_table_swa, block_table_swa=CONTROL.block_table)
    with pytest.raises(LayoutError, match=r"block_table must have shape \[6, 11\], got \[6, 8\]"):
        check_decode_call(attrs.evolve(CALL, control=swapped), CONTRACT)


def test_a_missing_and_an_unknown_weight_are_named_together() -> None:
    """A renamed weight shows both names."""
    weights = {"wqkv": CALL.weights["qkv"], "sinks": CALL.weights["sinks"]}
    with pytest.raises(LayoutError, match=r"missing \['qkv'\], unknown \['wqkv'\]"):
        check_decode_call(attrs.evolve(CALL, weights=weights), CONTRACT)


def test_a_weight_may_be_shared_by_all_layers() -> None:
    """A leading axis of 1 in place of L."""
    weights = dict(CALL.weights) | {"qkv": SpecTensor((1, 48, 70), "bfloat16")}
    assert check_decode_call(attrs.evolve(CALL, weights=weights), CONTRACT) is False


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (SpecTensor((3, 48, 70), "bfloat16"), r"qkv must have shape \[5, 48, 70\], got \[3, 48, 70\]"),
        (SpecTensor((5, 70, 48), "bfloat16"), r"qkv must have shape \[5, 48, 70\], got \[5, 70, 48\]"),
        (SpecTensor((1, 70, 48), "bfloat16"), r"qkv must have shape \[1, 48, 70\], got \[1, 70, 48\]"),
        (SpecTensor((), "bfloat16"), r"qkv must have shape \[5, 48, 70\], got \[\]"),
        (SpecTensor((5, 48, 70), "float32"), "qkv must be bfloat16, got float32"),
    ],
)
def test_a_wrong_weight_is_refused_by_name(tensor: SpecTensor, message: str) -> None:
    """One per buffer, transposed, empty, another dtype."""
    with pytest.raises(LayoutError, match=message):
        check_decode_call(attrs.evolve(CALL, weights=dict(CALL.weights) | {"qkv": tensor}), CONTRACT)


@pytest.mark.parametrize("rank", [4, -1])
def test_a_rank_outside_the_mesh_is_refused(rank: int) -> None:
    """Four ranks: 0..3."""
    with pytest.raises(LayoutError, match=rf"rank {rank} is outside 0\.\.3"):
        check_decode_call(attrs.evolve(CALL, rank=rank), CONTRACT)


def test_a_kernel_runs_at_lnc_1_only() -> None:
    """Logical NeuronCore config 2 is the prefill engine's."""
    with pytest.raises(UnsupportedError, match="config 1, got lnc 2"):
        attrs.evolve(CONTRACT, lnc=2)


def test_a_contract_whose_parts_disagree_is_refused() -> None:
    """Rows that do not divide over TP, and two block sizes."""
    with pytest.raises(LayoutError, match="multiple of tp_size 2, got 5; pad the batch"):
        attrs.evolve(CONTRACT, shape=attrs.evolve(CONTRACT.shape, num_rows=5))
    with pytest.raises(LayoutError, match="control has block_size 64, the layout has 32"):
        attrs.evolve(CONTRACT, shape=attrs.evolve(CONTRACT.shape, block_size=64))


def test_a_missing_scale_is_exactly_one() -> None:
    """Not a skipped multiplication, and not zero."""
    assert (KVScales().k, KVScales().v) == (1.0, 1.0)


@pytest.mark.parametrize("scale", [0.0, -2.0, float("nan"), float("inf")])
def test_a_scale_is_positive_and_finite(scale: float) -> None:
    """Each half by name."""
    with pytest.raises(LayoutError, match="k_scale must be a positive finite number"):
        KVScales(k=scale)
    with pytest.raises(LayoutError, match="v_scale must be a positive finite number"):
        KVScales(v=scale)


class _NamedDtype:
    name = "bfloat16"


@pytest.mark.parametrize(("dtype", "name"), [(_NamedDtype(), "bfloat16"), ("torch.bfloat16", "bfloat16"), ("i8", "i8")])
def test_a_dtype_has_one_name_in_every_library(dtype: object, name: str) -> None:
    """By its `name`, or by the last part of how it prints."""
    assert dtype_name(SpecTensor((1,), dtype)) == name


def test_check_tensor_names_tensor_got_and_wanted() -> None:
    """Shape first, then dtype."""
    spec = TensorSpec(name="x", shape=(2, 3), dtypes=("int8", "uint8"))
    check_tensor(SpecTensor((2, 3), "uint8"), spec)
    with pytest.raises(LayoutError, match=r"^x must have shape \[2, 3\], got \[3, 2\]$"):
        check_tensor(SpecTensor((3, 2), "int64"), spec)
    with pytest.raises(LayoutError, match=r"^x must be int8 or uint8, got int64$"):
        check_tensor(SpecTensor((2, 3), "int64"), spec)
