"""`gk check boundary`: which prompt lengths a disaggregated deployment answers differently from one engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from attrs import evolve

from gk_adapters.cli.common import console, emit_json, json_option
from gk_adapters.random_checkpoint import write_random_checkpoint
from gk_adapters.vllm.boundary_sweep import LengthResult, SweepReport, SweepSettings, Targets, parse_lengths, sweep
from gk_adapters.vllm.served import free_ports, started_servers
from gk_adapters.vllm.server_command import Connector, ServerKind, ServerSettings
from gk_core.disaggregation import stock_rule_loses_a_block
from gk_core.errors import RequestError

__all__ = ["boundary"]

_STOCK_TOLERANCE = 1e-3
_GK_TOLERANCE = 1e-4
_STOCK_CONFIRMATIONS = 4


@click.command()
@click.option("--lengths", default="1-700", show_default=True, help="Prompt lengths: 1-700, or 1,2,255.")
@click.option("--servers", nargs=3, metavar="PREFILL DECODE SINGLE", help="Base URLs of servers that run already.")
@click.option("--spawn", is_flag=True, help="Start three servers on loopback and end them afterwards.")
@click.option(
    "--model",
    help="Checkpoint folder, or the name under which running servers serve it.  [default with "
    "--spawn: a small one of random weights, made for the run]",
)
@click.option("--connector", type=click.Choice(["gk", "stock"]), default="gk", show_default=True, help="With --spawn.")
@click.option("--dtype", default=None, help="With --spawn; float32 for gk, bfloat16 for stock.")
@click.option("--block-size", type=click.IntRange(16, 256), default=128, show_default=True, help="With --spawn.")
@click.option("--window", type=click.IntRange(1), default=128, show_default=True, help="To name the rule's lengths.")
@click.option("--native-decode", is_flag=True, help="With --spawn: no giga kernel on the decode server.")
@click.option("--stock-polling", is_flag=True, help="With stock on a CPU: let NIXL keep a core busy, as vLLM does.")
@click.option("--cpu-cache-gib", type=click.IntRange(1), default=1, show_default=True, help="With --spawn, on a CPU.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="With --spawn: folder for server logs.")
@click.option("--extra", multiple=True, metavar="ARG", help="With --spawn: passed on to vLLM; may be given often.")
@click.option("--tokens", "num_tokens", type=click.IntRange(1), default=8, show_default=True, help="To generate.")
@click.option("--tolerance", type=float, default=None, help="Of a log-probability; 1e-4, for stock 1e-3.")
@click.option("--max-token-id", type=click.IntRange(4), default=500, show_default=True)
@click.option("--shared-prefix", is_flag=True, help="Prompts begin alike, so that prefix caches find something.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Of each prompt.")
@click.option(
    "--confirm",
    type=click.IntRange(0),
    default=None,
    help="Other prompts at each length that differs, to tell a fault from rounding; 4 for stock, else 0.",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Prompts under way at once.")
@json_option
@click.pass_context
def boundary(
    context: click.Context,
    lengths: str,
    servers: tuple[str, str, str] | None,
    spawn: bool,
    model: str | None,
    connector: str,
    dtype: str | None,
    block_size: int,
    window: int,
    native_decode: bool,
    stock_polling: bool,
    cpu_cache_gib: int,
    logs: Path | None,
    extra: tuple[str, ...],
    num_tokens: int,
    tolerance: float | None,
    max_token_id: int,
    shared_prefix: bool,
    repeats: int,
    confirm: int | None,
    workers: int,
    as_json: bool,
) -> None:
    """Send prompts through prefill and decode and through one engine; name each length that differs.

    Exit code 1 when one does.
    """
    if bool(servers) is spawn:
        raise RequestError("give either --servers PREFILL DECODE SINGLE or --spawn")
    if servers and model is None:
        raise RequestError("--servers needs --model, the name under which they serve it")
    kind = Connector(connector)
    stock = spawn and kind is Connector.STOCK
    settings = SweepSettings(
        lengths=parse_lengths(lengths),
        num_tokens=num_tokens,
        tolerance=(_STOCK_TOLERANCE if stock else _GK_TOLERANCE) if tolerance is None else tolerance,
        max_token_id=max_token_id,
        shared_prefix=shared_prefix,
        repeats=repeats,
        workers=workers,
        confirm=(_STOCK_CONFIRMATIONS if stock else 0) if confirm is None else confirm,
    )
    out = console()

    def show(result: LengthResult) -> None:
        if not as_json and (result.error or not result.tokens_equal):
            out.print(f"length {result.length}: {result.error or 'other tokens'}")

    if servers:
        targets = Targets(prefill=servers[0], decode=servers[1], single=servers[2], model=str(model))
        report = sweep(targets, settings, on_result=show)
    else:
        base = ServerSettings(
            kind=ServerKind.SINGLE,
            model=model or "",
            connector=kind,
            dtype=dtype or ("bfloat16" if stock else "float32"),
            block_size=block_size,
            max_model_len=max(settings.lengths) + num_tokens + 1,
            gk_decode=not native_decode,
            # vLLM's own rounding differs between cached and uncached prompts in bfloat16 by more than the fault.
            prefix_caching=not stock,
            nixl_polling=not stock or stock_polling,
            cpu_cache_gib=cpu_cache_gib,
            # Three servers that each took all cores would wait for one another.
            cpu_cores="nobind",
            extra=extra,
        )
        with _spawned(base, logs) as targets:
            report = sweep(targets, settings, on_result=show)
    _print_report(report, as_json, block_size, window)
    if report.differing_lengths:
        context.exit(1)


@contextlib.contextmanager
def _spawned(base: ServerSettings, logs: Path | None) -> Iterator[Targets]:
    ports = free_ports(5)
    with tempfile.TemporaryDirectory() as temporary:
        if not base.model:
            made = Path(temporary) / "model"
            write_random_checkpoint(made)
            base = evolve(base, model=str(made), extra=(*base.extra, "--skip-tokenizer-init"))
        settings = [
            evolve(base, kind=ServerKind.PREFILL, port=ports[0], side_channel_port=ports[3]),
            evolve(base, kind=ServerKind.DECODE, port=ports[1], side_channel_port=ports[4]),
            evolve(base, kind=ServerKind.SINGLE, port=ports[2], prefix_caching=False),
        ]
        folder = logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with started_servers(settings, logs=folder) as servers:
            yield Targets(prefill=servers[0].url, decode=servers[1].url, single=servers[2].url, model=base.model)


def _print_report(report: SweepReport, as_json: bool, block_size: int, window: int) -> None:
    if as_json:
        emit_json(report.as_json())
        return
    out = console()
    out.print(f"connector: {report.connector}")
    out.print(f"lengths checked: {len(report.results)}")
    out.print(f"largest log-probability difference: {report.max_logprob_difference:.3g}")
    if report.rounding_lengths:
        out.print(f"rounding, with one prompt and not with most others: {', '.join(map(str, report.rounding_lengths))}")
    if not report.differing_lengths:
        out.print("no length differs")
        return
    out.print(f"lengths that differ: {', '.join(map(str, report.differing_lengths))}")
    out.print(f"largest difference elsewhere: {report.rounding:.3g}")
    unanswered = {r.length for r in report.results if r.error}
    lost = [n for n in report.differing_lengths if stock_rule_loses_a_block(n, window, block_size)]
    named = [n for n in lost if n not in unanswered]
    if named:
        out.print(
            f"of these, a sliding-window block is lost between prefill and decode at {', '.join(map(str, named))} "
            f"(window {window}, block {block_size}): both sides must work one token short"
        )
