"""Stand-ins for what only a Neuron machine has. Their refusals are those of the documents that they cite."""

from __future__ import annotations

import torch

from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import ControlShape
from gk_core.kernel_contract import DecodeCall, KernelContract, TensorSpec, check_decode_call
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import KVDtype, LayerKVSpec, honest_specs
from gk_core.model_geometry import ModelGeometry
from gk_core.ports import DecodeKernel
from tests.builders import make_small_geometry

__all__ = ["MetaKernel", "control_of", "small_contract", "small_stacks"]

WEIGHTS = {"W_qkv": (6, 10), "sink": (3,), "expert_down_weights": (5, 7, 6)}
"""Name -> shape of one layer: few, and all different."""


def small_contract(
    *, num_layers: int = 4, k_byte_order: KByteOrder = KByteOrder.PAIR_PACKED, dtype: KVDtype = KVDtype.FP8_E4M3FN
) -> tuple[KernelContract, tuple[LayerKVSpec, ...]]:
    """A contract of few bytes: blocks of 16 tokens, head size 2, one KV head, 9 blocks, 3 rows."""
    geometry: ModelGeometry = make_small_geometry(num_layers=num_layers)
    specs = honest_specs(geometry, tp_size=1, block_size=16, dtype=dtype)
    layout: KVLayout = layout_for(specs, num_blocks=9, k_byte_order=k_byte_order)
    shape = ControlShape(num_rows=3, block_size=16, sliding_window=geometry.sliding_window, max_model_len=64)
    contract = KernelContract(
        layout=layout,
        shape=shape,
        mesh=DecodeMesh(tp_size=1),
        hidden_size=6,
        model_dtypes=("float32",),
        weights=tuple(TensorSpec(name=n, shape=(num_layers, *s), dtypes=("float32",)) for n, s in WEIGHTS.items()),
    )
    return contract, specs


def small_stacks(num_layers: int = 4) -> dict[str, torch.Tensor]:
    """Stacks of `small_contract`."""
    return {
        n: torch.arange(num_layers * 300.0)[: num_layers * _size(s)].view(num_layers, *s) for n, s in WEIGHTS.items()
    }


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def control_of(contract: KernelContract, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Control tensors of an idle step."""
    shape, half = contract.shape, contract.layout.head_size // 2
    rows = shape.num_rows
    return {
        "block_table": torch.zeros(rows, shape.full_width, dtype=torch.int32, device=device),
        "block_table_swa": torch.zeros(rows, shape.sliding_width, dtype=torch.int32, device=device),
        **{n: torch.zeros(rows, 1, device=device) for n in ("positions", "positions_swa", "swa_start")},
        **{
            n: torch.full((rows, 1), -1, dtype=torch.int32, device=device) for n in ("update_index", "update_index_swa")
        },
        "active": torch.zeros(rows, 1, dtype=torch.uint8, device=device),
        **{n: torch.ones(half, rows, 1, device=device) for n in ("cos", "sin")},
    }


class MetaKernel(DecodeKernel[torch.Tensor]):
    """Checks a call against the contract and returns a result of its shape without touching what it was given."""

    def __init__(self, contract: KernelContract) -> None:
        self.contract = contract
        self.calls: list[DecodeCall[torch.Tensor]] = []

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """Nothing but the checks."""
        check_decode_call(call, self.contract)
        self.calls.append(call)
        return torch.empty(call.hidden.shape, dtype=call.hidden.dtype, device=call.hidden.device)
