"""Notices: what a consumer and a producer say to each other about one lease.

    consumer -> producer   Claim            "do you still hold generation g for me?"; also the heartbeat
    producer -> consumer   ClaimReply       a verdict, and for how many seconds the blocks stay as they are
    consumer -> producer   Release          "I shall read no more", whatever the outcome
    producer -> consumer   ProducerFailure  "what you are reading is not worth having"

All four name the request by the producer's own id. Any of them may be lost, late, doubled or overtaken: a claim may be
repeated at any time, a lost release ends in the sweep, a lost reply in another claim.
"""

from __future__ import annotations

import math
from enum import Enum

from attrs import frozen

from gk_core.errors import RequestError
from gk_core.ports import PeerKey

__all__ = [
    "MAX_LEASE_SECONDS",
    "MAX_READERS",
    "Claim",
    "ClaimReply",
    "ClaimVerdict",
    "PeerNotice",
    "ProducerFailure",
    "Reader",
    "Release",
    "ReleaseKind",
]

MAX_READERS = 4096
"""Consumer ranks of one pull; above any mesh, so that a peer's number cannot make a producer wait for ever."""

MAX_LEASE_SECONDS = 86400.0
"""Longest validity that a reply may promise."""


@frozen(kw_only=True)
class Reader:
    """One consumer rank of one pull.

    Attributes:
        key: who reads, and where replies go.
        pull_id: the same for all ranks of one pull, never used again by that engine.
        num_readers: ranks of this pull that read from the addressed producer rank.

    Raises:
        RequestError: rank or count out of range.
    """

    key: PeerKey
    pull_id: str
    num_readers: int = 1

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.num_readers <= MAX_READERS:
            raise RequestError(f"num_readers must be 1..{MAX_READERS}, got {self.num_readers}")
        if not 0 <= self.key.rank < MAX_READERS:
            raise RequestError(f"a reader's rank must be 0..{MAX_READERS - 1}, got {self.key.rank}")

    @property
    def pull(self) -> tuple[str, str]:
        """Which pull: (engine id, pull id), the same for all its ranks."""
        return self.key.engine_id, self.pull_id


@frozen(kw_only=True)
class Claim:
    """A consumer's question whether a lease is still held, which also makes it hold longer.

    Attributes:
        engine_id: producer that the hand-off named; a restarted producer has another and refuses.
        request_id: the producer's id.
        generation: of the lease, from the hand-off.
        reader: who asks.
        sequence: echoed in the reply, so that the asker knows when the answered question was asked.
        digest: `offer_digest` of what the asker was told to read; the producer compares it with what it offered.
    """

    engine_id: str
    request_id: str
    generation: int
    reader: Reader
    sequence: int
    digest: str = ""


class ClaimVerdict(Enum):
    """What the producer says of a lease."""

    HELD = "held"
    UNKNOWN_REQUEST = "unknown_request"
    WRONG_ENGINE = "wrong_engine"
    STALE_GENERATION = "stale_generation"
    ALREADY_USED = "already_used"
    LEASE_OVER = "lease_over"
    PRODUCER_FAILED = "producer_failed"
    CONFLICT = "conflict"
    """The ranks of one pull contradict each other."""
    WRONG_OFFER = "wrong_offer"
    """The asker was told to read other blocks, or has another prompt, than the producer offered."""


@frozen(kw_only=True)
class ClaimReply:
    """Answer to one claim.

    Attributes:
        engine_id: producer that answers.
        request_id, generation, sequence, pull_id: as claimed.
        rank: producer rank that answers.
        verdict: HELD, or why not.
        valid_seconds: with HELD, the blocks keep their bytes at least this long after the claim was answered.

    Raises:
        RequestError: valid_seconds is not in 0..MAX_LEASE_SECONDS.
    """

    engine_id: str
    request_id: str
    generation: int
    pull_id: str
    sequence: int
    rank: int
    verdict: ClaimVerdict
    valid_seconds: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not (math.isfinite(self.valid_seconds) and 0 <= self.valid_seconds <= MAX_LEASE_SECONDS):
            raise RequestError(f"valid_seconds must be 0..{MAX_LEASE_SECONDS:.0f}, got {self.valid_seconds}")


class ReleaseKind(Enum):
    """Why a consumer lets go."""

    DONE = "done"
    FAILED = "failed"
    REJECTED = "rejected"
    """The whole request was refused before any rank read; counts for all ranks of the consumer."""


@frozen(kw_only=True)
class Release:
    """A consumer rank reads no more.

    Attributes:
        engine_id, request_id, generation: the lease, as in the hand-off.
        reader: who lets go.
        kind: why.
    """

    engine_id: str
    request_id: str
    generation: int
    reader: Reader
    kind: ReleaseKind


@frozen(kw_only=True)
class ProducerFailure:
    """The producer withdraws a lease that somebody has claimed.

    Attributes:
        engine_id, request_id, generation: the lease.
        pull_id: the pull that is told.
        rank: producer rank that says so.
        reason: for the reader's log, one line.
    """

    engine_id: str
    request_id: str
    generation: int
    pull_id: str
    rank: int
    reason: str


PeerNotice = Claim | ClaimReply | Release | ProducerFailure
"""Any of the four."""
