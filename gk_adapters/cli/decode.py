"""`gk decode`: the main job. Prefill on one engine, hand the KV cache over, decode with one kernel call per step."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from attrs import evolve, frozen
from rich.live import Live
from rich.table import Table

from gk_adapters.cli.common import KERNELS, KV_DTYPES, console, emit_json, json_option, kv_dtype_option
from gk_adapters.cli.servers import parse_endpoint, read_key, spawned_servers
from gk_core.errors import GkError, RequestError
from gk_core.kv_spec import KVDtype
from gk_core.metrics import NullMetrics
from gk_core.ports import Endpoint

__all__ = ["decode"]

_DTYPES = ("float32", "bfloat16", "checkpoint")
_TRANSPORTS = ("auto", "memory", "nixl")


@frozen(kw_only=True)
class _Job:
    directory: Path
    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    eos_ids: frozenset[int]
    kv_dtype: KVDtype
    block_size: int
    model_dtype: str | None
    kernel: str
    transport: str
    checksums: bool
    prefill: Endpoint | None
    decode: Endpoint | None
    key: bytes | None

    @property
    def kernel_label(self) -> str:
        """What runs the decode kernel, for people. A running server chose its own."""
        from gk_adapters.nodes import kernel_label

        return "the server's own" if self.decode is not None else kernel_label(self.kernel, self.directory)

    @property
    def packed(self) -> bool:
        """FP8 K is pair-packed."""
        return self.kv_dtype.is_fp8

    @property
    def max_model_len(self) -> int:
        """Tokens; what the longest prompt needs."""
        return max(len(p) for p in self.prompts) + self.max_new_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks for all prompts at once in both groups, and the null block."""
        per_prompt = 2 * (-(-self.max_model_len // self.block_size) + 2)
        return per_prompt * len(self.prompts) + 1


@click.command()
@click.option("--checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--prompt", "texts", multiple=True, help="Text; may be given often.")
@click.option("--prompt-ids", "ids", multiple=True, metavar="1,2,3", help="Token ids; may be given often.")
@click.option("--prompt-file", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True)
@kv_dtype_option("bf16")
@click.option("--block-size", type=int, default=128, show_default=True, help="Tokens per block.")
@click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True, help="Dtype computed in.")
@click.option("--kernel", type=click.Choice(KERNELS), default="torch", show_default=True,
              help="nki: on a Neuron device where there is one, else in the simulator; or by force.")  # fmt: skip
@click.option("--transport", type=click.Choice(_TRANSPORTS), default="auto", show_default=True,
              help="memory: both engines in this process; nixl: two processes; auto: nixl if installed.")  # fmt: skip
@click.option("--prefill", "prefill_at", metavar="HOST:PORT", help="Control address of a running gk prefill-server.")
@click.option("--decode", "decode_at", metavar="HOST:PORT", help="Control address of a running gk decode-server.")
@click.option("--key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Shared key.")
@click.option("--checksums", is_flag=True, help="Carry and check a checksum per block, half and head.")
@click.option("--ignore-eos", is_flag=True, help="Go on to --max-new-tokens whatever is generated.")
@click.option("--compare-hf", is_flag=True, help="Run transformers' GptOssForCausalLM beside it, in float32.")
@click.option("--compare-fp8", is_flag=True, help="Report a packed-FP8 KV cache beside the chosen one.")
@json_option
def decode(
    checkpoint: Path,
    texts: tuple[str, ...],
    ids: tuple[str, ...],
    files: tuple[Path, ...],
    max_new_tokens: int,
    kv_dtype: str,
    block_size: int,
    dtype: str,
    kernel: str,
    transport: str,
    prefill_at: str | None,
    decode_at: str | None,
    key_file: Path | None,
    checksums: bool,
    ignore_eos: bool,
    compare_hf: bool,
    compare_fp8: bool,
    as_json: bool,
) -> int:
    """Prefill, hand over, decode: greedy tokens for one or more prompts.

    Exit code 1 when a comparison with Hugging Face was asked for and tokens differ.
    """
    from gk_adapters.hf_config import read_hf_config

    if (prefill_at is None) is not (decode_at is None):
        raise RequestError("--prefill and --decode go together: the addresses of two running servers")
    config = read_hf_config(checkpoint)
    reader = _Reader(checkpoint)
    prompts = (
        *(reader.encode(t) for t in texts),
        *(_parse_ids(t) for t in ids),
        *(reader.encode(f.read_text(encoding="utf-8").strip()) for f in files),
    )
    if not prompts:
        raise RequestError("give at least one --prompt, --prompt-ids or --prompt-file")
    job = _Job(
        directory=checkpoint,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        eos_ids=frozenset() if ignore_eos else frozenset(config.eos_token_ids),
        kv_dtype=KV_DTYPES[kv_dtype],
        block_size=block_size,
        model_dtype=None if dtype == "checkpoint" else dtype,
        kernel=kernel,
        transport=_transport(transport, served=prefill_at is not None),
        checksums=checksums,
        prefill=None if prefill_at is None else parse_endpoint(prefill_at),
        decode=None if decode_at is None else parse_endpoint(decode_at),
        key=read_key(key_file),
    )
    _ = job.kernel_label  # refused here, before any server is started, where the kernel cannot run
    with _progress(job, reader, quiet=as_json) as on_token:
        answer = _run(job, on_token)
    wanted: list[tuple[int, ...]] | None = None
    if compare_hf:
        wanted = _reference(job)
        _compare(answer, wanted)
    if compare_fp8:
        beside = _run(evolve(job, kv_dtype=KVDtype.FP8_E4M3FN), lambda index, token: None)
        answer["fp8"] = {"outputs": beside["outputs"]}
        if wanted is not None:
            _compare(answer["fp8"], wanted)
    for output in answer["outputs"]:
        output["text"] = reader.decode(output["token_ids"])
    if as_json:
        emit_json(answer)
    else:
        _print_summary(answer)
    return 0 if answer.get("identical_to_hf", True) else 1


class _Reader:
    """The checkpoint's tokenizer, loaded only when text is met."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer: Any = None

    def encode(self, text: str) -> tuple[int, ...]:
        ids: tuple[int, ...] = self._loaded().encode(text)
        if not ids:
            raise RequestError("a prompt has at least one token, got an empty text")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        try:
            text: str = self._loaded().decode(token_ids)
        except GkError:
            return " ".join(map(str, token_ids))
        return text

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            from gk_adapters.text import Tokenizer

            self._tokenizer = Tokenizer(self._directory)
        return self._tokenizer


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(t) for t in text.replace(",", " ").split())
    except ValueError as error:
        raise RequestError(f"--prompt-ids must be integers separated by commas, got {text[:60]!r}") from error
    if not ids:
        raise RequestError("--prompt-ids must name at least one token")
    return ids


def _transport(wanted: str, *, served: bool) -> str:
    if served:
        return "nixl"
    if wanted != "auto":
        return wanted
    installed = all(importlib.util.find_spec(name) is not None for name in ("nixl", "zmq", "msgspec"))
    return "nixl" if installed else "memory"


def _run(job: _Job, on_token: Callable[[int, int], None]) -> dict[str, Any]:
    from gk_adapters.decode_job import Prompt

    prompts = [Prompt(token_ids=ids, max_new_tokens=job.max_new_tokens, eos_ids=job.eos_ids) for ids in job.prompts]
    if job.transport == "memory":
        results = _in_process(job, prompts, on_token)
    else:
        results = _over_servers(job, prompts, on_token)
    return {
        "checkpoint": str(job.directory),
        "kv_dtype": job.kv_dtype.dtype_name,
        "transport": job.transport,
        "kernel": job.kernel,
        "kernel_label": job.kernel_label,
        "outputs": [
            {
                "prompt_len": len(prompt.token_ids),
                "token_ids": list(result.token_ids),
                "transferred_tokens": result.transferred_tokens,
                "recomputed_tokens": result.recomputed_tokens,
                "timings": {
                    "prefill_seconds": round(result.prefill_seconds, 6),
                    "first_token_seconds": round(result.first_token_seconds, 6),
                    "decode_seconds": round(result.decode_seconds, 6),
                },
            }
            for prompt, result in zip(prompts, results, strict=True)
        ],
    }


def _in_process(job: _Job, prompts: list[Any], on_token: Callable[[int, int], None]) -> list[Any]:
    from gk_adapters.decode_job import run_in_process
    from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, kernel_factory, local_wirings
    from gk_adapters.torch_model import load_torch_model

    model = load_torch_model(job.directory, model_dtype=job.model_dtype)
    cache = CacheSettings(
        num_blocks=job.num_blocks,
        block_size=job.block_size,
        dtype=job.kv_dtype,
        packed=job.packed,
        max_model_len=job.max_model_len,
        num_rows=min(len(prompts), 8),
    )
    to_prefill, to_decode = local_wirings()
    metrics = NullMetrics()
    producer = PrefillNode(model=model, cache=cache, wiring=to_prefill, metrics=metrics, checksums=job.checksums)
    consumer = DecodeNode(
        model=model, cache=cache, wiring=to_decode, metrics=metrics, checksums=job.checksums,
        kernel=kernel_factory(job.kernel, job.directory),
    )  # fmt: skip
    try:
        return run_in_process(producer, consumer, prompts, on_token)
    finally:
        consumer.close()
        producer.close()


def _over_servers(job: _Job, prompts: list[Any], on_token: Callable[[int, int], None]) -> list[Any]:
    from gk_adapters.decode_job import run_over_services
    from gk_adapters.services import ServiceClient
    from gk_adapters.zmq_side_channel import ZmqSideChannel

    tag = uuid.uuid4().hex[:12]
    if job.prefill is not None and job.decode is not None:
        channel = ZmqSideChannel(key=job.key, allowed=(job.prefill, job.decode))
        clients = [ServiceClient(channel=channel, endpoint=e) for e in (job.prefill, job.decode)]
        try:
            return run_over_services(clients[0], clients[1], prompts, on_token, tag=tag)
        finally:
            channel.close()
    flags = [
        "--checkpoint", str(job.directory), "--num-blocks", str(job.num_blocks), "--block-size", str(job.block_size),
        "--kv-dtype", next(name for name, dtype in KV_DTYPES.items() if dtype is job.kv_dtype),
        "--max-model-len", str(job.max_model_len), "--num-rows", str(min(len(prompts), 8)),
        "--dtype", job.model_dtype or "checkpoint", *(["--checksums"] if job.checksums else []),
    ]  # fmt: skip
    with spawned_servers(flags, decode_flags=["--kernel", job.kernel]) as (prefill, decode_endpoint):
        channel = ZmqSideChannel()
        try:
            return run_over_services(
                ServiceClient(channel=channel, endpoint=prefill),
                ServiceClient(channel=channel, endpoint=decode_endpoint),
                prompts,
                on_token,
                tag=tag,
            )
        finally:
            channel.close()


def _reference(job: _Job) -> list[tuple[int, ...]]:
    from gk_adapters.hf_reference import HFReference

    reference = HFReference(job.directory)
    return [reference.greedy(prompt, job.max_new_tokens, job.eos_ids) for prompt in job.prompts]


def _compare(answer: dict[str, Any], wanted: list[tuple[int, ...]]) -> None:
    for output, reference in zip(answer["outputs"], wanted, strict=True):
        output["identical_to_hf"] = tuple(output["token_ids"]) == reference
        if not output["identical_to_hf"]:
            output["hf_token_ids"] = list(reference)
    answer["identical_to_hf"] = all(o["identical_to_hf"] for o in answer["outputs"])


@contextmanager
def _progress(job: _Job, reader: _Reader, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Tokens as they come: a live table on a terminal, otherwise one dot each."""
    if quiet:
        yield lambda index, token: None
        return
    out = console()
    out.print(
        f"{len(job.prompts)} prompt(s), {job.kv_dtype.dtype_name} KV, kernel: {job.kernel_label}, "
        + ("KV over NIXL between two processes" if job.transport == "nixl" else "both engines in this process")
    )
    tokens: list[list[int]] = [[] for _ in job.prompts]

    def table() -> Table:
        drawn = Table(box=None, show_header=True)
        for heading in ("prompt", "tokens so far"):
            drawn.add_column(heading)
        for prompt, so_far in zip(job.prompts, tokens, strict=True):
            drawn.add_row(f"{len(prompt)} tokens", reader.decode(so_far) if so_far else "...")
        return drawn

    with Live(table(), console=out, auto_refresh=False) as live:

        def on_token(index: int, token: int) -> None:
            tokens[index].append(token)
            if out.is_terminal:
                live.update(table(), refresh=True)

        yield on_token
        live.update(table(), refresh=True)


def _print_summary(answer: dict[str, Any]) -> None:
    out = console()
    compared = "identical_to_hf" in answer
    drawn = Table(box=None)
    headings = ["prompt", "new tokens", "KV transferred", "prefill s", "first token s", "ms per token"]
    for heading in headings + (["same as Hugging Face"] if compared else []):
        drawn.add_column(heading, justify="right")
    for output in answer["outputs"]:
        times, count = output["timings"], len(output["token_ids"])
        per_token = 1000 * times["decode_seconds"] / (count - 1) if count > 1 else 0.0
        row = [
            str(output["prompt_len"]),
            str(count),
            f"{output['transferred_tokens']} tokens",
            f"{times['prefill_seconds']:.3f}",
            f"{times['first_token_seconds']:.3f}",
            f"{per_token:.2f}",
        ]
        drawn.add_row(*row, *(["yes" if output["identical_to_hf"] else "NO"] if compared else []))
    out.print(drawn)
    if compared:
        out.print("all identical to Hugging Face" if answer["identical_to_hf"] else "tokens differ from Hugging Face")
    if "fp8" in answer:
        fp8 = answer["fp8"]
        same = sum(a["token_ids"] == b["token_ids"] for a, b in zip(answer["outputs"], fp8["outputs"], strict=True))
        beside = f"packed FP8 KV beside it: {same} of {len(fp8['outputs'])} prompts give the same tokens"
        if "identical_to_hf" in fp8:
            hf = sum(o["identical_to_hf"] for o in fp8["outputs"])
            beside += f", {hf} the same as Hugging Face"
        out.print(beside)
