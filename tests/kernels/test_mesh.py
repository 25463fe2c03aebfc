"""The giga kernel on meshes of simulated ranks, collectives and all, against one torch kernel per replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gk_core.decode_mesh import DecodeMesh
from tests.hf_models import make_hf_checkpoint
from tests.kernels.mesh_steps import run_mesh_step

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("tp", "dp", "experts", "rows", "mxfp4"),
    [
        pytest.param(2, 1, 5, 3, False, id="TP2"),
        pytest.param(2, 2, 5, 2, True, id="TP2xDP2-EP4"),
        pytest.param(8, 2, 17, 1, False, id="TP8xDP2-EP16"),
    ],
)
def test_a_mesh_computes_what_one_torch_kernel_per_replica_does(
    tmp_path: Path, tp: int, dp: int, experts: int, rows: int, mxfp4: bool
) -> None:
    """float32 to 1e-5; uneven experts, shared KV heads, rows of several lengths and an inactive one per replica."""
    make_hf_checkpoint(tmp_path, mxfp4=mxfp4, num_local_experts=experts, **SIZES)
    step = run_mesh_step(tmp_path, DecodeMesh(tp_size=tp, dp_size=dp, ep_size=tp * dp), rows_per_rank=rows)
    scale = float(step.expected.abs().max())
    assert float((step.hidden - step.expected).abs().max()) / scale <= 1e-5
    assert step.cache_difference <= 1e-4


@pytest.mark.parametrize(("dp", "experts"), [(1, 5), (2, 4)], ids=["several-experts-a-rank", "one-expert-a-rank"])
def test_a_bfloat16_mesh_is_near_bfloat16_torch(tmp_path: Path, dp: int, experts: int) -> None:
    """Relative error over all rows; both round, at different places."""
    make_hf_checkpoint(tmp_path, num_local_experts=experts, **SIZES)
    mesh = DecodeMesh(tp_size=2, dp_size=dp, ep_size=2 * dp)
    step = run_mesh_step(tmp_path, mesh, rows_per_rank=2, dtype="bfloat16")
    assert float((step.hidden - step.expected).norm() / step.expected.norm()) <= 2e-2


def test_fp8_reduce_scatter_is_an_option_that_costs_precision(tmp_path: Path) -> None:
    """Off by default, see above; on, the sums carry FP8's error and no more."""
    make_hf_checkpoint(tmp_path, **SIZES)
    step = run_mesh_step(tmp_path, DecodeMesh(tp_size=2, dp_size=2, ep_size=4), rows_per_rank=2, fp8=True)
    assert 1e-3 < float((step.hidden - step.expected).norm() / step.expected.norm()) < 4e-2


@pytest.mark.slow
def test_the_whole_topology_of_128_ranks_is_right(tmp_path: Path) -> None:
    """TP8 x DP16, EP128, one expert per rank, every collective met."""
    make_hf_checkpoint(tmp_path, num_local_experts=128, **(SIZES | {"hidden_size": 64, "intermediate_size": 32}))
    step = run_mesh_step(tmp_path, DecodeMesh(tp_size=8, dp_size=16, ep_size=128))
    scale = float(step.expected.abs().max())
    assert float((step.hidden - step.expected).abs().max()) / scale <= 1e-5
