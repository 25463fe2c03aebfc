"""PrefillModel on PyTorch's CPU: a native per-layer engine that fills the group buffers.

Dims: T tokens of a chunk, H hidden, q / h query and KV heads, g = q / h, d head size, m prior keys.

A chunk's own K and V take part in attention as the cache stores them (rounded, for FP8 clamped), so results do not
depend on how a prompt is cut into chunks, and a decode step that recomputes a token finds the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gk_adapters.torch_kv import BoundHalf, KVCodec, per_buffer_kv
from gk_adapters.torch_layers import LayerWeights, views_of_layers
from gk_adapters.torch_math import MASKED, apply_rope, attend, project, rms_norm, rope_factors, rope_tables
from gk_adapters.torch_model import TorchModel
from gk_adapters.torch_moe import experts_forward, route
from gk_core.block_table import NULL_BLOCK_ID, BlockTable
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_layout import KVHalf, KVLayout
from gk_core.model_geometry import AttentionKind, buffer_of_layer
from gk_core.ports import GroupTables, PrefillModel

__all__ = ["TorchPrefillModel"]


class TorchPrefillModel(PrefillModel):
    """Prefill over the caller's group buffers.

    Args:
        model: weights; one rank holds all heads and experts.
        layout: of the cache.
        buffers: as `allocate_group_buffers` makes them.
        max_chunk_tokens: tokens computed at once; bounds memory, changes no result beyond rounding.

    Raises:
        UnsupportedError: more than one rank, or two layers of one kind that share a buffer.
        LayoutError: model, layout and buffers disagree.
    """

    def __init__(
        self,
        *,
        model: TorchModel,
        layout: KVLayout,
        buffers: tuple[torch.Tensor, ...],
        max_chunk_tokens: int = 512,
    ) -> None:
        geometry = model.config.geometry
        if model.mesh.world_size != 1:
            raise UnsupportedError(f"prefill runs on one rank, got a mesh of {model.mesh.world_size}")
        kinds = geometry.attention_kinds
        for even, odd in zip(range(0, len(kinds), 2), range(1, len(kinds), 2), strict=False):
            if kinds[even] is kinds[odd]:
                raise UnsupportedError(
                    f"layers {even} and {odd} share a buffer and one block table ({kinds[even].value}), so one would "
                    "overwrite the other; layer kinds must alternate"
                )
        _require_buffers(model, layout, buffers)
        if max_chunk_tokens < 1:
            raise LayoutError(f"max_chunk_tokens must be >= 1, got {max_chunk_tokens}")
        self._model = model
        self._layout = layout
        self._codec = codec = KVCodec(layout, model.dtype)
        kv = per_buffer_kv(buffers, layout)
        self._kv = [(codec.bind(k, KVHalf.K), codec.bind(v, KVHalf.V)) for k, v in zip(kv.k, kv.v, strict=True)]
        self._layers = views_of_layers(model.stacks, geometry, model.mesh, model.rank)
        self._max_chunk_tokens = max_chunk_tokens

    def prefill(self, *, token_ids: Sequence[int], start_position: int, tables: GroupTables) -> None:
        """Compute K and V of tokens start_position.. and write them to the tables' blocks.

        Sliding blocks that the tables no longer hold are neither read nor written.

        Raises:
            LayoutError: positions or token ids out of range, or a block is missing that must be read or written;
                nothing was written.
        """
        self._forward(token_ids, start_position, tables, keep_hidden=False)

    def forward(self, *, token_ids: Sequence[int], start_position: int, tables: GroupTables) -> torch.Tensor:
        """The same, and the last layer's hidden states [T, H] (before the final norm)."""
        return torch.cat(self._forward(token_ids, start_position, tables, keep_hidden=True))

    def _forward(
        self, token_ids: Sequence[int], start_position: int, tables: GroupTables, *, keep_hidden: bool
    ) -> list[torch.Tensor]:
        self._check(token_ids, start_position, tables)
        hidden = []
        with torch.inference_mode():
            for first in range(0, len(token_ids), self._max_chunk_tokens):
                ids = torch.tensor(token_ids[first : first + self._max_chunk_tokens])
                x = self._chunk(self._model.embedding.index_select(0, ids), start_position + first, tables)
                if keep_hidden:
                    hidden.append(x)
        return hidden

    def _check(self, token_ids: Sequence[int], start: int, tables: GroupTables) -> None:
        geometry, layout = self._model.config.geometry, self._layout
        end = start + len(token_ids)
        if not token_ids or start < 0 or end > geometry.max_position:
            raise LayoutError(
                f"prefill of {len(token_ids)} tokens from position {start} must cover at least one token within "
                f"0..{geometry.max_position - 1}"
            )
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id < geometry.vocab_size:
                raise LayoutError(
                    f"token {i} of the prefill has id {token_id}, outside the vocabulary 0..{geometry.vocab_size - 1}"
                )
        oldest = max(start - geometry.sliding_window + 1, 0)
        needed = {"full": (tables.full, 0, end), "sliding": (tables.sliding, oldest, start)}
        for name, (table, low, high) in needed.items():
            if table.block_size != layout.block_size:
                raise LayoutError(f"{name} table has block_size {table.block_size}, the cache has {layout.block_size}")
            if end > table.num_slots:
                raise LayoutError(f"{name} table has {table.num_slots} slots, the prefill ends at position {end}")
            for logical, block_id in enumerate(table.block_ids):
                if block_id >= layout.num_blocks:
                    raise LayoutError(f"{name} table has block {block_id}, the cache has {layout.num_blocks} blocks")
                begin = logical * layout.block_size
                if block_id == NULL_BLOCK_ID and begin < high and begin + layout.block_size > low:
                    raise LayoutError(
                        f"{name} table has the null block at logical block {logical}, which the prefill needs"
                    )

    def _chunk(self, x: torch.Tensor, start: int, tables: GroupTables) -> torch.Tensor:
        geometry = self._model.config.geometry
        positions = torch.arange(start, start + x.shape[0])
        tables_cs = rope_tables(geometry.rope, geometry.head_size, positions, x.dtype)
        factors = rope_factors(*tables_cs)
        plans = {
            AttentionKind.FULL: _ChunkPlan(tables.full, start, x, None, self._layout),
            AttentionKind.SLIDING: _ChunkPlan(tables.sliding, start, x, geometry.sliding_window, self._layout),
        }
        for layer_id, (weights, kind) in enumerate(zip(self._layers, geometry.attention_kinds, strict=True)):
            normed = rms_norm(x, weights.input_norm, geometry.rms_norm_eps)
            x = x + self._attention(normed, weights, factors, buffer_of_layer(layer_id), plans[kind])
            normed = rms_norm(x, weights.post_norm, geometry.rms_norm_eps)
            ids, shares = route(normed, weights.router, weights.router_bias, geometry.experts_per_token)
            x = x + experts_forward(
                normed, ids, shares, weights.experts, alpha=geometry.swiglu_alpha, limit=geometry.swiglu_limit
            )
        return x

    def _attention(
        self,
        x: torch.Tensor,
        weights: LayerWeights,
        factors: tuple[torch.Tensor, torch.Tensor],
        buffer: int,
        plan: _ChunkPlan,
    ) -> torch.Tensor:
        d, heads = self._layout.head_size, self._layout.num_kv_heads
        scales, tokens = self._model.scales, x.shape[0]
        qkv = project(x, weights.qkv, weights.qkv_bias).view(tokens, -1, d)
        rotated = apply_rope(qkv[:, :-heads], factors)
        q = rotated[:, :-heads].view(tokens, heads, -1, d).permute(1, 2, 0, 3)  # [h, g, T, d]
        k_half, v_half = self._kv[buffer]
        k = self._keys(k_half, self._codec.encode(rotated[:, -heads:], scales.k), plan)
        v = self._keys(v_half, self._codec.encode(qkv[:, -heads:], scales.v), plan)
        out = attend(
            q,
            k[:, None].expand(-1, q.shape[1], -1, -1),
            v[:, None].expand(-1, q.shape[1], -1, -1),
            mask=plan.mask,
            sink=weights.sink.view(heads, -1, 1, 1),
            softmax_scale=scales.k * d**-0.5,
        )
        if scales.v != 1.0:
            out = out * scales.v
        return project(out.permute(2, 0, 1, 3).reshape(tokens, -1), weights.out, weights.out_bias)

    def _keys(self, half: BoundHalf, new: torch.Tensor, plan: _ChunkPlan) -> torch.Tensor:
        """Write the chunk's K (or V) where it has blocks; return prior and own keys [h, m + T, d]."""
        self._codec.write(half, plan.places, new[plan.written])
        own = self._codec.decode(new).transpose(0, 1)
        if not plan.num_prior:
            return own
        prior = self._codec.gather(half, plan.head_blocks, plan.num_blocks)
        return torch.cat((prior[:, plan.skip : plan.skip + plan.num_prior], own), dim=1)


class _ChunkPlan:
    """Where a chunk of one group's tokens goes, and which earlier keys it reads."""

    def __init__(
        self, table: BlockTable, start: int, x: torch.Tensor, sliding_window: int | None, layout: KVLayout
    ) -> None:
        block_size, heads = layout.block_size, layout.num_kv_heads
        positions = torch.arange(start, start + x.shape[0])
        block_ids = torch.tensor(table.block_ids)
        blocks = block_ids[positions // block_size]
        self.written = torch.nonzero(blocks != NULL_BLOCK_ID)[:, 0]
        offsets = (positions % block_size)[self.written, None]
        heads_of = blocks[self.written, None] * heads + torch.arange(heads)
        self.places = (heads_of * block_size + offsets).flatten()
        oldest = 0 if sliding_window is None else max(start - sliding_window + 1, 0)
        first = oldest // block_size
        prior = block_ids[first : -(-start // block_size)]
        self.num_blocks = len(prior)
        self.skip = oldest - first * block_size
        self.num_prior = start - oldest
        self.head_blocks = (prior[None, :] * heads + torch.arange(heads)[:, None]).flatten()
        keys = torch.arange(oldest, start + x.shape[0])
        hidden = keys[None, :] > positions[:, None]
        if sliding_window is not None:
            hidden |= keys[None, :] <= positions[:, None] - sliding_window
        self.mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill_(hidden, MASKED)[None, None]


def _require_buffers(model: TorchModel, layout: KVLayout, buffers: tuple[torch.Tensor, ...]) -> None:
    geometry = model.config.geometry
    ours = (geometry.num_layers, geometry.num_kv_heads, geometry.head_size)
    theirs = (layout.num_layers, layout.num_kv_heads, layout.head_size)
    if ours != theirs:
        raise LayoutError(f"model has (layers, kv heads, head size) {ours}, the layout has {theirs}")
    if len(buffers) != layout.num_buffers:
        raise LayoutError(f"the layout has {layout.num_buffers} group buffers, got {len(buffers)}")
    for i, buffer in enumerate(buffers):
        if tuple(buffer.shape) != layout.buffer_shape:
            raise LayoutError(f"group buffer {i} must have shape {list(layout.buffer_shape)}, got {list(buffer.shape)}")
