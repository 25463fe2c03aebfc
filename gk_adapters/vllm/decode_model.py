"""The giga-kernel decode model in vLLM: one kernel call per step for all layers.

Strategy. vLLM sees embedding, final norm, head and one attention module per layer. The attention modules only say,
honestly, what each layer keeps; they never run. A step takes block tables, slots and positions from vLLM's forward
context, makes control tensors of them and calls the kernel once.

There is no prefill graph. Where a row brings several tokens (a prompt without hand-off, a preempted request, a pull
that failed), they are replayed through decode steps, one position per row and call: slow, right, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from gk_adapters.torch_decode import TorchDecodeKernel
from gk_adapters.torch_dtypes import kv_torch_dtype
from gk_adapters.torch_kv import per_buffer_kv
from gk_adapters.torch_model import TorchModel, load_torch_model, torch_contract
from gk_adapters.vllm.attention import GkAttentionMetadata
from gk_adapters.vllm.engine_facts import require_gk_decode
from gk_adapters.vllm.hma import layer_name
from gk_adapters.vllm.seams_cache import group_buffer
from gk_adapters.vllm.step_control import GroupStep, StepRows, control_of_rows, row_starts
from gk_core.decode_step import ControlShape
from gk_core.errors import LayoutError
from gk_core.kernel_contract import DecodeCall, PerBufferKV, TensorSpec, check_tensor, is_packed
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import LayerKVSpec
from gk_core.model_geometry import layers_of_buffer

__all__ = ["GkDecodeModel"]


class GkDecodeModel(nn.Module):
    """GPT-OSS for a decode engine.

    Raises:
        UnsupportedError: this engine cannot run it, with every reason, before any weight is loaded.
    """

    # What vLLM's registry and loaders look at.
    supports_pp = False
    hf_to_vllm_mapper = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        facts = require_gk_decode(vllm_config)
        super().__init__()
        self.facts = facts
        self.config = vllm_config.model_config.hf_config
        geometry = self.geometry = facts.geometry
        self.dtype = _torch_dtype_of(vllm_config)
        self.shape = ControlShape(
            num_rows=vllm_config.scheduler_config.max_num_seqs,
            block_size=facts.block_size,
            sliding_window=geometry.sliding_window,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        self.embedding: Any = VocabParallelEmbedding(geometry.vocab_size, geometry.hidden_size)
        self.norm: Any = RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.lm_head: Any = ParallelLMHead(geometry.vocab_size, geometry.hidden_size)
        self.logits_processor = LogitsProcessor(geometry.vocab_size)
        self.keepers: Any = nn.ModuleList(self._keeper(vllm_config, spec) for spec in facts.specs)
        self.replayed_tokens = 0
        """Tokens that went through decode steps because their KV was not there; the last of each prompt not counted."""
        self._weights: TorchModel | None = None
        self._kernel: TorchDecodeKernel | None = None
        self._kv: PerBufferKV[torch.Tensor] | None = None
        self._bound_to: tuple[int, ...] = ()

    def _keeper(self, vllm_config: VllmConfig, spec: LayerKVSpec) -> nn.Module:
        module: nn.Module = Attention(
            self.geometry.num_q_heads // self.facts.tp_size,
            spec.head_size,
            spec.head_size**-0.5,
            num_kv_heads=spec.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=spec.sliding_window,
            prefix=layer_name(spec.layer_id),
        )
        return module

    # ---- the cache

    def get_kv_spec(self) -> tuple[LayerKVSpec, ...]:
        """What each layer keeps: sliding layers their window, full layers everything."""
        return self.facts.specs

    @property
    def use_stacked_kv_cache(self) -> bool:
        """Whether the kernel wants one K and one V tensor for all buffers; False: one of each per buffer."""
        return False

    def bind_kv_cache(self, kv_caches: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take {layer name: [k, v]} as any model does. K is packed where its rank is one more than V's.

        Raises:
            LayoutError: a layer is missing, two layers of one buffer do not share it, packing is not as configured, or
                a tensor is not what the cache's layout says. Nothing was bound.
        """
        g = self.geometry
        missing = [n for n in map(layer_name, range(g.num_layers)) if n not in kv_caches]
        if missing:
            raise LayoutError(f"no KV cache for {missing}; bind every layer")
        halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        for j in range(g.num_group_buffers):
            layers = layers_of_buffer(j, g.num_layers)
            pair = [tuple(kv_caches[layer_name(i)]) for i in layers]
            if any(len(kv) != 2 for kv in pair):
                raise LayoutError(
                    f"each of layers {list(layers)} brings one K and one V, got {[len(kv) for kv in pair]}"
                )
            if len({tuple(t.data_ptr() for t in kv) for kv in pair}) != 1:
                raise LayoutError(f"layers {list(layers)} must share buffer {j}")
            k, v = pair[0]
            packed = self.facts.k_byte_order is KByteOrder.PAIR_PACKED
            if is_packed(k, v) is not packed:
                raise LayoutError(f"K of buffer {j} is {'' if is_packed(k, v) else 'not '}packed, against the settings")
            halves.append((k, v))
        self._set_halves(halves)

    def set_kv_cache_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Take one tensor [2, num_blocks, kv, block, d] per group buffer: the K half, then the V half.

        Each half becomes an attribute of its own, `K_cache_buf_i` or `V_cache_buf_i`: code that walks a model's tensor
        attributes, as a meta swap before compiling does, finds those and would not look into a list.

        Raises:
            LayoutError: not one buffer per pair of layers, or one that is not what the cache's layout says. Nothing was
                set.
        """
        if len(buffers) != self.geometry.num_group_buffers:
            raise LayoutError(f"need {self.geometry.num_group_buffers} group buffers, got {len(buffers)}")
        layout = self.facts.layout(num_blocks=buffers[0].shape[1] if buffers[0].dim() > 1 else 1)
        itemsize = layout.dtype.itemsize
        for i, buffer in enumerate(buffers):
            if tuple(buffer.shape) != layout.buffer_shape or buffer.element_size() != itemsize:
                raise LayoutError(
                    f"group buffer {i} must be {list(layout.buffer_shape)} of {itemsize}-byte elements, got "
                    f"{list(buffer.shape)} of {buffer.element_size()}"
                )
        # vLLM stores FP8 as bytes.
        kv = per_buffer_kv(tuple(buffer.view(kv_torch_dtype(layout.dtype)) for buffer in buffers), layout)
        self._set_halves(tuple(zip(kv.k, kv.v, strict=True)))

    def _set_halves(self, halves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        layout = self.facts.layout(num_blocks=halves[0][1].shape[0])
        packed = layout.k_byte_order is KByteOrder.PAIR_PACKED
        shapes = (layout.packed_k_shape if packed else layout.buffer_shape[1:], layout.buffer_shape[1:])
        for i, kv in enumerate(halves):
            for half, tensor, shape in zip("KV", kv, shapes, strict=True):
                check_tensor(
                    tensor, TensorSpec(name=f"{half} of buffer {i}", shape=shape, dtypes=(layout.dtype.dtype_name,))
                )
        contract = torch_contract(self._loaded(), layout=layout, shape=self.shape)
        for i, (k, v) in enumerate(halves):
            setattr(self, f"K_cache_buf_{i}", k)
            setattr(self, f"V_cache_buf_{i}", v)
        self._kv = PerBufferKV(k=tuple(k for k, _ in halves), v=tuple(v for _, v in halves))
        self._kernel = TorchDecodeKernel(contract=contract, geometry=self.geometry)

    def _bind_from_context(self, layers: Mapping[str, Any]) -> None:
        """Group buffers as vLLM has bound them to the attention modules; once, and again if it binds others."""
        firsts = [layers[layer_name(2 * j)].kv_cache for j in range(self.geometry.num_group_buffers)]
        addresses = tuple(t.data_ptr() for t in firsts)
        if addresses == self._bound_to:
            return
        for i in range(self.geometry.num_layers):
            if layers[layer_name(i)].kv_cache.data_ptr() != addresses[i // 2]:
                raise LayoutError(f"layer {i} does not share buffer {i // 2}; keep the hybrid KV-cache manager on")
        spec = self.facts.specs[0]
        self.set_kv_cache_buffers(
            [group_buffer(t, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size) for t in firsts]
        )
        self._bound_to = addresses

    # ---- weights

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Build the stacks from the checkpoint's own files; `weights`, tensor by tensor, is not drawn from.

        Raises:
            CheckpointError: a file is missing, damaged, or not what its config promises.
        """
        del weights
        loaded = load_torch_model(self.facts.directory, model_dtype=str(self.dtype).rpartition(".")[2])
        vocab = self.geometry.vocab_size
        self.embedding.weight.data[:vocab] = loaded.embedding
        self.lm_head.weight.data[:vocab] = loaded.lm_head
        self.norm.weight.data.copy_(loaded.final_norm)
        for keeper in self.keepers:
            keeper._k_scale_float, keeper._v_scale_float = loaded.scales.k, loaded.scales.v
        # The two vocabulary matrices are vLLM's from here on; the stacks are the kernel's.
        self._weights = evolve(loaded, embedding=self.embedding.weight.data, lm_head=self.lm_head.weight.data)
        return {name for name, _ in self.named_parameters()}

    def _loaded(self) -> TorchModel:
        if self._weights is None:
            raise LayoutError("load_weights must come before the cache is bound")
        return self._weights

    # ---- steps

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] token ids -> [T, H]."""
        embedded: torch.Tensor = self.embedding(input_ids)
        return embedded

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[n, H] hidden states of rows that are sampled -> [n, V]."""
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step of vLLM: hidden states [T, H] after the final norm."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        context: Any = get_forward_context()
        if context.attn_metadata is None:
            return inputs_embeds  # a profiling run: no cache, nothing to attend to
        self._bind_from_context(context.no_compile_layers)
        sliding, full = (context.attn_metadata[layer_name(i)] for i in (0, 1))
        hidden = torch.zeros_like(inputs_embeds)
        firsts = torch.tensor(full.query_starts[:-1])
        lengths = torch.tensor(full.query_starts[1:]) - firsts
        groups = (
            GroupStep(table=sliding.block_table, slots=sliding.slot_mapping, window=self.shape.sliding_window),
            GroupStep(table=full.block_table, slots=full.slot_mapping),
        )
        starts = row_starts(groups, firsts, lengths, positions.long(), self.shape.block_size)
        for k in range(int((starts + lengths).max())):
            rows = torch.nonzero((starts <= k) & (k < starts + lengths))[:, 0]
            tokens = firsts[rows] + k - starts[rows]
            hidden[tokens] = self._step(inputs_embeds[tokens], positions[tokens], rows, tokens, sliding, full)
        self.replayed_tokens += int((lengths - 1).clamp(min=0).sum())
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def _step(
        self,
        embedded: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        sliding: GkAttentionMetadata,
        full: GkAttentionMetadata,
    ) -> torch.Tensor:
        """One kernel call: one token of each of some rows."""
        assert self._kernel is not None
        weights = self._loaded()
        control = control_of_rows(
            StepRows(
                positions=positions.long(),
                full_table=full.block_table[rows],
                sliding_table=sliding.block_table[rows],
                slots=full.slot_mapping[tokens],
                slots_swa=sliding.slot_mapping[tokens],
            ),
            self.shape,
            self.geometry,
            self.dtype,
        )
        hidden = torch.zeros(self.shape.num_rows, embedded.shape[1], dtype=embedded.dtype)
        hidden[: len(rows)] = embedded
        call = DecodeCall(
            hidden=hidden,
            weights=weights.stacks,
            per_buffer_kv=self._kv,
            stacked_kv=None,
            control=control,
            scales=weights.scales,
            rank=weights.rank,
        )
        return self._kernel.step(call=call)[: len(rows)]


def _torch_dtype_of(vllm_config: Any) -> torch.dtype:
    dtype: torch.dtype = vllm_config.model_config.dtype
    return dtype
