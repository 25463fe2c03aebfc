"""The whole decode engine over the giga kernel: pulled blocks, several rows, scratch, the torch kernel's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gk_adapters.cli.decode import decode
from gk_adapters.decode_job import Prompt, run_in_process
from gk_adapters.nki_kernel import NkiDecodeKernel
from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, kernel_factory, local_wirings
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_model import load_torch_model
from gk_core.errors import MissingDependencyError
from gk_core.kv_spec import KVDtype
from gk_core.metrics import NullMetrics
from gk_kernels.simulator.install import real_nki_present
from tests.hf_models import make_hf_checkpoint
from tools.recall_prompts import make_prompt

MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"
NO_SDK = pytest.mark.skipif(real_nki_present(), reason="the Neuron SDK is installed here")
VOCABULARY = 199
"""Of the random models."""


def _prompts(lengths: tuple[int, ...], new_tokens: int) -> list[Prompt]:
    made = [make_prompt(seed=n, length_tokens=n, distance=min(200, n)) for n in lengths]
    ids = [tuple(t % VOCABULARY for t in p.token_ids) for p in made]
    return [Prompt(token_ids=i, max_new_tokens=new_tokens, eos_ids=frozenset()) for i in ids]


def _decode(
    kernel: str, prompts: list[Prompt], cache: CacheSettings, path: Path = MODEL
) -> tuple[list[tuple[int, ...]], DecodeNode]:
    model = load_torch_model(path, model_dtype="float32")
    to_prefill, to_decode = local_wirings()
    producer = PrefillNode(model=model, cache=cache, wiring=to_prefill, metrics=NullMetrics())
    consumer = DecodeNode(
        model=model, cache=cache, wiring=to_decode, metrics=NullMetrics(), kernel=kernel_factory(kernel, path)
    )
    try:
        results = run_in_process(producer, consumer, prompts, lambda index, token: None)
    finally:
        consumer.close()
        producer.close()
    return [tuple(r.token_ids) for r in results], consumer


def _check(path: Path, lengths: tuple[int, ...], new_tokens: int, dtype: KVDtype) -> None:
    """Greedy tokens of both kernels through the engine, KV pulled from a prefill engine."""
    cache = CacheSettings(
        num_blocks=60, block_size=32, dtype=dtype, packed=dtype.is_fp8, max_model_len=384, num_rows=4
    )  # fmt: skip
    prompts = _prompts(lengths, new_tokens)
    found, node = _decode("nki-simulator", prompts, cache, path)
    wanted, other = _decode("torch", prompts, cache, path)
    assert found == wanted
    assert {len(tokens) for tokens in found} == {new_tokens}
    assert (node.memory.num_blocks, other.memory.num_blocks) == (61, 60)
    assert {r.num_blocks for r in node.regions} == {60}


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.FP8_E4M3FN], ids=["plain", "packed"])
def test_an_engine_over_the_giga_kernel_gives_the_torch_kernels_tokens(tmp_path: Path, dtype: KVDtype) -> None:
    """float32, a random model: block borders are crossed, rows are idle, requests end while others run."""
    make_hf_checkpoint(tmp_path, num_hidden_layers=2, initializer_range=0.08)
    _check(tmp_path, (30, 95, 126), 5, dtype)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_new_tokens_of_the_shipped_model_are_the_torch_kernels() -> None:
    """float32, four-bit experts: windows leave blocks behind on the way."""
    _check(MODEL, (255, 100), 64, KVDtype.FP32)


@pytest.mark.slow
def test_64_new_tokens_over_a_packed_cache_are_the_torch_kernels(tmp_path: Path) -> None:
    """float32 over packed FP8, a random model."""
    make_hf_checkpoint(tmp_path, num_hidden_layers=2, initializer_range=0.08)
    _check(tmp_path, (130, 30), 64, KVDtype.FP8_E4M3FN)


def test_scratch_lies_behind_each_half_outside_every_region(tmp_path: Path) -> None:
    """8 rows of 2 slots in blocks of 4 tokens: 4 blocks; V begins behind K's scratch; idle rows wrote there."""
    make_hf_checkpoint(tmp_path, num_hidden_layers=2)
    cache = CacheSettings(num_blocks=80, block_size=4, dtype=KVDtype.FP32, max_model_len=64, num_rows=8)
    _, node = _decode("nki-simulator", _prompts((9,), 2), cache, tmp_path)
    block = node.layout.block_bytes
    assert node.memory.num_blocks == 84
    for buffer, k, v in zip(node.buffers, node.regions[::2], node.regions[1::2], strict=True):
        assert buffer.shape[1] == 84
        assert (k.base_address, v.base_address) == (buffer.data_ptr(), buffer.data_ptr() + 84 * block)
        assert (k.size_bytes, v.size_bytes) == (80 * block, 80 * block)
        data = array_of(buffer)
        assert not data[:, 0].any(), "the null block"
        # Row 0 decodes; rows 1 .. 7 have slots 2, 4, .. 14 of the scratch.
        written = np.flatnonzero(data[1, 80:].swapaxes(1, 2).reshape(16, -1).any(axis=1))
        assert written.tolist() == [2, 4, 6, 8, 10, 12, 14]


def _command(*flags: str) -> Result:
    ids = ",".join(map(str, make_prompt(seed=7, length_tokens=60, distance=40).token_ids))
    given = ["--checkpoint", str(MODEL), "--transport", "memory", "--prompt-ids", ids, "--max-new-tokens", "2", *flags]
    return CliRunner().invoke(decode, given, standalone_mode=False, catch_exceptions=False)


@NO_SDK
def test_gk_decode_runs_the_giga_kernel_and_says_where() -> None:
    """The same tokens as Hugging Face, and an honest label."""
    answer: dict[str, Any] = json.loads(_command("--kernel", "nki", "--compare-hf", "--json").stdout)
    assert answer["identical_to_hf"] is True
    assert (answer["kernel"], answer["kernel_label"]) == ("nki", "nki on the simulator")
    assert "kernel: nki on the simulator" in _command("--kernel", "nki-simulator").output


@NO_SDK
def test_a_device_that_is_not_there_is_refused_with_what_to_install() -> None:
    """By force, where the packages are missing."""
    with pytest.raises(
        MissingDependencyError, match=r"nki is missing.*torch-neuronx is missing.*Neuron SDK.*gk doctor"
    ):
        _command("--kernel", "nki-device")


def test_the_kernel_of_a_factory_by_name_knows_its_scratch() -> None:
    """The engine's node asks the factory, and hands the number over."""
    cache = CacheSettings(num_blocks=9, block_size=128, dtype=KVDtype.FP32, max_model_len=256, num_rows=3)
    model = load_torch_model(MODEL, model_dtype="float32")
    made = []

    class Spy:
        label = "spy"

        def __init__(self) -> None:
            self._factory = kernel_factory("nki-simulator", MODEL)

        def scratch_blocks(self, shape: Any) -> int:
            return int(self._factory.scratch_blocks(shape))  # type: ignore[attr-defined]

        def __call__(self, contract: Any, model: Any, scratch_blocks: int = 0) -> Any:
            made.append(self._factory(contract, model, scratch_blocks))  # type: ignore[call-arg]
            return made[-1]

    node = DecodeNode(model=model, cache=cache, wiring=local_wirings()[1], metrics=NullMetrics(), kernel=Spy())
    node.close()
    assert isinstance(made[0], NkiDecodeKernel)
    assert (made[0].build.scratch_blocks, made[0].contract.layout.num_blocks) == (1, 10)
