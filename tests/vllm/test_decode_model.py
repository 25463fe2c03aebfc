"""The giga-kernel decode model as vLLM loads it, in this process: its cache, what it refuses, and a step's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attrs import evolve

from gk_adapters.vllm.hma import HmaPlanner, layer_name
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_spec import honest_specs, plan_kv_cache
from tests.vllm.engine_configs import decode_config

pytestmark = pytest.mark.vllm

NUM_BLOCKS, NUM_TOKENS = 7, 200
SHAPE = (2, NUM_BLOCKS, 2, 128, 64)


@pytest.fixture(scope="module")
def one_rank(bf16_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups of one process, which its layers ask for."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    state: Any = parallel_state
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with set_current_vllm_config(decode_config(bf16_checkpoint)):
        state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        state.initialize_model_parallel(1, 1)
    yield
    state.destroy_model_parallel()
    state.destroy_distributed_environment()


class Loaded:
    """A model with weights and the config that it was made of."""

    def __init__(self, checkpoint: Path, *, packed: bool) -> None:
        from vllm.config import set_current_vllm_config

        from gk_adapters.vllm import factory
        from gk_adapters.vllm.plugin import register

        register()
        gate: Any = factory.GptOssForCausalLM
        cache = {"kv_cache_dtype": "fp8"} if packed else {}
        self.config = decode_config(checkpoint, {"fp8_packed_kv": packed}, max_model_len=256, **cache)
        with set_current_vllm_config(self.config):
            self.model = gate(vllm_config=self.config)
        self.model.load_weights(iter(()))

    def plan(self) -> Any:
        """vLLM's own KVCacheConfig with `NUM_BLOCKS` blocks."""
        specs = self.model.get_kv_spec()
        memory_bytes = NUM_BLOCKS * 2 * 2 * specs[0].half_block_bytes
        config = HmaPlanner(self.config).kv_cache_config(specs=specs, memory_bytes=memory_bytes)
        assert config.num_blocks == NUM_BLOCKS
        return config


@pytest.fixture
def plain(one_rank: None, bf16_checkpoint: Path) -> Loaded:
    """Float32 cache."""
    return Loaded(bf16_checkpoint, packed=False)


@pytest.fixture
def packed(one_rank: None, bf16_checkpoint: Path) -> Loaded:
    """FP8 cache, K in pairs."""
    return Loaded(bf16_checkpoint, packed=True)


def no_other(config: Any) -> dict[str, torch.Tensor]:
    """For a gate that must not open."""
    raise AssertionError("left to the runner")


def cache_attributes(model: Any) -> dict[str, torch.Tensor]:
    """The model's own K and V tensors by attribute."""
    return {name: value for name, value in vars(model).items() if "_cache_buf_" in name}


def test_specs_are_honest_and_the_cache_is_not_stacked(plain: Loaded) -> None:
    """Even layers name their window of 128, odd ones none; vLLM's plan of them is the core's."""
    specs = plain.model.get_kv_spec()
    assert [spec.sliding_window for spec in specs] == [128, None, 128, None]
    assert plain.model.use_stacked_kv_cache is False
    assert specs == honest_specs(plain.model.geometry, tp_size=1, block_size=128, dtype=specs[0].dtype)
    assert len(plan_kv_cache(specs, num_blocks=NUM_BLOCKS).buffers) == 2


def test_a_runner_of_ones_own_gets_a_separate_tensor_per_buffer(plain: Loaded) -> None:
    """Two allocations addressed from 0, K half before V half, each shared by a sliding and a full layer."""
    from gk_adapters.vllm.runner_cache import initialize_kv_cache

    caches = initialize_kv_cache(plain.model, plain.plan(), otherwise=no_other)
    held = cache_attributes(plain.model)
    assert sorted(held) == ["K_cache_buf_0", "K_cache_buf_1", "V_cache_buf_0", "V_cache_buf_1"]
    bases = {j: held[f"K_cache_buf_{j}"].untyped_storage() for j in (0, 1)}
    assert bases[0].data_ptr() != bases[1].data_ptr()
    half_bytes = NUM_BLOCKS * 2 * 128 * 64 * 4
    for j in (0, 1):
        assert bases[j].nbytes() == 2 * half_bytes
        assert held[f"K_cache_buf_{j}"].data_ptr() == bases[j].data_ptr()
        assert held[f"V_cache_buf_{j}"].data_ptr() == bases[j].data_ptr() + half_bytes
    assert list(caches) == [layer_name(i) for i in range(4)]
    assert [caches[layer_name(i)].data_ptr() for i in range(4)] == [bases[i // 2].data_ptr() for i in range(4)]


def test_what_it_returns_is_what_the_connector_registers(plain: Loaded) -> None:
    """A K and a V region per buffer."""
    from gk_adapters.vllm.connector_worker import group_regions
    from gk_adapters.vllm.runner_cache import initialize_kv_cache
    from gk_adapters.vllm.seams_cache import group_buffer

    caches = initialize_kv_cache(plain.model, plain.plan(), otherwise=no_other)
    buffers = {name: group_buffer(cache, num_kv_heads=2, head_size=64) for name, cache in caches.items()}
    layout, regions = group_regions(plain.model.facts, buffers)
    held = cache_attributes(plain.model)
    assert (layout.num_blocks, len(regions)) == (NUM_BLOCKS, 4)
    assert [r.base_address for r in regions] == [
        held[name].data_ptr() for name in ("K_cache_buf_0", "V_cache_buf_0", "K_cache_buf_1", "V_cache_buf_1")
    ]


def test_packed_k_is_a_view_of_the_same_bytes_and_v_is_not_packed(packed: Loaded) -> None:
    """[blocks, kv, 64 pairs, 64, 2] of FP8 over the K half."""
    from gk_adapters.vllm.runner_cache import initialize_kv_cache

    initialize_kv_cache(packed.model, packed.plan(), otherwise=no_other)
    k, v = packed.model.K_cache_buf_1, packed.model.V_cache_buf_1
    assert (tuple(k.shape), tuple(v.shape)) == ((NUM_BLOCKS, 2, 64, 64, 2), (NUM_BLOCKS, 2, 128, 64))
    assert k.dtype == v.dtype == torch.float8_e4m3fn
    assert v.data_ptr() - k.data_ptr() == NUM_BLOCKS * 2 * 128 * 64


def test_any_other_model_is_left_to_the_runner(plain: Loaded) -> None:
    """With the config untouched."""
    from gk_adapters.vllm.runner_cache import initialize_kv_cache

    config, answer = plain.plan(), {"a": torch.zeros(1)}
    own = Mock(return_value=answer)
    assert initialize_kv_cache(torch.nn.Linear(1, 1), config, otherwise=own) is answer
    own.assert_called_once_with(config)


def test_a_plan_for_another_model_is_refused(plain: Loaded) -> None:
    """Six layers, three buffers; nothing is bound."""
    from gk_adapters.vllm.runner_cache import initialize_kv_cache

    four = plain.model.geometry
    six = evolve(four, num_layers=6, attention_kinds=four.attention_kinds + four.attention_kinds[:2])
    specs = honest_specs(six, tp_size=1, block_size=128, dtype=plain.model.facts.kv_dtype)
    config = HmaPlanner(plain.config).kv_cache_config(specs=specs, memory_bytes=2**28)
    with pytest.raises(UnsupportedError, match=r"the plan has 3 buffers .* the model needs 2 of"):
        initialize_kv_cache(plain.model, config, otherwise=no_other)
    assert cache_attributes(plain.model) == {}


def test_binding_by_layer_ends_as_the_same_attributes(packed: Loaded) -> None:
    """{layer: [k, v]}, K packed by its rank."""
    buffers = [torch.zeros(SHAPE, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)]
    pairs = [(b[0].view(NUM_BLOCKS, 2, 64, 64, 2), b[1]) for b in buffers]
    packed.model.bind_kv_cache({layer_name(i): list(pairs[i // 2]) for i in range(4)})
    held = cache_attributes(packed.model)
    assert [held[f"K_cache_buf_{j}"].data_ptr() for j in (0, 1)] == [b.data_ptr() for b in buffers]
    assert held["K_cache_buf_0"].dim() == held["V_cache_buf_0"].dim() + 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("missing", r"no KV cache for \['model.layers.2.attn.attn'\]"),
        ("apart", r"layers \[2, 3\] must share buffer 1"),
        ("three", r"each of layers \[0, 1\] brings one K and one V, got \[3, 3\]"),
        ("packed", "K of buffer 0 is packed, against the settings"),
        ("shape", r"V of buffer 1 must have shape \[7, 2, 128, 64\], got \[7, 2, 128, 32\]"),
        ("dtype", "K of buffer 0 must be float32, got float16"),
    ],
)
def test_a_binding_that_is_not_the_caches_is_refused_whole(plain: Loaded, wrong: str, said: str) -> None:
    """Nothing is bound after a refusal."""
    buffers = [torch.zeros(SHAPE) for _ in range(2)]
    caches: dict[str, list[torch.Tensor]] = {layer_name(i): list(buffers[i // 2].unbind(0)) for i in range(4)}
    if wrong == "missing":
        del caches[layer_name(2)]
    elif wrong == "apart":
        caches[layer_name(3)] = [t.clone() for t in caches[layer_name(3)]]
    else:
        for i in (2, 3) if wrong == "shape" else (0, 1):
            k, v = caches[layer_name(i)]
            caches[layer_name(i)] = {
                "three": [k, v, v], "packed": [k.view(7, 2, 64, 64, 2), v], "shape": [k, v[..., :32]],
                "dtype": [buffers[0].view(torch.float16)[0, ..., :64], v],
            }[wrong]  # fmt: skip
    with pytest.raises(LayoutError, match=said):
        plain.model.bind_kv_cache(caches)
    assert cache_attributes(plain.model) == {}


@pytest.mark.parametrize(
    ("buffers", "said"),
    [
        ([torch.zeros(SHAPE)], "need 2 group buffers, got 1"),
        ([torch.zeros(SHAPE), torch.zeros(2, 7, 128, 2, 64)], r"group buffer 1 must be \[2, 7, 2, 128, 64\] of 4-byte"),
        ([torch.zeros(SHAPE, dtype=torch.float16)] * 2, "of 4-byte elements, got .* of 2"),
    ],
)
def test_buffers_of_another_number_shape_or_size_are_refused(
    plain: Loaded, buffers: list[torch.Tensor], said: str
) -> None:
    """Two buffers of the layout's shape, or nothing."""
    with pytest.raises(LayoutError, match=said):
        plain.model.set_kv_cache_buffers(buffers)
    assert cache_attributes(plain.model) == {}


def test_weights_come_before_the_cache(one_rank: None, bf16_checkpoint: Path) -> None:
    """The contract is made of both."""
    from vllm.config import set_current_vllm_config

    from gk_adapters.vllm.decode_model import GkDecodeModel

    config = decode_config(bf16_checkpoint)
    with set_current_vllm_config(config):
        model = GkDecodeModel(vllm_config=config)
    with pytest.raises(LayoutError, match="load_weights must come before"):
        model.set_kv_cache_buffers([torch.zeros(SHAPE), torch.zeros(SHAPE)])
    assert cache_attributes(model) == {}


def logits_of(loaded: Loaded, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), V]: one vLLM step that replays the prompt from nothing."""
    from vllm.forward_context import set_forward_context

    from gk_adapters.vllm.attention import GkAttentionMetadata

    count = len(prompt)
    positions = torch.arange(count)
    tables = (torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[3, 4]], dtype=torch.int32))
    sliding, full = (
        GkAttentionMetadata(
            num_actual_tokens=count, query_starts=(0, count), seq_lens=(count,), block_table=table,
            slot_mapping=table[0, positions // 128].long() * 128 + positions % 128, max_query_len=count,
        )
        for table in tables
    )  # fmt: skip
    metadata: Any = {layer_name(i): (sliding, full)[i % 2] for i in range(4)}
    with set_forward_context(metadata, loaded.config), torch.inference_mode():
        hidden: torch.Tensor = loaded.model.forward(torch.tensor(prompt), positions)
        # vLLM's loader prepares the head for its own product of matrices, which is not in question here.
        logits: torch.Tensor = hidden @ loaded.model.lm_head.weight[: loaded.model.geometry.vocab_size].T
    return logits


def test_a_steps_logits_are_hugging_faces(plain: Loaded, bf16_checkpoint: Path) -> None:
    """Over a cache that a runner of one's own made: 200 tokens, across a block and past the window."""
    from transformers import GptOssForCausalLM

    from gk_adapters.vllm.runner_cache import initialize_kv_cache

    initialize_kv_cache(plain.model, plain.plan(), otherwise=no_other)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 500, (NUM_TOKENS,), generator=generator).tolist()
    peer = GptOssForCausalLM.from_pretrained(bf16_checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        wanted = peer(torch.tensor([prompt])).logits[0]
    got = logits_of(plain, prompt)
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert plain.model.replayed_tokens == NUM_TOKENS - 1
