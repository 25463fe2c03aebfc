"""A giga-kernel decode engine that cannot work says why before it loads a weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gk_adapters.vllm.engine_facts import engine_facts, require_gk_decode
from gk_core.disaggregation import Role
from gk_core.errors import CheckpointError, GkError, RequestError, UnsupportedError
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from tests.vllm.engine_configs import decode_config, engine_config, transfer_config

pytestmark = pytest.mark.vllm


def test_an_engine_that_can_start_is_not_refused(bf16_checkpoint: Path) -> None:
    """And its facts are those of its command line."""
    facts = require_gk_decode(decode_config(bf16_checkpoint))
    assert (facts.role, facts.kv_dtype, facts.k_byte_order) == (Role.DECODE, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    assert (facts.block_size, facts.geometry.num_layers, facts.directory) == (128, 4, bf16_checkpoint)


def test_packed_fp8_is_a_fact_of_the_cache(bf16_checkpoint: Path) -> None:
    """fp8_packed_kv with an FP8 cache."""
    facts = require_gk_decode(decode_config(bf16_checkpoint, {"fp8_packed_kv": True}, kv_cache_dtype="fp8"))
    assert (facts.kv_dtype, facts.k_byte_order) == (KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED)


@pytest.mark.parametrize(
    ("neuron", "settings", "said"),
    [
        ({}, {"kv_transfer_config": "kv_producer"}, "decodes only: run prefill on the native per-layer model"),
        ({}, {"kv_transfer_config": "kv_both"}, "split them into a prefill engine and a decode engine"),
        ({}, {"kv_transfer_config": None}, "there is no --kv-transfer-config"),
        ({}, {"kv_transfer_config": "stock"}, "the connector must be GkNixlConnector, got NixlConnector"),
        ({}, {"disable_hybrid_kv_cache_manager": True}, "hybrid KV-cache manager is off"),
        ({}, {"block_size": 48}, "block_size must divide 128"),
        ({"logical_nc_config": 2}, {}, "logical NeuronCore config 1, got lnc 2"),
        ({"fp8_packed_kv": True}, {}, "fp8_packed_kv needs an FP8 KV cache, got float32"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
            "got 3 draft tokens",
        ),
        ({"gk_attention": False}, {}, "need gk's cache layout"),
    ],
)
def test_each_refusal_names_its_reason(
    bf16_checkpoint: Path, neuron: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    """One wrong thing at a time."""
    role = settings.get("kv_transfer_config", "")
    if role == "stock":
        settings = {"kv_transfer_config": transfer_config("kv_consumer", connector="NixlConnector")}
    elif role:
        settings = {"kv_transfer_config": transfer_config(role)}
    config = decode_config(bf16_checkpoint, neuron, **settings)
    with pytest.raises((UnsupportedError, RequestError), match=said):
        require_gk_decode(config)


def test_several_reasons_come_together(bf16_checkpoint: Path) -> None:
    """No transfer config, HMA off and lnc 2 are three reasons in one message."""
    config = decode_config(
        bf16_checkpoint,
        {"logical_nc_config": 2},
        kv_transfer_config=None,
        disable_hybrid_kv_cache_manager=True,
    )
    with pytest.raises(UnsupportedError) as caught:
        require_gk_decode(config)
    for said in ("there is no --kv-transfer-config", "got lnc 2", "hybrid KV-cache manager is off"):
        assert said in str(caught.value)


def test_ranks_that_the_kernel_does_not_have_are_refused(bf16_checkpoint: Path) -> None:
    """The kernel on a CPU runs one rank."""
    config = decode_config(bf16_checkpoint)
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(UnsupportedError, match="tensor_parallel_size must be 1, got 2"):
        require_gk_decode(config)


def test_layers_of_the_wrong_parity_are_refused(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """A checkpoint whose even layers are full."""
    inverted = tmp_path / "inverted"
    shutil.copytree(bf16_checkpoint, inverted)
    config = json.loads((inverted / "config.json").read_text())
    config["layer_types"] = config["layer_types"][::-1]
    (inverted / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="layer 0 is full_attention, must be sliding_attention"):
        require_gk_decode(decode_config(inverted))


def test_the_factory_refuses_before_it_builds_anything(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """No weights are needed to hear the reason: here they are gone."""
    from vllm.config import set_current_vllm_config

    from gk_adapters.vllm.factory import GptOssForCausalLM

    empty = tmp_path / "no-weights"
    shutil.copytree(bf16_checkpoint, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    config = decode_config(empty, kv_transfer_config=transfer_config("kv_producer"))
    with set_current_vllm_config(config), pytest.raises(UnsupportedError, match="decodes only"):
        GptOssForCausalLM(vllm_config=config)  # type: ignore[abstract]


def test_a_native_engine_is_not_judged(bf16_checkpoint: Path) -> None:
    """Without gk_decode nothing of this applies."""
    config = engine_config(bf16_checkpoint, kv_transfer_config=transfer_config("kv_producer"))
    assert require_gk_decode(config).role is Role.PREFILL


def test_a_model_that_is_not_here_is_refused(bf16_checkpoint: Path) -> None:
    """Neither a folder nor in the download cache."""
    config = engine_config(bf16_checkpoint)
    config.model_config.model = "nobody/nothing"
    with pytest.raises(CheckpointError, match="neither a folder nor a model that was downloaded"):
        engine_facts(config)


def test_an_unserved_cache_dtype_is_refused(bf16_checkpoint: Path) -> None:
    """fp8_e5m2 is another format."""
    config = engine_config(bf16_checkpoint)
    config.cache_config.cache_dtype = "fp8_e5m2"
    with pytest.raises(GkError, match="fp8_e5m2 is not served"):
        engine_facts(config)
