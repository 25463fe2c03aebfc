"""What goes into a decode engine and what comes out of it."""

from __future__ import annotations

from enum import Enum

from attrs import field, frozen

from gk_core.decode_step import ControlShape
from gk_core.errors import LayoutError, RequestError
from gk_core.hand_off import HandOff
from gk_core.pull import PullSettings

__all__ = [
    "DecodeEvent",
    "DecodeRequest",
    "DecodeSettings",
    "FailedPull",
    "FinishReason",
    "RequestFinished",
    "TokenEmitted",
    "blocks_at_most",
    "require_servable",
]


@frozen(kw_only=True)
class DecodeRequest:
    """One request.

    Attributes:
        request_id: ours; unique among the requests that have not finished.
        prompt: N token ids.
        max_new_tokens: most tokens to generate.
        eos_ids: token ids that end the answer; the one that does is emitted too.
        hand_off: the producer's offer for N - 1 tokens; None computes the whole prompt here, one step per token.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    hand_off: HandOff | None = None


class FailedPull(Enum):
    """What becomes of a request whose KV could not be pulled."""

    FAIL = "fail"
    REPLAY = "replay"
    """Compute the prompt here, one decode step per token."""


@frozen(kw_only=True)
class DecodeSettings:
    """Choices of a decode engine.

    Attributes:
        on_failed_pull: fail the request, or compute its prompt here.
        pull: times and limits of each pull.
        max_ahead: requests that may hold blocks without having a row yet; their pulls overlap with decoding.
        require_checksums: refuse hand-offs that carry none.

    Raises:
        LayoutError: a number out of range.
    """

    on_failed_pull: FailedPull = FailedPull.FAIL
    pull: PullSettings = field(factory=PullSettings)
    max_ahead: int = 4
    require_checksums: bool = False

    def __attrs_post_init__(self) -> None:
        if self.max_ahead < 0:
            raise LayoutError(f"max_ahead must be >= 0, got {self.max_ahead}")


@frozen(kw_only=True)
class TokenEmitted:
    """One generated token; index counts from 0."""

    request_id: str
    token_id: int
    index: int


class FinishReason(Enum):
    """Why a request is over."""

    EOS = "eos"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@frozen(kw_only=True)
class RequestFinished:
    """The one outcome of a request; nothing is emitted for it afterwards.

    Attributes:
        request_id: ours.
        reason: why.
        error: one line for people; empty unless FAILED.
        token_ids: everything that was generated.
        transferred_tokens: prompt tokens whose KV came by transfer.
        recomputed_tokens: prompt tokens computed here, the last one not counted.
    """

    request_id: str
    reason: FinishReason
    error: str
    token_ids: tuple[int, ...]
    transferred_tokens: int
    recomputed_tokens: int


DecodeEvent = TokenEmitted | RequestFinished
"""What `DecodeEngine.poll` returns."""


def blocks_at_most(num_tokens: int, shape: ControlShape) -> int:
    """Most blocks that a request with this many cached tokens ever holds, both groups together.

    ceil(T / n) full blocks, and as many sliding ones, but never more than a window touches, (W + n - 2) // n + 1, plus
    the one that it is about to leave.

    >>> shape = ControlShape(num_rows=1, block_size=16, sliding_window=128, max_model_len=1024)
    >>> blocks_at_most(16, shape), blocks_at_most(17, shape), blocks_at_most(1000, shape)
    (2, 4, 73)
    """
    full = -(-num_tokens // shape.block_size)
    touched = (shape.sliding_window + shape.block_size - 2) // shape.block_size + 1
    return full + min(full, touched + 1)


def require_servable(request: DecodeRequest, *, vocab_size: int, shape: ControlShape, capacity: int) -> None:
    """Refuse a request that no state of the engine could serve.

    Args:
        request: untrusted.
        vocab_size: of the model.
        shape: of the engine's steps.
        capacity: blocks of the whole cache.

    Raises:
        RequestError: naming value and limit.
    """
    n = len(request.prompt)
    if not n:
        raise RequestError("a prompt has at least 1 token, got 0")
    if request.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens must be >= 1, got {request.max_new_tokens}")
    for position, token in enumerate(request.prompt):
        if not 0 <= token < vocab_size:
            raise RequestError(f"token id {token} at position {position} is outside 0..{vocab_size - 1}")
    if n + request.max_new_tokens > shape.max_model_len:
        raise RequestError(
            f"prompt of {n} and max_new_tokens {request.max_new_tokens} exceed max_model_len {shape.max_model_len}"
        )
    need = blocks_at_most(n + request.max_new_tokens - 1, shape)
    if need > capacity:
        raise RequestError(
            f"prompt of {n} and max_new_tokens {request.max_new_tokens} may need {need} blocks, the whole cache has "
            f"{capacity}"
        )
    offered = request.hand_off
    if offered is not None and offered.num_tokens != n - 1:
        raise RequestError(f"a hand-off for a prompt of {n} tokens has {n - 1} tokens of KV, got {offered.num_tokens}")
