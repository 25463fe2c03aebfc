"""Orders in which weights are stored: small index rules, one home for each.

Dims: H hidden, I intermediate; Hp, Ip the same padded to whole tiles; d head size.

A rule maps a stored index to the checkpoint's index, or to PADDING where the stored element is zero. The NKI layout's
rules all say one thing: a contraction tile is 512 consecutive features, feature 512 t + 4 p + q of it on partition p in
lane q, so that one MX group (8 partitions x 4 lanes) is 32 consecutive features, which is one checkpoint scale block:
nibbles and scales go in without requantising.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from gk_core.errors import LayoutError

__all__ = [
    "FEATURES_PER_TILE",
    "FP4_PER_BLOCK",
    "LANES",
    "PADDING",
    "PARTITIONS",
    "ExpertFormat",
    "WeightLayout",
    "bf16_bias_order",
    "fp4x4_order",
    "hidden_of_stored",
    "hidden_order",
    "intermediate_of_stored",
    "intermediate_order",
    "mx_bias_order",
    "padded_features",
    "plain_padded_order",
    "scale_block_order",
    "stored_of_hidden",
    "stored_of_intermediate",
]

PADDING = -1
PARTITIONS = 128
LANES = 4
FEATURES_PER_TILE = PARTITIONS * LANES
FP4_PER_BLOCK = 32
_BLOCKS_PER_TILE = FEATURES_PER_TILE // FP4_PER_BLOCK


class WeightLayout(Enum):
    """Who reads the stacks: the PyTorch kernel (checkpoint order, no padding) or the NKI kernel (tiles)."""

    PLAIN = "plain"
    NKI = "nki"


class ExpertFormat(Enum):
    """How the checkpoint holds expert matrices."""

    BF16 = "bf16"
    MXFP4 = "mxfp4"


def padded_features(n: int) -> int:
    """Features rounded up to whole tiles of 512.

    >>> padded_features(2880), padded_features(512), padded_features(33)
    (3072, 512, 512)

    Raises:
        LayoutError: n < 1.
    """
    if n < 1:
        raise LayoutError(f"a feature axis must have >= 1 features, got {n}")
    return -(-n // FEATURES_PER_TILE) * FEATURES_PER_TILE


def hidden_of_stored(stored: int, hidden: int) -> int:
    """Hidden feature at a stored index: 4 (s mod Hp/4) + s // (Hp/4), or PADDING past the last feature.

    Lane q of tile t, partition p is stored at q Hp/4 + 128 t + p and is feature 512 t + 4 p + q.

    >>> [hidden_of_stored(s, 2880) for s in (0, 1, 719, 720, 767, 768, 769, 3071)]
    [0, 4, 2876, -1, -1, 1, 5, -1]

    Raises:
        LayoutError: the index is outside the padded axis.
    """
    quarter = _checked(stored, padded_features(hidden)) // LANES
    feature = LANES * (stored % quarter) + stored // quarter
    return feature if feature < hidden else PADDING


def stored_of_hidden(feature: int, hidden: int) -> int:
    """Where a hidden feature is stored.

    >>> [stored_of_hidden(h, 2880) for h in (0, 1, 4, 2879)]
    [0, 768, 1, 3023]

    Raises:
        LayoutError: the feature is outside the padded axis.
    """
    return feature % LANES * (_checked(feature, padded_features(hidden)) // LANES) + feature // LANES


def intermediate_of_stored(stored: int, intermediate: int) -> int:
    """Intermediate feature of a stored expert column: 512 T + 128 w + p holds 512 T + 4 p + w.

    >>> [intermediate_of_stored(j, 2880) for j in (0, 1, 128, 511, 512, 2639, 2640, 2687, 2688)]
    [0, 4, 1, 511, 512, 2876, -1, -1, 2561]

    Raises:
        LayoutError: the index is outside the padded axis.
    """
    _checked(stored, padded_features(intermediate))
    tile, rest = divmod(stored, FEATURES_PER_TILE)
    lane, partition = divmod(rest, PARTITIONS)
    feature = FEATURES_PER_TILE * tile + LANES * partition + lane
    return feature if feature < intermediate else PADDING


def stored_of_intermediate(feature: int, intermediate: int) -> int:
    """Where an intermediate feature's column is stored.

    >>> [stored_of_intermediate(i, 2880) for i in (0, 1, 4, 2879)]
    [0, 128, 1, 3023]

    Raises:
        LayoutError: the feature is outside the padded axis.
    """
    _checked(feature, padded_features(intermediate))
    tile, rest = divmod(feature, FEATURES_PER_TILE)
    return FEATURES_PER_TILE * tile + PARTITIONS * (rest % LANES) + rest // LANES


def _checked(index: int, size: int) -> int:
    if not 0 <= index < size:
        raise LayoutError(f"index {index} is outside 0..{size - 1}")
    return size


@lru_cache(maxsize=64)
def hidden_order(hidden: int) -> tuple[int, ...]:
    """Hidden feature of each stored index; shape [Hp].

    >>> order = hidden_order(2880)
    >>> len(order), order[:3], order[768:771], order.count(-1)
    (3072, (0, 4, 8), (1, 5, 9), 192)
    """
    return tuple(hidden_of_stored(s, hidden) for s in range(padded_features(hidden)))


@lru_cache(maxsize=64)
def intermediate_order(intermediate: int) -> tuple[int, ...]:
    """Intermediate feature of each stored column; shape [Ip].

    >>> order = intermediate_order(2880)
    >>> len(order), order[:3], order[128:131], order.count(-1)
    (3072, (0, 4, 8), (1, 5, 9), 192)
    """
    return tuple(intermediate_of_stored(j, intermediate) for j in range(padded_features(intermediate)))


@lru_cache(maxsize=64)
def plain_padded_order(n: int) -> tuple[int, ...]:
    """Features in checkpoint order, padded at the end; shape [padded_features(n)].

    >>> plain_padded_order(510)[508:]
    (508, 509, -1, -1)
    """
    return tuple(i if i < n else PADDING for i in range(padded_features(n)))


@lru_cache(maxsize=64)
def fp4x4_order(n: int) -> tuple[int, ...]:
    """Unit of four consecutive FP4 values at [p, t], row-major; shape [128, tiles].

    Unit 128 t + p holds features 512 t + 4 p + 0..3.

    >>> fp4x4_order(2880)[:6], fp4x4_order(2880)[-6:]
    ((0, 128, 256, 384, 512, 640), (127, 255, 383, 511, 639, -1))
    """
    return _by_tile(PARTITIONS, padded_features(n) // FEATURES_PER_TILE, n // LANES)


@lru_cache(maxsize=64)
def scale_block_order(n: int) -> tuple[int, ...]:
    """Scale block at [B, t], row-major; shape [16, tiles]: block 16 t + B.

    >>> scale_block_order(2880)[:6], scale_block_order(2880)[-6:]
    ((0, 16, 32, 48, 64, 80), (15, 31, 47, 63, 79, -1))
    """
    return _by_tile(_BLOCKS_PER_TILE, padded_features(n) // FEATURES_PER_TILE, n // FP4_PER_BLOCK)


def _by_tile(per_tile: int, tiles: int, limit: int) -> tuple[int, ...]:
    units = (per_tile * t + p for p in range(per_tile) for t in range(tiles))
    return tuple(u if u < limit else PADDING for u in units)


@lru_cache(maxsize=64)
def mx_bias_order(intermediate: int) -> tuple[int, ...]:
    """Intermediate feature of a bias at [p, T, w], row-major; shape [128, tiles, 4]: 512 T + 4 p + w.

    >>> mx_bias_order(2880)[:8], mx_bias_order(2880)[-4:]
    ((0, 1, 2, 3, 512, 513, 514, 515), (-1, -1, -1, -1))
    """
    tiles = padded_features(intermediate) // FEATURES_PER_TILE
    features = (
        FEATURES_PER_TILE * tile + LANES * p + w
        for p in range(PARTITIONS)
        for tile in range(tiles)
        for w in range(LANES)
    )
    return tuple(i if i < intermediate else PADDING for i in features)


@lru_cache(maxsize=64)
def bf16_bias_order(intermediate: int) -> tuple[int, ...]:
    """Intermediate feature of a bias at [p, c], row-major; shape [128, Ip / 128]: 128 c + p.

    >>> bf16_bias_order(510)[:4], bf16_bias_order(510)[-8:]
    ((0, 128, 256, 384), (126, 254, 382, -1, 127, 255, 383, -1))
    """
    return _by_tile(PARTITIONS, padded_features(intermediate) // PARTITIONS, intermediate)
