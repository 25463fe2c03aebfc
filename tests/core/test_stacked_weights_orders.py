"""Index rules of the stored orders, against numbers worked by hand and against the text of the rule."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gk_core import checkpoint_tensors, stack_builder, weight_layouts
from gk_core.errors import LayoutError
from gk_core.weight_layouts import (
    PADDING,
    bf16_bias_order,
    fp4x4_order,
    hidden_of_stored,
    hidden_order,
    intermediate_of_stored,
    intermediate_order,
    mx_bias_order,
    padded_features,
    scale_block_order,
    stored_of_hidden,
    stored_of_intermediate,
)

sizes = st.integers(1, 1700)


@pytest.mark.parametrize("module", [weight_layouts, checkpoint_tensors, stack_builder])
def test_worked_examples_in_the_docstrings_are_true(module: object) -> None:
    """Every order shows its numbers."""
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert (failed, tried > 0) == (0, True)


@pytest.mark.parametrize(
    ("stored", "feature"),
    [(0, 0), (1, 4), (127, 508), (128, 512), (767, PADDING), (768, 1), (896, 513), (1536, 2), (2304, 3), (3023, 2879)],
)
def test_hidden_order_deals_quads_over_quarters(stored: int, feature: int) -> None:
    """Stored q * 768 + 128 t + p of a 2880 axis is feature 512 t + 4 p + q; quarters end in 48 zeros."""
    assert hidden_of_stored(stored, 2880) == feature


@pytest.mark.parametrize(
    ("stored", "feature"),
    [(0, 0), (1, 4), (127, 508), (128, 1), (384, 3), (511, 511), (512, 512), (2560, 2560), (2639, 2876), (2640, -1)],
)
def test_intermediate_order_deals_quads_inside_tiles(stored: int, feature: int) -> None:
    """Stored 512 T + 128 w + p of a 2880 axis is feature 512 T + 4 p + w."""
    assert intermediate_of_stored(stored, 2880) == feature


@given(size=sizes, data=st.data())
def test_orders_are_their_inverses_inverse(size: int, data: st.DataObject) -> None:
    """Storing a feature and asking what is stored there gives the feature back."""
    feature = data.draw(st.integers(0, size - 1))
    assert hidden_of_stored(stored_of_hidden(feature, size), size) == feature
    assert intermediate_of_stored(stored_of_intermediate(feature, size), size) == feature


@given(size=sizes)
def test_orders_hold_every_feature_once_and_zeros_elsewhere(size: int) -> None:
    """A padded axis is a permutation of the features and padding."""
    for order in (hidden_order(size), intermediate_order(size), mx_bias_order(size), bf16_bias_order(size)):
        assert len(order) == padded_features(size)
        assert sorted(i for i in order if i != PADDING) == list(range(size))


@given(blocks=st.integers(1, 60))
def test_an_mx_group_of_the_tile_is_one_checkpoint_block(blocks: int) -> None:
    """The 8 partitions x 4 lanes that share scale row B of tile t are the 32 features of checkpoint block 16 t + B."""
    size = 32 * blocks
    tiles = padded_features(size) // 512
    units, scales = fp4x4_order(size), scale_block_order(size)
    for p in range(128):
        for t in range(tiles):
            unit, block = units[p * tiles + t], scales[p // 8 * tiles + t]
            assert (unit == PADDING) == (block == PADDING)
            if unit != PADDING:
                assert {(4 * unit + lane) // 32 for lane in range(4)} == {block}


@pytest.mark.parametrize("stored", [-1, 3072])
def test_a_stored_index_outside_the_padded_axis_is_refused(stored: int) -> None:
    """2880 features have 3072 places."""
    for rule in (hidden_of_stored, intermediate_of_stored, stored_of_hidden, stored_of_intermediate):
        with pytest.raises(LayoutError, match=r"outside 0\.\.3071"):
            rule(stored, 2880)


def test_an_empty_feature_axis_is_refused() -> None:
    """Zero features cannot be padded to a tile."""
    with pytest.raises(LayoutError, match="got 0"):
        padded_features(0)
