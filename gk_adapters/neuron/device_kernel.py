"""The launched giga kernel behind an engine that knows nothing of devices: weights stay there, small tensors travel.

Caches that are on the device are the kernel's own operands. Caches elsewhere, such as the host memory that a transport
of this package fills, are mirrored: blocks that a step reads go to the device before it, the blocks that it wrote come
back after it. That is right and slow; it is for trying the kernel under a whole engine.

Nothing here has run on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, fields
from numpy.typing import NDArray

from gk_adapters.neuron.holder import tensor_over
from gk_adapters.neuron.launch import NeuronDecodeKernel
from gk_adapters.torch_decode_plan import plan_step
from gk_adapters.torch_giga import engine_layout
from gk_core.block_table import NULL_BLOCK_ID, PAD_SLOT_ID
from gk_core.errors import LayoutError
from gk_core.kernel_contract import ControlTensors, DecodeCall, PerBufferKV
from gk_core.ports import DecodeKernel

__all__ = ["CacheMirror", "DeviceDecodeKernel"]


class CacheMirror:
    """An engine's caches on a device, block by block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mirror: PerBufferKV[torch.Tensor] | None = None

    def bring(self, kv: PerBufferKV[torch.Tensor], blocks: torch.Tensor) -> PerBufferKV[torch.Tensor]:
        """Caches on the device with these blocks [n] as `kv` has them; what other blocks hold is old or zero."""
        if self._mirror is None:
            self._mirror = PerBufferKV(k=self._like(kv.k), v=self._like(kv.v))
        _copy(kv, self._mirror, blocks)
        return self._mirror

    def take_back(self, kv: PerBufferKV[torch.Tensor], blocks: torch.Tensor) -> None:
        """Put these blocks [n] of the device's caches into `kv`."""
        assert self._mirror is not None
        _copy(self._mirror, kv, blocks)

    def _like(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros_like(t, device=self._device) for t in tensors)


def _copy(source: PerBufferKV[torch.Tensor], target: PerBufferKV[torch.Tensor], blocks: torch.Tensor) -> None:
    for a, b in zip((*source.k, *source.v), (*target.k, *target.v), strict=True):
        taken = a.view(torch.uint8).index_select(0, blocks.to(a.device))
        b.view(torch.uint8).index_copy_(0, blocks.to(b.device), taken.to(b.device))


class DeviceDecodeKernel(DecodeKernel[torch.Tensor]):
    """One rank's decode kernel on a device.

    Args:
        kernel: what is launched; its contract's weights are the stacks.
        stacks: this rank's, in the NKI weight layout; each goes to the device once.
        device: torch's name of it.
        mirror: mirror the caches; None: if the first call has them elsewhere.
    """

    label = "nki on a device"

    def __init__(
        self,
        *,
        kernel: NeuronDecodeKernel,
        stacks: Mapping[str, NDArray[Any]],
        device: str,
        mirror: bool | None = None,
    ) -> None:
        self.contract = kernel.contract
        self.kernel = kernel
        self._device = torch.device(device)
        self._stacks = {name: tensor_over(stack).to(self._device) for name, stack in stacks.items()}
        self._mirror = mirror
        self._caches = CacheMirror(self._device)

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        """Run all layers for one token per row; rows that are not active come back as zeros, on the call's device.

        Raises:
            LayoutError: the call is not what the contract allows, names a scratch block, or has its caches stacked;
                nothing was launched.
        """
        layout = engine_layout(self.contract.layout, self.kernel.build)
        kv, home = call.per_buffer_kv, call.hidden.device
        if kv is None:
            raise LayoutError("on a device each buffer is an argument of its own; pass per-buffer KV")
        self.kernel.check(evolve(call, weights=self._stacks))
        result = torch.zeros_like(call.hidden)
        if plan_step(call.control, layout, call.hidden.dtype) is None:
            return result
        if self._mirror is None:
            self._mirror = kv.k[0].device != self._device
        read, written = _blocks(call.control, layout.block_size)
        moved = evolve(
            call, hidden=call.hidden.to(self._device), weights=self._stacks, control=self._moved(call.control),
            per_buffer_kv=self._caches.bring(kv, read) if self._mirror else kv,
        )  # fmt: skip
        hidden = self.kernel.step(call=moved).to(home)
        if self._mirror:
            self._caches.take_back(kv, written)
        active = call.control.active[:, 0] != 0
        result[active] = hidden[active]
        return result

    def _moved(self, control: ControlTensors[torch.Tensor]) -> ControlTensors[torch.Tensor]:
        return ControlTensors(**{f.name: getattr(control, f.name).to(self._device) for f in fields(type(control))})


def _blocks(control: ControlTensors[torch.Tensor], block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks that a step reads, those that it writes among them, and those that it writes."""
    slots = torch.cat([control.update_index[:, 0], control.update_index_swa[:, 0]]).long()
    written = torch.unique(slots[slots != PAD_SLOT_ID] // block_size)
    active = control.active[:, 0] != 0
    tables = torch.cat([control.block_table[active].flatten(), control.block_table_swa[active].flatten()]).long()
    return torch.unique(torch.cat([tables[tables > NULL_BLOCK_ID], written])), written
