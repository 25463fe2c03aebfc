"""What one vLLM engine is, in the core's words: geometry, cache dtype, role, and every reason not to start.

Read from the engine's own config before weights load; used by the giga-kernel model and by the connector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import frozen

from gk_adapters.hf_config import read_hf_config
from gk_adapters.vllm.hma import layer_id_of, vllm_specs
from gk_adapters.vllm.plugin import CONNECTOR_NAME
from gk_adapters.vllm.settings import GkSettings, parse_settings
from gk_core.block_table import require_block_size
from gk_core.disaggregation import Deployment, Role, deployment_faults
from gk_core.errors import CheckpointError, LayoutError, UnsupportedError
from gk_core.kv_layout import KByteOrder, KVLayout, layout_for
from gk_core.kv_spec import KVDtype, LayerKVSpec, honest_specs
from gk_core.model_geometry import AttentionKind, ModelGeometry

__all__ = [
    "CONNECTOR_NAME",
    "SCHEDULER_NAME",
    "EngineFacts",
    "checkpoint_directory",
    "deployment_of",
    "engine_facts",
    "engine_faults",
    "require_gk_decode",
    "role_of",
]

SCHEDULER_NAME = "gk_adapters.vllm.scheduler.GkScheduler"

_ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}
_FLOATS = {"torch.float32": KVDtype.FP32, "torch.bfloat16": KVDtype.BF16, "torch.float16": KVDtype.FP16}


@frozen(kw_only=True)
class EngineFacts:
    """One engine as configured.

    Attributes:
        directory: the checkpoint.
        geometry: of the model.
        settings: gk's own.
        role: None for an engine that does both.
        block_size: tokens.
        kv_dtype: element type of the cache.
        k_byte_order: of the K half.
        tp_size: tensor-parallel ranks.
        dcp_size: decode-context-parallel ranks.
    """

    directory: Path
    geometry: ModelGeometry
    settings: GkSettings
    role: Role | None
    block_size: int
    kv_dtype: KVDtype
    k_byte_order: KByteOrder
    tp_size: int
    dcp_size: int

    @property
    def specs(self) -> tuple[LayerKVSpec, ...]:
        """Honest specs of one rank, in layer order."""
        return honest_specs(self.geometry, tp_size=self.tp_size, block_size=self.block_size, dtype=self.kv_dtype)

    def layout(self, *, num_blocks: int) -> KVLayout:
        """Of one rank's cache with so many blocks."""
        return layout_for(self.specs, num_blocks=num_blocks, k_byte_order=self.k_byte_order)


def role_of(vllm_config: Any) -> Role | None:
    """Role by the engine's kv_role."""
    transfer = vllm_config.kv_transfer_config
    return None if transfer is None else _ROLES.get(transfer.kv_role)


def engine_facts(vllm_config: Any) -> EngineFacts:
    """Facts of an engine.

    Raises:
        CheckpointError: the checkpoint's config is not understood.
        RequestError: a gk setting is wrong.
        UnsupportedError: a cache dtype that gk does not have, or packed K without an FP8 cache.
    """
    settings = parse_settings(vllm_config.additional_config)
    directory = checkpoint_directory(vllm_config.model_config)
    dtype = _kv_dtype(vllm_config)
    if settings.fp8_packed_kv and not dtype.is_fp8:
        raise UnsupportedError(
            f"neuron_config.fp8_packed_kv needs an FP8 KV cache, got {dtype.dtype_name}; add --kv-cache-dtype fp8"
        )
    return EngineFacts(
        directory=directory,
        geometry=read_hf_config(directory).geometry,
        settings=settings,
        role=role_of(vllm_config),
        block_size=vllm_config.cache_config.block_size,
        kv_dtype=dtype,
        k_byte_order=KByteOrder.PAIR_PACKED if settings.fp8_packed_kv else KByteOrder.TOKEN_MAJOR,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        dcp_size=getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1),
    )


def checkpoint_directory(model_config: Any) -> Path:
    """Folder of the model; a hub id is looked up among what is downloaded already.

    Raises:
        CheckpointError: there is no such folder on this machine.
    """
    directory = Path(model_config.model)
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
    except Exception as error:
        raise CheckpointError(
            f"{model_config.model} is neither a folder nor a model that was downloaded: {type(error).__name__}; "
            "download it and give its folder"
        ) from error


def deployment_of(vllm_config: Any, facts: EngineFacts) -> Deployment:
    """The engine as the core judges it; groups and pairs are what vLLM itself makes of honest specs."""
    hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    groups = _planned_groups(vllm_config, facts)
    speculative = vllm_config.speculative_config
    return Deployment(
        role=facts.role,
        gk_decode=facts.settings.gk_decode,
        lnc=facts.settings.lnc,
        hybrid_kv_cache=hybrid,
        group_kinds=tuple(kind for kind, _ in groups),
        buffer_layers=tuple(
            tuple(layers[i] for _, layers in groups if i < len(layers)) for i in range(max(len(x) for _, x in groups))
        ),
        attention_kinds=facts.geometry.attention_kinds,
        num_speculative_tokens=0 if speculative is None else int(speculative.num_speculative_tokens or 0),
        dcp_size=facts.dcp_size,
    )


def engine_faults(vllm_config: Any, facts: EngineFacts) -> tuple[str, ...]:
    """Every reason why this engine cannot run giga-kernel decode; none for an engine that does not ask for it."""
    if not facts.settings.gk_decode:
        return ()
    faults: list[str] = []
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer is None:
        faults.append(
            f"there is no --kv-transfer-config: a decode engine is a kv_consumer of {CONNECTOR_NAME}, "
            "behind a prefill engine"
        )
    elif transfer.kv_connector != CONNECTOR_NAME:
        faults.append(f"the connector must be {CONNECTOR_NAME}, got {transfer.kv_connector}")
    try:
        require_block_size(facts.block_size)
        faults += deployment_faults(deployment_of(vllm_config, facts))
    except (UnsupportedError, LayoutError) as error:
        faults.append(str(error))
    for name, size in (("tensor", facts.tp_size), ("pipeline", parallel.pipeline_parallel_size)):
        if size != 1:
            faults.append(f"the CPU kernel runs one rank: {name}_parallel_size must be 1, got {size}")
    if vllm_config.lora_config is not None:
        faults.append("LoRA adapters are not served: weights are stacked once")
    return tuple(faults)


def require_gk_decode(vllm_config: Any) -> EngineFacts:
    """Refuse an engine that cannot run giga-kernel decode, before its weights load.

    Raises:
        UnsupportedError: with every reason.
        CheckpointError, RequestError: see `engine_facts`.
    """
    facts = engine_facts(vllm_config)
    faults = engine_faults(vllm_config, facts)
    if faults:
        raise UnsupportedError("cannot start giga-kernel decode: " + "; ".join(faults))
    return facts


def _planned_groups(vllm_config: Any, facts: EngineFacts) -> list[tuple[AttentionKind, tuple[int, ...]]]:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from gk_adapters.vllm.seams_cache import planning_view

    return [
        (
            AttentionKind.SLIDING if isinstance(group.kv_cache_spec, SlidingWindowSpec) else AttentionKind.FULL,
            tuple(map(layer_id_of, group.layer_names)),
        )
        for group in get_kv_cache_groups(planning_view(vllm_config), vllm_specs(facts.specs))
    ]


def _kv_dtype(vllm_config: Any) -> KVDtype:
    named = vllm_config.cache_config.cache_dtype
    if named in ("fp8", "fp8_e4m3"):
        return KVDtype.FP8_E4M3FN
    found = _FLOATS.get(str(vllm_config.model_config.dtype)) if named == "auto" else None
    found = found or next((d for d in _FLOATS.values() if d.dtype_name == named), None)
    if found is None:
        raise UnsupportedError(f"a KV cache of {named} is not served; use auto, bfloat16, float16, fp8 or fp8_e4m3")
    return found
