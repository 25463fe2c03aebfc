"""`gk show`: the KV layout drawn in the terminal, the address of any element with the sum that leads there, and what a
rank says of its cache in a handshake."""

from __future__ import annotations

from pathlib import Path

import click
from attrs import evolve, frozen
from rich.table import Table

from gk_adapters.cli.common import (
    KV_DTYPES,
    console,
    emit_json,
    json_option,
    kv_dtype_option,
    resolve_geometry,
)
from gk_core.disaggregation import Role
from gk_core.kernel_contract import KVScales
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout, byte_address, layout_for, offset_in_head
from gk_core.kv_spec import honest_specs
from gk_core.model_geometry import ModelGeometry, kind_of_layer, layers_of_buffer, require_gk_geometry
from gk_core.peer_layout import describe_rank
from gk_core.rank_grid import RankGrid

__all__ = ["show"]

_ORDERS = {"auto": None, "token-major": KByteOrder.TOKEN_MAJOR, "packed": KByteOrder.PAIR_PACKED}
_SHOWN_TOKENS, _SHOWN_BYTES = 4, 12


@frozen(kw_only=True)
class _Shown:
    """What the subcommands start from."""

    model: str
    geometry: ModelGeometry
    layout: KVLayout
    tp_size: int


@click.group(invoke_without_command=True)
@click.option("--model", default="gpt-oss-120b", show_default=True, metavar="gpt-oss-120b|gpt-oss-20b|DIR")
@click.option("--num-blocks", type=int, default=36175, show_default=True, help="Blocks of every buffer.")
@click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per block.")
@kv_dtype_option("fp8")
@click.option("--tp", type=int, default=8, show_default=True, help="Tensor-parallel ranks of one replica.")
@click.option("--k-order", type=click.Choice(list(_ORDERS)), default="auto", help="auto: packed when FP8.")
@json_option
@click.pass_context
def show(
    ctx: click.Context,
    model: str,
    num_blocks: int,
    block_size: int,
    kv_dtype: str,
    tp: int,
    k_order: str,
    as_json: bool,
) -> None:
    """Draw the KV layout: layers to buffers, halves, blocks, and one block's bytes in both K orders."""
    geometry = resolve_geometry(model)
    require_gk_geometry(geometry)
    dtype = KV_DTYPES[kv_dtype]
    order = _ORDERS[k_order] or (KByteOrder.PAIR_PACKED if dtype.is_fp8 else KByteOrder.TOKEN_MAJOR)
    specs = honest_specs(geometry, tp_size=tp, block_size=block_size, dtype=dtype)
    layout = layout_for(specs, num_blocks=num_blocks, k_byte_order=order)
    ctx.obj = _Shown(model=model, geometry=geometry, layout=layout, tp_size=tp)
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        emit_json(_layout_json(layout))
    else:
        _draw(layout)


@show.command()
@click.option("--layer", type=int, required=True)
@click.option("--half", type=click.Choice(["k", "v"], case_sensitive=False), required=True)
@click.option("--block", type=int, required=True)
@click.option("--head", type=int, default=0, show_default=True, help="KV head of this rank.")
@click.option("--token", type=int, required=True, help="Token inside the block.")
@click.option("--dim", type=int, required=True)
@json_option
@click.pass_obj
def address(shown: _Shown, layer: int, half: str, block: int, head: int, token: int, dim: int, as_json: bool) -> None:
    """Buffer and byte offset of one element, and the sum that leads there."""
    layout = shown.layout
    found = byte_address(layout, layer=layer, half=KVHalf[half.upper()], block=block, head=head, token=token, dim=dim)
    if as_json:
        emit_json(
            {
                "buffer": found.buffer_index,
                "byte_offset": found.byte_offset,
                "k_order": layout.k_byte_order.value,
                "sum": [{"term": what, "count": n, "bytes": size} for what, n, size in found.terms],
            }
        )
        return
    out = console()
    out.print(f"layer {layer} is {kind_of_layer(layer).value}: buffer {found.buffer_index} (layer // 2)")
    table = Table(box=None)
    for heading in ("term", "count", "x bytes", "= bytes"):
        table.add_column(heading, justify="right")
    for what, count, size in found.terms:
        table.add_row(what, f"{count:,}", f"{size:,}", f"{count * size:,}")
    out.print(table)
    out.print(f"byte offset {found.byte_offset:,} in buffer {found.buffer_index}")


@show.command()
@click.option("--role", type=click.Choice([r.value for r in Role]), required=True)
@click.option("--engine-id", default="", help="Name of the engine; the role where none is given.")
@click.option("--rank", type=int, default=0, show_default=True, help="Tensor-parallel rank.")
@click.option("--dcp", type=int, default=1, show_default=True, help="Decode-context-parallel ranks; divides --tp.")
@click.pass_obj
def peer(shown: _Shown, role: str, engine_id: str, rank: int, dcp: int) -> None:
    """What one rank says of its cache in a handshake, as the JSON that `gk check peers` reads.

    Scales and the name of the weights are the checkpoint's where --model is a folder that holds weights.
    """
    from gk_adapters.peer_codec import encode_layout_json

    grid = RankGrid(num_kv_heads=shown.geometry.num_kv_heads, tp_size=shown.tp_size, dcp_size=dcp)
    weights_id, scales = _weights(Path(shown.model))
    described = describe_rank(
        shown.geometry,
        evolve(shown.layout, num_kv_heads=grid.heads_per_rank),
        engine_id=engine_id or role,
        role=Role(role),
        tp_size=shown.tp_size,
        tp_rank=rank,
        dcp_size=dcp,
        k_scale=scales.k,
        v_scale=scales.v,
        weights_id=weights_id,
    )
    click.echo(encode_layout_json(described).decode())


def _weights(directory: Path) -> tuple[str, KVScales]:
    """Name and KV scales of a checkpoint's weights; none, and 1.0, where there are no weights to read."""
    if not any(directory.glob("*.safetensors")):
        return "", KVScales()
    from gk_adapters.hf_checkpoint import HFCheckpoint, read_kv_scales, weights_id_of

    checkpoint = HFCheckpoint(directory)
    return weights_id_of(checkpoint), read_kv_scales(checkpoint)


def _layout_json(layout: KVLayout) -> dict[str, object]:
    return {
        "group_buffers": [
            {"buffer": j, "layers": list(layers_of_buffer(j, layout.num_layers))} for j in range(layout.num_buffers)
        ],
        "buffer_shape": list(layout.buffer_shape),
        "packed_k_shape": list(layout.packed_k_shape) if layout.k_byte_order is KByteOrder.PAIR_PACKED else None,
        "dtype": layout.dtype.dtype_name,
        "k_order": layout.k_byte_order.value,
        "head_bytes": layout.head_bytes,
        "block_bytes": layout.block_bytes,
        "half_bytes": layout.half_bytes,
        "buffer_bytes": layout.buffer_bytes,
        "kv_bytes": layout.kv_bytes,
    }


def _draw(layout: KVLayout) -> None:
    out = console()
    out.print(f"[bold]{layout.num_buffers} group buffers[/], each its own allocation {list(layout.buffer_shape)}")
    out.print(f"{layout.dtype.dtype_name}, [2, num_blocks, kv, block, d], {layout.buffer_bytes:,} bytes each\n")
    table = Table(box=None)
    for heading in ("buffer", "sliding layer", "full layer"):
        table.add_column(heading, justify="right")
    shown = [*range(min(3, layout.num_buffers))]
    for j in shown:
        table.add_row(*_buffer_row(layout, j))
    if layout.num_buffers > len(shown) + 1:
        table.add_row("...", "...", "...")
    if layout.num_buffers > len(shown):
        table.add_row(*_buffer_row(layout, layout.num_buffers - 1))
    out.print(table)
    last = layout.num_blocks - 1
    out.print(f"\n[bold]one buffer[/], byte offsets (block = {layout.block_bytes:,} bytes)")
    for half in KVHalf:
        base = half.value * layout.half_bytes
        out.print(
            f"  {half.name} half | block 0 (null) {base:,} | block 1 {base + layout.block_bytes:,} | ... "
            f"| block {last:,} {base + last * layout.block_bytes:,}"
        )
    out.print(f"\n[bold]one head of one K block[/], first {_SHOWN_BYTES} elements as (token, dim)")
    for order in KByteOrder:
        if order is KByteOrder.PAIR_PACKED and not (layout.dtype.is_fp8 and layout.block_size % 2 == 0):
            continue
        mark = "  <- this layout" if order is layout.k_byte_order else ""
        out.print(f"  {order.value:<12} {_first_elements(layout, order)} ...{mark}")
    out.print("  V is always token_major")


def _buffer_row(layout: KVLayout, buffer_index: int) -> tuple[str, str, str]:
    layers = [str(i) for i in layers_of_buffer(buffer_index, layout.num_layers)]
    return (str(buffer_index), layers[0], layers[1] if len(layers) > 1 else "-")


def _first_elements(layout: KVLayout, order: KByteOrder) -> str:
    drawn = KVLayout(
        num_layers=1,
        num_blocks=1,
        num_kv_heads=1,
        block_size=layout.block_size,
        head_size=layout.head_size,
        dtype=layout.dtype,
        k_byte_order=order,
    )
    by_offset = {
        offset_in_head(drawn, KVHalf.K, token, dim): (token, dim)
        for token in range(min(_SHOWN_TOKENS, drawn.block_size))
        for dim in range(drawn.head_size)
    }
    return " ".join(f"({t},{c})" for t, c in (by_offset[i] for i in range(min(_SHOWN_BYTES, len(by_offset)))))
