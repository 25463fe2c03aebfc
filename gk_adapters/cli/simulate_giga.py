"""`gk simulate giga`: what one rank's decode step with the giga kernel would cost, from the simulator's counters.

A pair of layers (one sliding, one full) is traced on shapes alone, at full size; each further pair costs the same, so
totals are that of one pair plus the rest times what a second pair adds. Counts of bytes, instructions and collectives
are exact for the kernel as written; cycles are the simulator's model. Nothing here has run on a device.
"""

from __future__ import annotations

import math
from typing import Any

import click
from attrs import evolve, frozen
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
from gk_core.decode_mesh import DecodeMesh
from gk_core.decode_step import ControlShape
from gk_core.errors import RequestError
from gk_core.kernel_contract import KernelContract, KVScales
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import honest_specs
from gk_core.model_geometry import ModelGeometry, alternating_kinds, require_gk_geometry
from gk_core.stacked_weights import build_stacked_weight_specs, total_bytes
from gk_core.weight_layouts import ExpertFormat, WeightLayout, padded_features

__all__ = ["GigaCase", "giga", "giga_cost"]

_PARTS = (
    "rms_norm", "make_new_tokens", "attend", "write_tokens", "write_packed_keys", "project_out", "route", "add_experts",
    "add_experts_mx", "all_gather_rows", "reduce_scatter_rows", "make_gather",
)  # fmt: skip


@frozen(kw_only=True)
class GigaCase:
    """One build of the kernel to be measured.

    Attributes:
        geometry: of the whole model.
        mesh: ranks; the cost is rank 0's.
        layout: KV layout of the rank.
        rows: rows per replica, all active, all at the full context.
        context: tokens of each row, the new one included.
        target: "trn2" or "trn3".
        mx_terms: MXFP8 terms of an activation, on trn3.
    """

    geometry: ModelGeometry
    mesh: DecodeMesh
    layout: KVLayout
    rows: int
    context: int
    target: str
    mx_terms: int = 2

    @property
    def shape(self) -> ControlShape:
        """Control tables just wide enough for the context."""
        return ControlShape(
            num_rows=self.rows,
            block_size=self.layout.block_size,
            sliding_window=self.geometry.sliding_window,
            max_model_len=self.context,
        )


def giga_cost(case: GigaCase) -> dict[str, Any]:
    """What one decode step of rank 0 moves and computes, as plain values."""
    one, two = _trace(case, 2), _trace(case, 4)
    pairs = case.geometry.num_layers / 2
    extra = pairs - 1

    def total(first: float, second: float) -> int:
        return round(first + extra * (second - first))

    a, b = one.counters[0], two.counters[0]
    hbm = total(a.hbm_read_bytes + a.hbm_write_bytes, b.hbm_read_bytes + b.hbm_write_bytes)
    ideal = _ideal_bytes(case)
    sbuf, psum = two.peaks[0]
    collectives = {
        kind: {key: total(a.collectives[kind][key], b.collectives[kind][key]) for key in ("count", "bytes")}
        for kind in b.collectives
    }
    by_part = {part: total(_part(a, part, "cycles"), _part(b, part, "cycles")) for part in b.sections}
    return {
        "where": "simulator, not device",
        "target": case.target,
        "mx_terms": case.mx_terms if case.target == "trn3" else 0,
        "ranks": case.mesh.world_size,
        "rows": case.rows,
        "context": case.context,
        "num_layers": case.geometry.num_layers,
        "hbm_bytes": hbm,
        "ideal_hbm_bytes": ideal,
        "hbm_ratio": round(hbm / ideal, 4),
        "hbm_read_bytes": total(a.hbm_read_bytes, b.hbm_read_bytes),
        "hbm_write_bytes": total(a.hbm_write_bytes, b.hbm_write_bytes),
        "sbuf_peak_bytes_per_partition": sbuf.bytes_per_partition,
        "sbuf_usable_bytes_per_partition": two.target.sbuf_usable_bytes,
        "psum_peak_banks": psum.banks,
        "collectives": collectives,
        "engine_cycles": {e: total(a.engine_cycles[e], b.engine_cycles[e]) for e in b.engine_cycles},
        "matmul_macs": total(a.matmul_macs, b.matmul_macs),
        "instructions": total(a.instructions, b.instructions),
        "cycles_by_part": by_part,
        "kv_blocks_read_per_row": {
            "sliding": case.shape.sliding_width,
            "full": case.shape.full_width,
        },
        "warnings": len(two.warnings),
    }


def _part(counters: Any, part: str, what: str) -> int:
    return int(getattr(counters.total(section=part), what))


def _pair_geometry(case: GigaCase, layers: int) -> ModelGeometry:
    return evolve(case.geometry, num_layers=layers, attention_kinds=alternating_kinds(layers))


def _ideal_bytes(case: GigaCase) -> int:
    """Every weight once, K and V of every token that is attended to once, K and V of every new token once."""
    g, layout = case.geometry, case.layout
    weights = total_bytes(build_stacked_weight_specs(g, case.mesh, 0, WeightLayout.NKI, ExpertFormat.MXFP4, "bfloat16"))
    token = 2 * layout.num_kv_heads * layout.head_size * layout.dtype.itemsize
    sliding = (g.num_layers + 1) // 2
    read = sliding * min(g.sliding_window, case.context) + (g.num_layers - sliding) * case.context
    hidden = 2 * case.rows // case.mesh.tp_size * padded_features(g.hidden_size) * 2
    return weights + case.rows * token * (read + g.num_layers) + hidden


def _trace(case: GigaCase, layers: int) -> Any:
    """The simulator's result of so many layers on shapes alone."""
    from gk_adapters.nki_kernel import giga_kernel
    from gk_adapters.torch_giga import GigaBuild, giga_config, giga_weight_names, require_kernel_limits, scratch_blocks
    from gk_kernels.simulator import HbmInput, simulate

    g, mesh, shape = _pair_geometry(case, layers), case.mesh, case.shape
    scratch = scratch_blocks(case.rows, case.layout.block_size)
    build = GigaBuild(target=case.target, scratch_blocks=scratch, mx_terms=case.mx_terms)
    layout = evolve(case.layout, num_layers=layers, num_blocks=case.layout.num_blocks + scratch)
    contract = KernelContract(
        layout=layout, shape=shape, mesh=mesh, hidden_size=g.hidden_size,
        model_dtypes=("bfloat16",), weights=(),
    )  # fmt: skip
    require_kernel_limits(contract, build)

    def shaped(dims: tuple[int, ...], dtype: str) -> HbmInput:
        return HbmInput(shape=dims, dtype=dtype)

    specs = build_stacked_weight_specs(g, mesh, 0, WeightLayout.NKI, ExpertFormat.MXFP4, "bfloat16")
    stacks = {spec.name: shaped(spec.shape, spec.dtype) for spec in specs}
    packed = layout.k_byte_order is KByteOrder.PAIR_PACKED
    v_shape = layout.buffer_shape[1:]
    k_shape = layout.packed_k_shape if packed else v_shape
    buffers = layers // 2
    kv_dtype = layout.dtype.dtype_name
    rows, half = case.rows, layout.head_size // 2
    column = (rows, 1)
    args = (
        shaped((contract.shard_rows, padded_features(g.hidden_size)), "bfloat16"),
        *(stacks[name] for name in giga_weight_names()),
        tuple(shaped(k_shape, kv_dtype) for _ in range(buffers)),
        tuple(shaped(v_shape, kv_dtype) for _ in range(buffers)),
        shaped((rows, shape.full_width), "int32"),
        shaped((rows, shape.sliding_width), "int32"),
        *(shaped(column, "float32") for _ in range(3)),
        *(shaped(column, "int32") for _ in range(2)),
        *(shaped(column, "uint8") for _ in range(2)),
        *(shaped((half, rows, 1), "bfloat16") for _ in range(2)),
        shaped((1, 1), "int32"),
        giga_config(g, contract, 0, KVScales(), build, mx_matmul=case.target == "trn3"),
    )
    return simulate(giga_kernel(simulated=True), *args, trace=True, target=case.target, sections=_PARTS)


@click.command()
@model_option
@click.option("--tp", type=click.IntRange(1), default=8, show_default=True, help="Tensor-parallel ranks of a replica.")
@click.option(
    "--dp", type=click.IntRange(1), default=16, show_default=True, help="Replicas; experts go over all ranks."
)
@click.option("--rows", type=click.IntRange(1), default=8, show_default=True, help="Rows (requests) per replica.")
@click.option("--context", type=click.IntRange(2), default=8192, show_default=True, help="Tokens of each row.")
@click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per block.")
@kv_dtype_option("fp8")
@click.option("--target", type=click.Choice(["trn2", "trn3"]), default="trn3", show_default=True)
@click.option(
    "--mx-terms", type=click.IntRange(1, 2), default=2, show_default=True, help="MXFP8 terms of an activation (trn3)."
)
@json_option
def giga(
    model: str, tp: int, dp: int, rows: int, context: int, block_size: int, kv_dtype: str, target: str, mx_terms: int,
    as_json: bool,
) -> None:  # fmt: skip
    """What one rank's decode step with the giga kernel would cost: bytes, memory, collectives, cycles.

    Runs in the simulator, not on a device; cycles are a model from counted work.
    """
    from gk_kernels.simulator.errors import SimulationError

    geometry = resolve_geometry(model)
    require_gk_geometry(geometry)
    if rows % tp:
        raise RequestError(f"--rows must be a multiple of --tp {tp}, got {rows}; pad the batch")
    dtype = KV_DTYPES[kv_dtype]
    specs = honest_specs(geometry, tp_size=tp, block_size=block_size, dtype=dtype)
    packed = dtype.is_fp8 and block_size % 2 == 0
    blocks = 1 + rows * (math.ceil(context / block_size) + 2)
    layout = layout_for(
        specs, num_blocks=blocks, k_byte_order=KByteOrder.PAIR_PACKED if packed else KByteOrder.TOKEN_MAJOR
    )
    mesh = DecodeMesh(tp_size=tp, dp_size=dp, ep_size=tp * dp)
    case = GigaCase(
        geometry=geometry, mesh=mesh, layout=layout, rows=rows, context=context, target=target, mx_terms=mx_terms
    )
    try:
        answer = giga_cost(case)
    except SimulationError as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    if as_json:
        emit_json({"model": model, "tp": tp, "dp": dp, **answer})
        return
    table = Table(show_header=False, box=None, title=f"{model}, TP{tp} x DP{dp}, {target} (simulator, not device)")
    for key, value in answer.items():
        table.add_row(key.replace("_", " "), f"{value:,}" if isinstance(value, int | float) else str(value))
    console().print(table)
