"""`gk serve prefill|decode`: the vLLM command of one server of a deployment, printed or run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gk_adapters.vllm.server_command import (
    Connector,
    ServerKind,
    ServerSettings,
    server_arguments,
    server_environment,
    shell_line,
)
from gk_adapters.vllm.versions import require_vllm

__all__ = ["serve"]

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def serve() -> None:
    """Serve GPT-OSS with vLLM: a prefill server, a decode server, and `gk proxy` in front of them."""


def _shared(command: F) -> F:
    for option in reversed(
        (
            click.argument("model"),
            click.option("--host", default="127.0.0.1", show_default=True),
            click.option("--side-channel-host", default="127.0.0.1", show_default=True, help="What peers are told."),
            click.option("--dtype", default="auto", show_default=True),
            click.option("--kv-cache-dtype", default="auto", show_default=True),
            click.option("--packed-k", is_flag=True, help="Pair-packed K; needs --kv-cache-dtype fp8 on both servers."),
            click.option("--block-size", type=click.IntRange(16, 256), default=128, show_default=True),
            click.option("--max-model-len", type=click.IntRange(1), default=None),
            click.option("--max-num-seqs", type=click.IntRange(1), default=None),
            click.option("--max-num-batched-tokens", type=click.IntRange(1), default=None),
            click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True),
            click.option("--lease-seconds", type=click.IntRange(1), default=30, show_default=True),
            click.option("--connector", type=click.Choice(["gk", "stock"]), default="gk", show_default=True),
            click.option(
                "--gk-attention/--vllm-attention",
                default=True,
                show_default=True,
                help="Group buffers, or vLLM's own cache layout under gk's connector.",
            ),
            click.option("--cpu-cache-gib", type=click.IntRange(1), default=None, help="KV cache on a CPU."),
            click.option("--cpu-cores", default=None, metavar="LIST", help="Cores on a CPU, such as 0 or 0-3."),
            click.option("--print-only", is_flag=True, help="Print the command and run nothing."),
            click.argument("extra", nargs=-1, type=click.UNPROCESSED),
        )
    ):
        command = option(command)
    return command


@serve.command(context_settings={"ignore_unknown_options": True})
@click.option("--port", type=click.IntRange(1, 65_535), default=8100, show_default=True)
@click.option("--side-channel-port", type=click.IntRange(1, 65_535), default=5600, show_default=True)
@_shared
def prefill(print_only: bool, connector: str, **options: Any) -> None:
    """Compute prompts and offer their KV; the native per-layer model. What follows `--` goes to vLLM."""
    _go(ServerSettings(kind=ServerKind.PREFILL, connector=Connector(connector), **options), print_only)


@serve.command(context_settings={"ignore_unknown_options": True})
@click.option("--port", type=click.IntRange(1, 65_535), default=8200, show_default=True)
@click.option("--side-channel-port", type=click.IntRange(1, 65_535), default=5601, show_default=True)
@click.option("--gk-decode/--native-decode", default=True, show_default=True, help="The giga kernel, or per layer.")
@click.option(
    "--missing-kv",
    type=click.Choice(["replay", "pull_again", "refuse"]),
    default="replay",
    show_default=True,
    help="What a giga-kernel engine does with prompt tokens whose KV it does not have.",
)
@click.option("--on-failed-pull", type=click.Choice(["recompute", "fail"]), default="recompute", show_default=True)
@_shared
def decode(print_only: bool, connector: str, **options: Any) -> None:
    """Pull KV and decode. What follows `--` goes to vLLM."""
    _go(ServerSettings(kind=ServerKind.DECODE, connector=Connector(connector), **options), print_only)


def _go(settings: ServerSettings, print_only: bool) -> None:
    if print_only:
        click.echo(shell_line(settings))
        return
    require_vllm()
    args = server_arguments(settings)
    # From here on this process is the server, so that signals and exit codes are its own.
    os.execve(args[0], args, {**os.environ, **server_environment(settings)})
