"""Ports: what the engines need of the world. Adapters subclass these explicitly and pass the port's contract tests.

Values in, values out; keyword-only; no port returns a status string or None for failure. An adapter that lacks a method
cannot be made. `T` is the adapter's own tensor type, which the core passes through unread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from attrs import frozen

from gk_core.block_table import BlockTable
from gk_core.decode_step import AttentionControl
from gk_core.kernel_contract import DecodeCall, TensorLike
from gk_core.kv_spec import KVCachePlan, LayerKVSpec
from gk_core.region import KVRegion
from gk_core.transfer_plan import RankRead

__all__ = [
    "BlockPool",
    "CallBuilder",
    "Clock",
    "DecodeKernel",
    "Endpoint",
    "GroupTables",
    "KVCachePlanner",
    "KVTransport",
    "Metrics",
    "Notice",
    "NoticePort",
    "PeerAgent",
    "PeerKey",
    "PrefillModel",
    "ReadHandle",
    "ReadState",
    "Sampler",
    "SideChannel",
    "SideChannelServer",
    "WeightInfo",
    "WeightSource",
]

T = TypeVar("T", bound=TensorLike)
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Clock(Protocol):
    """Time."""

    @abstractmethod
    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        ...


class KVCachePlanner(Protocol):
    """Turns honest per-layer specs and a memory budget into groups, shared buffers and a block count."""

    @abstractmethod
    def plan(self, *, specs: tuple[LayerKVSpec, ...], memory_bytes: int) -> KVCachePlan:
        """Plan a cache.

        Raises:
            LayoutError: the memory does not hold two blocks.
            UnsupportedError: the planner's groups or pairs are not what the giga kernel reads.
        """
        ...


@frozen(kw_only=True)
class GroupTables:
    """One request's block tables, by group.

    Attributes:
        full: full-attention group.
        sliding: sliding group, evicted entries NULL_BLOCK_ID.
    """

    full: BlockTable
    sliding: BlockTable


class BlockPool(Protocol):
    """One pool of block ids that both groups draw from. Block 0 is the null block and is never handed out."""

    @abstractmethod
    def grow(self, *, request_id: str, num_computed_tokens: int, num_new_tokens: int) -> GroupTables:
        """Evict what a query at `num_computed_tokens` no longer reads, then make room for the new tokens.

        Tokens before `num_computed_tokens` that have no block yet get one too (they arrive by transfer), except those
        that the sliding window has already left behind.

        Raises:
            CapacityError: not enough free blocks; nothing was taken. What the window left behind is given back even so.
            LayoutError: counts that go backwards or below zero.
        """
        ...

    @abstractmethod
    def tables(self, *, request_id: str) -> GroupTables:
        """Current tables.

        Raises:
            LayoutError: the request holds nothing.
        """
        ...

    @abstractmethod
    def free(self, *, request_id: str) -> None:
        """Give back all blocks of a request; harmless when it holds none."""
        ...

    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        ...


class PrefillModel(Protocol):
    """A native per-layer engine that fills the group buffers it was built over."""

    @abstractmethod
    def prefill(self, *, token_ids: Sequence[int], start_position: int, tables: GroupTables) -> None:
        """Compute K and V of tokens start_position.. and write them to the tables' blocks. Blocks until written.

        Earlier tokens of the request are read from the tables. Sliding blocks that the tables no longer hold are not
        read.
        """
        ...


class DecodeKernel(Protocol[T]):
    """The whole decoder stack as one call."""

    @abstractmethod
    def step(self, *, call: DecodeCall[T]) -> T:
        """Run all layers for one token per row; write each active row's K and V; return the hidden shard [T, H].

        Rows that are not active change no block, the null block included.

        Raises:
            LayoutError: the call is not what the kernel's contract allows; nothing was written.
        """
        ...


class CallBuilder(Protocol[T]):
    """Embeds tokens and turns plain control values into the tensors of a call."""

    @abstractmethod
    def build(self, *, token_ids: tuple[int, ...], control: AttentionControl) -> DecodeCall[T]:
        """One call; token_ids has one entry per row, anything for inactive rows."""
        ...


class Sampler(Protocol[T_contra]):
    """Final norm, vocabulary projection and greedy choice."""

    @abstractmethod
    def sample(self, *, hidden: T_contra, active: tuple[bool, ...]) -> tuple[int, ...]:
        """One token id per row; entries of inactive rows are meaningless.

        Raises:
            LayoutError: an active row's logits hold NaN.
        """
        ...


@frozen(kw_only=True)
class WeightInfo:
    """Shape and dtype name of one checkpoint tensor."""

    shape: tuple[int, ...]
    dtype: str


class WeightSource(Protocol[T_co]):
    """Checkpoint tensors by name, read lazily."""

    @abstractmethod
    def tensors(self) -> Mapping[str, WeightInfo]:
        """Every tensor of the checkpoint."""
        ...

    @abstractmethod
    def read(self, *, name: str) -> T_co:
        """One whole tensor.

        Raises:
            CheckpointError: no such tensor, or its file is damaged.
        """
        ...


@frozen(kw_only=True)
class Endpoint:
    """Where a side channel listens."""

    host: str
    port: int


@frozen(kw_only=True)
class PeerKey:
    """One worker of one engine.

    Attributes:
        engine_id: serving instance; a restart gets a new one.
        rank: its rank.
    """

    engine_id: str
    rank: int


@frozen(kw_only=True)
class PeerAgent:
    """What a transport needs to reach one peer worker.

    Attributes:
        key: who.
        agent_metadata: the transport's own blob, opaque to the core.
        regions: the peer's registered regions, same order as ours.
    """

    key: PeerKey
    agent_metadata: bytes
    regions: tuple[KVRegion, ...]


class ReadState(Enum):
    """How a posted read stands."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class ReadHandle(Protocol):
    """One posted read."""

    @abstractmethod
    def poll(self) -> ReadState:
        """State now; never blocks. DONE means every byte has landed; after FAILED no byte will land any more."""
        ...

    @abstractmethod
    def release(self) -> None:
        """Free the handle; only when it is no longer PENDING. Harmless twice."""
        ...


class KVTransport(Protocol):
    """Moves blocks from a peer's regions into ours."""

    @abstractmethod
    def register(self, *, regions: tuple[KVRegion, ...]) -> bytes:
        """Register our regions once and return the blob that peers need. The same regions again change nothing.

        Raises:
            TransferError: the transport refused, or other regions are registered already.
        """
        ...

    @abstractmethod
    def connect(self, *, peer: PeerAgent) -> None:
        """Make a peer known. The same peer again changes nothing; other metadata under the same key replaces it.

        Raises:
            PeerLostError: the peer's blob is not valid.
            LayoutError: its regions do not pair with ours.
        """
        ...

    @abstractmethod
    def read(self, *, peer: PeerKey, read: RankRead) -> ReadHandle:
        """Post one read without blocking.

        Raises:
            PeerLostError: the peer is not connected.
            LayoutError: a block is outside either side's regions; nothing was posted.
            TransferError: the transport refused to post.
        """
        ...

    @abstractmethod
    def disconnect(self, *, peer: PeerKey) -> None:
        """Forget a peer; reads from it that are under way end as FAILED once quiet. Harmless when unknown."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Release everything, quiescing reads first. Harmless twice."""
        ...


@frozen(kw_only=True)
class Notice:
    """A small message from a peer's agent; untrusted bytes."""

    sender: str
    payload: bytes


class NoticePort(Protocol):
    """Small messages between agents. No order between a notice and a read; may be lost, late or doubled."""

    @abstractmethod
    def send_notice(self, *, peer: PeerKey, payload: bytes) -> None:
        """Send without blocking.

        Raises:
            PeerLostError: the peer is not connected or has gone.
        """
        ...

    @abstractmethod
    def take_notices(self) -> tuple[Notice, ...]:
        """Notices since the last call, in order of arrival."""
        ...


class SideChannel(Protocol):
    """Out-of-band requests for metadata, never KV."""

    @abstractmethod
    def request(self, *, endpoint: Endpoint, message: bytes, timeout_seconds: float) -> bytes:
        """One request, one reply. Blocks at most `timeout_seconds`.

        Raises:
            TransferTimeoutError: no reply in time.
            PeerLostError: nobody there, or the reply failed its checks.
        """
        ...

    @abstractmethod
    def close(self) -> None:
        """Harmless twice."""
        ...


class SideChannelServer(Protocol):
    """The listening half of a side channel. Whatever arrives, it goes on listening."""

    @abstractmethod
    def serve(self, *, handler: Callable[[bytes], bytes]) -> Endpoint:
        """Start answering in the background and return where. A handler that raises answers that one request only."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Stop; harmless twice."""
        ...


class Metrics(Protocol):
    """Counts what an operator needs to see. Names are the core's, labels are the adapter's affair."""

    @abstractmethod
    def count(self, *, name: str, value: float = 1.0) -> None:
        """Add to a counter."""
        ...

    @abstractmethod
    def observe(self, *, name: str, value: float) -> None:
        """Record one value of a distribution."""
        ...
