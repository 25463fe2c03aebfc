"""Prompts of many lengths through prefill and decode servers and through one server: which lengths come out different.

A deployment that loses KV at a window boundary answers with HTTP 200, at the right speed, with tokens that read well.
It shows only against an engine that moved nothing.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attrs import evolve, frozen

from gk_adapters.vllm.served import post_json
from gk_core.errors import RequestError, TransferError

__all__ = [
    "LengthResult",
    "SweepReport",
    "SweepSettings",
    "Targets",
    "lengths_with_neighbours",
    "parse_lengths",
    "prompt_of",
    "sweep",
]


_WARM_UP_TOKENS = 40


@frozen(kw_only=True)
class Targets:
    """Base URLs of the three servers, and the model that they serve."""

    prefill: str
    decode: str
    single: str
    model: str


@frozen(kw_only=True)
class SweepSettings:
    """What is sent and what counts as different.

    Attributes:
        lengths: prompt lengths, tokens.
        num_tokens: tokens to generate per prompt.
        tolerance: largest difference of a token's log-probability that still counts as equal.
        max_token_id: prompts are of ids below this.
        shared_prefix: prompts are the beginnings of one sequence, so that prefix caches have something to find.
        repeats: how often each prompt goes through prefill and decode.
        workers: prompts under way at once.
        seed: of the prompts.
        confirm: other prompts to send at each length that differs. A lost block shows with every prompt of its length;
            rounding, which in bfloat16 now and then turns an expert choice, with few. 0: every difference counts.
    """

    lengths: tuple[int, ...]
    num_tokens: int = 8
    tolerance: float = 1e-4
    max_token_id: int = 500
    shared_prefix: bool = False
    repeats: int = 1
    workers: int = 1
    seed: int = 0
    confirm: int = 0


@frozen(kw_only=True)
class LengthResult:
    """One length.

    Attributes:
        length: tokens of the prompt.
        tokens_equal: whether every answer had the single server's tokens.
        logprob_difference: largest difference over tokens that both have in common from the front, over all repeats.
        transferred: whether the prefill server offered KV.
        generation: whether the offer carried a lease's generation, as gk's do.
        error: what a server answered instead; empty when all answered.
        is_rounding: it differs, and other prompts of its length do not.
    """

    length: int
    tokens_equal: bool
    logprob_difference: float
    transferred: bool = False
    generation: bool = False
    error: str = ""
    is_rounding: bool = False

    def differs(self, tolerance: float) -> bool:
        """Whether it was answered with other tokens, other log-probabilities, or an error."""
        return bool(self.error) or not self.tokens_equal or not self.logprob_difference <= tolerance


@frozen(kw_only=True)
class SweepReport:
    """All lengths."""

    results: tuple[LengthResult, ...]
    tolerance: float

    @property
    def differing_lengths(self) -> tuple[int, ...]:
        """Lengths whose tokens or log-probabilities differ, by more than rounding, or that ended in an error."""
        return tuple(r.length for r in self.results if r.differs(self.tolerance) and not r.is_rounding)

    @property
    def rounding_lengths(self) -> tuple[int, ...]:
        """Lengths at which one prompt was answered differently and most others were not."""
        return tuple(r.length for r in self.results if r.is_rounding)

    @property
    def max_logprob_difference(self) -> float:
        """Over all lengths that were answered."""
        return max((r.logprob_difference for r in self.results if not r.error), default=0.0)

    @property
    def rounding(self) -> float:
        """Largest difference at lengths that do not count as differing."""
        wrong = set(self.differing_lengths)
        return max((r.logprob_difference for r in self.results if r.length not in wrong), default=0.0)

    @property
    def connector(self) -> str:
        """Whose offers the prefill server made: gk, stock, or none."""
        offers = [r for r in self.results if r.transferred]
        return ("gk" if all(r.generation for r in offers) else "stock") if offers else "none"

    def as_json(self) -> dict[str, Any]:
        """The report as `gk check boundary --json` prints it."""
        return {
            "lengths_checked": [r.length for r in self.results],
            "differing_lengths": list(self.differing_lengths),
            "max_logprob_difference": self.max_logprob_difference,
            "connector": self.connector,
            "rounding": self.rounding,
            "rounding_lengths": list(self.rounding_lengths),
            "tolerance": self.tolerance,
            "logprob_differences": {str(r.length): r.logprob_difference for r in self.results if r.logprob_difference},
            "errors": {str(r.length): r.error for r in self.results if r.error},
        }


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths from text, ascending and once each.

    >>> parse_lengths("1-3,255,7,2-2")
    (1, 2, 3, 7, 255)

    Raises:
        RequestError: not of the form 1-700 or 1,2,255.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise RequestError(f"lengths must be like 1-700 or 1,2,255, got {text[:64]!r}")
        low, high = int(first), int(last) if dash else int(first)
        if not 1 <= low <= high <= 1_000_000:
            raise RequestError(f"lengths must ascend within 1..1000000, got {part.strip()!r}")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def sweep(
    targets: Targets, settings: SweepSettings, *, on_result: Callable[[LengthResult], None] | None = None
) -> SweepReport:
    """Send every prompt; an answer that is an error belongs to its length and stops nothing.

    Each server first computes one prompt by itself: vLLM 0.28's own CPU attention ends its process with an illegal
    instruction on processors with AMX when the first thing that it ever runs is a decode step.
    """
    for url in sorted({targets.prefill, targets.decode, targets.single}):
        with contextlib.suppress(TransferError):
            post_json(f"{url}/v1/completions", _body(targets, prompt_of(settings, _WARM_UP_TOKENS), 1))
    with ThreadPoolExecutor(settings.workers) as threads:
        results: list[LengthResult] = []
        for result in threads.map(lambda n: _check_and_confirm(targets, settings, n), settings.lengths):
            results.append(result)
            if on_result is not None:
                on_result(result)
    return SweepReport(results=tuple(results), tolerance=settings.tolerance)


def prompt_of(settings: SweepSettings, length: int) -> list[int]:
    """Token ids of one prompt; the same for the same settings and length."""
    seed = settings.seed if settings.shared_prefix else settings.seed * 1_000_003 + length
    rng = random.Random(seed)
    return [rng.randrange(3, settings.max_token_id) for _ in range(length)]


@frozen
class _Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def _check_and_confirm(targets: Targets, settings: SweepSettings, length: int) -> LengthResult:
    result = _check(targets, settings, length)
    if result.error or not settings.confirm or not result.differs(settings.tolerance):
        return result
    others = [
        _check(targets, evolve(settings, seed=settings.seed + 1 + i), length).differs(settings.tolerance)
        for i in range(settings.confirm)
    ]
    return evolve(result, is_rounding=sum(others) < 0.75 * len(others))


def _check(targets: Targets, settings: SweepSettings, length: int) -> LengthResult:
    body = _body(targets, prompt_of(settings, length), settings.num_tokens)
    equal, difference, transferred, generation = True, 0.0, False, False
    try:
        # A salt of its own: the single engine may also be the prefill server, and must not find what that computed.
        wanted = _answer(post_json(f"{targets.single}/v1/completions", {**body, "cache_salt": "single"}))
        for _ in range(settings.repeats):
            offer = _prefill(targets, body)
            transferred, generation = offer is not None, offer is not None and "remote_generation" in offer
            got = _answer(
                post_json(f"{targets.decode}/v1/completions", {**body, "kv_transfer_params": offer} if offer else body)
            )
            equal = equal and got.token_ids == wanted.token_ids
            difference = max(difference, _difference(got, wanted))
    except TransferError as error:
        return LengthResult(length=length, tokens_equal=False, logprob_difference=0.0, error=str(error))
    return LengthResult(
        length=length,
        tokens_equal=equal,
        logprob_difference=difference,
        transferred=transferred,
        generation=generation,
    )


def _body(targets: Targets, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": targets.model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }


def _prefill(targets: Targets, body: dict[str, Any]) -> dict[str, Any] | None:
    asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    del asked["logprobs"]
    offer = post_json(f"{targets.prefill}/v1/completions", asked).get("kv_transfer_params")
    return offer if isinstance(offer, dict) else None


def _answer(reply: dict[str, Any]) -> _Answer:
    try:
        choice = reply["choices"][0]
        return _Answer(tuple(map(int, choice["token_ids"])), tuple(map(float, choice["logprobs"]["token_logprobs"])))
    except (KeyError, IndexError, TypeError, ValueError):
        raise TransferError("the server's answer has no token ids with log-probabilities") from None


def _difference(a: _Answer, b: _Answer) -> float:
    """Largest difference up to and including the first position with different tokens."""
    return max(_differences(a, b), default=0.0)


def _differences(a: _Answer, b: _Answer) -> Iterable[float]:
    for x, y, p, q in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=False):
        yield abs(p - q)
        if x != y:
            return


def lengths_with_neighbours(lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths and those on either side.

    >>> lengths_with_neighbours([255, 383])
    (254, 255, 256, 382, 383, 384)
    """
    return tuple(sorted({m for n in lengths for m in (n - 1, n, n + 1) if m >= 1}))
