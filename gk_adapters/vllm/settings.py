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

    REPLAY recomputes them through decode steps, one token each: slow, right, counted. PULL_AGAIN does so too, but first
    asks the producer again for as long as it keeps the KV. REFUSE fails the request; the log says which and why.
    """

    REPLAY = "replay"
    PULL_AGAIN = "pull_again"
    REFUSE = "refuse"


@frozen(kw_only=True)
class GkSettings:
    """The `neuron_config` keys that gk reads.

    Attributes:
        gk_decode: serve decode steps through the giga kernel.
        fp8_packed_kv: pair-packed K; needs an FP8 cache.
        missing_kv: policy for tokens without KV.
        lnc: logical NeuronCore config.
        gk_attention: whether attention runs on gk's backend, over group buffers. Not set: wherever gk_decode,
            fp8_packed_kv or gk's connector is. False keeps vLLM's own attention and cache layout under gk's connector.
    """

    gk_decode: bool = False
    fp8_packed_kv: bool = False
    missing_kv: MissingKVPolicy = MissingKVPolicy.REPLAY
    lnc: int = 1
    gk_attention: bool | None = None


_KNOWN = ("gk_attention", "gk_decode", "gk_missing_kv")


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
    unknown = sorted(k for k in config if str(k).startswith("gk_") and k not in _KNOWN)
    if unknown:
        raise RequestError(
            f"unknown neuron_config keys {unknown}; gk knows gk_attention, gk_decode, gk_missing_kv, fp8_packed_kv"
        )
    lnc = config.get("logical_nc_config", 1)
    if type(lnc) is not int:
        raise RequestError(f"neuron_config.logical_nc_config must be an int, got {lnc!r}")
    policy = config.get("gk_missing_kv", MissingKVPolicy.REPLAY.value)
    if policy not in {p.value for p in MissingKVPolicy}:
        raise RequestError(f"gk_missing_kv must be one of {[p.value for p in MissingKVPolicy]}, got {policy!r}")
    settings = GkSettings(
        gk_decode=_flag(config, "gk_decode"),
        fp8_packed_kv=_flag(config, "fp8_packed_kv"),
        missing_kv=MissingKVPolicy(policy),
        lnc=lnc,
        gk_attention=_flag(config, "gk_attention") if "gk_attention" in config else None,
    )
    if settings.gk_attention is False and (settings.gk_decode or settings.fp8_packed_kv):
        raise RequestError("gk_decode and fp8_packed_kv need gk's cache layout; take gk_attention: false out")
    return settings


def engine_uses_gk(vllm_config: Any) -> bool:
    """Whether an engine's attention runs on gk's backend: as `gk_attention` says, else by its other settings."""
    settings = parse_settings(vllm_config.additional_config)
    if settings.gk_attention is not None:
        return settings.gk_attention
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    connected = getattr(transfer, "kv_connector", None) == "GkNixlConnector"
    # Another model under gk's connector keeps vLLM's own attention and cache.
    model = getattr(getattr(vllm_config.model_config, "hf_config", None), "model_type", None)
    return (connected and model == "gpt_oss") or settings.gk_decode or settings.fp8_packed_kv


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
