"""DecodeKernel over the giga kernel: on a Neuron device where there is one, in our simulator elsewhere.

Dims: R rows of the replica, T rows of the rank, H hidden, Hp padded hidden.

Calls are the contract's own, in torch tensors. In the simulator arrays share the tensors' memory, so the kernel writes
the caller's cache. Hidden states go in and come out in the model's order; the shuffle and the padding of the NKI weight
layout stay inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.neuron.environment import examine_machine
from gk_adapters.neuron.where import Site, Where, choose_where
from gk_adapters.torch_decode_plan import plan_step
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_giga import (
    GigaArguments,
    GigaBuild,
    checked_contract,
    engine_layout,
    from_stored_order,
    giga_arguments,
    require_kernel_limits,
    scratch_blocks,
)
from gk_adapters.torch_model import TorchModel
from gk_adapters.weight_stacks import build_stacks
from gk_core.decode_step import ControlShape
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KernelContract, check_decode_call
from gk_core.model_geometry import ModelGeometry, require_gk_geometry
from gk_core.ports import DecodeKernel
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import WeightLayout

__all__ = ["NkiDecodeKernel", "NkiKernelFactory", "giga_kernel", "nki_kernel_from_checkpoint", "simulate_mesh"]

Array = NDArray[Any]


def giga_kernel(*, simulated: bool = False) -> Any:
    """The kernel, loaded beside the real nki where that is installed, else inside the simulator.

    Args:
        simulated: inside the simulator even so.

    Raises:
        UnsupportedError: simulated, but this process has loaded the kernel beside the real nki before.
    """
    from gk_kernels.simulator import language, simulated_nki

    with simulated_nki(force=simulated):
        from gk_kernels.giga_decode import entry
    if simulated and vars(entry)["nl"] is not language:
        raise UnsupportedError("this process has loaded the giga kernel for a device; simulate it in another process")
    return entry.giga_decode


class NkiDecodeKernel(DecodeKernel[torch.Tensor]):
    """One rank's decode kernel over the giga kernel, in the simulator.

    Args:
        contract: what calls must look like; its layout counts the build's scratch blocks. Its weights are checked only
            where they are the kernel's own.
        geometry: of the model.
        stacks: this rank's stacks in the NKI weight layout.
        build: target, scratch blocks and options. Without scratch blocks, rows that write nothing put back the bytes
            that the null block has.

    Raises:
        UnsupportedError: layers that do not alternate, more than one rank, more than 128 rows, a block size that is no
            power of two.
        LayoutError: too few scratch blocks.
    """

    label = "nki on the simulator"

    def __init__(
        self,
        *,
        contract: KernelContract,
        geometry: ModelGeometry,
        stacks: Mapping[str, Array],
        build: GigaBuild | None = None,
    ) -> None:
        require_gk_geometry(geometry)
        if contract.mesh.world_size != 1:
            raise UnsupportedError(
                f"this kernel runs one rank, got a mesh of {contract.mesh.world_size}; use tp_size 1, dp_size 1"
            )
        self.build = build or GigaBuild()
        require_kernel_limits(contract, self.build)
        self.contract = contract
        self.geometry = geometry
        self._checked_contract = checked_contract(contract)
        self._engine_layout = engine_layout(contract.layout, self.build)
        self._stacks = dict(stacks)
        self._kernel = giga_kernel(simulated=True)

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """Run all layers for one token per row; rows that are not active come back as zeros.

        Raises:
            LayoutError: the call is not what the contract allows, or names a scratch block; nothing was written.
        """
        check_decode_call(call, self._checked_contract)
        result = torch.zeros(call.hidden.shape, dtype=call.hidden.dtype)
        if plan_step(call.control, self._engine_layout, call.hidden.dtype) is None:
            return result
        arguments = giga_arguments(call, self._stacks, self.contract, self.geometry, self.build)
        hidden = _simulate(self._kernel, [arguments], target=self.build.target)[0]
        active = call.control.active.numpy()[:, 0] != 0
        model_order = from_stored_order(hidden, self.geometry.hidden_size)
        array_of(result)[active] = model_order[active]
        return result


def simulate_mesh(
    calls: Sequence[DecodeCall[torch.Tensor]],
    stacks: Sequence[Mapping[str, Array]],
    contract: KernelContract,
    geometry: ModelGeometry,
    *,
    build: GigaBuild | None = None,
) -> list[Array]:
    """One step of all ranks of a mesh in our simulator: each rank's hidden shard [T, H].

    Args:
        calls, stacks: one per rank, in the order of ranks; every rank's cache is its own.
        contract, build: of every rank, see `NkiDecodeKernel`.

    Raises:
        LayoutError: not one call and one set of stacks per rank, or a call that the contract does not allow.
        UnsupportedError: see `NkiDecodeKernel`.
    """
    build = build or GigaBuild()
    require_kernel_limits(contract, build)
    world = contract.mesh.world_size
    if len(calls) != world or len(stacks) != world or [c.rank for c in calls] != list(range(world)):
        raise LayoutError(f"a mesh of {world} ranks takes one call and one set of stacks per rank, in order")
    for call in calls:
        check_decode_call(call, checked_contract(contract))
        plan_step(call.control, engine_layout(contract.layout, build), call.hidden.dtype)
    arguments = [giga_arguments(c, s, contract, geometry, build) for c, s in zip(calls, stacks, strict=True)]
    hidden = _simulate(giga_kernel(simulated=True), arguments, target=build.target)
    return [from_stored_order(h, geometry.hidden_size) for h in hidden]


def _simulate(kernel: Any, ranks: Sequence[GigaArguments], *, target: str) -> list[Array]:
    """Hidden states of every rank, in the stored order."""
    from gk_kernels.simulator import simulate

    result = simulate(kernel, ranks=len(ranks), rank_args=[r.values for r in ranks], target=target)
    return [np.asarray(output) for output in result.outputs]


@frozen(kw_only=True)
class NkiKernelFactory:
    """Makes kernels whose stacks are built from a checkpoint directory, in the NKI layout.

    The torch model decides dtype and contract; its own stacks are not read.

    Attributes:
        checkpoint: directory.
        where: device or simulator.
        target: "trn2" or "trn3"; None: what the device's machine says, in the simulator trn3.
        mx_terms: see `GigaBuild`.
        site: the machine that decides where.
        device: torch's name of the device.
    """

    checkpoint: Path
    where: Where = Where.AUTO
    target: str | None = None
    mx_terms: int = 2
    site: Site = field(factory=Site)
    device: str = "neuron:0"

    @property
    def label(self) -> str:
        """What runs the kernel, for people."""
        return f"nki on {'a device' if choose_where(self.where, self.site) is Where.DEVICE else 'the simulator'}"

    def scratch_blocks(self, shape: ControlShape) -> int:
        """Blocks that the kernel wants behind the engine's in every half of every buffer."""
        return scratch_blocks(shape.num_rows, shape.block_size)

    def __call__(
        self, contract: KernelContract, model: TorchModel, scratch_blocks: int = 0
    ) -> DecodeKernel[torch.Tensor]:
        """A kernel for calls of this contract.

        Args:
            contract: its layout counts the scratch blocks.
            scratch_blocks: see `GigaBuild`.

        Raises:
            MissingDependencyError, UnsupportedError: see `choose_where`, `NkiDecodeKernel` and `DeviceDecodeKernel`.
        """
        where = choose_where(self.where, self.site)
        said = examine_machine(self.site.environ, root=self.site.root).target if where is Where.DEVICE else None
        build = GigaBuild(
            target=self.target or said or "trn3", scratch_blocks=scratch_blocks, mx_terms=self.mx_terms
        )  # fmt: skip
        geometry = model.config.geometry
        source = HFCheckpoint(self.checkpoint)
        name = str(model.dtype).rpartition(".")[2]
        specs = build_stacked_weight_specs(
            geometry, model.mesh, model.rank, WeightLayout.NKI, source.config.expert_format, name
        )
        if where is Where.SIMULATOR:
            return NkiDecodeKernel(
                contract=contract, geometry=geometry, stacks=build_stacks(source, specs), build=build
            )  # fmt: skip
        from gk_adapters.neuron.device_kernel import DeviceDecodeKernel
        from gk_adapters.neuron.launch import NeuronDecodeKernel, load_wrap_nki

        launched = NeuronDecodeKernel(
            contract=evolve(contract, weights=tuple(s.tensor_spec for s in specs)), geometry=geometry, build=build,
            wrap_nki=load_wrap_nki(), environ=self.site.environ,
        )  # fmt: skip
        return DeviceDecodeKernel(kernel=launched, stacks=build_stacks(source, specs), device=self.device)


def nki_kernel_from_checkpoint(
    checkpoint: Path, *, target: str | None = None, where: Where = Where.AUTO
) -> Callable[[KernelContract, TorchModel], DecodeKernel[torch.Tensor]]:
    """`NkiKernelFactory` in short."""
    return NkiKernelFactory(checkpoint=checkpoint, target=target, where=where)
