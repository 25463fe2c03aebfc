"""The part kernels, loaded in the simulator, and a compile-time configuration for them."""

from __future__ import annotations

import importlib
from typing import Any

from gk_kernels.giga_decode.config import DecodeConfig
from gk_kernels.simulator import simulate, simulated_nki

__all__ = ["make_config", "run_part"]


def run_part(name: str, *args: Any, target: str = "trn3") -> Any:
    """What the kernel `name` of `part_kernels` gives."""
    with simulated_nki():
        module = importlib.import_module("tests.kernels.part_kernels")
    return simulate(getattr(module, name), *args, target=target).output


def make_config(**changes: Any) -> DecodeConfig:
    """One rank, one KV head."""
    values: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 510, "num_q_heads": 3, "num_kv_heads": 1, "head_size": 32,
        "experts_per_token": 2, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "k_scale": 1.0,
        "v_scale": 1.0, "tp_groups": ((0,),), "ep_groups": ((0,),),
    }  # fmt: skip
    return DecodeConfig(**(values | changes))
