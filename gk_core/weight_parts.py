"""A stacked weight as a value: which element of which checkpoint tensor stands at each of its places.

A stack is made of parts, each a gather from one checkpoint tensor per layer. A part names an index vector for each
source axis and the stack axes that the vector runs over; everything else (the element function below, the loader that
moves bytes, the coverage checks) is derived from those vectors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from enum import Enum

from attrs import frozen

from gk_core.errors import LayoutError
from gk_core.kernel_contract import TensorSpec
from gk_core.weight_layouts import PADDING

__all__ = [
    "DTYPE_BYTES",
    "ElementSource",
    "Indices",
    "SourceAxis",
    "SourceView",
    "StackedWeightSpec",
    "ValueRule",
    "WeightPart",
    "element_source",
    "specs_digest",
]

Indices = range | tuple[int, ...]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint16": 2, "uint8": 1}


class SourceView(Enum):
    """How a part looks at the stored tensor."""

    STORED = "stored"
    FP4_BYTES = "fp4 bytes"
    """MXFP4 blocks [..., blocks, 16] with the last two axes joined: bytes of two values, low nibble first."""
    FP4_X4 = "fp4 x4"
    """The same, two consecutive bytes read as one little-endian uint16: four values, lowest nibble first."""


@frozen(kw_only=True)
class SourceAxis:
    """Where one axis of the (viewed) source goes.

    Attributes:
        indices: source index of each place, row-major over `shape`; PADDING is a zero.
        stack_axes: axes of the per-layer stack that the vector runs over.
        shape: extents over those axes.
        rule: the vector in words.
    """

    indices: Indices
    stack_axes: tuple[int, ...]
    shape: tuple[int, ...]
    rule: str

    def __attrs_post_init__(self) -> None:
        if len(self.shape) != len(self.stack_axes) or math.prod(self.shape) != len(self.indices):
            raise LayoutError(
                f"{len(self.indices)} indices do not fill {list(self.shape)} over stack axes {list(self.stack_axes)}"
            )


@frozen(kw_only=True)
class ValueRule:
    """What happens to real (not padding) values, in float32, before the cast: x / divide_by + add.

    Attributes:
        refused: a stored value that must not occur; 255 is NaN in a scale byte.
    """

    divide_by: int = 1
    add: int = 0
    refused: int | None = None

    @property
    def keeps_values(self) -> bool:
        """Whether values pass unchanged."""
        return self.divide_by == 1 and self.add == 0


@frozen(kw_only=True)
class WeightPart:
    """A gather from one checkpoint tensor into one box of a per-layer stack.

    Attributes:
        tensor: name, with `{layer}` where the layer id goes.
        source_shape, source_dtypes: what the tensor must be in the checkpoint.
        view: how its last axes are read.
        axes: one per viewed source axis, in order.
        starts: first place of the box on each per-layer stack axis.
        rule: value rule.
    """

    tensor: str
    source_shape: tuple[int, ...]
    source_dtypes: tuple[str, ...]
    view: SourceView
    axes: tuple[SourceAxis, ...]
    starts: tuple[int, ...]
    rule: ValueRule

    def __attrs_post_init__(self) -> None:
        fed = [a for axis in self.axes for a in axis.stack_axes]
        if len(set(fed)) != len(fed) or not set(fed) <= set(range(len(self.starts))):
            raise LayoutError(f"{self.tensor}: stack axes {fed} must be distinct and below {len(self.starts)}")
        sizes = self.viewed_shape
        if len(self.axes) != len(sizes):
            raise LayoutError(f"{self.tensor}: {len(self.axes)} index vectors for {len(sizes)} source axes")
        for size, axis in zip(sizes, self.axes, strict=True):
            if axis.indices and not (min(axis.indices) >= PADDING and max(axis.indices) < size):
                raise LayoutError(f"{self.tensor}: indices of '{axis.rule}' leave the source axis 0..{size - 1}")

    @property
    def viewed_shape(self) -> tuple[int, ...]:
        """Source shape as the index vectors see it."""
        if self.view is SourceView.STORED:
            return self.source_shape
        *rest, blocks, block_bytes = self.source_shape
        return (*rest, blocks * block_bytes // (1 if self.view is SourceView.FP4_BYTES else 2))

    @property
    def extents(self) -> tuple[int, ...]:
        """Size of the box on each per-layer stack axis; 1 where no source axis goes."""
        sizes = dict.fromkeys(range(len(self.starts)), 1)
        for axis in self.axes:
            sizes.update(zip(axis.stack_axes, axis.shape, strict=True))
        return tuple(sizes.values())

    @property
    def words(self) -> str:
        """The part in words, for people."""
        rule = self.rule
        changes = [f"/ {rule.divide_by}"] * (rule.divide_by != 1) + [f"+ {rule.add}"] * (rule.add != 0)
        return ", ".join([axis.rule for axis in self.axes] + changes)

    def tensor_of_layer(self, layer: int | None) -> str:
        """Checkpoint name for one layer."""
        return self.tensor if layer is None else self.tensor.format(layer=layer)


@frozen(kw_only=True)
class StackedWeightSpec:
    """One weight of one rank.

    Attributes:
        name: as the kernel calls it.
        layer_shape: shape without the layer axis.
        num_layers: leading axis, or None for a weight that no layer owns (embedding, lm_head, final norm).
        dtype: element type, by name.
        parts: boxes that together fill the stack once.
    """

    name: str
    layer_shape: tuple[int, ...]
    num_layers: int | None
    dtype: str
    parts: tuple[WeightPart, ...]

    def __attrs_post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"{self.name}: dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype}")
        boxes = [_box(part) for part in self.parts]
        inside = all(
            len(box) == len(self.layer_shape) and all(r.stop <= n for r, n in zip(box, self.layer_shape, strict=True))
            for box in boxes
        )
        apart = not any(_overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
        volume = sum(math.prod(len(r) for r in box) for box in boxes)
        if not (inside and apart and volume == math.prod(self.layer_shape)):
            raise LayoutError(f"{self.name}: its parts do not fill {list(self.layer_shape)} exactly once")

    @property
    def shape(self) -> tuple[int, ...]:
        """Full shape, layer axis first."""
        return self.layer_shape if self.num_layers is None else (self.num_layers, *self.layer_shape)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's share."""
        return math.prod(self.layer_shape) * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole stack."""
        return self.layer_bytes * (1 if self.num_layers is None else self.num_layers)

    @property
    def layers(self) -> tuple[int | None, ...]:
        """Layer ids to fill; (None,) for a weight that no layer owns."""
        return (None,) if self.num_layers is None else tuple(range(self.num_layers))

    @property
    def tensor_spec(self) -> TensorSpec:
        """What a kernel contract asks of the stack."""
        return TensorSpec(name=self.name, shape=self.shape, dtypes=(self.dtype,))


def _box(part: WeightPart) -> tuple[range, ...]:
    return tuple(range(s, s + n) for s, n in zip(part.starts, part.extents, strict=True))


def _overlap(a: tuple[range, ...], b: tuple[range, ...]) -> bool:
    return all(max(x.start, y.start) < min(x.stop, y.stop) for x, y in zip(a, b, strict=True))


@frozen(kw_only=True)
class ElementSource:
    """Where one stacked element comes from.

    Attributes:
        tensor: checkpoint name.
        coords: place in the viewed tensor.
        view: how the tensor is viewed.
        rule: value rule.
    """

    tensor: str
    coords: tuple[int, ...]
    view: SourceView
    rule: ValueRule


def element_source(spec: StackedWeightSpec, layer: int | None, coords: Sequence[int]) -> ElementSource | None:
    """Checkpoint element behind one place of a stack, or None for padding.

    Args:
        layer: layer id, None for a weight that no layer owns.
        coords: place in the per-layer stack.

    Raises:
        LayoutError: no such layer or place.
    """
    if layer not in spec.layers:
        raise LayoutError(f"{spec.name} has no layer {layer}; it has {spec.num_layers}")
    for part in spec.parts:
        box = _box(part)
        if len(coords) == len(box) and all(c in r for c, r in zip(coords, box, strict=True)):
            local = [c - s for c, s in zip(coords, part.starts, strict=True)]
            source = tuple(_source_index(axis, local) for axis in part.axes)
            if PADDING in source:
                return None
            return ElementSource(tensor=part.tensor_of_layer(layer), coords=source, view=part.view, rule=part.rule)
    raise LayoutError(f"{list(coords)} is outside {spec.name} {list(spec.layer_shape)}")


def _source_index(axis: SourceAxis, local: Sequence[int]) -> int:
    flat = 0
    for stack_axis, extent in zip(axis.stack_axes, axis.shape, strict=True):
        flat = flat * extent + local[stack_axis]
    return axis.indices[flat]


def specs_digest(specs: Sequence[StackedWeightSpec]) -> str:
    """SHA-256 over everything that the specs say; equal digests build equal stacks from equal checkpoints."""
    digest = hashlib.sha256()
    for spec in specs:
        digest.update(repr((spec.name, spec.layer_shape, spec.num_layers, spec.dtype)).encode())
        for part in spec.parts:
            digest.update(repr((part.tensor, part.source_shape, part.view, part.starts, part.rule)).encode())
            for axis in part.axes:
                digest.update(repr((axis.stack_axes, axis.shape, tuple(axis.indices))).encode())
    return digest.hexdigest()
