"""Two nodes of this process over real NIXL and ZeroMQ: byte for byte what they are over the in-memory transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gk_adapters.decode_job import Prompt, run_in_process
from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, Wiring, local_wirings, nixl_wiring, torch_kernel
from gk_adapters.torch_loop import TorchDecodeLoop
from gk_adapters.torch_model import load_torch_model
from gk_core.kernel_contract import DecodeCall
from gk_core.kv_spec import KVDtype
from gk_core.metrics import NullMetrics
from gk_core.ports import DecodeKernel
from tools.recall_prompts import make_prompt

pytestmark = pytest.mark.nixl
pytest.importorskip("nixl")

MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"
LENGTHS = (1, 127, 128, 129, 255, 256, 300)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny kernels on a busy machine: threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome(wirings: tuple[Wiring, Wiring], cache: CacheSettings) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Tokens, and the decode side's whole cache as bytes once all is done."""
    model = load_torch_model(MODEL, model_dtype="float32")
    producer = PrefillNode(model=model, cache=cache, wiring=wirings[0], metrics=NullMetrics())
    consumer = DecodeNode(model=model, cache=cache, wiring=wirings[1], metrics=NullMetrics())
    tokens = []
    for length in LENGTHS:
        ids = make_prompt(seed=length, length_tokens=length, distance=min(100, length)).token_ids
        prompt = Prompt(token_ids=ids, max_new_tokens=3, eos_ids=frozenset())
        (result,) = run_in_process(producer, consumer, [prompt], lambda index, token: None)
        tokens.append(result.token_ids)
    assert producer.pool.num_free_blocks() == consumer.pool.num_free_blocks() == cache.num_blocks - 1
    cached = [buffer.view(torch.uint8).clone() for buffer in consumer.buffers]
    for node in (producer, consumer):
        node.close()
        node.close()
    return tokens, cached


@pytest.mark.parametrize(
    "cache",
    [
        CacheSettings(num_blocks=48, dtype=KVDtype.FP8_E4M3FN, packed=True, num_rows=2),
        CacheSettings(num_blocks=96, dtype=KVDtype.BF16, block_size=64, num_rows=2),
    ],
    ids=["packed-fp8", "bf16-blocks-of-64"],
)
def test_nixl_moves_the_bytes_that_the_memory_transport_moves(cache: CacheSettings) -> None:
    """Same tokens, and every byte of every block of the decode side's cache."""
    wanted_tokens, wanted = outcome(local_wirings(), cache)
    tokens, cached = outcome((nixl_wiring(listen=True), nixl_wiring(listen=False)), cache)
    assert tokens == wanted_tokens
    assert all(torch.equal(a, b) for a, b in zip(cached, wanted, strict=True))
    assert any(bool(buffer.any()) for buffer in cached)


class _Recording(DecodeKernel[torch.Tensor]):
    """The torch kernel, and what each of its steps gave."""

    def __init__(self, kernel: DecodeKernel[torch.Tensor], steps: list[torch.Tensor]) -> None:
        self._kernel, self._steps = kernel, steps

    def step(self, *, call: DecodeCall[torch.Tensor]) -> torch.Tensor:
        hidden = self._kernel.step(call=call)
        self._steps.append(hidden.clone())
        return hidden


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3FN, KVDtype.FP32], ids=["packed-fp8", "float32"])
def test_a_pulled_cache_decodes_bit_for_bit_as_one_that_never_moved(dtype: KVDtype) -> None:
    """Prefill and decode in one pool, no transfer of any kind, against two nodes over NIXL: every step equal."""
    packed = dtype is KVDtype.FP8_E4M3FN
    model = load_torch_model(MODEL, model_dtype="float32")
    cache = CacheSettings(num_blocks=24, dtype=dtype, packed=packed, num_rows=1, max_model_len=700)
    pulled: list[torch.Tensor] = []
    producer = PrefillNode(model=model, cache=cache, wiring=nixl_wiring(listen=True), metrics=NullMetrics())
    consumer = DecodeNode(
        model=model, cache=cache, wiring=nixl_wiring(listen=False), metrics=NullMetrics(),
        kernel=lambda contract, model: _Recording(torch_kernel(contract, model), pulled),
    )  # fmt: skip
    try:
        for length in (1, 100, 127, 128, 129, 255, 256, 383, 600):
            ids = make_prompt(seed=length, length_tokens=length, distance=min(200, length)).token_ids
            pulled.clear()
            prompt = Prompt(token_ids=ids, max_new_tokens=3, eos_ids=frozenset())
            (result,) = run_in_process(producer, consumer, [prompt], lambda index, token: None)
            assert result.transferred_tokens == length - 1
            stayed: list[torch.Tensor] = []
            loop = TorchDecodeLoop(model=model, prompts=[ids], max_new_tokens=4, kv_dtype=dtype, packed=packed)
            loop._kernel = _Recording(loop._kernel, stayed)  # type: ignore[assignment]
            assert [loop.step()[0] for _ in range(3)] == list(result.token_ids)
            assert [torch.equal(a, b) for a, b in zip(pulled, stayed, strict=True)] == [True] * 3, length
    finally:
        consumer.close()
        producer.close()
