"""Peer layout: everything about one rank's cache that a peer's must equal, or that is mapped onto it."""

from __future__ import annotations

import math
from enum import Enum

from attrs import frozen

from gk_core.disaggregation import Role
from gk_core.errors import LayoutError
from gk_core.kv_layout import KByteOrder, KVLayout
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import AttentionKind, ModelGeometry, YarnRope, layers_of_buffer
from gk_core.rank_grid import RankGrid

__all__ = [
    "SCHEMA_VERSION",
    "BlockOrder",
    "PeerLayout",
    "ScaleGranularity",
    "TransferMode",
    "describe_rank",
]

SCHEMA_VERSION = 1
"""Of the handshake and everything in it; counts up with any change of a field or of its meaning."""


class BlockOrder(Enum):
    """Order of axes inside a block. Only head-major blocks can be split and merged by head."""

    HEAD_MAJOR = "kv,block,d"
    TOKEN_MAJOR = "block,kv,d"


class ScaleGranularity(Enum):
    """What one KV scale covers. Per-block scales would have to travel with the blocks; they are refused."""

    PER_TENSOR = "per_tensor"
    PER_BLOCK = "per_block"


class TransferMode(Enum):
    """Who moves the bytes. Only pull, where the decode side reads, is served."""

    PULL = "pull"
    PUSH = "push"


@frozen(kw_only=True)
class PeerLayout:
    """Everything about one rank's cache that must agree with a peer's, or be mapped onto it.

    Attributes:
        schema_version: of this value.
        engine_id: serving instance; a restart gets a new one.
        role: producer or consumer.
        weights_id: what the operator calls the weights, equal on both sides; "" on both when unused. Never a path.
        num_layers, hidden_size, num_q_heads, num_kv_heads, head_size, vocab_size, sliding_window: of the whole model.
        attention_kinds: one per layer.
        rope: K is stored rotated, so rotary parameters are part of its bytes.
        kernel_block_size: tokens of one registered block; the unit that moves.
        kv_dtype: element type; FP8 dialects are different types.
        k_byte_order: of K inside one head.
        block_order: of axes inside one block.
        k_scale, v_scale: stored = x / scale.
        scale_granularity: what one scale covers.
        buffer_layers: layers that share each buffer, in region order.
        group_kinds: attention kind of each KV cache group, in order.
        group_block_sizes: tokens of one block id, per group; a multiple of kernel_block_size.
        num_blocks: registered (kernel) blocks of this rank, the null block's included.
        block_bytes: bytes of one registered block, per region; K then V of each buffer.
        tp_size, tp_rank: tensor parallelism.
        dcp_size, dcp_rank: decode context parallelism; dcp_rank = tp_rank % dcp_size.
        interleave_size: tokens dealt to one DCP rank in turn; meaningful when a side has DCP.
        transfer_mode: pull or push.
        num_speculative_tokens: draft tokens per step.

    Raises:
        LayoutError: numbers that describe no cache.
    """

    schema_version: int = SCHEMA_VERSION
    engine_id: str
    role: Role
    weights_id: str
    num_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    sliding_window: int
    attention_kinds: tuple[AttentionKind, ...]
    rope: YarnRope
    kernel_block_size: int
    kv_dtype: KVDtype
    k_byte_order: KByteOrder
    block_order: BlockOrder
    k_scale: float
    v_scale: float
    scale_granularity: ScaleGranularity
    buffer_layers: tuple[tuple[int, ...], ...]
    group_kinds: tuple[AttentionKind, ...]
    group_block_sizes: tuple[int, ...]
    num_blocks: int
    block_bytes: tuple[int, ...]
    tp_size: int
    tp_rank: int
    dcp_size: int
    dcp_rank: int
    interleave_size: int
    transfer_mode: TransferMode
    num_speculative_tokens: int

    def __attrs_post_init__(self) -> None:
        for name in (
            "schema_version", "num_layers", "hidden_size", "num_q_heads", "num_kv_heads", "head_size", "vocab_size",
            "sliding_window", "kernel_block_size", "num_blocks", "tp_size", "dcp_size", "interleave_size",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not self.engine_id:
            raise LayoutError("engine_id must not be empty")
        for name in ("k_scale", "v_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise LayoutError(f"{name} must be a positive finite number, got {value}")
        if self.num_speculative_tokens < 0:
            raise LayoutError(f"num_speculative_tokens must be >= 0, got {self.num_speculative_tokens}")
        if not self.block_bytes or min(self.block_bytes) < 1:
            raise LayoutError(f"block_bytes must have one entry >= 1 per region, got {self.block_bytes}")
        if not self.group_kinds or len(self.group_kinds) != len(self.group_block_sizes):
            raise LayoutError(
                f"need one block size per KV cache group: got {len(self.group_block_sizes)} for {len(self.group_kinds)}"
            )
        self._check_kernel_blocks()
        RankGrid(num_kv_heads=self.num_kv_heads, tp_size=self.tp_size, dcp_size=self.dcp_size)
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.dcp_rank < self.dcp_size):
            raise LayoutError(
                f"tp_rank {self.tp_rank} of {self.tp_size} or dcp_rank {self.dcp_rank} of {self.dcp_size} is outside"
            )

    def _check_kernel_blocks(self) -> None:
        for size in self.group_block_sizes:
            ratio = size // self.kernel_block_size
            if size < 1 or size % self.kernel_block_size:
                raise LayoutError(
                    f"group_block_sizes must be multiples of kernel_block_size {self.kernel_block_size}, got {size}"
                )
            if self.num_blocks % ratio:
                raise LayoutError(
                    f"num_blocks must be a multiple of the {ratio} kernel blocks of one block, got {self.num_blocks}"
                )

    @property
    def num_regions(self) -> int:
        """Registered regions, K and V."""
        return len(self.block_bytes)

    @property
    def block_size(self) -> int:
        """Tokens of one block id, the same in every group (`check_peer` refuses others)."""
        return self.group_block_sizes[0]

    @property
    def kernel_blocks_per_block(self) -> int:
        """Registered blocks behind one block id."""
        return self.block_size // self.kernel_block_size

    @property
    def grid(self) -> RankGrid:
        """Who holds which heads and tokens."""
        return RankGrid(num_kv_heads=self.num_kv_heads, tp_size=self.tp_size, dcp_size=self.dcp_size)

    @property
    def expected_block_bytes(self) -> int:
        """Bytes that its own numbers make one registered block of one region: heads * tokens * d * itemsize."""
        return self.grid.heads_per_rank * self.kernel_block_size * self.head_size * self.kv_dtype.itemsize


def describe_rank(
    geometry: ModelGeometry,
    layout: KVLayout,
    *,
    engine_id: str,
    role: Role,
    tp_size: int,
    tp_rank: int,
    dcp_size: int = 1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    weights_id: str = "",
) -> PeerLayout:
    """The layout of one rank with gk's own cache: two groups, shared buffers, one K and one V region each."""
    kinds = tuple(k for k in (AttentionKind.SLIDING, AttentionKind.FULL) if k in geometry.attention_kinds)
    return PeerLayout(
        engine_id=engine_id,
        role=role,
        weights_id=weights_id,
        num_layers=geometry.num_layers,
        hidden_size=geometry.hidden_size,
        num_q_heads=geometry.num_q_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        vocab_size=geometry.vocab_size,
        sliding_window=geometry.sliding_window,
        attention_kinds=geometry.attention_kinds,
        rope=geometry.rope,
        kernel_block_size=layout.block_size,
        kv_dtype=layout.dtype,
        k_byte_order=layout.k_byte_order,
        block_order=BlockOrder.HEAD_MAJOR,
        k_scale=k_scale,
        v_scale=v_scale,
        scale_granularity=ScaleGranularity.PER_TENSOR,
        buffer_layers=tuple(layers_of_buffer(j, layout.num_layers) for j in range(layout.num_buffers)),
        group_kinds=kinds,
        group_block_sizes=(layout.block_size,) * len(kinds),
        num_blocks=layout.num_blocks,
        block_bytes=(layout.block_bytes,) * (2 * layout.num_buffers),
        tp_size=tp_size,
        tp_rank=tp_rank,
        dcp_size=dcp_size,
        dcp_rank=tp_rank % dcp_size,
        interleave_size=layout.block_size,
        transfer_mode=TransferMode.PULL,
        num_speculative_tokens=0,
    )
