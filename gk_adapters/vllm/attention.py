"""vLLM attention backend over group buffers [2, num_blocks, kv, block, d], on the CPU, in plain PyTorch.

One buffer is shared by a sliding and a full layer, K half then V half. With an FP8 cache and packed K, the K half holds
token pairs side by side; this module reads and writes both orders. It is the native per-layer path: prefill on a
producer, and any step that the giga kernel does not serve.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import frozen
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from gk_adapters.vllm.seams_cache import BackendLayout, group_buffer
from gk_adapters.vllm.settings import packed_kv_requested
from gk_core.block_table import first_window_block
from gk_core.errors import UnsupportedError
from gk_core.kv_spec import KVDtype

__all__ = ["GkAttentionBackend", "GkAttentionImpl", "GkAttentionMetadata", "gather_tokens", "write_tokens"]

_KERNEL_BLOCK_MULTIPLE = 16


class GkAttentionBackend(BackendLayout, AttentionBackend):  # type: ignore[misc]
    """Group buffers with K and V halves; registered in place of vLLM's CPU backend by the plugin."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's enum, which has no entry for backends from outside but this one."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any multiple of 16 tokens."""
        return [MultipleOf(_KERNEL_BLOCK_MULTIPLE)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Even layers slide."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """One raw logit per query head."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoder layers only."""
        return attn_type == AttentionType.DECODER

    @staticmethod
    def get_impl_cls() -> type[GkAttentionImpl]:
        """The per-layer implementation."""
        return GkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[GkAttentionMetadataBuilder]:
        """The metadata builder, one object per KV cache group."""
        return GkAttentionMetadataBuilder

    @staticmethod
    def use_cascade_attention(*args: Any, **kwargs: Any) -> bool:
        """Never."""
        return False


@frozen(kw_only=True)
class GkAttentionMetadata:
    """One step's metadata of one KV cache group.

    Attributes:
        num_actual_tokens: tokens without padding.
        query_starts: [num_reqs + 1] first token of each request, ascending.
        seq_lens: [num_reqs] tokens in the cache after the step.
        block_table: int32 [num_reqs, width]; null entries 0.
        slot_mapping: int64 [num_actual_tokens or more]; negative means pad.
        max_query_len: longest query of the step; 1 in a pure decode step.
    """

    num_actual_tokens: int
    query_starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int


class GkAttentionMetadataBuilder(AttentionMetadataBuilder[GkAttentionMetadata]):
    """Keeps what vLLM already has, as plain integers where Python loops over requests."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GkAttentionMetadata:
        """Metadata of one step."""
        common = common_attn_metadata
        return GkAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_starts=tuple(common.query_start_loc[: common.num_reqs + 1].tolist()),
            seq_lens=tuple(common.seq_lens[: common.num_reqs].tolist()),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
        )


class GkAttentionImpl(AttentionImpl[Any]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        for name, value in (("alibi_slopes", alibi_slopes), ("logits_soft_cap", logits_soft_cap or None)):
            if value is not None:
                raise UnsupportedError(f"the gk attention backend has no {name}; GPT-OSS does not use it")
        if kv_sharing_target_layer_name is not None:
            raise UnsupportedError("the gk attention backend does not share one layer's KV with another layer")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.sinks = sinks
        self.is_fp8 = kv_cache_dtype.startswith("fp8")
        self.packed = self.is_fp8 and packed_kv_requested()

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's K and V, [num_tokens, kv, d], to their slots."""
        if kv_cache.numel() == 0:
            return
        kv_cache = group_buffer(kv_cache, num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        count = min(slot_mapping.shape[0], key.shape[0])
        scales: Any = layer
        for half, tokens, scale in ((0, key, scales._k_scale_float), (1, value, scales._v_scale_float)):
            write_tokens(
                kv_cache[half],
                _to_cache_dtype(tokens[:count], self.is_fp8, scale),
                slot_mapping[:count],
                packed=self.packed and half == 0,
            )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GkAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [num_tokens, heads, d] -> output of the same shape; one request after the other.

        A request's result does not depend on what else is in the batch.
        """
        if attn_metadata is None:
            return output
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("the gk attention backend does not quantise its output")
        kv_cache = group_buffer(kv_cache, num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        shaped = output.view(-1, self.num_heads, self.head_size)
        queries = query.view(-1, self.num_heads, self.head_size)
        starts = attn_metadata.query_starts
        for row, seq_len in enumerate(attn_metadata.seq_lens):
            begin, end = starts[row], starts[row + 1]
            if end > begin:
                shaped[begin:end] = self._attend(
                    layer, queries[begin:end], seq_len, attn_metadata.block_table[row], kv_cache
                )
        return output

    def _attend(
        self, layer: Any, query: torch.Tensor, seq_len: int, table: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        num_queries, block_size = query.shape[0], kv_cache.shape[3]
        first_query = seq_len - num_queries
        window = self.sliding_window
        first_block = 0 if window is None else first_window_block(first_query, window, block_size)
        blocks = table[first_block : -(-seq_len // block_size)].long()
        first_key = first_block * block_size
        num_keys = seq_len - first_key
        k = gather_tokens(kv_cache[0], blocks, num_keys, packed=self.packed)
        v = gather_tokens(kv_cache[1], blocks, num_keys, packed=False)
        if self.is_fp8:
            k = k.view(torch.float8_e4m3fn).float() * layer._k_scale_float
            v = v.view(torch.float8_e4m3fn).float() * layer._v_scale_float
        key_positions = torch.arange(first_key, seq_len)
        query_positions = torch.arange(first_query, seq_len)[:, None]
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        grouped = query.float().view(num_queries, self.num_kv_heads, -1, self.head_size).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped, k.float()[:, None].transpose(-1, -2)) * self.scale
        scores = scores.masked_fill_(hidden, float("-inf"))
        if self.sinks is not None:
            sink = self.sinks.float().view(self.num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)
            weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v.float()[:, None])
        return mixed.permute(2, 0, 1, 3).reshape(num_queries, self.num_heads, self.head_size).to(query.dtype)


def write_tokens(half: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, *, packed: bool) -> None:
    """Write tokens [num_tokens, kv, d] to their slots in a half [num_blocks, kv, block, d]; negative slots are skipped.

    Packed: token t of a block goes to pair t // 2, lane t % 2 of the half seen as [num_blocks, kv, block // 2, d, 2].
    """
    block_size = half.shape[2]
    real = slots >= 0
    if not bool(real.all()):
        slots, tokens = slots[real], tokens[real]
    blocks, offsets = slots // block_size, slots % block_size
    if packed:
        pairs = half.view(half.shape[0], half.shape[1], block_size // 2, half.shape[3], 2)
        pairs[blocks, :, offsets // 2, :, offsets % 2] = tokens
    else:
        half[blocks, :, offsets] = tokens


def gather_tokens(half: torch.Tensor, blocks: torch.Tensor, num_tokens: int, *, packed: bool) -> torch.Tensor:
    """First `num_tokens` tokens of some blocks of one half, head-major: [kv, num_tokens, d]."""
    num_kv_heads, block_size, head_size = half.shape[1:]
    taken = half[blocks]
    if packed:
        taken = taken.view(-1, num_kv_heads, block_size // 2, head_size, 2).transpose(-1, -2)
    taken = taken.reshape(-1, num_kv_heads, block_size, head_size).transpose(0, 1)
    return taken.reshape(num_kv_heads, -1, head_size)[:, :num_tokens]


def _to_cache_dtype(tokens: torch.Tensor, is_fp8: bool, scale: float) -> torch.Tensor:
    """stored = x / scale, clamped to the largest finite FP8 value; as bytes, which index like integers."""
    if not is_fp8:
        return tokens
    limit = KVDtype.FP8_E4M3FN.max_finite
    return (tokens.float() / scale).clamp_(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)
