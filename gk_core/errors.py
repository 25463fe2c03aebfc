"""Every error of gk, grouped by who has to act.

    GkError
    ├── LayoutError            the caller's numbers do not describe a cache      -> fix the call
    ├── CheckpointError        a file does not hold what its names promise       -> fix the checkpoint
    ├── RequestError           one request's parameters cannot be served        -> fix that request
    ├── CapacityError          no room for this now                             -> wait, preempt or enlarge
    ├── PeerMismatchError      two valid caches cannot exchange blocks          -> fix the deployment
    ├── UnsupportedError       valid in the field, not done here                -> choose another path
    ├── MissingDependencyError an optional package is not installed             -> install the extra
    └── TransferError          a port failed while bytes were to move           -> retry or recompute
        ├── PeerLostError
        └── TransferTimeoutError

The core raises the first six; adapters raise the last two kinds. Messages state the rule, what was got, the limit and
what to do.
"""

from __future__ import annotations

from attrs import frozen

__all__ = [
    "CapacityError",
    "CheckpointError",
    "GkError",
    "LayoutError",
    "Mismatch",
    "MissingDependencyError",
    "PeerLostError",
    "PeerMismatchError",
    "RequestError",
    "TransferError",
    "TransferTimeoutError",
    "UnsupportedError",
]


class GkError(Exception):
    """Base of every error that gk raises on purpose."""


class LayoutError(GkError, ValueError):
    """Numbers that do not describe a KV cache, a table or a mesh."""


class CheckpointError(GkError, ValueError):
    """A checkpoint file that is missing, damaged or contradicts its config; names the key or tensor."""


class RequestError(GkError, ValueError):
    """One request's parameters, often a client's own, that cannot be served; no other request is touched."""


@frozen(kw_only=True)
class Mismatch:
    """One field on which two peers differ.

    Attributes:
        field: name of the field as in `PeerLayout`.
        ours: our value, printable.
        theirs: the peer's value, printable.
    """

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs}"


class CapacityError(GkError):
    """No free blocks or rows for this now; nothing was taken, the same call may succeed later."""


class PeerMismatchError(GkError):
    """Two caches, each valid, that cannot exchange blocks. Holds every mismatch, not only the first."""

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        self.mismatches = mismatches
        super().__init__("peers differ: " + "; ".join(str(m) for m in mismatches))


class UnsupportedError(GkError):
    """Valid elsewhere, not served here; the message says which other path serves it."""


class MissingDependencyError(GkError, ImportError):
    """An optional package is absent; the message says which extra installs it."""


class TransferError(GkError):
    """A transport or side channel failed while bytes were to move; nothing of it counts as received."""


class PeerLostError(TransferError):
    """The peer does not exist, has gone, or came back as somebody else."""


class TransferTimeoutError(TransferError):
    """A deadline passed first."""
