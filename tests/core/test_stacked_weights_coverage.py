"""All ranks' specs together: every checkpoint element is stacked exactly as often as the mesh says."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from gk_core.checkpoint_tensors import checkpoint_tensors
from gk_core.decode_mesh import DecodeMesh
from gk_core.model_geometry import GPT_OSS_20B, GPT_OSS_120B, ModelGeometry, alternating_kinds
from gk_core.stacked_weights import build_stacked_weight_specs, build_unstacked_weight_specs
from gk_core.weight_layouts import PADDING, ExpertFormat, WeightLayout
from gk_core.weight_parts import SourceView, WeightPart, element_source

Ints = NDArray[np.int64]


def copies_of(name: str, mesh: DecodeMesh, num_kv_heads: int, vocab_dp_size: int) -> int:
    """How many ranks must hold each element of a tensor."""
    if ".mlp.experts." in name:
        return 1
    if any(k in name for k in ("q_proj", "o_proj.weight", "sinks")):
        return mesh.dp_size
    if "k_proj" in name or "v_proj" in name:
        return mesh.dp_size * max(1, mesh.tp_size // num_kv_heads)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return mesh.dp_size // vocab_dp_size
    return mesh.world_size


def all_parts(
    geometry: ModelGeometry, mesh: DecodeMesh, layout: WeightLayout, fmt: ExpertFormat, vocab_dp_size: int
) -> dict[str, list[WeightPart]]:
    """Parts of every rank, by tensor name template."""
    parts = defaultdict(list)
    for rank in range(mesh.world_size):
        stacked = build_stacked_weight_specs(geometry, mesh, rank, layout, fmt)
        for spec in (
            *stacked,
            *build_unstacked_weight_specs(geometry, mesh, rank, layout, vocab_dp_size=vocab_dp_size),
        ):
            assert spec.num_layers in (None, geometry.num_layers)
            for part in spec.parts:
                assert ("{layer}" in part.tensor) == (spec.num_layers is not None)
                parts[part.tensor].append(part)
    return parts


def axis_counts(part: WeightPart, cache: dict[object, Ints]) -> list[Ints]:
    """How often each source index occurs on each axis of a part."""
    counts = []
    for axis, size in zip(part.axes, part.viewed_shape, strict=True):
        key = axis.indices if isinstance(axis.indices, range) else id(axis.indices)
        if key not in cache:
            real = np.asarray(axis.indices)
            cache[key] = np.bincount(real[real != PADDING], minlength=size)
        counts.append(cache[key])
    return counts


def coverage(parts: list[WeightPart]) -> set[int]:
    """Distinct copy counts over all elements of one tensor.

    A part is a product of its axes, so indices that occur alike in every part can be taken together: the count of an
    element is the sum over parts of the product of its axes' counts, evaluated once per class.
    """
    cache: dict[object, Ints] = {}
    counts = [axis_counts(part, cache) for part in parts]
    classes = [one_of_each_class(list(axis)) for axis in zip(*counts, strict=True)]
    total = np.zeros([c.shape[1] for c in classes], np.int64)
    for i in range(len(parts)):
        product: Ints = np.ones((), np.int64)
        for axis in classes:
            product = np.multiply.outer(product, axis[i])
        total += product
    return set(total.ravel().tolist())


def one_of_each_class(rows: list[Ints]) -> Ints:
    """Columns of the matrix [parts, axis size] without repeats, found by a random 62-bit sum over distinct rows."""
    distinct = {id(row): row for row in rows}
    weights = np.random.default_rng(7).integers(1, 2**62, len(distinct), dtype=np.uint64)
    signature = np.zeros(rows[0].shape, np.uint64)
    for weight, row in zip(weights, distinct.values(), strict=True):
        signature += weight * row.astype(np.uint64)
    _, first = np.unique(signature, return_index=True)
    return np.stack([row[first] for row in rows])


CASES = [
    pytest.param(GPT_OSS_120B, DecodeMesh(tp_size=8, dp_size=16, ep_size=128), 16, id="120b tp8 dp16"),
    pytest.param(GPT_OSS_120B, DecodeMesh(tp_size=16, dp_size=2, ep_size=32), 1, id="120b tp16, kv heads twice"),
    pytest.param(GPT_OSS_20B, DecodeMesh(tp_size=4, dp_size=3, ep_size=12), 3, id="20b, uneven experts"),
    pytest.param(evolve(GPT_OSS_20B, tie_embeddings=True), DecodeMesh(tp_size=1), 1, id="20b alone, tied"),
]


@pytest.mark.parametrize("layout", WeightLayout)
@pytest.mark.parametrize("fmt", ExpertFormat)
@pytest.mark.parametrize(("geometry", "mesh", "vocab_dp_size"), CASES)
def test_all_ranks_hold_each_real_element_as_often_as_the_mesh_says(
    geometry: ModelGeometry, mesh: DecodeMesh, vocab_dp_size: int, fmt: ExpertFormat, layout: WeightLayout
) -> None:
    """Every element of every tensor of the real models, none missing and none too many."""
    parts = all_parts(geometry, mesh, layout, fmt, vocab_dp_size)
    expected = {t.name for t in checkpoint_tensors(evolve(geometry, num_layers=1, attention_kinds=alternating_kinds(1)),
                                                   fmt).values()}  # fmt: skip
    assert {name.format(layer=0) for name in parts} == expected
    for name, found in parts.items():
        copies = copies_of(name, mesh, geometry.num_kv_heads, vocab_dp_size)
        if geometry.tie_embeddings and name == "model.embed_tokens.weight":
            copies *= 2  # once as embedding, once as lm_head
        assert coverage(found) == {copies}, name


def test_the_coverage_check_sees_a_hole_and_a_double() -> None:
    """The check itself: two parts that both take index 1 and leave out index 3."""
    geometry = evolve(GPT_OSS_20B, num_q_heads=4, num_kv_heads=2, head_size=2)
    spec = build_stacked_weight_specs(geometry, DecodeMesh(tp_size=1), 0, WeightLayout.PLAIN, ExpertFormat.BF16)[5]
    (part,) = spec.parts
    wrong = [evolve(part, axes=(evolve(part.axes[0], indices=(0, 1, 2, 1)),))]
    assert coverage([part]) == {1}
    assert coverage(wrong) == {0, 1, 2}


def test_each_element_by_coordinates_on_a_small_model() -> None:
    """The same by brute force: every place of every rank's stacks is looked up, one by one, and counted."""
    geometry = evolve(
        GPT_OSS_20B, num_layers=2, hidden_size=32, intermediate_size=64, num_q_heads=6, num_kv_heads=2, head_size=4,
        num_experts=7, experts_per_token=2, vocab_size=11, attention_kinds=alternating_kinds(2),
    )  # fmt: skip
    mesh = DecodeMesh(tp_size=2, dp_size=3, ep_size=6)
    counts: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for rank in range(6):
        for spec in (
            *build_stacked_weight_specs(geometry, mesh, rank, WeightLayout.PLAIN, ExpertFormat.MXFP4),
            *build_unstacked_weight_specs(geometry, mesh, rank, WeightLayout.PLAIN),
        ):
            for layer in spec.layers:
                for coords in np.ndindex(spec.layer_shape):
                    source = element_source(spec, layer, coords)
                    if source is not None:
                        counts[source.tensor][source.coords] += 1
    for name, tensor in checkpoint_tensors(geometry, ExpertFormat.MXFP4).items():
        viewed = tensor.shape if not name.endswith("_blocks") else (*tensor.shape[:-2], tensor.shape[-2] * 16)
        assert len(counts[name]) == np.prod(viewed), name
        assert set(counts[name].values()) == {copies_of(name, mesh, 2, 1)}, name


def test_views_of_packed_blocks_have_the_extent_of_their_units() -> None:
    """90 blocks of 16 bytes are 1440 bytes or 720 quads."""
    mesh = DecodeMesh(tp_size=8, dp_size=16, ep_size=128)
    extents = {}
    for layout in WeightLayout:
        specs = build_stacked_weight_specs(GPT_OSS_120B, mesh, 0, layout, ExpertFormat.MXFP4)
        (part,) = next(s for s in specs if s.name == "expert_down_weights").parts
        extents[part.view] = part.viewed_shape
    assert extents == {SourceView.FP4_BYTES: (128, 2880, 1440), SourceView.FP4_X4: (128, 2880, 720)}
