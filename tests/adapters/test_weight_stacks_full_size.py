"""One rank of a 120B checkpoint of real size: real names, shapes, 15 shards; sparse on disk, about a gigabyte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from gk_adapters.bench_stacking import bench_stacking, measure, rank_120b_specs
from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.weight_cache import WeightCache
from gk_adapters.weight_stacks import build_stacks
from gk_core.stacked_weights import total_bytes
from tests.synthetic_checkpoint import write_120b

pytestmark = pytest.mark.slow
RANK, TP_RANK = 77, 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("120b")
    write_120b(directory, rank_120b_specs())
    return directory


def test_the_made_up_checkpoint_has_real_extents_and_little_disk(checkpoint: Path) -> None:
    """687 tensors in 15 shards of 65 GB in all, of which about one is stored; it opens like any checkpoint."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    stats = [shard.stat() for shard in shards]
    assert len(shards) == 15
    assert 65_000_000_000 < sum(s.st_size for s in stats) < 66_000_000_000
    assert sum(s.st_blocks * 512 for s in stats) < 1_300_000_000
    assert len(HFCheckpoint(checkpoint).tensors()) == 687


def test_building_a_rank_needs_the_stack_a_layer_and_little_more(checkpoint: Path, tmp_path: Path) -> None:
    """Peak resident memory of a process that does only this: <= stacks + 1 layer + 200 MiB; far less into a cache."""
    total = total_bytes(rank_120b_specs())
    layer = total // 36
    assert measure("stacks", checkpoint, tmp_path)["bytes"] <= total + layer + (200 << 20)
    assert measure("cache", checkpoint, tmp_path)["bytes"] <= 4 * layer + (200 << 20)


class SlowPath:
    """Elements of rank 77's stacks, one by one, through safetensors and the rule as people write it down."""

    def __init__(self, directory: Path) -> None:
        self.map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        self.files: dict[str, Any] = {n: safe_open(directory / n, framework="pt") for n in set(self.map.values())}

    def tensor(self, layer: int, suffix: str, *index: int) -> float:
        """One element."""
        name = f"model.layers.{layer}.{suffix}"
        part = self.files[self.map[name]].get_slice(name)[tuple(slice(i, i + 1) for i in index)]
        return float(part.item())

    def element(self, name: str, layer: int, at: tuple[int, ...]) -> float:
        """Value at a place of a stack, before rounding; 0.0 for padding."""

        def hidden(s: int) -> int:
            return 4 * (s % 768) + s // 768

        def column(j: int) -> int:
            return j // 512 * 512 + 4 * (j % 128) + j % 512 // 128

        def word(kind: str, row: int, feature: int) -> float:
            low, high = (
                self.tensor(layer, f"mlp.experts.{kind}_blocks", RANK, row, feature // 32, feature % 32 // 2 + k)
                for k in (0, 1)
            )
            return low + 256 * high

        match_h = {"W_qkv": 0, "W_out": 1, "router_weights": 0}.get(name, len(at) - 1)
        h = hidden(at[match_h]) if at[match_h] < 3072 else 0
        t = self.tensor
        if name in ("bias_qkv", "sink", "router_bias"):
            if name == "bias_qkv":
                kind, row = self.qkv(at[1])
                return t(layer, f"self_attn.{kind}_proj.bias", row)
            return t(layer, "self_attn.sinks", 40 + at[0]) if name == "sink" else t(layer, "mlp.router.bias", at[1])
        if name == "expert_gate_up_bias":
            _, p, g, tile, w = at
            i = 512 * tile + 4 * p + w
            return t(layer, "mlp.experts.gate_up_proj_bias", RANK, 2 * i + g) + g if i < 2880 else 0.0
        if name.startswith("expert_gate_up_weights"):
            _, p, g, tile, j = at
            row, size = 2 * column(j) + g, 4 if name.endswith("weights") else 32
            feature = 512 * tile + size * p
            if row >= 5760 or feature >= 2880:
                return 0.0
            if size == 4:
                return word("gate_up_proj", row, feature)
            return t(layer, "mlp.experts.gate_up_proj_scales", RANK, row, feature // 32)
        if h >= 2880:
            return 0.0
        if name == "W_qkv":
            kind, row = self.qkv(at[1])
            return t(layer, f"self_attn.{kind}_proj.weight", row, h)
        if name == "W_out":
            return t(layer, "self_attn.o_proj.weight", h, 512 * TP_RANK + at[0])
        if name == "router_weights":
            return t(layer, "mlp.router.weight", at[1], h)
        if name == "expert_down_bias":
            return t(layer, "mlp.experts.down_proj_bias", RANK, h)
        if name.startswith("expert_down"):
            _, p, tile, _ = at
            size = 4 if name.endswith("weights") else 32
            feature = 512 * tile + size * p
            if feature >= 2880:
                return 0.0
            if size == 4:
                return word("down_proj", h, feature)
            return t(layer, "mlp.experts.down_proj_scales", RANK, h, feature // 32)
        if name == "bias_out":
            return t(layer, "self_attn.o_proj.bias", h) / 8
        norm = "input" if name.startswith("input") else "post_attention"
        return t(layer, f"{norm}_layernorm.weight", h)

    @staticmethod
    def qkv(column: int) -> tuple[str, int]:
        """Projection and its row: 8 query heads, then KV head 5, of 64."""
        if column < 512:
            return "q", 512 * TP_RANK + column
        return ("k" if column < 576 else "v"), 64 * TP_RANK + (column - 512) % 64


def test_random_samples_of_every_stack_equal_the_slow_path(checkpoint: Path, tmp_path: Path) -> None:
    """300 places of each, in memory and through the cache."""
    source, specs, slow = HFCheckpoint(checkpoint), rank_120b_specs(), SlowPath(checkpoint)
    stacks = build_stacks(source, specs)
    cached = WeightCache(directory=tmp_path).load_or_build(source, specs)
    rng = np.random.default_rng(3)
    dtypes: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    for spec in specs:
        real = 0
        for _ in range(300):
            layer, *rest = (int(rng.integers(n)) for n in spec.shape)
            wanted = slow.element(spec.name, layer, tuple(rest))
            rounded = float(np.float32(wanted).astype(dtypes.get(spec.dtype, np.float32)))
            place = (layer, *rest)
            assert float(stacks[spec.name][place]) == rounded, (spec.name, place)
            assert float(cached[spec.name][place]) == rounded, (spec.name, place)
            real += wanted != 0.0
        assert real > 50, spec.name


def test_the_benchmark_says_what_it_compared(checkpoint: Path) -> None:
    """Form and names; figures are for people."""
    answer = bench_stacking(repeats=1, checkpoint=checkpoint)
    assert answer["name"] == "stacking"
    assert [case["case"] for case in answer["cases"]] == [
        "rank_120b", "rank_120b_cpu", "rank_120b_peak_rss", "rank_120b_to_disk", "rank_120b_in_memory",
    ]  # fmt: skip
    for case in answer["cases"]:
        assert case["ratio"] == case["ours"]["median"] / case["peer"]["median"]
        assert case["ours"]["min"] <= case["ours"]["median"] <= case["ours"]["max"]
