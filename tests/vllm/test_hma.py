"""Planning by real vLLM: the same groups, pairs, blocks and tokens as the core's own arithmetic."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import attrs
import pytest

from gk_adapters.vllm.hma import HmaPlanner, layer_id_of, layer_name, plan_of_config, planning_config, vllm_specs
from gk_adapters.vllm.seams_cache import shared_tensors
from gk_adapters.vllm.versions import Era, served_era
from gk_core.errors import LayoutError, MissingDependencyError, UnsupportedError
from gk_core.kv_budget import budget, num_blocks_for_memory
from gk_core.kv_spec import KVDtype, LayerKVSpec, honest_specs, plan_kv_cache
from gk_core.model_geometry import GPT_OSS_20B, GPT_OSS_120B

pytestmark = pytest.mark.vllm

MEMORY_BYTES = 36_175 * 294_912
NULL_BLOCKS_COUNTED = int(served_era() is Era.LAYOUTS)
SPECS = honest_specs(GPT_OSS_120B, tp_size=8, block_size=128, dtype=KVDtype.FP8_E4M3FN)


def planner(max_model_len: int = 10_240, max_num_batched_tokens: int = 8192, *, hybrid: bool = True) -> HmaPlanner:
    return HmaPlanner(
        planning_config(max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens, hybrid=hybrid)
    )


def test_real_vllm_gives_the_target_two_groups_eighteen_tensors_and_36175_blocks() -> None:
    """Shared by [2j, 2j+1], 592,691,200 bytes each, 9.936 GiB in all."""
    config = planner().kv_cache_config(specs=SPECS, memory_bytes=MEMORY_BYTES)
    assert config.num_blocks == 36_175
    assert len(config.kv_cache_groups) == 2
    tensors = shared_tensors(config)
    assert [t.shared_by for t in tensors] == [(layer_name(2 * j), layer_name(2 * j + 1)) for j in range(18)]
    assert {t.num_bytes for t in tensors} == {592_691_200}
    assert sum(t.num_bytes for t in tensors) == MEMORY_BYTES


def test_the_plan_is_the_cores_own() -> None:
    """Real vLLM and gk_core agree on every field."""
    plan = planner().plan(specs=SPECS, memory_bytes=MEMORY_BYTES)
    assert plan == plan_kv_cache(SPECS, num_blocks=num_blocks_for_memory(MEMORY_BYTES, 294_912))
    assert plan.half_block_bytes == 8192
    assert plan.kv_bytes == MEMORY_BYTES


@pytest.mark.parametrize(
    ("max_len", "batched", "tokens"),
    [
        (10_240, 8192, 2_537_205),
        (10_240, 2048, 3_779_918),
        (10_240, 10_240, 2_300_819),
        (131_072, 8192, 4_350_027),
        (10_240, 64, 4_463_036),
        (10_240, 128, 4_463_036),
        (10_240, 256, 4_409_904),
    ],
)
def test_token_capacity_is_what_vllm_prints(max_len: int, batched: int, tokens: int) -> None:
    """vLLM's number, the core's number and the literal."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    p = planner(max_len, batched)
    config = p.kv_cache_config(specs=SPECS, memory_bytes=MEMORY_BYTES)
    theirs, concurrency = get_kv_cache_capacity(p.vllm_config, config)
    ours = budget(plan_of_config(config), max_model_len=max_len, max_num_batched_tokens=batched)
    assert theirs == ours.token_capacity == tokens
    assert concurrency == pytest.approx(float(ours.max_requests), rel=1e-12)


def test_247_77_requests_fit() -> None:
    """At 10,240 tokens and batches of 8192."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    p = planner()
    config = p.kv_cache_config(specs=SPECS, memory_bytes=MEMORY_BYTES)
    assert round(get_kv_cache_capacity(p.vllm_config, config)[1], 2) == 247.77


@pytest.mark.parametrize(
    ("geometry", "tp", "block_size", "dtype", "window"),
    [
        (GPT_OSS_20B, 8, 128, KVDtype.FP8_E4M3FN, 128),
        (GPT_OSS_120B, 4, 64, KVDtype.FP8_E4M3, 128),
        (GPT_OSS_120B, 1, 16, KVDtype.BF16, 100),
        (GPT_OSS_20B, 16, 256, KVDtype.FP32, 300),
        (GPT_OSS_20B, 2, 32, KVDtype.FP16, 128),
    ],
)
def test_other_models_blocks_dtypes_and_windows_agree_too(
    geometry: Any, tp: int, block_size: int, dtype: KVDtype, window: int
) -> None:
    """Plan and budget of the core and of real vLLM."""
    specs = honest_specs(attrs.evolve(geometry, sliding_window=window), tp_size=tp, block_size=block_size, dtype=dtype)
    per_block = len(specs) * specs[0].half_block_bytes
    memory = 1000 * per_block + 17
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    p = planner(5000, 1111)
    plan = p.plan(specs=specs, memory_bytes=memory)
    assert plan == plan_kv_cache(specs, num_blocks=num_blocks_for_memory(memory, per_block))
    theirs = get_kv_cache_capacity(p.vllm_config, p.kv_cache_config(specs=specs, memory_bytes=memory))
    assert theirs[0] == budget(plan, max_model_len=5000, max_num_batched_tokens=1111).token_capacity


@pytest.mark.slow
def test_a_real_model_config_plans_the_same(tmp_path: Any) -> None:
    """The stand-in for a model's config hides nothing: vLLM's own, read from a folder, gives the same plan."""
    import json

    from vllm.config import ModelConfig

    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 36,
                "hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
                "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128,
                "vocab_size": 101, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
            }
        )
    )  # fmt: skip
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=10_240, dtype="bfloat16")
    p = planner()
    p.vllm_config.model_config = model
    assert p.plan(specs=SPECS, memory_bytes=MEMORY_BYTES) == plan_kv_cache(SPECS, num_blocks=36_175)


def test_lexicographic_order_pairs_the_wrong_layers_and_is_refused() -> None:
    """layers.10 before layers.2: vLLM pairs [2, 21] without a word; we name the first wrong pair."""
    lexicographic = tuple(sorted(SPECS, key=lambda s: layer_name(s.layer_id)))
    config = planner().kv_cache_config(specs=lexicographic, memory_bytes=MEMORY_BYTES)
    pairs = [[layer_id_of(n) for n in t.shared_by] for t in shared_tensors(config)]
    assert pairs[:4] == [[0, 1], [10, 11], [12, 13], [14, 15]]
    assert [2, 21] in pairs
    assert [20, 23] in pairs
    with pytest.raises(UnsupportedError, match=r"buffer 1 must be shared by layers \[2, 3\], got \[10, 11\]"):
        planner().plan(specs=lexicographic, memory_bytes=MEMORY_BYTES)


def test_full_layers_first_pairs_the_other_way_round_and_is_refused() -> None:
    """[1, 0] in place of [0, 1]."""
    backwards = tuple(sorted(SPECS, key=lambda s: (s.layer_id % 2 == 0, s.layer_id)))
    with pytest.raises(UnsupportedError, match=r"buffer 0 must be shared by layers \[0, 1\], got \[1, 0\]"):
        planner().plan(specs=backwards, memory_bytes=MEMORY_BYTES)


def test_without_the_hybrid_manager_the_plan_is_refused_with_the_reason() -> None:
    """One group, 36 tensors, half the blocks."""
    p = planner(hybrid=False)
    config = p.kv_cache_config(specs=SPECS, memory_bytes=MEMORY_BYTES)
    assert (len(config.kv_cache_groups), len(shared_tensors(config)), config.num_blocks) == (1, 36, 18_087)
    with pytest.raises(
        UnsupportedError, match=r"needs 2 KV cache groups .* got 1; keep the hybrid KV-cache manager on"
    ):
        p.plan(specs=SPECS, memory_bytes=MEMORY_BYTES)


def test_inverted_parity_is_refused() -> None:
    """Layer 0 full, layer 1 sliding: vLLM plans it, the kernel would read it wrong."""
    inverted = tuple(attrs.evolve(s, layer_id=s.layer_id ^ 1) for s in SPECS)
    in_order = tuple(sorted(inverted, key=lambda s: s.layer_id))
    with pytest.raises(UnsupportedError, match="layer 0 must be sliding_attention, got full_attention"):
        planner().plan(specs=in_order, memory_bytes=MEMORY_BYTES)


def test_memory_for_less_than_one_request_is_a_layout_error() -> None:
    """145 blocks where one longest request needs 146, and the null block too where vLLM counts it; in vLLM's words."""
    null = NULL_BLOCKS_COUNTED
    assert planner().plan(specs=SPECS, memory_bytes=(146 + null) * 294_912).num_blocks == 146 + null
    said = rf"vLLM refuses {(145 + null) * 294_912} bytes for 36 layers: .*max seq len"
    with pytest.raises(LayoutError, match=said):
        planner().plan(specs=SPECS, memory_bytes=(145 + null) * 294_912)


def test_no_layers_and_impossible_settings_are_layout_errors() -> None:
    """Ours for an empty cache, vLLM's for its settings."""
    with pytest.raises(LayoutError, match="at least one layer spec"):
        planner().plan(specs=(), memory_bytes=MEMORY_BYTES)
    with pytest.raises(LayoutError, match="vLLM refuses these settings"):
        planning_config(max_model_len=10, max_num_batched_tokens=0)


def test_specs_become_vllms_in_the_order_given() -> None:
    """One-byte elements for FP8, windows where layers slide."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    theirs = vllm_specs(SPECS[:2])
    assert list(theirs) == ["model.layers.0.attn.attn", "model.layers.1.attn.attn"]
    sliding, full = theirs.values()
    assert (type(sliding), sliding.sliding_window) == (SlidingWindowSpec, 128)
    assert (type(full), full.sliding_window) == (FullAttentionSpec, None)
    for spec in (sliding, full):
        assert (spec.block_size, spec.num_kv_heads, spec.head_size) == (128, 1, 64)
        assert spec.dtype == torch.float8_e4m3fn
        assert spec.page_size_bytes == 16_384


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_every_dtype_has_its_size_in_vllm(dtype: KVDtype) -> None:
    """A page is K and V of one block."""
    spec = honest_specs(GPT_OSS_20B, tp_size=4, block_size=32, dtype=dtype)[0]
    assert next(iter(vllm_specs([spec]).values())).page_size_bytes == 2 * spec.half_block_bytes


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.0.attn.attn", 0), ("layers.21", 21), ("model.layers.35.self_attn.attn", 35)],
)
def test_a_layer_is_read_from_its_name(name: str, layer: int) -> None:
    """As vLLM's models and others' spell it."""
    assert layer_id_of(name) == layer


@pytest.mark.parametrize("name", ["model.embed", "model.mylayers.3.attn", "layers.x", ""])
def test_a_name_without_a_layer_is_refused(name: str) -> None:
    """Named in full."""
    with pytest.raises(UnsupportedError, match=re.escape(f"cannot tell the layer of {name!r}")):
        layer_id_of(name)


def test_groups_of_another_kind_are_refused() -> None:
    """Chunked local attention is neither sliding nor full."""
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=2, dtype=torch.bfloat16, attention_chunk_size=32
    )
    config = KVCacheConfig(num_blocks=5, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)])
    with pytest.raises(UnsupportedError, match="a group of ChunkedLocalAttentionSpec is neither sliding nor full"):
        plan_of_config(config)


def test_padded_and_packed_tensors_are_refused() -> None:
    """The kernel reads whole pages from each tensor's own base."""
    config = planner().kv_cache_config(specs=SPECS, memory_bytes=MEMORY_BYTES)
    last = config.kv_cache_tensors[-1]
    if served_era() is Era.SHAPES:
        last.size += 1
    else:
        last.layer_stride += 1
    with pytest.raises(UnsupportedError, match=r"has 592691201 bytes, must have 36175 blocks of 16384"):
        plan_of_config(config)
    if served_era() is Era.SHAPES:
        last.size -= 1
    else:
        last.layer_stride -= 1
    last.block_stride = 294_912
    with pytest.raises(UnsupportedError, match="packed cross-layer layout"):
        plan_of_config(config)


def test_groups_with_pages_of_two_sizes_are_refused() -> None:
    """One block id means the same bytes in both groups."""
    config = planner().kv_cache_config(specs=SPECS, memory_bytes=MEMORY_BYTES)
    group = config.kv_cache_groups[1]
    group.kv_cache_spec = group.kv_cache_spec.copy_with_new_block_size(64)
    with pytest.raises(UnsupportedError, match=r"pages of one size, got \[8192, 16384\] bytes"):
        plan_of_config(config)


def test_a_planner_whose_pages_are_not_the_specs_is_refused() -> None:
    """A subclass that hands vLLM other specs does not go unnoticed."""

    class Wider(HmaPlanner):
        def kv_cache_config(self, *, specs: Any, memory_bytes: int) -> Any:
            wider: list[LayerKVSpec] = [attrs.evolve(s, num_kv_heads=2) for s in specs]
            return super().kv_cache_config(specs=wider, memory_bytes=memory_bytes)

    config = planning_config(max_model_len=10_240, max_num_batched_tokens=64)
    with pytest.raises(UnsupportedError, match="half a block 16384 bytes, the specs need 8192"):
        Wider(config).plan(specs=SPECS, memory_bytes=MEMORY_BYTES)


def test_without_vllm_every_entry_says_what_to_install() -> None:
    """In an interpreter that sees no installed packages' metadata, and so no vLLM."""
    code = """
import importlib.metadata as m
def nothing(name): raise m.PackageNotFoundError(name)
m.version = nothing
from gk_adapters.vllm.hma import HmaPlanner, planning_config, vllm_specs
from gk_core.errors import MissingDependencyError
for call in (lambda: HmaPlanner(None), lambda: vllm_specs([]),
             lambda: planning_config(max_model_len=1, max_num_batched_tokens=1)):
    try:
        call()
    except MissingDependencyError as error:
        assert "gk-decode[vllm]" in str(error), error
    else:
        raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert issubclass(MissingDependencyError, ImportError)


def test_importing_the_adapters_does_not_import_vllm() -> None:
    """A user without vLLM may import everything that does not need it."""
    code = "import sys, gk_adapters.vllm, gk_adapters.vllm.hma\nassert not {'vllm', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
