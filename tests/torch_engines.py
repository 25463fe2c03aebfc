"""Torch prefill and decode over one cache, block ids handed out in a shuffled order: what the torch tests drive."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from attrs import frozen

from gk_adapters.torch_decode import TorchDecodeKernel
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_adapters.torch_model import TorchModel, torch_contract
from gk_adapters.torch_prefill import TorchPrefillModel
from gk_adapters.torch_sampling import TorchCallBuilder, logits
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.decode_step import AttentionControl, ControlShape, DecodeRow, build_attention_control
from gk_core.kernel_contract import PerBufferKV
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.ports import GroupTables

__all__ = ["TorchEngines", "evict", "make_engines", "make_tables"]


@frozen(kw_only=True, eq=False)
class TorchEngines:
    """Both engines over the same buffers."""

    model: TorchModel
    layout: KVLayout
    shape: ControlShape
    buffers: tuple[torch.Tensor, ...]
    kv: PerBufferKV[torch.Tensor]
    prefill: TorchPrefillModel
    kernel: TorchDecodeKernel
    builder: TorchCallBuilder

    def prefill_logits(self, ids: list[int], start: int, tables: GroupTables) -> torch.Tensor:
        """Logits of every prefilled token."""
        return logits(self.prefill.forward(token_ids=ids, start_position=start, tables=tables), self.model)

    @staticmethod
    def rows(rows: Sequence[tuple[int, GroupTables] | None]) -> list[DecodeRow | None]:
        """(position, tables) as the core takes them."""
        return [
            None if r is None else DecodeRow(position=r[0], full_table=r[1].full, sliding_table=r[1].sliding)
            for r in rows
        ]

    def control(self, rows: Sequence[tuple[int, GroupTables] | None]) -> AttentionControl:
        """Control of (position, tables) rows."""
        return build_attention_control(self.rows(rows), self.shape)

    def step(self, rows: Sequence[tuple[int, int, GroupTables] | None]) -> torch.Tensor:
        """Hidden states of one step over (token, position, tables) rows."""
        padded = [*rows, *[None] * (self.shape.num_rows - len(rows))]
        control = self.control([None if r is None else r[1:] for r in padded])
        ids = tuple(0 if r is None else r[0] for r in padded)
        return self.kernel.step(call=self.builder.build(token_ids=ids, control=control))

    def step_logits(self, rows: Sequence[tuple[int, int, GroupTables] | None]) -> torch.Tensor:
        """Logits of one step, [R, V]."""
        return logits(self.step(rows), self.model)


def make_engines(
    model: TorchModel,
    *,
    dtype: KVDtype = KVDtype.FP32,
    k_byte_order: KByteOrder = KByteOrder.TOKEN_MAJOR,
    block_size: int = 128,
    num_blocks: int = 40,
    num_rows: int = 4,
    max_model_len: int = 1024,
    max_chunk_tokens: int = 512,
) -> TorchEngines:
    """Engines over fresh buffers."""
    geometry = model.config.geometry
    specs = honest_specs(geometry, tp_size=1, block_size=block_size, dtype=dtype)
    layout = layout_for(specs, num_blocks=num_blocks, k_byte_order=k_byte_order)
    shape = ControlShape(
        num_rows=num_rows,
        block_size=block_size,
        sliding_window=geometry.sliding_window,
        max_model_len=max_model_len,
    )
    buffers = allocate_group_buffers(layout)
    kv = per_buffer_kv(buffers, layout)
    return TorchEngines(
        model=model,
        layout=layout,
        shape=shape,
        buffers=buffers,
        kv=kv,
        prefill=TorchPrefillModel(model=model, layout=layout, buffers=buffers, max_chunk_tokens=max_chunk_tokens),
        kernel=TorchDecodeKernel(contract=torch_contract(model, layout=layout, shape=shape), geometry=geometry),
        builder=TorchCallBuilder(model=model, kv=kv),
    )


def make_tables(engines: TorchEngines, num_requests: int, num_tokens: int, *, seed: int = 5) -> list[GroupTables]:
    """Tables of several requests with room for num_tokens each; all blocks distinct, in a shuffled order."""
    block_size = engines.layout.block_size
    per = -(-num_tokens // block_size)
    ids = list(range(1, engines.layout.num_blocks))
    random.Random(seed).shuffle(ids)
    assert num_requests * per * 2 <= len(ids)
    taken = iter(ids)

    def table() -> BlockTable:
        return BlockTable(block_ids=tuple(BlockId(next(taken)) for _ in range(per)), block_size=block_size)

    return [GroupTables(full=table(), sliding=table()) for _ in range(num_requests)]


def evict(tables: GroupTables, position: int, sliding_window: int) -> GroupTables:
    """The tables with sliding blocks that a query at `position` no longer reads replaced by the null block."""
    first = max(position - sliding_window + 1, 0) // tables.sliding.block_size
    ids = tuple(NULL_BLOCK_ID if i < first else b for i, b in enumerate(tables.sliding.block_ids))
    return GroupTables(full=tables.full, sliding=BlockTable(block_ids=ids, block_size=tables.sliding.block_size))
