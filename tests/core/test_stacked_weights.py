"""Specs of one rank's stacks: literal shapes and bytes, literal sources, the written rules, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.model_geometry import GPT_OSS_20B, GPT_OSS_120B, ModelGeometry, alternating_kinds
from gk_core.stacked_weights import build_stacked_weight_specs, build_unstacked_weight_specs, total_bytes
from gk_core.weight_layouts import ExpertFormat, WeightLayout
from gk_core.weight_parts import (
    SourceAxis,
    SourceView,
    StackedWeightSpec,
    ValueRule,
    WeightPart,
    element_source,
    specs_digest,
)

PLAIN, NKI = WeightLayout.PLAIN, WeightLayout.NKI
BF16, MXFP4 = ExpertFormat.BF16, ExpertFormat.MXFP4
MESH = DecodeMesh(tp_size=8, dp_size=16, ep_size=128)

NKI_120B = {
    "input_layernorm_weight": ((36, 1, 3072), "bfloat16", 221_184),
    "W_qkv": ((36, 3072, 640), "bfloat16", 141_557_760),
    "bias_qkv": ((36, 1, 640), "bfloat16", 46_080),
    "W_out": ((36, 512, 3072), "bfloat16", 113_246_208),
    "bias_out": ((36, 1, 3072), "bfloat16", 221_184),
    "sink": ((36, 8, 1), "float32", 1_152),
    "post_attn_layernorm_weight": ((36, 1, 3072), "float32", 442_368),
    "router_weights": ((36, 3072, 128), "float16", 28_311_552),
    "router_bias": ((36, 1, 128), "float16", 9_216),
    "expert_gate_up_weights": ((36, 1, 128, 2, 6, 3072), "uint16", 339_738_624),
    "expert_gate_up_weights_scale": ((36, 1, 16, 2, 6, 3072), "uint8", 21_233_664),
    "expert_gate_up_bias": ((36, 1, 128, 2, 6, 4), "bfloat16", 442_368),
    "expert_down_weights": ((36, 1, 128, 6, 3072), "uint16", 169_869_312),
    "expert_down_weights_scale": ((36, 1, 16, 6, 3072), "uint8", 10_616_832),
    "expert_down_bias": ((36, 1, 3072), "bfloat16", 221_184),
}
PLAIN_20B_TP2 = {
    "input_layernorm_weight": ((24, 2880), "float32"),
    "W_qkv": ((24, 2880, 2560), "float32"),
    "bias_qkv": ((24, 2560), "float32"),
    "W_out": ((24, 2048, 2880), "float32"),
    "bias_out": ((24, 2880), "float32"),
    "sink": ((24, 32), "float32"),
    "post_attn_layernorm_weight": ((24, 2880), "float32"),
    "router_weights": ((24, 2880, 32), "float32"),
    "router_bias": ((24, 32), "float32"),
    "expert_gate_up_weights": ((24, 16, 2, 2880, 1440), "uint8"),
    "expert_gate_up_weights_scale": ((24, 16, 2, 2880, 90), "uint8"),
    "expert_gate_up_bias": ((24, 16, 2, 2880), "float32"),
    "expert_down_weights": ((24, 16, 2880, 1440), "uint8"),
    "expert_down_weights_scale": ((24, 16, 2880, 90), "uint8"),
    "expert_down_bias": ((24, 16, 2880), "float32"),
}


def small_geometry(**changes: Any) -> ModelGeometry:
    """Every size different: 3 layers, H 544, I 96, 6 q and 2 kv heads of 10, 7 experts, vocabulary 101."""
    base = evolve(
        GPT_OSS_20B, num_layers=3, hidden_size=544, intermediate_size=96, num_q_heads=6, num_kv_heads=2, head_size=10,
        num_experts=7, experts_per_token=2, vocab_size=101, attention_kinds=alternating_kinds(3),
    )  # fmt: skip
    return evolve(base, **changes)


def spec_of(specs: tuple[StackedWeightSpec, ...], name: str) -> StackedWeightSpec:
    return next(spec for spec in specs if spec.name == name)


def test_a_120b_rank_holds_826_megabytes() -> None:
    """Each term of TP8 x DP16, EP128 in the kernel's layout, and their sum."""
    specs = build_stacked_weight_specs(GPT_OSS_120B, MESH, 77, NKI, MXFP4)
    assert {s.name: (s.shape, s.dtype, s.num_bytes) for s in specs} == NKI_120B
    assert total_bytes(specs) == 826_178_688


def test_plain_stacks_have_checkpoint_extents() -> None:
    """20B over two ranks in float32: no padding, 16 experts and 32 query heads each."""
    specs = build_stacked_weight_specs(GPT_OSS_20B, DecodeMesh(tp_size=2, ep_size=2), 1, PLAIN, MXFP4, dtype="float32")
    assert {s.name: (s.shape, s.dtype) for s in specs} == PLAIN_20B_TP2


def test_bf16_experts_have_shapes_of_their_own() -> None:
    """20B, one rank per expert: three stacks differ, and there are no scales."""
    mesh = DecodeMesh(tp_size=8, dp_size=4, ep_size=32)
    names = ("expert_gate_up_weights", "expert_gate_up_bias", "expert_down_weights")
    for layout, shapes in (
        (PLAIN, ((24, 1, 2, 2880, 2880), (24, 1, 2, 2880), (24, 1, 2880, 2880))),
        (NKI, ((24, 1, 3072, 2, 3072), (24, 1, 128, 2, 24), (24, 1, 3072, 3072))),
    ):
        specs = build_stacked_weight_specs(GPT_OSS_20B, mesh, 3, layout, BF16)
        assert tuple(spec_of(specs, n).shape for n in names) == shapes
        assert {spec_of(specs, n).dtype for n in names} == {"bfloat16"}
        assert not [s.name for s in specs if s.name.endswith("_scale")]


def test_a_float32_build_narrows_nothing() -> None:
    """Router tensors are float16 only beside narrow weights."""
    specs = build_stacked_weight_specs(GPT_OSS_120B, MESH, 0, NKI, MXFP4, dtype="float32")
    assert {s.dtype for s in specs} == {"float32", "uint16", "uint8"}


SOURCES = [
    # name, coords, tensor suffix, source coords. Rank 77 is TP rank 5, expert 77.
    (NKI, "input_layernorm_weight", (0, 768), "input_layernorm.weight", (1,)),
    (NKI, "W_qkv", (1, 0), "self_attn.q_proj.weight", (2560, 4)),
    (NKI, "W_qkv", (3023, 511), "self_attn.q_proj.weight", (3071, 2879)),
    (NKI, "W_qkv", (0, 512), "self_attn.k_proj.weight", (320, 0)),
    (NKI, "W_qkv", (0, 639), "self_attn.v_proj.weight", (383, 0)),
    (NKI, "bias_qkv", (0, 576), "self_attn.v_proj.bias", (320,)),
    (NKI, "W_out", (3, 768), "self_attn.o_proj.weight", (1, 2563)),
    (NKI, "sink", (7, 0), "self_attn.sinks", (47,)),
    (NKI, "router_weights", (2, 9), "mlp.router.weight", (9, 8)),
    (NKI, "router_bias", (0, 127), "mlp.router.bias", (127,)),
    # partition 3, up, hidden tile 2, column 512 T + 128 w + p with T 1, w 3, p 5: unit 2 * 128 + 3, row 2 * 535 + 1
    (NKI, "expert_gate_up_weights", (0, 3, 1, 2, 901), "mlp.experts.gate_up_proj_blocks", (77, 1071, 259)),
    (NKI, "expert_gate_up_weights_scale", (0, 3, 0, 2, 901), "mlp.experts.gate_up_proj_scales", (77, 1070, 35)),
    (NKI, "expert_gate_up_bias", (0, 5, 1, 1, 3), "mlp.experts.gate_up_proj_bias", (77, 1071)),
    (NKI, "expert_down_weights", (0, 127, 4, 1536), "mlp.experts.down_proj_blocks", (77, 2, 639)),
    (NKI, "expert_down_weights_scale", (0, 15, 4, 1536), "mlp.experts.down_proj_scales", (77, 2, 79)),
    (NKI, "expert_down_bias", (0, 1), "mlp.experts.down_proj_bias", (77, 4)),
    (PLAIN, "W_qkv", (11, 513), "self_attn.k_proj.weight", (321, 11)),
    (PLAIN, "W_out", (3, 768), "self_attn.o_proj.weight", (768, 2563)),
    (PLAIN, "router_weights", (2, 9), "mlp.router.weight", (9, 2)),
    (PLAIN, "expert_gate_up_weights", (0, 1, 535, 17), "mlp.experts.gate_up_proj_blocks", (77, 1071, 17)),
    (PLAIN, "expert_gate_up_weights_scale", (0, 0, 535, 89), "mlp.experts.gate_up_proj_scales", (77, 1070, 89)),
    (PLAIN, "expert_gate_up_bias", (0, 1, 5), "mlp.experts.gate_up_proj_bias", (77, 11)),
    (PLAIN, "expert_down_weights", (0, 2, 639), "mlp.experts.down_proj_blocks", (77, 2, 639)),
    (PLAIN, "expert_down_bias", (0, 6), "mlp.experts.down_proj_bias", (77, 6)),
]


@pytest.mark.parametrize(("layout", "name", "coords", "tensor", "source"), SOURCES)
def test_each_place_has_the_source_that_was_worked_by_hand(
    layout: WeightLayout, name: str, coords: tuple[int, ...], tensor: str, source: tuple[int, ...]
) -> None:
    """Rank 77 of 120B, layer 7."""
    spec = spec_of(build_stacked_weight_specs(GPT_OSS_120B, MESH, 77, layout, MXFP4), name)
    found = element_source(spec, 7, coords)
    assert found is not None
    assert (found.tensor, found.coords) == (f"model.layers.7.{tensor}", source)


@pytest.mark.parametrize(
    ("name", "coords"),
    [
        ("input_layernorm_weight", (0, 720)),
        ("W_qkv", (767, 0)),
        ("W_out", (0, 3071)),
        ("expert_gate_up_weights", (0, 80, 0, 5, 0)),
        ("expert_gate_up_weights", (0, 0, 0, 0, 2640)),
        ("expert_gate_up_weights_scale", (0, 10, 0, 5, 0)),
        ("expert_gate_up_bias", (0, 80, 1, 5, 0)),
        ("expert_down_weights", (0, 80, 5, 0)),
        ("expert_down_weights", (0, 0, 0, 720)),
        ("expert_down_bias", (0, 1500)),
    ],
)
def test_padding_has_no_source(name: str, coords: tuple[int, ...]) -> None:
    """Places past 2880 features of either axis are zeros."""
    spec = spec_of(build_stacked_weight_specs(GPT_OSS_120B, MESH, 77, NKI, MXFP4), name)
    assert element_source(spec, 0, coords) is None


def test_value_rules_sit_where_they_belong() -> None:
    """o bias is shared out over TP, up bias gets 1, scale bytes refuse NaN; all else passes as it is."""
    specs = build_stacked_weight_specs(GPT_OSS_120B, MESH, 3, NKI, MXFP4)
    rules = {(s.name, i): p.rule for s in specs for i, p in enumerate(s.parts) if p.rule != ValueRule()}
    assert rules == {
        ("bias_out", 0): ValueRule(divide_by=8),
        ("expert_gate_up_bias", 1): ValueRule(add=1),
        ("expert_gate_up_weights_scale", 0): ValueRule(refused=255),
        ("expert_down_weights_scale", 0): ValueRule(refused=255),
    }
    up = element_source(spec_of(specs, "expert_gate_up_bias"), 0, (0, 0, 1, 0, 0))
    assert up is not None
    assert up.rule.add == 1


def test_bf16_experts_keep_intermediate_order_in_the_nki_layout() -> None:
    """Rows are stored hidden, columns plain intermediate; bias [p, g, c] is feature 128 c + p."""
    specs = build_stacked_weight_specs(GPT_OSS_120B, MESH, 5, NKI, BF16)
    found = {
        name: element_source(spec_of(specs, name), 1, coords)
        for name, coords in (
            ("expert_gate_up_weights", (0, 769, 1, 130)),
            ("expert_gate_up_bias", (0, 2, 1, 3)),
            ("expert_down_weights", (0, 130, 769)),
        )
    }
    assert {n: f and (f.tensor, f.coords) for n, f in found.items()} == {
        "expert_gate_up_weights": ("model.layers.1.mlp.experts.gate_up_proj", (5, 5, 261)),
        "expert_gate_up_bias": ("model.layers.1.mlp.experts.gate_up_proj_bias", (5, 773)),
        "expert_down_weights": ("model.layers.1.mlp.experts.down_proj", (5, 130, 5)),
    }
    assert element_source(spec_of(specs, "expert_gate_up_weights"), 1, (0, 0, 0, 2880)) is None
    assert element_source(spec_of(specs, "expert_down_weights"), 1, (0, 2880, 0)) is None


@settings(max_examples=60)
@given(data=st.data())
def test_mxfp4_tiles_follow_the_rule_as_written(data: st.DataObject) -> None:
    """[p, g, t, j] holds hidden 512 t + 4 p .. + 3 of gate or up row i(j), written out here from the text alone."""
    geometry = small_geometry(intermediate_size=544 + 32 * data.draw(st.integers(0, 9)))
    rank = data.draw(st.integers(0, 5))
    specs = build_stacked_weight_specs(geometry, DecodeMesh(tp_size=2, dp_size=3, ep_size=6), rank, NKI, MXFP4)
    spec = spec_of(specs, "expert_gate_up_weights")
    p, g, t, j = (data.draw(st.integers(0, n - 1)) for n in spec.layer_shape[1:])
    tile, w, q = j // 512, j % 512 // 128, j % 128
    i, h = 512 * tile + 4 * q + w, 512 * t + 4 * p
    found = element_source(spec, 2, (0, p, g, t, j))
    if i >= geometry.intermediate_size or h >= 544:
        assert found is None
    else:
        assert found is not None
        expert = (0, 2, 3, 4, 5, 6)[rank]  # 7 experts over 6 ranks: 2, 1, 1, 1, 1, 1
        assert (found.view, found.coords) == (SourceView.FP4_X4, (expert, 2 * i + g, h // 4))


def test_uneven_experts_give_ranks_their_own_counts() -> None:
    """7 experts over 6 ranks: rank 0 has two."""
    mesh = DecodeMesh(tp_size=2, dp_size=3, ep_size=6)
    counts = [
        spec_of(build_stacked_weight_specs(small_geometry(), mesh, r, PLAIN, BF16), "expert_down_bias").shape
        for r in range(6)
    ]
    assert counts == [(3, 2, 544), *[(3, 1, 544)] * 5]


def test_kv_heads_repeat_where_there_are_more_ranks_than_heads() -> None:
    """16 ranks, 8 KV heads: ranks 10 and 11 both hold head 5."""
    geometry, mesh = evolve(GPT_OSS_120B, num_experts=16), DecodeMesh(tp_size=16, ep_size=16)
    for rank in (10, 11):
        spec = spec_of(build_stacked_weight_specs(geometry, mesh, rank, PLAIN, BF16), "W_qkv")
        assert spec.layer_shape == (2880, (4 + 2) * 64)
        assert [p.axes[0].indices for p in spec.parts[1:]] == [range(320, 384)] * 2


def test_vocabulary_is_cut_in_even_rows_and_the_rest_is_padding() -> None:
    """101 tokens over 2 TP ranks x 3 replicas: 17 rows each, the last shard has 16 and one zero row."""
    mesh = DecodeMesh(tp_size=2, dp_size=6, ep_size=12)
    geometry = small_geometry(num_experts=12)
    first = {}
    for rank in range(12):
        embed, head, norm = build_unstacked_weight_specs(geometry, mesh, rank, NKI, vocab_dp_size=3)
        assert (embed.shape, head.shape, norm.shape) == ((17, 1024), (17, 1024), (1, 1024))
        first[rank] = embed.parts[0].axes[0].indices[0]
    assert [first[r] for r in range(12)] == [0, 17, 34, 51, 68, 85] * 2
    last = build_unstacked_weight_specs(geometry, mesh, 5, NKI, vocab_dp_size=3)[1]
    assert element_source(last, None, (15, 1)) is not None
    assert element_source(last, None, (16, 0)) is None


def test_a_120b_vocabulary_divides_over_all_ranks() -> None:
    """201088 / 128 = 1571 rows, and 25136 over eight."""
    for vocab_dp_size, rows in ((16, 1571), (1, 25_136)):
        embed, head, norm = build_unstacked_weight_specs(GPT_OSS_120B, MESH, 127, PLAIN, vocab_dp_size=vocab_dp_size)
        assert (embed.shape, head.shape, norm.shape) == ((rows, 2880), (rows, 2880), (2880,))
        assert embed.parts[0].axes[0].indices == range(201_088 - rows, 201_088)


def test_a_vocabulary_smaller_than_its_shards_leaves_empty_ones() -> None:
    """3 tokens over 8 ranks: shard 7 is one zero row."""
    geometry, mesh = small_geometry(vocab_size=3, num_q_heads=8, num_experts=8), DecodeMesh(tp_size=8, ep_size=8)
    embed = build_unstacked_weight_specs(geometry, mesh, 7, PLAIN)[0]
    assert embed.shape == (1, 544)
    assert element_source(embed, None, (0, 5)) is None


@pytest.mark.parametrize(("tied", "source"), [(False, "lm_head.weight"), (True, "model.embed_tokens.weight")])
def test_tied_models_read_lm_head_from_the_embedding(tied: bool, source: str) -> None:
    """An untied model has a tensor of its own."""
    specs = build_unstacked_weight_specs(
        small_geometry(tie_embeddings=tied), DecodeMesh(tp_size=2, ep_size=2), 0, PLAIN
    )
    assert [p.tensor for p in spec_of(specs, "lm_head").parts] == [source]


@pytest.mark.parametrize(
    ("mesh", "rank", "geometry", "dtype", "match"),
    [
        (DecodeMesh(tp_size=2, ep_size=2), 2, small_geometry(), "bfloat16", r"rank 2 is outside 0\.\.1"),
        (DecodeMesh(tp_size=4, ep_size=4), 0, small_geometry(), "bfloat16", "6 query heads do not divide"),
        (DecodeMesh(tp_size=1), 0, small_geometry(hidden_size=545), "bfloat16", "hidden_size in whole blocks of 32"),
        (DecodeMesh(tp_size=1), 0, small_geometry(intermediate_size=90), "bfloat16", "intermediate_size in whole"),
        (DecodeMesh(tp_size=1), 0, small_geometry(), "uint8", "must be one of .* got uint8"),
        (DecodeMesh(tp_size=2, dp_size=4, ep_size=8), 0, small_geometry(), "bfloat16", "7 experts over ep_size 8"),
    ],
)
def test_what_cannot_be_stacked_is_refused(
    mesh: DecodeMesh, rank: int, geometry: ModelGeometry, dtype: str, match: str
) -> None:
    """Each refusal names the rule and the number."""
    for layout in WeightLayout:
        with pytest.raises((LayoutError, UnsupportedError), match=match):
            build_stacked_weight_specs(geometry, mesh, rank, layout, MXFP4, dtype)


@pytest.mark.parametrize("vocab_dp_size", [0, 5])
def test_vocabulary_shards_must_divide_the_replicas(vocab_dp_size: int) -> None:
    """16 replicas cannot share a vocabulary five ways."""
    with pytest.raises(LayoutError, match="must divide dp_size 16"):
        build_unstacked_weight_specs(GPT_OSS_120B, MESH, 0, PLAIN, vocab_dp_size=vocab_dp_size)


def make_part(indices: tuple[int, ...], start: int) -> WeightPart:
    axis = SourceAxis(indices=indices, stack_axes=(0,), shape=(len(indices),), rule="test")
    return WeightPart(
        tensor="t", source_shape=(4,), source_dtypes=("float32",), view=SourceView.STORED, axes=(axis,),
        starts=(start,), rule=ValueRule(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "parts",
    [
        (make_part((0, 1), 0),),
        (make_part((0, 1), 0), make_part((2, 3), 1)),
        (make_part((0, 1), 0), make_part((2, 3, 0), 2)),
    ],
    ids=["gap", "overlap", "outside"],
)
def test_parts_that_do_not_fill_a_stack_once_are_refused(parts: tuple[WeightPart, ...]) -> None:
    """A stack of four places needs four places filled, each by one part."""
    with pytest.raises(LayoutError, match=r"do not fill \[4\] exactly once"):
        StackedWeightSpec(name="w", layer_shape=(4,), num_layers=None, dtype="float32", parts=parts)


def test_indices_that_leave_the_source_are_refused() -> None:
    """A source of four has no element 4, and -2 is not padding."""
    for bad in (4, -2):
        with pytest.raises(LayoutError, match=r"leave the source axis 0\.\.3"):
            make_part((0, bad), 0)


def test_parts_say_in_words_what_they_do() -> None:
    """Axes in source order, then what happens to values."""
    specs = build_stacked_weight_specs(GPT_OSS_120B, MESH, 9, NKI, MXFP4)
    assert [p.words for p in spec_of(specs, "W_qkv").parts] == [
        "q heads 8..15, hidden order", "k head 1, hidden order", "v head 1, hidden order",
    ]  # fmt: skip
    assert spec_of(specs, "bias_out").parts[0].words == "hidden order, / 8"
    assert spec_of(specs, "expert_gate_up_bias").parts[1].words == "expert 9, up, odd rows, + 1"


def test_a_place_or_layer_that_does_not_exist_is_refused() -> None:
    """element_source checks both."""
    spec = spec_of(build_stacked_weight_specs(small_geometry(), DecodeMesh(tp_size=1), 0, PLAIN, BF16), "W_qkv")
    for layer, coords in ((3, (0, 0)), (None, (0, 0)), (0, (544, 0)), (0, (0,)), (0, (0, -1))):
        with pytest.raises(LayoutError):
            element_source(spec, layer, coords)


def test_digests_differ_whenever_the_specs_do() -> None:
    """Layout, format, rank and dtype all count; the same specs give the same digest."""
    mesh, geometry = DecodeMesh(tp_size=2, ep_size=2), small_geometry(num_experts=8)
    digests = {
        specs_digest(build_stacked_weight_specs(geometry, mesh, rank, layout, fmt, dtype))
        for rank, layout, fmt, dtype in itertools.product((0, 1), WeightLayout, ExpertFormat, ("bfloat16", "float32"))
    }
    assert len(digests) == 16
    again = build_stacked_weight_specs(geometry, mesh, 0, PLAIN, BF16)
    assert specs_digest(again) in digests
