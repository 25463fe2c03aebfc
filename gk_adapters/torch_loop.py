"""A bare greedy decode loop on the torch engines: a fixed batch, one pool of blocks, no transfer. For measuring.

What a step holds is what an engine's step holds: control tensors, embedding, the kernel, the sampler.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gk_adapters.control_tensors import TrackedControl
from gk_adapters.torch_decode import TorchDecodeKernel
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_adapters.torch_model import TorchModel, torch_contract
from gk_adapters.torch_prefill import TorchPrefillModel
from gk_adapters.torch_sampling import TorchCallBuilder, TorchSampler
from gk_core.block_table import BlockId, BlockTable
from gk_core.decode_step import ControlShape, DecodeRow
from gk_core.errors import LayoutError
from gk_core.kv_layout import KByteOrder, layout_for
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.ports import GroupTables

__all__ = ["TorchDecodeLoop", "time_steps"]


class TorchDecodeLoop:
    """One row per prompt. All prompt tokens but the last are prefilled; the first step recomputes that one.

    Args:
        model: as `load_torch_model` gives it.
        prompts: token ids, one list per row.
        max_new_tokens: how many steps there is room for.
        kv_dtype: of the cache.
        packed: pair-packed K (FP8 only).
        prepack: see `TorchDecodeKernel`.
        block_size: tokens per block.

    Raises:
        LayoutError: no prompts, an empty prompt, or more tokens than the model's longest context.
    """

    def __init__(
        self,
        *,
        model: TorchModel,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        kv_dtype: KVDtype = KVDtype.BF16,
        packed: bool = False,
        prepack: bool = False,
        block_size: int = 128,
    ) -> None:
        geometry = model.config.geometry
        if not prompts or not all(prompts):
            raise LayoutError("a decode loop needs at least one prompt, and a token in each")
        longest = max(map(len, prompts)) + max_new_tokens
        if longest > geometry.max_position:
            raise LayoutError(f"{longest} tokens are more than the model's longest context {geometry.max_position}")
        self._shape = ControlShape(
            num_rows=len(prompts),
            block_size=block_size,
            sliding_window=geometry.sliding_window,
            max_model_len=longest,
        )
        per_table = self._shape.full_width
        layout = layout_for(
            honest_specs(geometry, tp_size=1, block_size=block_size, dtype=kv_dtype),
            num_blocks=1 + 2 * per_table * len(prompts),
            k_byte_order=KByteOrder.PAIR_PACKED if packed else KByteOrder.TOKEN_MAJOR,
        )
        buffers = allocate_group_buffers(layout)
        self._tables = [_tables(row, per_table, block_size) for row in range(len(prompts))]
        prefill = TorchPrefillModel(model=model, layout=layout, buffers=buffers)
        for prompt, tables in zip(prompts, self._tables, strict=True):
            if len(prompt) > 1:
                prefill.prefill(token_ids=prompt[:-1], start_position=0, tables=tables)
        self._tracked = TrackedControl(self._shape)
        self._kernel = TorchDecodeKernel(
            contract=torch_contract(model, layout=layout, shape=self._shape), geometry=geometry, prepack=prepack
        )
        self._builder = TorchCallBuilder(model=model, kv=per_buffer_kv(buffers, layout), tracked=self._tracked)
        self._sampler = TorchSampler(model=model)
        self._positions = [len(p) - 1 for p in prompts]
        self._tokens = tuple(p[-1] for p in prompts)

    def step(self) -> tuple[int, ...]:
        """The next token of every row.

        Raises:
            LayoutError: there is no room for another token.
        """
        rows = [
            DecodeRow(position=position, full_table=tables.full, sliding_table=tables.sliding)
            for position, tables in zip(self._positions, self._tables, strict=True)
        ]
        control = self._tracked(rows, self._shape)
        hidden = self._kernel.step(call=self._builder.build(token_ids=self._tokens, control=control))
        self._tokens = self._sampler.sample(hidden=hidden, active=control.active)
        self._positions = [position + 1 for position in self._positions]
        return self._tokens


def time_steps(loop: TorchDecodeLoop, *, num_steps: int, warmup_steps: int = 3) -> tuple[float, ...]:
    """Seconds of each of `num_steps` steps, after some that are not counted."""
    for _ in range(warmup_steps):
        loop.step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        loop.step()
        seconds.append(time.perf_counter() - start)
    return tuple(seconds)


def _tables(row: int, per_table: int, block_size: int) -> GroupTables:
    first = 1 + 2 * per_table * row

    def table(start: int) -> BlockTable:
        return BlockTable(block_ids=tuple(BlockId(start + i) for i in range(per_table)), block_size=block_size)

    return GroupTables(full=table(first), sliding=table(first + per_table))
