"""Stacks built from checkpoints hold what the specs say; broken checkpoints are refused by tensor name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gk_adapters.bench_checkpoint import made_up_values
from gk_adapters.bench_naive_stacks import naive_stacks
from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_stacks import build_plain_stacks
from gk_adapters.weight_gather import fill_part, numpy_dtype, plan_part
from gk_adapters.weight_stacks import BuildProgress, build_stacks, drain, num_threads, plan_stacks
from gk_core.checkpoint_tensors import checkpoint_tensors
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import CheckpointError
from gk_core.model_geometry import ModelGeometry
from gk_core.ports import WeightInfo
from gk_core.weight_layouts import PADDING, ExpertFormat, WeightLayout
from gk_core.weight_parts import (
    SourceAxis,
    SourceView,
    StackedWeightSpec,
    ValueRule,
    WeightPart,
    element_source,
)
from tests.synthetic_checkpoint import SMALL, all_specs, tensor_values, write_small

Array = NDArray[Any]
MXFP4, BF16 = ExpertFormat.MXFP4, ExpertFormat.BF16
PLAIN, NKI = WeightLayout.PLAIN, WeightLayout.NKI
MESH = DecodeMesh(tp_size=2, dp_size=3, ep_size=6)


class MemoryCheckpoint:
    """A checkpoint whose contents are made when they are read."""

    def __init__(self, geometry: ModelGeometry, fmt: ExpertFormat, dtype: str = "bfloat16") -> None:
        self.reads: list[str] = []
        self.changed: dict[str, Array] = {}
        self._what = (fmt, geometry, dtype)
        self.infos = {
            t.name: WeightInfo(shape=t.shape, dtype="uint8" if t.dtypes == ("uint8",) else dtype)
            for t in checkpoint_tensors(geometry, fmt).values()
        }

    def tensors(self) -> Mapping[str, WeightInfo]:
        return self.infos

    def whole(self, name: str) -> Array:
        found = self.changed.get(name)
        return tensor_values(name, *self._what) if found is None else found

    def read_slice(self, *, name: str, index: tuple[slice, ...]) -> Array:
        self.reads.append(name)
        view: Array = self.whole(name)[index]
        return view


def viewed(values: Array, view: SourceView) -> Array:
    """A tensor as index vectors see it, joined byte by byte."""
    if view is SourceView.STORED:
        return values
    joined = values.reshape(*values.shape[:-2], -1)
    if view is SourceView.FP4_BYTES:
        return joined
    return joined[..., 0::2].astype(np.uint16) | (joined[..., 1::2].astype(np.uint16) << 8)


def expected_element(
    spec: StackedWeightSpec, layer: int | None, coords: tuple[int, ...], whole: Mapping[str, Array]
) -> Array:
    """One element by the core's element function."""
    source = element_source(spec, layer, coords)
    if source is None:
        return np.zeros((), numpy_dtype(spec.dtype))
    value = viewed(whole[source.tensor], source.view)[source.coords]
    if value.dtype in (np.uint8, np.uint16):
        return np.asarray(value, numpy_dtype(spec.dtype))
    wide = np.float32(value) / np.float32(source.rule.divide_by) + np.float32(source.rule.add)
    return np.asarray(wide).astype(numpy_dtype(spec.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", WeightLayout)
@pytest.mark.parametrize("fmt", ExpertFormat)
def test_every_stack_holds_what_its_element_function_says(fmt: ExpertFormat, layout: WeightLayout, dtype: str) -> None:
    """400 random places of each stack of two ranks, in a mesh where experts are uneven."""
    rng = np.random.default_rng(5)
    source = MemoryCheckpoint(SMALL, fmt)
    whole = {name: source.whole(name) for name in source.infos}
    for rank in (0, 5):
        specs = all_specs(SMALL, MESH, rank, layout, fmt, dtype)
        stacks = build_stacks(source, specs)
        assert {n: (s.shape, s.dtype.name) for n, s in stacks.items()} == {s.name: (s.shape, s.dtype) for s in specs}
        for spec in specs:
            for _ in range(400):
                layer = None if spec.num_layers is None else int(rng.integers(spec.num_layers))
                coords = tuple(int(rng.integers(n)) for n in spec.layer_shape)
                got = stacks[spec.name][coords if layer is None else (layer, *coords)]
                assert got == expected_element(spec, layer, coords, whole), (spec.name, layer, coords)


@pytest.mark.parametrize("fmt", ExpertFormat)
def test_plain_stacks_equal_those_of_the_slow_builder(fmt: ExpertFormat, tmp_path: Path) -> None:
    """Every value of every rank, against code that shares nothing with the specs."""
    write_small(tmp_path, fmt)
    checkpoint = HFCheckpoint(tmp_path)
    for rank in range(6):
        wanted = build_plain_stacks(checkpoint, MESH, rank, model_dtype="bfloat16")
        got = build_stacks(checkpoint, all_specs(SMALL, MESH, rank, PLAIN, fmt))
        assert set(got) - set(wanted) == {"embed_tokens", "lm_head", "final_norm"}
        for name, stack in wanted.items():
            assert got[name].tobytes() == array_of(stack).tobytes(), (rank, name)


@pytest.mark.parametrize("layout", WeightLayout)
@pytest.mark.parametrize("fmt", ExpertFormat)
def test_stacks_equal_those_stacked_layer_by_layer_with_torch(
    fmt: ExpertFormat, layout: WeightLayout, tmp_path: Path
) -> None:
    """The benchmark's peer, which reads with safetensors and reorders with torch, makes the same bytes."""
    write_small(tmp_path, fmt)
    specs = [s for s in all_specs(SMALL, MESH, 0, layout, fmt) if s.num_layers is not None]
    got = build_stacks(HFCheckpoint(tmp_path), specs)
    for name, stack in naive_stacks(tmp_path, specs).items():
        assert got[name].shape == tuple(stack.shape)
        assert got[name].tobytes() == array_of(stack).tobytes(), name


def written_rule(name: str, layer: int, at: tuple[int, ...], rank: int, whole: Mapping[str, Array]) -> float | None:
    """The NKI layout of SMALL, MESH and MXFP4, from the rule as people write it down; None for padding."""

    def tensor(suffix: str) -> Array:
        return whole[f"model.layers.{layer}.{suffix}"]

    def hidden(s: int) -> int:
        return 4 * (s % 256) + s // 256  # Hp 1024

    def column(j: int) -> int:
        return j // 512 * 512 + 4 * (j % 128) + j % 512 // 128

    def floats(values: Array, *index: int) -> float | None:
        inside = all(i < n for i, n in zip(index, values.shape, strict=True))
        return float(values[index]) if inside else None

    tp, experts = rank % 2, [[0, 1], [2], [3], [4], [5], [6]][rank]
    d, q0, k0 = 10, 3 * (rank % 2), rank % 2
    if name in ("input_layernorm_weight", "post_attn_layernorm_weight", "bias_out"):
        source = {"i": "input_layernorm.weight", "p": "post_attention_layernorm.weight", "b": "self_attn.o_proj.bias"}
        value = floats(tensor(source[name[0]]), hidden(at[1]))
        return value if value is None or name != "bias_out" else value / 2
    if name in ("W_qkv", "bias_qkv"):
        c = at[1]
        kind, row = ("q", q0 * d + c) if c < 30 else ("k", k0 * d + c - 30) if c < 40 else ("v", k0 * d + c - 40)
        if name == "bias_qkv":
            return floats(tensor(f"self_attn.{kind}_proj.bias"), row)
        return floats(tensor(f"self_attn.{kind}_proj.weight"), row, hidden(at[0]))
    if name == "W_out":
        return floats(tensor("self_attn.o_proj.weight"), hidden(at[1]), 30 * tp + at[0])
    if name == "sink":
        return floats(tensor("self_attn.sinks"), q0 + at[0])
    if name == "router_weights":
        return floats(tensor("mlp.router.weight"), at[1], hidden(at[0]))
    if name == "router_bias":
        return floats(tensor("mlp.router.bias"), at[1])
    e = experts[at[0]]
    if name == "expert_down_bias":
        return floats(tensor("mlp.experts.down_proj_bias"), e, hidden(at[1]))
    if name == "expert_gate_up_bias":
        _, p, g, t, w = at
        value = floats(tensor("mlp.experts.gate_up_proj_bias"), e, 2 * (512 * t + 4 * p + w) + g)
        return None if value is None else value + g
    if name == "expert_gate_up_weights_scale":
        _, b, g, t, j = at
        return floats(tensor("mlp.experts.gate_up_proj_scales"), e, 2 * column(j) + g, 16 * t + b)
    if name == "expert_down_weights_scale":
        _, b, t, s = at
        return floats(tensor("mlp.experts.down_proj_scales"), e, hidden(s), 16 * t + b)
    if name == "expert_gate_up_weights":
        _, p, g, t, j = at
        blocks, row, feature = tensor("mlp.experts.gate_up_proj_blocks"), 2 * column(j) + g, 512 * t + 4 * p
    else:
        _, p, t, s = at
        blocks, row, feature = tensor("mlp.experts.down_proj_blocks"), hidden(s), 512 * t + 4 * p
    low = floats(blocks, e, row, feature // 32, feature % 32 // 2)
    high = floats(blocks, e, row, feature // 32, feature % 32 // 2 + 1)
    return None if low is None or high is None else low + 256 * high


def test_nki_stacks_equal_the_written_rule() -> None:
    """1500 places of each stack; the rule is written out in this file and the specs are not asked."""
    rng = np.random.default_rng(11)
    source = MemoryCheckpoint(SMALL, MXFP4)
    whole = {name: source.whole(name) for name in source.infos}
    for rank in (0, 3):
        specs = [s for s in all_specs(SMALL, MESH, rank, NKI, MXFP4, "float32") if s.num_layers is not None]
        stacks = build_stacks(source, specs)
        for spec in specs:
            seen_real = seen_padding = 0
            for _ in range(1500):
                place = tuple(int(rng.integers(n)) for n in spec.shape)
                wanted = written_rule(spec.name, place[0], place[1:], rank, whole)
                assert float(stacks[spec.name][place]) == (wanted or 0.0), (spec.name, place)
                seen_real += wanted is not None
                seen_padding += wanted is None
            assert seen_real > 100
            assert (seen_padding > 0) == (spec.name not in ("bias_qkv", "sink", "router_bias"))


def test_narrowing_rounds_as_a_cast_does() -> None:
    """A float32 checkpoint in a bfloat16 build: round to nearest even, after scaling and adding in float32."""
    source = MemoryCheckpoint(SMALL, BF16, dtype="float32")
    stacks = build_stacks(source, all_specs(SMALL, MESH, 1, PLAIN, BF16))
    bias = source.whole("model.layers.1.mlp.experts.gate_up_proj_bias")[2, 1::2]
    assert np.array_equal(stacks["expert_gate_up_bias"][1, 0, 1], (bias + np.float32(1)).astype(ml_dtypes.bfloat16))
    out = source.whole("model.layers.2.self_attn.o_proj.bias")
    assert np.array_equal(stacks["bias_out"][2], (out / 2).astype(ml_dtypes.bfloat16))
    assert np.array_equal(stacks["final_norm"], source.whole("model.norm.weight").astype(ml_dtypes.bfloat16))


def test_literal_values_of_a_hand_made_expert() -> None:
    """Bytes 0x21, 0xF8 in a block's front become the little-endian word 0xF821; up bias 0.5 becomes 1.5."""
    source = MemoryCheckpoint(SMALL, MXFP4)
    blocks = np.zeros((7, 192, 17, 16), np.uint8)
    blocks[3, 2 * 5 + 1, 16, 2:4] = (0x21, 0xF8)  # up row 5, features 512 + 4 .. 512 + 7
    source.changed["model.layers.1.mlp.experts.gate_up_proj_blocks"] = blocks
    bias = np.zeros((7, 192), ml_dtypes.bfloat16)
    bias[3, 11] = 0.5
    source.changed["model.layers.1.mlp.experts.gate_up_proj_bias"] = bias
    stacks = build_stacks(source, all_specs(SMALL, MESH, 2, NKI, MXFP4))
    weights = stacks["expert_gate_up_weights"][1, 0]
    # up, hidden tile 1, partition 1; feature 5 = 4 * 1 + 1 stands in column 128 * 1 + 1
    assert [tuple(map(int, place)) for place in np.argwhere(weights)] == [(1, 1, 1, 129)]
    assert weights[1, 1, 1, 129] == 0xF821
    up = stacks["expert_gate_up_bias"][1, 0, :, 1, 0].astype(np.float32)
    assert (up[1, 1], up[0, 0], float(up.sum())) == (1.5, 1.0, 96.5)


@pytest.mark.parametrize(
    "vector", [(0, PADDING, 0), (2, PADDING, 1), (PADDING, 0, 1), (0, 1, PADDING), (0, 2, PADDING), (0, 0, 2)]
)
def test_padding_and_repeats_may_stand_anywhere_in_a_vector(vector: tuple[int, ...]) -> None:
    """-1 must not be taken for a step of a stride, nor as many sources as their span for all of it."""
    axis = SourceAxis(indices=vector, stack_axes=(0,), shape=(3,), rule="test")
    other = SourceAxis(indices=(0, 1), stack_axes=(1,), shape=(2,), rule="test")
    values = np.array([[5, 50], [6, 60], [7, 70]], np.float32)
    for axes, source in (((axis, other), values), ((other, axis), values.T)):  # along rows, and transposed
        part = WeightPart(
            tensor="t", source_shape=source.shape, source_dtypes=("float32",), view=SourceView.STORED, axes=axes,
            starts=(0, 0), rule=ValueRule(),
        )  # fmt: skip
        spec = StackedWeightSpec(name="w", layer_shape=(3, 2), num_layers=None, dtype="float32", parts=(part,))
        stack = np.zeros((3, 2), np.float32)

        def read(name: str, index: tuple[slice, ...], source: Array = source) -> Array:
            view: Array = source[index]
            return view

        fill_part(plan_part(spec, part, "float32"), read, None, stack)
        assert stack.tolist() == [[0.0, 0.0] if i == PADDING else [5.0 + i, 50.0 + 10 * i] for i in vector]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_part_is_executed_as_its_vectors_say(data: st.DataObject) -> None:
    """Random index vectors, axis orders, boxes and views against a loop over places."""
    rank = data.draw(st.integers(1, 3), label="source axes")
    shape = tuple(data.draw(st.integers(1, 70)) if i == rank - 1 else data.draw(st.integers(1, 5)) for i in range(rank))
    num_axes = rank + data.draw(st.integers(0, 2), label="extra stack axes")
    stack_axes = data.draw(st.permutations(range(num_axes)))
    axes = []
    for i, size in enumerate(shape):
        mine = tuple(stack_axes[i : i + 1]) if i < rank - 1 else tuple(stack_axes[i:])
        extents = tuple(data.draw(st.integers(1, 6)) for _ in mine)
        n = math.prod(extents)
        kind = data.draw(st.sampled_from(["any", "affine", "padding"]))
        if kind == "affine":
            step = data.draw(st.integers(0, max(0, (size - 1) // max(1, n - 1))))
            base = data.draw(st.integers(0, max(0, size - 1 - step * (n - 1))))
            vector = tuple(min(base + k * step, size - 1) for k in range(n))
        else:
            low = PADDING if kind == "padding" else 0
            vector = tuple(data.draw(st.lists(st.integers(low, size - 1), min_size=n, max_size=n)))
        axes.append(SourceAxis(indices=vector, stack_axes=mine, shape=extents, rule="test"))
    starts = tuple(data.draw(st.integers(0, 2)) for _ in range(num_axes))
    part = WeightPart(
        tensor="t", source_shape=shape, source_dtypes=("bfloat16",), view=SourceView.STORED, axes=tuple(axes),
        starts=starts, rule=ValueRule(),
    )  # fmt: skip
    spec = StackedWeightSpec(
        name="w", layer_shape=part.extents, num_layers=None, dtype="bfloat16",
        parts=(evolve(part, starts=(0,) * num_axes),),
    )  # fmt: skip
    values = made_up_values("t", "bfloat16", 0, math.prod(shape)).reshape(shape)
    stack = np.zeros([s + n + 1 for s, n in zip(starts, part.extents, strict=True)], ml_dtypes.bfloat16)

    def read(name: str, index: tuple[slice, ...]) -> Array:
        assert name == "t"
        view: Array = values[index]
        return view

    chunk_bytes = data.draw(st.sampled_from([1, 300, 1 << 20]), label="chunk bytes")
    fill_part(plan_part(spec, part, "bfloat16", chunk_bytes), read, None, stack)
    wanted = np.zeros_like(stack)
    for place in np.ndindex(part.extents):
        source = element_source(spec, None, place)
        if source is not None:
            wanted[tuple(p + s for p, s in zip(place, starts, strict=True))] = values[source.coords]
    assert stack.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("padded_axis", [0, 1])
def test_an_axis_of_padding_alone_leaves_zeros(padded_axis: int) -> None:
    """As in a vocabulary shard past the vocabulary."""
    vectors = [(0, 1), (2, 3)]
    vectors[padded_axis] = (PADDING, PADDING)
    axes = tuple(
        SourceAxis(indices=vector, stack_axes=(1 - i,), shape=(2,), rule="test") for i, vector in enumerate(vectors)
    )
    part = WeightPart(
        tensor="t", source_shape=(5, 7), source_dtypes=("bfloat16",), view=SourceView.STORED, axes=axes, starts=(0, 0),
        rule=ValueRule(add=1),
    )  # fmt: skip
    spec = StackedWeightSpec(name="w", layer_shape=(2, 2), num_layers=None, dtype="bfloat16", parts=(part,))
    stack = np.zeros((2, 2), ml_dtypes.bfloat16)
    fill_part(plan_part(spec, part, "bfloat16"), lambda name, index: np.ones((5, 7))[index], None, stack)
    assert not stack.any()


@pytest.mark.parametrize(
    ("name", "info", "match"),
    [
        ("model.layers.2.self_attn.sinks", None, r"model\.layers\.2\.self_attn\.sinks is missing"),
        (
            "model.layers.1.mlp.experts.down_proj_blocks",
            WeightInfo(shape=(7, 544, 16, 3), dtype="uint8"),
            r"down_proj_blocks must have shape \[7, 544, 3, 16\], got \[7, 544, 16, 3\]",
        ),
        (
            "model.norm.weight",
            WeightInfo(shape=(544,), dtype="int64"),
            "norm.weight must be bfloat16 or .* int64",
        ),
        ("lm_head.weight", None, "lm_head.weight is missing"),
    ],
)
def test_a_tensor_that_is_not_as_the_specs_read_it_is_refused_before_any_is_read(
    name: str, info: WeightInfo | None, match: str
) -> None:
    """Name, rule and what was got; no slice was asked for."""
    source = MemoryCheckpoint(SMALL, MXFP4)
    if info is None:
        del source.infos[name]
    else:
        source.infos[name] = info
    with pytest.raises(CheckpointError, match=match):
        build_stacks(source, all_specs(SMALL, MESH, 0, NKI, MXFP4))
    assert source.reads == []


def test_many_wrong_tensors_are_counted_not_listed() -> None:
    """The first three by name, then how many more."""
    source = MemoryCheckpoint(SMALL, MXFP4)
    for layer in range(3):
        for letter in "qkv":
            del source.infos[f"model.layers.{layer}.self_attn.{letter}_proj.bias"]
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.bias is missing.*; and 6 more$"):
        plan_stacks(source, all_specs(SMALL, MESH, 0, NKI, MXFP4))


@pytest.mark.parametrize("layout", WeightLayout)
@pytest.mark.parametrize("kind", ["gate_up_proj", "down_proj"])
def test_a_nan_scale_is_refused_by_name(kind: str, layout: WeightLayout) -> None:
    """Byte 255 in this rank's expert; in another rank's expert it is that rank's affair."""
    source = MemoryCheckpoint(SMALL, MXFP4)
    name = f"model.layers.1.mlp.experts.{kind}_scales"
    source.changed[name] = source.whole(name).copy()
    source.changed[name][3, 7, 2] = 255
    with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.mlp\.experts\.{kind}_scales holds the byte 255"):
        build_stacks(source, all_specs(SMALL, MESH, 2, layout, MXFP4))
    build_stacks(source, all_specs(SMALL, MESH, 3, layout, MXFP4))


def test_a_router_that_float16_cannot_hold_is_refused() -> None:
    """65504 is the last float16; the float32 build takes the same checkpoint."""
    source = MemoryCheckpoint(SMALL, MXFP4)
    name = "model.layers.0.mlp.router.weight"
    source.changed[name] = source.whole(name).copy()
    source.changed[name][1, 1] = 70000.0
    with pytest.raises(CheckpointError, match=r"router\.weight holds values that float16 cannot"):
        build_stacks(source, all_specs(SMALL, MESH, 0, NKI, MXFP4))
    wide = build_stacks(source, all_specs(SMALL, MESH, 0, NKI, MXFP4, "float32"))
    assert wide["router_weights"].max() == np.float32(ml_dtypes.bfloat16(70000.0))


def test_an_error_in_one_layer_stops_the_build() -> None:
    """Later layers are not begun: one thread reads nothing of layer 2."""
    source = MemoryCheckpoint(SMALL, MXFP4)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    source.changed[name] = np.full((7, 544, 3), 255, np.uint8)
    with pytest.raises(CheckpointError):
        build_stacks(source, all_specs(SMALL, MESH, 0, NKI, MXFP4), threads=1)
    assert not [r for r in source.reads if r.startswith("model.layers.2.")]


def test_progress_ends_at_the_total() -> None:
    """Bytes only grow, and the last report is everything."""
    seen: list[BuildProgress] = []
    specs = all_specs(SMALL, MESH, 0, PLAIN, BF16)
    build_stacks(MemoryCheckpoint(SMALL, BF16), specs, progress=seen.append)
    done = [p.bytes_done for p in seen]
    assert done == sorted(done)
    total = sum(s.num_bytes for s in specs)
    assert (done[-1], {p.bytes_total for p in seen}) == (total, {total})


@pytest.mark.parametrize(
    ("threads", "memory", "each", "wanted"), [(8, 100, 30, 3), (2, 100, 30, 2), (8, 100, 101, 1), (8, 90, 30, 3)]
)
def test_threads_stay_inside_the_memory_bound(threads: int, memory: int, each: int, wanted: int) -> None:
    """As many as fit, and one in any case."""
    assert num_threads(threads, memory, each) == wanted


def test_big_tensors_are_read_in_chunks() -> None:
    """32 experts of 64 MiB each are read one at a time, not 2 GiB at once."""
    wide = evolve(
        SMALL, hidden_size=4096, intermediate_size=4096, num_experts=32, num_layers=1,
        attention_kinds=SMALL.attention_kinds[:1],
    )  # fmt: skip
    spec = next(s for s in all_specs(wide, DecodeMesh(tp_size=1), 0, NKI, BF16) if s.name == "expert_gate_up_weights")
    plan = plan_part(spec, spec.parts[0], "bfloat16")
    assert (plan.chunk, plan.mapped_bytes) == (1, 4096 * 8192 * 2)


@pytest.mark.parametrize("layout", WeightLayout)
@pytest.mark.parametrize("fmt", ExpertFormat)
def test_chunked_reads_fill_the_same_places(fmt: ExpertFormat, layout: WeightLayout) -> None:
    """With chunks of 4 KiB tensors come in pieces: more reads, the same bytes."""
    source = MemoryCheckpoint(SMALL, fmt)
    specs = all_specs(SMALL, DecodeMesh(tp_size=2, ep_size=2), 1, layout, fmt)
    whole = build_stacks(source, specs)
    whole_reads = len(source.reads)
    pieces = {spec.name: np.zeros(spec.shape, numpy_dtype(spec.dtype)) for spec in specs}
    plan = plan_stacks(source, specs, chunk_bytes=4096)
    source.reads.clear()
    for unit in plan.units:
        shares = {s.name: pieces[s.name] if unit.layer is None else pieces[s.name][unit.layer] for s in unit.specs}
        plan.fill(unit, lambda spec, shares=shares: shares[spec.name])  # type: ignore[misc]
    assert len(source.reads) > whole_reads
    for name, stack in whole.items():
        assert pieces[name].tobytes() == stack.tobytes(), name


def test_drain_hands_out_each_stack_once_and_lets_go() -> None:
    """What has been handed out is no longer in the dict."""
    stacks = {"a": np.zeros(2), "b": np.ones(3)}
    left = [(name, array.shape, tuple(stacks)) for name, array in drain(stacks)]
    assert left == [("a", (2,), ("b",)), ("b", (3,), ())]
