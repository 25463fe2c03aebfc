"""`gk weights`: what one rank's kernel reads, where every byte of it comes from; and `gk weights build`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import frozen
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from gk_adapters.cli.common import NAMED_MODELS, console, emit_json, json_option, resolve_geometry
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import RequestError
from gk_core.kernel_contract import KVScales
from gk_core.model_geometry import ModelGeometry
from gk_core.stacked_weights import build_stacked_weight_specs, build_unstacked_weight_specs, total_bytes
from gk_core.weight_layouts import ExpertFormat, WeightLayout
from gk_core.weight_parts import StackedWeightSpec

__all__ = ["weights"]

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = (
    click.option(
        "--model",
        metavar="gpt-oss-120b|gpt-oss-20b|DIR",
        help="A model by name, or a checkpoint directory, which is then checked whole.",
    ),
    click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks of one replica."),
    click.option("--dp", type=int, default=1, show_default=True, help="Replicas."),
    click.option("--ep", type=int, help="Ranks that share the experts; default and only choice: tp * dp."),
    click.option("--rank", type=int, default=0, show_default=True, help="Whose weights."),
    click.option(
        "--layout",
        type=click.Choice([layout.value for layout in WeightLayout]),
        default=WeightLayout.NKI.value,
        show_default=True,
        help="nki: tiles for the NKI kernel; plain: checkpoint order, for the PyTorch kernel.",
    ),
    click.option(
        "--expert-format",
        type=click.Choice([fmt.value for fmt in ExpertFormat]),
        help="Of a model given by name (default mxfp4); a checkpoint's own otherwise.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        help="Of everything that the layout does not fix; default: the checkpoint's, or bfloat16.",
    ),
    click.option("--vocab-dp", type=int, default=1, show_default=True, help="Replicas that share the vocabulary."),
)


def _options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return json_option(command)


@frozen(kw_only=True)
class _Job:
    """The options, resolved."""

    model: str
    geometry: ModelGeometry
    mesh: DecodeMesh
    rank: int
    layout: WeightLayout
    expert_format: ExpertFormat
    dtype: str
    stacked: tuple[StackedWeightSpec, ...]
    unstacked: tuple[StackedWeightSpec, ...]
    checkpoint: Any

    @property
    def specs(self) -> tuple[StackedWeightSpec, ...]:
        return (*self.unstacked, *self.stacked)

    @property
    def answer(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tp": self.mesh.tp_size,
            "dp": self.mesh.dp_size,
            "ep": self.mesh.ep_size,
            "rank": self.rank,
            "layout": self.layout.value,
            "expert_format": self.expert_format.value,
            "dtype": self.dtype,
        }


@click.group(invoke_without_command=True)
@_options
@click.pass_context
def weights(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Every stacked weight of one rank: shape, dtype, bytes, source tensors and index rule."""
    if ctx.invoked_subcommand is not None:
        return
    job = _job(**options)
    scales, scales_from = _kv_scales(job.checkpoint)
    answer = job.answer | {
        "weights": [_row(spec) for spec in job.stacked],
        "total_bytes": total_bytes(job.stacked),
        "outside_layers": [_row(spec) for spec in job.unstacked],
        "outside_layers_bytes": total_bytes(job.unstacked),
        "kv_scales": {"k": scales.k, "v": scales.v, "from": scales_from},
    }
    if as_json:
        emit_json(answer)
    else:
        _print(answer)


@weights.command()
@_options
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    default=lambda: Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gk" / "weights",
    help="Directory of built stacks; default: gk/weights in the user's cache directory.",
)
@click.option("--threads", type=int, help="Layers built at once; default: one per core.")
def build(as_json: bool, cache: Path, threads: int | None, **options: Any) -> None:
    """Build one rank's stacks into the cache, or check that they are there."""
    from gk_adapters.weight_cache import WeightCache
    from gk_adapters.weight_stacks import BuildProgress

    job = _job(**options)
    if job.checkpoint is None:
        raise RequestError(f"--model must be a checkpoint directory to build from, got the name {job.model!r}")
    store = WeightCache(directory=cache)
    start = time.perf_counter()
    with Progress(
        TextColumn("rank {task.fields[rank]}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console(),
        disable=as_json,
    ) as bar:
        task = bar.add_task("build", total=total_bytes(job.specs), rank=job.rank, note="")

        def show(progress: BuildProgress) -> None:
            bar.update(task, completed=progress.bytes_done, note="")

        key = store.build(
            job.checkpoint,
            job.specs,
            threads=threads,
            progress=show,
            on_wait=lambda: bar.update(task, note="waiting for another build of the same stacks"),
        )
        bar.update(task, completed=total_bytes(job.specs))
    answer = job.answer | {
        "key": key,
        "path": str(store.entry(key)),
        "total_bytes": total_bytes(job.specs),
        "seconds": round(time.perf_counter() - start, 3),
    }
    if as_json:
        emit_json(answer)
    else:
        console().print(f"{answer['path']}\n{answer['total_bytes']:,} bytes in {answer['seconds']} s")


def _job(
    model: str | None,
    tp: int,
    dp: int,
    ep: int | None,
    rank: int,
    layout: str,
    expert_format: str | None,
    dtype: str | None,
    vocab_dp: int,
) -> _Job:
    if model is None:
        raise RequestError(f"--model must be one of {', '.join(NAMED_MODELS)} or a checkpoint directory")
    checkpoint = None
    geometry = resolve_geometry(model)
    fmt, own_dtype = ExpertFormat(expert_format or ExpertFormat.MXFP4.value), "bfloat16"
    if model not in NAMED_MODELS:
        from gk_adapters.hf_checkpoint import HFCheckpoint

        checkpoint = HFCheckpoint(Path(model))
        fmt, own_dtype = checkpoint.config.expert_format, checkpoint.config.model_dtype
        if expert_format not in (None, fmt.value):
            raise RequestError(f"--expert-format is {expert_format}, but the checkpoint's experts are {fmt.value}")
    dtype = dtype or own_dtype
    mesh = DecodeMesh(tp_size=tp, dp_size=dp, ep_size=tp * dp if ep is None else ep)
    stacked = build_stacked_weight_specs(geometry, mesh, rank, WeightLayout(layout), fmt, dtype)
    unstacked = build_unstacked_weight_specs(geometry, mesh, rank, WeightLayout(layout), dtype, vocab_dp)
    return _Job(
        model=model, geometry=geometry, mesh=mesh, rank=rank, layout=WeightLayout(layout), expert_format=fmt,
        dtype=dtype, stacked=stacked, unstacked=unstacked, checkpoint=checkpoint,
    )  # fmt: skip


def _kv_scales(checkpoint: Any) -> tuple[KVScales, str]:
    """The scales, and whether they were found or are the default of 1."""
    if checkpoint is None:
        return KVScales(), "default"
    from gk_adapters.hf_checkpoint import read_kv_scales

    found = any(name.endswith(("k_scale", "v_scale")) for name in checkpoint.tensors())
    return read_kv_scales(checkpoint), "checkpoint" if found else "default"


def _row(spec: StackedWeightSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "bytes": spec.num_bytes,
        "sources": [part.tensor for part in spec.parts],
        "rule": "; ".join(part.words for part in spec.parts),
    }


def _print(answer: dict[str, Any]) -> None:
    mesh = f"rank {answer['rank']} of TP{answer['tp']} x DP{answer['dp']}, EP{answer['ep']}"
    for key, total in (("weights", "total_bytes"), ("outside_layers", "outside_layers_bytes")):
        table = Table(
            title=f"{answer['model']}, {mesh}, {answer['layout']}" if key == "weights" else "outside the layers"
        )
        for column in ("name", "shape", "dtype", "bytes"):
            table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
        table.add_column("rule (per source axis)", overflow="fold")
        for row in answer[key]:
            shape = " ".join(str(n) for n in row["shape"])
            table.add_row(row["name"], shape, row["dtype"], f"{row['bytes']:,}", row["rule"])
        table.add_section()
        table.add_row("total", "", "", f"{answer[total]:,}", "")
        console().print(table)
    scales = answer["kv_scales"]
    console().print(f"KV scales: k {scales['k']}, v {scales['v']} ({scales['from']})")
