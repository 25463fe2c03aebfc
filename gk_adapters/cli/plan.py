"""`gk plan`: what a KV budget holds, with every setting that the answer depends on."""

from __future__ import annotations

import click
from rich.table import Table

from gk_adapters.cli.common import (
    KV_DTYPES,
    console,
    emit_json,
    json_option,
    kv_dtype_option,
    model_option,
    resolve_geometry,
)
from gk_core.errors import RequestError
from gk_core.kv_budget import budget, num_blocks_for_memory
from gk_core.kv_layout import (
    DMA_OFFSET_LIMIT,
    KByteOrder,
    OffsetUnit,
    layout_for,
    max_dma_offset,
    stacked_cap_blocks,
)
from gk_core.kv_spec import honest_specs, plan_kv_cache
from gk_core.model_geometry import require_gk_geometry

__all__ = ["plan"]

_MINIMUM_BLOCKS = 2


@click.command()
@model_option
@click.option("--kv-memory-bytes", type=int, help="Bytes for the KV cache of one rank.")
@click.option("--num-blocks", type=int, help="Blocks of every buffer, instead of a memory budget.")
@click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per block.")
@kv_dtype_option("fp8")
@click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks of one replica.")
@click.option("--max-model-len", type=int, help="Tokens; default: the model's longest context.")
@click.option("--max-num-batched-tokens", type=int, default=8192, show_default=True, help="Tokens of a prefill batch.")
@json_option
def plan(
    model: str,
    kv_memory_bytes: int | None,
    num_blocks: int | None,
    block_size: int,
    kv_dtype: str,
    tp: int,
    max_model_len: int | None,
    max_num_batched_tokens: int,
    as_json: bool,
) -> None:
    """How many blocks, requests and tokens a KV budget holds.

    Token capacity depends on --max-model-len and --max-num-batched-tokens; both are part of the answer.
    """
    if (kv_memory_bytes is None) is (num_blocks is None):
        raise RequestError("give exactly one of --kv-memory-bytes and --num-blocks")
    geometry = resolve_geometry(model)
    require_gk_geometry(geometry)
    dtype = KV_DTYPES[kv_dtype]
    specs = honest_specs(geometry, tp_size=tp, block_size=block_size, dtype=dtype)
    per_block = plan_kv_cache(specs, num_blocks=_MINIMUM_BLOCKS).bytes_per_block_all_buffers
    if num_blocks is None:
        assert kv_memory_bytes is not None
        num_blocks = num_blocks_for_memory(kv_memory_bytes, per_block)
    kv_plan = plan_kv_cache(specs, num_blocks=num_blocks)
    length = max_model_len if max_model_len is not None else geometry.max_position
    capacity = budget(kv_plan, max_model_len=length, max_num_batched_tokens=max_num_batched_tokens)
    packed = dtype.is_fp8 and block_size % 2 == 0
    order = KByteOrder.PAIR_PACKED if packed else KByteOrder.TOKEN_MAJOR
    layout = layout_for(specs, num_blocks=num_blocks, k_byte_order=order)
    offset = max_dma_offset(layout)
    answer = {
        "model": model,
        "tp": tp,
        "block_size": block_size,
        "kv_dtype": dtype.dtype_name,
        "max_model_len": length,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_blocks": num_blocks,
        "group_buffers": len(kv_plan.buffers),
        "num_groups": len(kv_plan.groups),
        "kv_heads_per_rank": layout.num_kv_heads,
        "block_bytes": layout.block_bytes,
        "bytes_per_block_all_buffers": per_block,
        "kv_bytes": kv_plan.kv_bytes,
        "kv_gib": round(kv_plan.kv_bytes / 2**30, 4),
        "full_blocks_per_request": capacity.full_blocks,
        "sliding_blocks_per_request": capacity.sliding_blocks,
        "max_requests": round(float(capacity.max_requests), 2),
        "token_capacity": capacity.token_capacity,
        "max_dma_offset": offset,
        "dma_offset_limit": DMA_OFFSET_LIMIT,
        "dma_offset_ok": offset < DMA_OFFSET_LIMIT,
        "dma_offset_wraps_at_blocks": DMA_OFFSET_LIMIT // layout.block_bytes,
        "stacked_cap_blocks": stacked_cap_blocks(layout),
        "stacked_cap_blocks_by_unit": {
            "bytes": stacked_cap_blocks(layout),
            "two_bytes": stacked_cap_blocks(layout, unit=OffsetUnit.TWO_BYTES),
            "k_and_v_together": stacked_cap_blocks(layout, k_and_v_together=True),
        },
    }
    if as_json:
        emit_json(answer)
        return
    table = Table(show_header=False, box=None, title=f"{model}, TP{tp}, block {block_size}, {dtype.dtype_name}")
    for key, value in answer.items():
        if key not in ("model", "tp", "block_size", "kv_dtype"):
            table.add_row(key.replace("_", " "), _human(value))
    console().print(table)


def _human(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k.replace('_', ' ')} {v:,}" for k, v in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
