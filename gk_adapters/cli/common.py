"""What the commands share: the JSON switch, the console, model names and the one-line error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from gk_core.errors import RequestError
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import GPT_OSS_20B, GPT_OSS_120B, ModelGeometry

__all__ = [
    "KERNELS",
    "KV_DTYPES",
    "NAMED_MODELS",
    "console",
    "emit_json",
    "json_option",
    "kv_dtype_option",
    "model_option",
    "resolve_geometry",
]

NAMED_MODELS = {"gpt-oss-120b": GPT_OSS_120B, "gpt-oss-20b": GPT_OSS_20B}
KERNELS = ("torch", "nki", "nki-simulator", "nki-device")
"""Decode kernels by name; see `nodes.kernel_factory`."""
KV_DTYPES = {
    "bf16": KVDtype.BF16,
    "fp8": KVDtype.FP8_E4M3FN,
    "fp8_e4m3": KVDtype.FP8_E4M3,
    "fp16": KVDtype.FP16,
    "fp32": KVDtype.FP32,
}

F = TypeVar("F", bound=Callable[..., Any])


def console() -> Console:
    """Where people read: standard output, plain when it is not a terminal."""
    return Console(highlight=False, soft_wrap=True)


def emit_json(value: object) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=2, sort_keys=False))


def json_option(command: F) -> F:
    """`--json` on every command."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def kv_dtype_option(default: str) -> Callable[[F], F]:
    """`--kv-dtype`, as an enum's name on the command line."""
    return click.option(
        "--kv-dtype",
        type=click.Choice(list(KV_DTYPES)),
        default=default,
        show_default=True,
        help="Element type of the KV cache; fp8 is OCP e4m3fn (max 448), fp8_e4m3 the one with max 240.",
    )


def model_option(command: F) -> F:
    """`--model NAME|DIR`."""
    return click.option(
        "--model",
        required=True,
        metavar="gpt-oss-120b|gpt-oss-20b|DIR",
        help="A model by name, or a checkpoint directory with a config.json.",
    )(command)


def resolve_geometry(model: str) -> ModelGeometry:
    """Geometry of a named model or of a checkpoint directory.

    Raises:
        RequestError: neither a known name nor a directory.
        CheckpointError: the directory's config.json is missing or wrong.
    """
    if model in NAMED_MODELS:
        return NAMED_MODELS[model]
    if not Path(model).is_dir():
        raise RequestError(f"--model must be one of {', '.join(NAMED_MODELS)} or a directory, got {model!r}")
    from gk_adapters.hf_config import read_hf_config

    return read_hf_config(Path(model)).geometry
