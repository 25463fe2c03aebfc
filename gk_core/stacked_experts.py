"""The experts' stacks in each layout and checkpoint format; shapes are in `stacked_weights`.

Checkpoint rows 2 i are gate and 2 i + 1 up.
"""

from __future__ import annotations

from gk_core.stack_builder import AS_IS, StackBuilder, one_axis
from gk_core.weight_layouts import (
    FEATURES_PER_TILE,
    FP4_PER_BLOCK,
    LANES,
    PADDING,
    PARTITIONS,
    bf16_bias_order,
    fp4x4_order,
    intermediate_order,
    mx_bias_order,
    padded_features,
    plain_padded_order,
    scale_block_order,
)
from gk_core.weight_parts import Indices, SourceAxis, SourceView, StackedWeightSpec, ValueRule

__all__ = ["nki_bf16", "nki_mxfp4", "plain_bf16", "plain_mxfp4"]

_UP_BIAS = ValueRule(add=1)
_SCALE_BYTE = ValueRule(refused=255)
_GATE_UP = (("gate, even rows", AS_IS), ("up, odd rows", _UP_BIAS))


def _interleaved(order: Indices) -> tuple[int, ...]:
    """Rows 2 i + g of gate (g 0) and up (g 1), [2, len(order)] row-major."""
    return tuple(PADDING if i == PADDING else 2 * i + g for g in (0, 1) for i in order)


def _gate_up_bias(
    b: StackBuilder, order: Indices, stack_axes: tuple[int, ...], shape: tuple[int, ...]
) -> StackedWeightSpec:
    """Gate and up bias as two boxes, since only up gets + 1; gate/up is stack axis 2 for NKI, 1 for PLAIN."""
    gate_axis = 2 if b.is_nki else 1
    parts = [
        b.part(
            b.layer["mlp.experts.gate_up_proj_bias"],
            [
                b.experts(),
                SourceAxis(
                    indices=tuple(PADDING if i == PADDING else 2 * i + g for i in order),
                    stack_axes=stack_axes, shape=shape, rule=words,
                ),
            ],
            2 + len(shape), {gate_axis: g}, rule,
        )
        for g, (words, rule) in enumerate(_GATE_UP)
    ]  # fmt: skip
    return b.spec("expert_gate_up_bias", parts)


def _down_bias(b: StackBuilder) -> StackedWeightSpec:
    source = b.layer["mlp.experts.down_proj_bias"]
    return b.spec("expert_down_bias", [b.part(source, [b.experts(), b.hidden(1)], 2)])


def plain_mxfp4(b: StackBuilder) -> list[StackedWeightSpec]:
    """The experts of an MXFP4 checkpoint in checkpoint order, gate and up apart, packed as they are stored."""
    h, i = b.geometry.hidden_size, b.geometry.intermediate_size
    gate_up = SourceAxis(
        indices=_interleaved(range(i)), stack_axes=(1, 2), shape=(2, i), rule="even rows gate, odd rows up"
    )

    def stack(name: str, key: str, rows: SourceAxis, columns: int, axes: int, scales: bool) -> StackedWeightSpec:
        per_column = FP4_PER_BLOCK if scales else 2
        last = one_axis(range(columns // per_column), axes - 1, "scale blocks" if scales else "bytes of two")
        return b.spec(
            name,
            [
                b.part(
                    b.layer[key], [b.experts(), rows, last], axes,
                    rule=_SCALE_BYTE if scales else AS_IS,
                    view=SourceView.STORED if scales else SourceView.FP4_BYTES,
                )
            ],
            "uint8",
        )  # fmt: skip

    hidden = one_axis(range(h), 1, "hidden")
    return [
        stack("expert_gate_up_weights", "mlp.experts.gate_up_proj_blocks", gate_up, h, 4, False),
        stack("expert_gate_up_weights_scale", "mlp.experts.gate_up_proj_scales", gate_up, h, 4, True),
        _gate_up_bias(b, range(i), (2,), (i,)),
        stack("expert_down_weights", "mlp.experts.down_proj_blocks", hidden, i, 3, False),
        stack("expert_down_weights_scale", "mlp.experts.down_proj_scales", hidden, i, 3, True),
        _down_bias(b),
    ]


def plain_bf16(b: StackBuilder) -> list[StackedWeightSpec]:
    """The experts of a BF16 checkpoint in checkpoint order, gate and up apart."""
    i = b.geometry.intermediate_size
    gate_up = SourceAxis(
        indices=_interleaved(range(i)), stack_axes=(1, 3), shape=(2, i), rule="even columns gate, odd columns up"
    )
    down = [b.experts(), one_axis(range(i), 1, "intermediate"), b.hidden(2)]
    return [
        b.spec(
            "expert_gate_up_weights",
            [b.part(b.layer["mlp.experts.gate_up_proj"], [b.experts(), b.hidden(2), gate_up], 4)],
        ),
        _gate_up_bias(b, range(i), (2,), (i,)),
        b.spec("expert_down_weights", [b.part(b.layer["mlp.experts.down_proj"], down, 3)]),
        _down_bias(b),
    ]


def nki_mxfp4(b: StackBuilder) -> list[StackedWeightSpec]:
    """The experts of an MXFP4 checkpoint in the NKI layout: four FP4 values a word, scale bytes beside them."""
    h, i = b.geometry.hidden_size, b.geometry.intermediate_size
    i_tiles = padded_features(i) // FEATURES_PER_TILE
    columns = intermediate_order(i)
    gate_up = SourceAxis(
        indices=_interleaved(columns), stack_axes=(2, 4), shape=(2, len(columns)),
        rule="even rows gate, odd rows up, intermediate order",
    )  # fmt: skip
    scale_rows = FEATURES_PER_TILE // FP4_PER_BLOCK

    def stack(name: str, key: str, rows: SourceAxis, n: int, inner: tuple[int, int], axes: int) -> StackedWeightSpec:
        """Weights and scales differ in what a unit is: four values on 128 partitions, or 32 on 16 rows."""
        scales = key.endswith("scales")
        units = SourceAxis(
            indices=scale_block_order(n) if scales else fp4x4_order(n), stack_axes=inner,
            shape=(scale_rows if scales else PARTITIONS, padded_features(n) // FEATURES_PER_TILE),
            rule="scale block 16 t + B" if scales else "four values at 512 t + 4 p",
        )  # fmt: skip
        part = b.part(
            b.layer[key], [b.experts(), rows, units], axes,
            rule=_SCALE_BYTE if scales else AS_IS, view=SourceView.STORED if scales else SourceView.FP4_X4,
        )  # fmt: skip
        return b.spec(name, [part], "uint8" if scales else "uint16")

    return [
        stack("expert_gate_up_weights", "mlp.experts.gate_up_proj_blocks", gate_up, h, (1, 3), 5),
        stack("expert_gate_up_weights_scale", "mlp.experts.gate_up_proj_scales", gate_up, h, (1, 3), 5),
        _gate_up_bias(b, mx_bias_order(i), (1, 3, 4), (PARTITIONS, i_tiles, LANES)),
        stack("expert_down_weights", "mlp.experts.down_proj_blocks", b.hidden(3), i, (1, 2), 4),
        stack("expert_down_weights_scale", "mlp.experts.down_proj_scales", b.hidden(3), i, (1, 2), 4),
        _down_bias(b),
    ]


def nki_bf16(b: StackBuilder) -> list[StackedWeightSpec]:
    """The experts of a BF16 checkpoint in the NKI layout: hidden shuffled, intermediate padded to whole tiles."""
    i = b.geometry.intermediate_size
    order = plain_padded_order(i)
    gate_up = SourceAxis(
        indices=_interleaved(order), stack_axes=(2, 3), shape=(2, len(order)), rule="even columns gate, odd columns up"
    )
    down = [b.experts(), one_axis(order, 1, "intermediate"), b.hidden(2)]
    return [
        b.spec(
            "expert_gate_up_weights",
            [b.part(b.layer["mlp.experts.gate_up_proj"], [b.experts(), b.hidden(1), gate_up], 4)],
        ),
        _gate_up_bias(b, bf16_bias_order(i), (1, 3), (PARTITIONS, len(order) // PARTITIONS)),
        b.spec("expert_down_weights", [b.part(b.layer["mlp.experts.down_proj"], down, 3)]),
        _down_bias(b),
    ]
