"""The main job: prompts in, greedy tokens out, by a prefill node and a decode node, in one process or in two.

`run_in_process` drives both engines over the fakes; `run_over_services` asks two services that already listen. Both
report tokens as they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import field, frozen, mutable

from gk_adapters.nodes import DecodeNode, PrefillNode
from gk_adapters.services import ServiceClient
from gk_core.decode_request import DecodeRequest, FinishReason, TokenEmitted
from gk_core.errors import CapacityError, TransferError, TransferTimeoutError

__all__ = ["JobResult", "Prompt", "run_in_process", "run_over_services"]

OnToken = Callable[[int, int], None]
"""(index of the prompt, token id), called for every token as it comes."""

_POLL_SECONDS = 0.002


@frozen(kw_only=True)
class Prompt:
    """One prompt and how far to continue it."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int]


@mutable(kw_only=True)
class JobResult:
    """What became of one prompt.

    Attributes:
        token_ids: generated tokens.
        transferred_tokens, recomputed_tokens: prompt tokens whose KV came by transfer, or was computed again.
        prefill_seconds: from submission to hand-off.
        first_token_seconds: from hand-off to the first token: pull and one step.
        decode_seconds: from the first token to the last.
    """

    token_ids: list[int] = field(factory=list)
    transferred_tokens: int = 0
    recomputed_tokens: int = 0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0


def run_in_process(
    prefill: PrefillNode, decode: DecodeNode, prompts: Sequence[Prompt], on_token: OnToken
) -> list[JobResult]:
    """Prefill every prompt, hand over, decode all of them together.

    Raises:
        TransferError: a request failed; names it.
        GkError: a prompt cannot be served.
    """
    results = [JobResult() for _ in prompts]
    handed_over: dict[int, float] = {}
    waiting = list(range(len(prompts)))
    running = 0
    while waiting or running:
        while waiting and running < decode.shape.num_rows:
            index = waiting[0]
            started = time.perf_counter()
            try:
                offer = prefill.engine.submit(request_id=f"prompt-{index}", token_ids=prompts[index].token_ids)
            except CapacityError:
                if not running:
                    raise
                break
            handed_over[index] = time.perf_counter()
            results[index].prefill_seconds = handed_over[index] - started
            decode.engine.submit(
                DecodeRequest(
                    request_id=str(index),
                    prompt=prompts[index].token_ids,
                    max_new_tokens=prompts[index].max_new_tokens,
                    eos_ids=prompts[index].eos_ids,
                    hand_off=offer,
                )
            )
            waiting.pop(0)
            running += 1
        prefill.engine.poll()
        for event in decode.engine.poll():
            index, now = int(event.request_id), time.perf_counter()
            result = results[index]
            if isinstance(event, TokenEmitted):
                if not result.token_ids:
                    result.first_token_seconds = now - handed_over[index]
                    handed_over[index] = now
                result.token_ids.append(event.token_id)
                on_token(index, event.token_id)
                continue
            if event.reason is FinishReason.FAILED:
                raise TransferError(f"prompt {index} failed: {event.error}")
            running -= 1
            result.decode_seconds = now - handed_over[index]
            result.transferred_tokens, result.recomputed_tokens = event.transferred_tokens, event.recomputed_tokens
    # Let the last releases reach the producer, so that nothing is left on lease.
    for _ in range(1000):
        if not (prefill.engine.leases or decode.engine.has_work):
            break
        decode.engine.poll()
        prefill.engine.poll()
    return results


def run_over_services(
    prefill: ServiceClient,
    decode: ServiceClient,
    prompts: Sequence[Prompt],
    on_token: OnToken,
    *,
    tag: str,
    timeout_seconds: float = 600.0,
) -> list[JobResult]:
    """The same over two services.

    Args:
        tag: makes request ids that no other client uses.
        timeout_seconds: without any progress.

    Raises:
        TransferError: a request failed; names it.
        TransferTimeoutError: nothing happened for too long.
    """
    results = [JobResult() for _ in prompts]
    names = [f"{tag}-{index}" for index in range(len(prompts))]
    since: dict[int, float] = {}
    for index, prompt in enumerate(prompts):
        since[index] = time.perf_counter()
        prefill.ask(do="submit", request_id=names[index], prompt=list(prompt.token_ids))
    prefilling, decoding = set(range(len(prompts))), set[int]()
    progressed = time.perf_counter()
    while prefilling or decoding:
        for index in sorted(prefilling):
            answer = prefill.ask(do="result", request_id=names[index])
            if "error" in answer:
                raise TransferError(f"prompt {index} was not prefilled: {answer['error']}")
            if "hand_off" not in answer:
                continue
            progressed = time.perf_counter()
            results[index].prefill_seconds, since[index] = progressed - since[index], progressed
            decode.ask(
                do="submit",
                request_id=names[index],
                prompt=list(prompts[index].token_ids),
                max_new_tokens=prompts[index].max_new_tokens,
                eos_ids=sorted(prompts[index].eos_ids),
                hand_off=answer["hand_off"],
            )
            prefilling.remove(index)
            decoding.add(index)
        for index in sorted(decoding):
            result = results[index]
            answer = decode.ask(do="result", request_id=names[index], after=len(result.token_ids))
            now = time.perf_counter()
            for token in answer["tokens"]:
                progressed = now
                if not result.token_ids:
                    result.first_token_seconds, since[index] = now - since[index], now
                result.token_ids.append(token)
                on_token(index, token)
            if answer["finished"] in (FinishReason.EOS.value, FinishReason.LENGTH.value):
                result.decode_seconds = now - since[index]
                result.transferred_tokens = answer["transferred_tokens"]
                result.recomputed_tokens = answer["recomputed_tokens"]
                decoding.remove(index)
            elif answer["finished"] is not None:
                raise TransferError(f"prompt {index} {answer['finished']}: {answer['error']}")
        if time.perf_counter() - progressed > timeout_seconds:
            raise TransferTimeoutError(f"no progress for {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)
    return results
