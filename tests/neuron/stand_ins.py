"""Stand-ins for what only a Neuron machine has. Their refusals are those of the documents that they cite."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from gk_adapters.neuron.holder import tensor_over
from gk_adapters.torch_dtypes import array_of
from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import ControlShape
from gk_core.kernel_contract import DecodeCall, KernelContract, TensorSpec, check_decode_call
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import KVDtype, LayerKVSpec, honest_specs
from gk_core.model_geometry import ModelGeometry
from gk_core.ports import DecodeKernel
from gk_kernels.simulator import simulate
from tests.builders import make_small_geometry

__all__ = ["MetaKernel", "WrapNki", "control_of", "small_contract", "small_stacks"]

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


class WrapNki:
    """torch_neuronx's `wrap_nki` for an NKI kernel, run in gk's simulator, with the refusals of the documents:

    - the bracket takes one number, and a kernel's degree must match the graph's ("Using Logical NeuronCores (LNC) with
      NKI");
    - arguments are tensors, which become operands one by one, or constants, which are hashed; NKI takes no lists
      (`torch_neuronx/nki_hop.py`, "How to work with NKI kernels from torch-neuronx");
    - an operand that the kernel writes must be among what it returns, or the graph does not learn of the write (the
      same: aliases of operands and outputs).
    """

    def __init__(self, kernel: Any, lnc: int = 1, graph_lnc: int = 1) -> None:
        self.kernel, self.lnc, self.graph_lnc = kernel, lnc, graph_lnc

    def __getitem__(self, grid: int) -> WrapNki:
        if type(grid) is not int:
            raise TypeError(f"the launch bracket takes one number, got {grid!r}")
        return WrapNki(self.kernel, grid, self.graph_lnc)

    def __call__(self, *args: Any) -> Any:
        """Run once."""
        if self.lnc != self.graph_lnc:
            raise RuntimeError(f"kernel of degree {self.lnc} in a graph of degree {self.graph_lnc}")
        names = list(inspect.signature(self.kernel).parameters)
        if len(args) != len(names):
            raise TypeError(f"{len(names)} parameters, {len(args)} arguments")
        operands = {n: a for n, a in zip(names, args, strict=True) if isinstance(a, torch.Tensor)}
        for name, value in zip(names, args, strict=True):
            if isinstance(value, list):
                raise TypeError(f"{name}: NKI takes no list arguments")
            if name not in operands:
                _refuse_tensors(name, value)
                hash((name, value))
        arrays = [array_of(a.detach()) if isinstance(a, torch.Tensor) else a for a in args]
        before = {n: array_of(t).tobytes() for n, t in operands.items()}
        outputs = simulate(self.kernel, ranks=1, rank_args=[tuple(arrays)], lnc=self.lnc).outputs[0]
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        returned = {np.asarray(o).tobytes() for o in outputs}
        for name, tensor in operands.items():
            now = array_of(tensor).tobytes()
            if now != before[name] and now not in returned:
                raise RuntimeError(f"operand {name} is written but is no output: the graph would drop the write")
        return tuple(tensor_over(np.array(o)) for o in outputs)


def _refuse_tensors(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: a tensor inside a tuple is a constant, not an operand")
    if isinstance(value, tuple):
        for part in value:
            _refuse_tensors(name, part)
