"""The decode module that torch-neuronx compiles: stacked weights, KV buffers, one kernel call.

Dims: g group buffers, B blocks, h KV heads, n tokens per block, d head size, T rows of the rank, R rows of the replica.

Every tensor that the graph reads is an attribute of its own: weights are buffers of the module under their stack's
name, caches are `K_cache_buf_i` and `V_cache_buf_i`. Code that moves a model to another device walks parameters,
buffers and attributes that are tensors, and does not look into lists; a cache held in a list would be left behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from gk_adapters.neuron.aliases import same_memory
from gk_adapters.torch_dtypes import kv_torch_dtype
from gk_core.errors import LayoutError
from gk_core.kernel_contract import (
    ControlTensors,
    DecodeCall,
    KernelContract,
    KVScales,
    PerBufferKV,
    StackedKV,
    TensorSpec,
    check_tensor,
    dtype_name,
    is_packed,
)
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import LayerKVSpec
from gk_core.model_geometry import layers_of_buffer
from gk_core.ports import DecodeKernel

__all__ = ["GigaModelHolder", "NeuronLayerSpec", "layer_name", "tensor_over"]


def layer_name(layer_id: int) -> str:
    """Name under which a runner knows a layer's cache."""
    return f"layers.{layer_id}.self_attn"


@frozen(kw_only=True)
class NeuronLayerSpec:
    """What a runner asks of one layer's cache.

    Attributes:
        name: see `layer_name`.
        num_kv_heads: on this rank.
        head_size: elements per head.
        dtype: as torch stores it.
        sliding_window_size: tokens, None for full attention.
        chunk_size: always None; no chunked attention here.
    """

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    sliding_window_size: int | None
    chunk_size: int | None = None


def tensor_over(array: NDArray[Any]) -> torch.Tensor:
    """A tensor over an array's own memory, bfloat16 and FP8 included."""
    if array.dtype.name in ("bfloat16", "float8_e4m3fn"):
        plain = np.int16 if array.dtype.itemsize == 2 else np.uint8
        return torch.from_numpy(array.view(plain)).view(getattr(torch, array.dtype.name))
    return torch.from_numpy(array)


class GigaModelHolder(torch.nn.Module):
    """One rank's weights and caches, and the call over them.

    Args:
        contract: what a call must look like; names and shapes of weights and caches come from it.
        specs: honest KV specs, one per layer.
        kernel: what runs the call.
        scales: KV scales.
        rank: in the contract's mesh.
        use_stacked_kv_cache: one K and one V tensor for all buffers, instead of one of each per buffer.
    """

    def __init__(
        self,
        *,
        contract: KernelContract,
        specs: Sequence[LayerKVSpec],
        kernel: DecodeKernel[torch.Tensor],
        scales: KVScales | None = None,
        rank: int = 0,
        use_stacked_kv_cache: bool = False,
    ) -> None:
        super().__init__()
        if [s.layer_id for s in specs] != list(range(contract.layout.num_layers)):
            raise LayoutError(f"specs must name layers 0..{contract.layout.num_layers - 1} in order")
        contract.mesh.tp_rank(rank)
        self.contract = contract
        self.specs = tuple(specs)
        self.kernel = kernel
        self.scales = scales or KVScales()
        self.rank = rank
        self.use_stacked_kv_cache = use_stacked_kv_cache
        self._bound = False

    # ---- weights

    def load_weights(self, stacks: Iterable[tuple[str, torch.Tensor | NDArray[Any]]], *, device: str = "cpu") -> None:
        """Take the stacks one by one; each is on the device before the next one is asked for.

        Args:
            stacks: (name, whole stack) pairs, for example `weight_stacks.drain(build_stacks(...))`, which forgets each
                stack as it hands it out: the host then never holds two copies of one.

        Raises:
            LayoutError: a stack that is unknown, doubled, missing, or not what the contract says.
        """
        specs = {spec.name: spec for spec in self.contract.weights}
        for name, stack in stacks:
            if name not in specs:
                raise LayoutError(f"unknown or doubled weight {name!r}; wanted {sorted(specs)}")
            spec = specs.pop(name)
            tensor = stack if isinstance(stack, torch.Tensor) else tensor_over(stack)
            shared = tuple(tensor.shape[:1]) == (1,)
            shape = (1, *spec.shape[1:]) if shared else spec.shape
            check_tensor(tensor, TensorSpec(name=name, shape=shape, dtypes=spec.dtypes))
            self.register_buffer(name, tensor.to(device), persistent=False)
        if specs:
            raise LayoutError(f"weights are missing: {sorted(specs)}")

    # ---- cache

    def get_kv_spec(self) -> list[NeuronLayerSpec]:
        """One spec per layer, in layer order."""
        return [
            NeuronLayerSpec(
                name=layer_name(s.layer_id),
                num_kv_heads=s.num_kv_heads,
                head_size=s.head_size,
                dtype=kv_torch_dtype(s.dtype),
                sliding_window_size=s.sliding_window,
            )
            for s in self.specs
        ]

    def bind_kv_cache(self, kv_caches: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take {layer name: [k, v]}. Layers 2j and 2j+1 must bring the same two tensors; K may be packed.

        Raises:
            LayoutError: layers missing or unknown, a pair that does not share its buffer, or tensors that are not what
                the layout says. Nothing was bound.
        """
        self._refuse_stacked()
        layout = self.contract.layout
        wanted = [layer_name(i) for i in range(layout.num_layers)]
        if kv_caches.keys() != set(wanted):
            missing, unknown = sorted(set(wanted) - kv_caches.keys()), sorted(kv_caches.keys() - set(wanted))
            raise LayoutError(f"bind every layer once: missing {missing}, unknown {unknown}")
        halves = []
        for j in range(layout.num_buffers):
            layers = layers_of_buffer(j, layout.num_layers)
            pairs = [tuple(kv_caches[layer_name(i)]) for i in layers]
            for pair in pairs:
                if len(pair) != 2:
                    raise LayoutError(f"a layer brings one K and one V, got {len(pair)} tensors in buffer {j}")
            first = pairs[0]
            if not all(same_memory(a, b) for pair in pairs[1:] for a, b in zip(first, pair, strict=True)):
                raise LayoutError(f"layers {list(layers)} must bring the same K and V: they share buffer {j}")
            halves.append((first[0], first[1]))
        self._set_halves(halves)

    def set_kv_cache_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take one tensor [2, B, h, n, d] per group buffer: the K half, then the V half, views of one base.

        Raises:
            LayoutError: another number of buffers, or one that is not what the layout says. Nothing was set.
        """
        self._refuse_stacked()
        layout = self.contract.layout
        if len(buffers) != layout.num_buffers:
            raise LayoutError(f"{layout.num_layers} layers share {layout.num_buffers} buffers, got {len(buffers)}")
        spec = TensorSpec(name="KV buffer", shape=layout.buffer_shape, dtypes=(self._stored_dtype,))
        for buffer in buffers:
            check_tensor(buffer, spec)
        packed = layout.k_byte_order is KByteOrder.PAIR_PACKED
        self._set_halves([(b[0].view(layout.packed_k_shape) if packed else b[0], b[1]) for b in buffers])

    def set_stacked_kv_cache(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Take K and V of all buffers, each with a leading axis g.

        Raises:
            LayoutError: the holder was made for buffers, or a tensor is not what the layout says.
        """
        if not self.use_stacked_kv_cache:
            raise LayoutError("this holder takes one tensor per buffer; make it with use_stacked_kv_cache=True")
        g = self.contract.layout.num_buffers
        self._check_half(k, v, "stacked", (g,))
        self.K_cache, self.V_cache = k, v
        self._bound = True

    def _refuse_stacked(self) -> None:
        if self.use_stacked_kv_cache:
            raise LayoutError("this holder takes one stacked cache; give it to set_stacked_kv_cache")

    @property
    def _stored_dtype(self) -> str:
        return dtype_name(torch.empty(0, dtype=kv_torch_dtype(self.contract.layout.dtype)))

    def _check_half(self, k: torch.Tensor, v: torch.Tensor, name: str, lead: tuple[int, ...]) -> None:
        layout = self.contract.layout
        packed = layout.k_byte_order is KByteOrder.PAIR_PACKED
        if is_packed(k, v) is not packed:
            raise LayoutError(f"K of {name} is {'' if is_packed(k, v) else 'not '}packed, the layout says otherwise")
        v_shape = layout.buffer_shape[1:]
        dtypes = (self._stored_dtype,)
        k_shape = layout.packed_k_shape if packed else v_shape
        check_tensor(k, TensorSpec(name=f"K of {name}", shape=(*lead, *k_shape), dtypes=dtypes))
        check_tensor(v, TensorSpec(name=f"V of {name}", shape=(*lead, *v_shape), dtypes=dtypes))

    def _set_halves(self, halves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for i, (k, v) in enumerate(halves):
            self._check_half(k, v, f"buffer {i}", ())
        for i, (k, v) in enumerate(halves):
            setattr(self, f"K_cache_buf_{i}", k)
            setattr(self, f"V_cache_buf_{i}", v)
        self._bound = True

    # ---- the call

    def held(self) -> dict[str, torch.Tensor]:
        """Weights and caches by attribute: what a graph may hand to the kernel and must not copy."""
        names = [spec.name for spec in self.contract.weights]
        if self.use_stacked_kv_cache:
            names += ["K_cache", "V_cache"]
        else:
            names += [f"{half}_cache_buf_{i}" for half in "KV" for i in range(self.contract.layout.num_buffers)]
        return {name: getattr(self, name) for name in names}

    def forward(self, hidden: torch.Tensor, **control: torch.Tensor) -> torch.Tensor:
        """One step: the rank's hidden rows [T, H], from its embedded tokens and the tensors of `ControlTensors`.

        Raises:
            LayoutError: no cache bound, weights not loaded, or a call that the contract does not allow.
        """
        if not self._bound:
            raise LayoutError("no KV cache is bound; call set_kv_cache_buffers or bind_kv_cache first")
        loaded = {spec.name for spec in self.contract.weights} <= self._buffers.keys()
        if not loaded:
            raise LayoutError("weights are not loaded; call load_weights first")
        buffers = range(self.contract.layout.num_buffers)
        call = DecodeCall(
            hidden=hidden,
            weights={spec.name: getattr(self, spec.name) for spec in self.contract.weights},
            per_buffer_kv=None
            if self.use_stacked_kv_cache
            else PerBufferKV(
                k=tuple(getattr(self, f"K_cache_buf_{i}") for i in buffers),
                v=tuple(getattr(self, f"V_cache_buf_{i}") for i in buffers),
            ),
            stacked_kv=StackedKV(k=self.K_cache, v=self.V_cache) if self.use_stacked_kv_cache else None,
            control=ControlTensors(**control),
            scales=self.scales,
            rank=self.rank,
        )
        return self.kernel.step(call=call)
