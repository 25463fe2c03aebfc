"""What a vLLM user sets: `additional_config={"neuron_config": {...}}`, read once and checked key by key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from attrs import frozen

from gk_core.errors import RequestError

__all__ = ["GkSettings", "MissingKVPolicy", "engine_uses_gk", "packed_kv_requested", "parse_settings"]


class MissingKVPolicy(Enum):
    """What a GK engine, which has no prefill graph, does with prompt tokens whose KV it does not have.

    REPLAY recomputes them through decode steps, one token each: slow, right, counted. REFUSE fails the request by name.
    """

    REPLAY = "replay"
    REFUSE = "refuse"


@frozen(kw_only=True)
class GkSettings:
    """The `neuron_config` keys that gk reads.

    Attributes:
        gk_decode: serve decode steps through the giga kernel.
        fp8_packed_kv: pair-packed K; needs an FP8 cache.
        missing_kv: policy for tokens without KV.
    """

    gk_decode: bool = False
    fp8_packed_kv: bool = False
    missing_kv: MissingKVPolicy = MissingKVPolicy.REPLAY


def parse_settings(additional_config: object) -> GkSettings:
    """Settings of one engine; other systems' keys beside `neuron_config` are theirs.

    >>> parse_settings({"neuron_config": {"gk_decode": True}}).gk_decode
    True

    Raises:
        RequestError: a value of the wrong type, or an unknown key that begins with `gk_`.
    """
    outer = additional_config if isinstance(additional_config, Mapping) else {}
    config = outer.get("neuron_config", {})
    if not isinstance(config, Mapping):
        raise RequestError(f"additional_config.neuron_config must be an object, got {type(config).__name__}")
    unknown = sorted(k for k in config if str(k).startswith("gk_") and k not in ("gk_decode", "gk_missing_kv"))
    if unknown:
        raise RequestError(f"unknown neuron_config keys {unknown}; gk knows gk_decode, gk_missing_kv, fp8_packed_kv")
    policy = config.get("gk_missing_kv", MissingKVPolicy.REPLAY.value)
    if policy not in {p.value for p in MissingKVPolicy}:
        raise RequestError(f"gk_missing_kv must be one of {[p.value for p in MissingKVPolicy]}, got {policy!r}")
    return GkSettings(
        gk_decode=_flag(config, "gk_decode"),
        fp8_packed_kv=_flag(config, "fp8_packed_kv"),
        missing_kv=MissingKVPolicy(policy),
    )


def engine_uses_gk(vllm_config: Any) -> bool:
    """Whether an engine asked for gk: by its connector, or by a gk key in `neuron_config`."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if getattr(transfer, "kv_connector", None) == "GkNixlConnector":
        return True
    return parse_settings(vllm_config.additional_config) != GkSettings()


def packed_kv_requested() -> bool:
    """Whether the engine being built asks for packed K; False where no vLLM config is current."""
    from vllm.config import get_current_vllm_config_or_none

    config: Any = get_current_vllm_config_or_none()
    return config is not None and parse_settings(config.additional_config).fp8_packed_kv


def _flag(config: Mapping[Any, Any], key: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"neuron_config.{key} must be true or false, got {value!r}")
    return value
