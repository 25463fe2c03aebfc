"""What the stacks of one rank have in common: the rank's slices, the layout's orders, parts and specs from them."""

from __future__ import annotations

from attrs import frozen

from gk_core.checkpoint_tensors import FLOAT_DTYPES, CheckpointTensor, layer_tensors, model_tensors
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import LayoutError
from gk_core.model_geometry import ModelGeometry
from gk_core.weight_layouts import ExpertFormat, WeightLayout, hidden_order
from gk_core.weight_parts import Indices, SourceAxis, SourceView, StackedWeightSpec, ValueRule, WeightPart

__all__ = ["AS_IS", "StackBuilder", "one_axis", "span_words"]

AS_IS = ValueRule()
_ALL_LAYERS = -1


def one_axis(indices: Indices, stack_axis: int, rule: str) -> SourceAxis:
    """A source axis that runs along one stack axis."""
    return SourceAxis(indices=indices, stack_axes=(stack_axis,), shape=(len(indices),), rule=rule)


def span_words(thing: str, span: range) -> str:
    """A span in words.

    >>> span_words("expert", range(77, 78)), span_words("q head", range(8, 16))
    ('expert 77', 'q heads 8..15')
    """
    if len(span) == 1:
        return f"{thing} {span.start}"
    return f"{thing}s {span.start}..{span.stop - 1}"


@frozen(kw_only=True)
class StackBuilder:
    """Slices, orders and sources of one rank and layout.

    Attributes:
        geometry, mesh, rank, layout: whose stacks.
        dtype: of every weight that fixes none itself.
        layer, model: checkpoint tensors, see `checkpoint_tensors`.
    """

    geometry: ModelGeometry
    mesh: DecodeMesh
    rank: int
    layout: WeightLayout
    dtype: str
    layer: dict[str, CheckpointTensor]
    model: dict[str, CheckpointTensor]

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        mesh: DecodeMesh,
        rank: int,
        layout: WeightLayout,
        expert_format: ExpertFormat | None,
        dtype: str,
    ) -> StackBuilder:
        """Builder for one rank; no expert format for weights outside the layers."""
        if dtype not in FLOAT_DTYPES:
            raise LayoutError(f"weights' dtype must be one of {list(FLOAT_DTYPES)}, got {dtype}")
        mesh.tp_rank(rank)
        return cls(
            geometry=geometry, mesh=mesh, rank=rank, layout=layout, dtype=dtype,
            layer={} if expert_format is None else layer_tensors(geometry, expert_format),
            model=model_tensors(geometry),
        )  # fmt: skip

    @property
    def is_nki(self) -> bool:
        """Whether axes are tiled and vectors are [1, n]."""
        return self.layout is WeightLayout.NKI

    @property
    def hidden_indices(self) -> Indices:
        """Hidden feature of each stored index."""
        return hidden_order(self.geometry.hidden_size) if self.is_nki else range(self.geometry.hidden_size)

    @property
    def hidden_words(self) -> str:
        """The same, said."""
        return "hidden order" if self.is_nki else "hidden"

    def hidden(self, stack_axis: int) -> SourceAxis:
        """A source's hidden axis, in this layout's order."""
        return one_axis(self.hidden_indices, stack_axis, self.hidden_words)

    def experts(self) -> SourceAxis:
        """The rank's experts, always the first axis of a stack."""
        ids = self.mesh.experts(self.rank, self.geometry.num_experts)
        return one_axis(ids, 0, span_words("expert", ids))

    def part(
        self,
        source: CheckpointTensor,
        axes: list[SourceAxis],
        num_stack_axes: int,
        starts: dict[int, int] | None = None,
        rule: ValueRule = AS_IS,
        view: SourceView = SourceView.STORED,
    ) -> WeightPart:
        """A gather from `source`; `starts` gives the stack axes on which its box does not start at 0."""
        return WeightPart(
            tensor=source.name, source_shape=source.shape, source_dtypes=source.dtypes, view=view, axes=tuple(axes),
            starts=tuple((starts or {}).get(i, 0) for i in range(num_stack_axes)), rule=rule,
        )  # fmt: skip

    def row(
        self, source: CheckpointTensor, indices: Indices, words: str, start: int = 0, rule: ValueRule = AS_IS
    ) -> WeightPart:
        """A vector: [n], or [1, n] for the NKI kernel."""
        last = 1 if self.is_nki else 0
        return self.part(source, [one_axis(indices, last, words)], last + 1, {last: start}, rule)

    def spec(
        self, name: str, parts: list[WeightPart], dtype: str | None = None, num_layers: int | None = _ALL_LAYERS
    ) -> StackedWeightSpec:
        """Parts as one stack that they fill from its start."""
        ends = zip(*(tuple(s + n for s, n in zip(p.starts, p.extents, strict=True)) for p in parts), strict=True)
        return StackedWeightSpec(
            name=name, layer_shape=tuple(max(end) for end in ends),
            num_layers=self.geometry.num_layers if num_layers == _ALL_LAYERS else num_layers,
            dtype=dtype or self.dtype, parts=tuple(parts),
        )  # fmt: skip
