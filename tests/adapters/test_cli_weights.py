"""`gk weights`: the numbers worked out by hand, checkpoints checked whole, stacks built into a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from gk_adapters.cli.weights import weights
from gk_core.errors import CheckpointError, GkError, LayoutError, RequestError, UnsupportedError
from gk_core.weight_layouts import ExpertFormat
from tests.synthetic_checkpoint import write_small

TARGET = ("--model", "gpt-oss-120b", "--tp", "8", "--dp", "16", "--ep", "128", "--rank", "77")


def run_json(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(weights, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert isinstance(answer, dict)
    return answer


def refusal(*args: str) -> GkError:
    error = CliRunner().invoke(weights, [*args]).exception
    assert isinstance(error, GkError), error
    return error


def test_a_120b_rank_is_listed_with_its_bytes_and_sources() -> None:
    """826 MB in 15 stacks, 309 MB outside the layers."""
    answer = run_json(*TARGET)
    assert (answer["total_bytes"], len(answer["weights"])) == (826_178_688, 15)
    assert answer["outside_layers_bytes"] == 308_877_312
    rows = {row["name"]: row for row in answer["weights"]}
    assert rows["expert_gate_up_weights"] == {
        "name": "expert_gate_up_weights", "shape": [36, 1, 128, 2, 6, 3072], "dtype": "uint16", "bytes": 339_738_624,
        "sources": ["model.layers.{layer}.mlp.experts.gate_up_proj_blocks"],
        "rule": "expert 77, even rows gate, odd rows up, intermediate order, four values at 512 t + 4 p",
    }  # fmt: skip
    assert rows["W_qkv"]["sources"] == [f"model.layers.{{layer}}.self_attn.{k}_proj.weight" for k in "qkv"]
    assert rows["W_qkv"]["rule"].startswith("q heads 40..47, hidden order; k head 5")
    assert answer["kv_scales"] == {"k": 1.0, "v": 1.0, "from": "default"}


@pytest.mark.parametrize(
    ("args", "total"),
    [
        (("--layout", "plain"), 742_612_608),
        (("--expert-format", "bf16"), 2_323_152_000),
        (("--layout", "plain", "--expert-format", "bf16", "--dtype", "float32"), 4_116_622_464),
    ],
)
def test_totals_follow_layout_format_and_dtype(args: tuple[str, ...], total: int) -> None:
    """Plain has no padding, BF16 experts are four times as large, float32 doubles every float."""
    assert run_json(*TARGET, *args)["total_bytes"] == total


def test_people_get_a_table_with_the_total() -> None:
    """The same without --json."""
    result = CliRunner().invoke(weights, [*TARGET], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "826,178,688" in result.output
    assert "expert_down_weights_scale" in result.output


@pytest.mark.parametrize(
    ("args", "kind", "match"),
    [
        (("--tp", "8"), RequestError, "--model must be one of"),
        (("--model", "gpt-2"), RequestError, "--model must be one of"),
        (("--model", "gpt-oss-20b", "--tp", "7"), LayoutError, "64 query heads do not divide"),
        (("--model", "gpt-oss-20b", "--tp", "8", "--ep", "4"), UnsupportedError, "ep_size must be"),
        (("--model", "gpt-oss-20b", "--tp", "8", "--dp", "8"), UnsupportedError, "32 experts over ep_size 64"),
        (("--model", "gpt-oss-20b", "--rank", "1"), LayoutError, r"rank 1 is outside 0\.\.0"),
        (("build", "--model", "gpt-oss-20b"), RequestError, "must be a checkpoint directory to build from"),
    ],
)
def test_bad_options_are_refused(args: tuple[str, ...], kind: type[GkError], match: str) -> None:
    """Errors of the tree, which the main command prints in one line."""
    error = refusal(*args)
    assert isinstance(error, kind)
    with pytest.raises(kind, match=match):
        raise error


def test_a_checkpoint_says_its_own_format_and_dtype(tmp_path: Path) -> None:
    """A float16 checkpoint with BF16-form experts; contradicting it is refused."""
    write_small(tmp_path, ExpertFormat.BF16, dtype="float16")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    answer = run_json("--model", str(tmp_path), "--layout", "plain")
    assert (answer["expert_format"], answer["dtype"]) == ("bf16", "float16")
    assert "checkpoint's experts are bf16" in str(refusal("--model", str(tmp_path), "--expert-format", "mxfp4"))


def test_kv_scales_of_a_checkpoint_are_recorded_as_its_own(tmp_path: Path) -> None:
    """One scale for all layers is listed; scales that differ are refused by tensor name."""
    write_small(tmp_path, ExpertFormat.MXFP4, num_shards=1)
    shard = tmp_path / "model-00000-of-00000.safetensors"
    tensors = load_file(shard)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for layer in range(3):
        for kind, value in (("k", 0.5), ("v", 0.25)):
            name = f"model.layers.{layer}.self_attn.{kind}_scale"
            tensors[name] = np.array([value], ml_dtypes.bfloat16)
            index["weight_map"][name] = shard.name
    save_file(tensors, shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run_json("--model", str(tmp_path))["kv_scales"] == {"k": 0.5, "v": 0.25, "from": "checkpoint"}
    tensors["model.layers.2.self_attn.v_scale"] = np.array([0.5], ml_dtypes.bfloat16)
    save_file(tensors, shard)
    error = refusal("--model", str(tmp_path))
    assert isinstance(error, CheckpointError)
    assert "model.layers.2.self_attn.v_scale is 0.5" in str(error)


def test_a_truncated_shard_is_refused_by_tensor_name_before_building(tmp_path: Path) -> None:
    """Nothing is made in the cache."""
    checkpoint, cache = tmp_path / "model", tmp_path / "cache"
    write_small(checkpoint, ExpertFormat.MXFP4)
    shard = sorted(checkpoint.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    error = refusal("build", "--model", str(checkpoint), "--cache", str(cache))
    assert isinstance(error, CheckpointError)
    assert "is truncated: tensor " in str(error)
    assert not cache.exists()


def test_build_makes_an_entry_once_and_says_where(tmp_path: Path) -> None:
    """The second build finds the first one's entry; the file is an ordinary safetensors file."""
    checkpoint, cache = tmp_path / "model", tmp_path / "cache"
    write_small(checkpoint, ExpertFormat.MXFP4)
    args = ("build", "--model", str(checkpoint), "--tp", "2", "--rank", "1", "--cache", str(cache), "--threads", "1")
    first, second = run_json(*args), run_json(*args)
    assert (first["key"], first["path"]) == (second["key"], second["path"])
    assert first["path"] == str(cache / first["key"])
    tensors = load_file(Path(first["path"]) / "stacks.safetensors")
    assert sum(t.nbytes for t in tensors.values()) == first["total_bytes"]
    assert tensors["W_qkv"].shape == (3, 1024, 50)
    result = CliRunner().invoke(weights, [*args], catch_exceptions=False)
    assert first["path"] in result.output
