"""The giga kernel behind the decode port, in the simulator, against the torch kernel on the same calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, frozen

from gk_adapters.nki_kernel import from_stored_order, nki_kernel_from_checkpoint, scratch_slots, to_stored_order
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_model import TorchModel, load_torch_model
from gk_adapters.torch_sampling import logits
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, StackedKV
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_core.ports import DecodeKernel
from gk_core.weight_layouts import ExpertFormat
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import TorchEngines, evict, make_engines, make_tables

FLOAT32 = 1e-5
IDS = torch.randint(0, 199, (512,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = (300, 17, 128)


@frozen(kw_only=True, eq=False)
class Checkpoint:
    """A random model on disk and in memory."""

    path: Path
    model: TorchModel


@pytest.fixture(scope="module", params=["float", "mxfp4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("model")
    make_hf_checkpoint(path, mxfp4=request.param == "mxfp4", num_hidden_layers=2)
    return Checkpoint(path=path, model=load_torch_model(path))


def _engines(model: TorchModel, dtype: KVDtype, order: KByteOrder) -> TorchEngines:
    engines = make_engines(model, dtype=dtype, k_byte_order=order, max_model_len=512)
    tables = make_tables(engines, len(PROMPTS), 512)
    for length, table in zip(PROMPTS, tables, strict=True):
        engines.prefill_logits(IDS[:length], 0, table)
    return engines


def _call(engines: TorchEngines) -> DecodeCall[torch.Tensor]:
    """Three active rows at the prompts' ends and an inactive one between them."""
    tables = make_tables(engines, len(PROMPTS), 512)
    rows = [(n, evict(t, n, 128)) for n, t in zip(PROMPTS, tables, strict=True)]
    control = engines.control([rows[0], None, rows[1], rows[2]])
    return engines.builder.build(token_ids=(IDS[300], 0, IDS[17], IDS[128]), control=control)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        (KVDtype.FP32, KByteOrder.TOKEN_MAJOR),
        (KVDtype.BF16, KByteOrder.TOKEN_MAJOR),
        (KVDtype.FP8_E4M3, KByteOrder.TOKEN_MAJOR),
        (KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED),
    ],
)
def test_hidden_states_and_cache_equal_the_torch_kernels(
    checkpoint: Checkpoint, dtype: KVDtype, order: KByteOrder
) -> None:
    """One step in float32 over every form of cache: hidden states to 1e-5, the new tokens' bytes too."""
    ours, theirs = (_engines(checkpoint.model, dtype, order) for _ in range(2))
    kernel = nki_kernel_from_checkpoint(checkpoint.path)(ours.kernel.contract, checkpoint.model)
    before = [b.clone() for b in ours.buffers]
    hidden = kernel.step(call=_call(ours))
    expected = theirs.kernel.step(call=_call(theirs))
    assert _relative(hidden, expected) <= FLOAT32
    assert (hidden[1] == 0).all()
    for mine, other, old in zip(ours.buffers, theirs.buffers, before, strict=True):
        assert _relative(mine.float(), other.float()) <= FLOAT32
        assert not torch.equal(mine.float(), old.float())


def _small(tmp_path: Path) -> tuple[TorchEngines, DecodeKernel[torch.Tensor]]:
    make_hf_checkpoint(tmp_path, num_hidden_layers=2)
    model = load_torch_model(tmp_path)
    engines = _engines(model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    return engines, nki_kernel_from_checkpoint(tmp_path)(engines.kernel.contract, model)


def test_nan_in_unread_blocks_reaches_no_result_and_inactive_rows_change_no_byte(tmp_path: Path) -> None:
    """The null block full of NaN: results stay finite and right, its bytes stay as they are."""
    engines, kernel = _small(tmp_path)
    expected = engines.kernel.step(call=_call(engines))
    for buffer in engines.buffers:
        buffer[:, 0] = float("nan")
    before = [array_of(b[:, 0]).tobytes() for b in engines.buffers]
    hidden = kernel.step(call=_call(engines))
    assert torch.isfinite(hidden).all()
    assert _relative(hidden, expected) <= FLOAT32
    assert [array_of(b[:, 0]).tobytes() for b in engines.buffers] == before


def test_nothing_is_written_when_a_call_is_refused(tmp_path: Path) -> None:
    """A slot that is not the position's is refused before the kernel runs."""
    engines, kernel = _small(tmp_path)
    call = _call(engines)
    wrong = call.control.update_index.clone()
    wrong[0] += 1
    before = [b.clone() for b in engines.buffers]
    with pytest.raises(LayoutError, match="update index"):
        kernel.step(call=evolve(call, control=evolve(call.control, update_index=wrong)))
    assert all(torch.equal(a, b) for a, b in zip(engines.buffers, before, strict=True))


def test_padding_rows_get_slots_of_their_own_in_the_null_block() -> None:
    """All indices are valid: none is a skip-me value beside those that write."""
    slots, writes = scratch_slots(np.array([[-1], [900], [-1], [257]], np.int32), 128)
    assert slots.dtype == np.int32
    assert slots[:, 0].tolist() == [0, 900, 2, 257]
    assert writes[:, 0].tolist() == [0, 1, 0, 1]


def test_hidden_states_are_stored_in_quarters_and_padded() -> None:
    """Feature 4 i + q stands at q * Hp / 4 + i; the rest is zero."""
    hidden = np.arange(1, 97, dtype=np.float32)[None]
    stored = to_stored_order(hidden, 96)
    assert stored.shape == (1, 512)
    assert stored[0, [0, 1, 128, 129, 384]].tolist() == [1.0, 5.0, 2.0, 6.0, 4.0]
    assert float(stored.sum()) == float(hidden.sum())
    assert np.array_equal(from_stored_order(stored, 96), hidden)


def _greedy(engines: TorchEngines, kernel: DecodeKernel[torch.Tensor], steps: int) -> list[list[int]]:
    tables = make_tables(engines, len(PROMPTS), 512)
    tokens = [[IDS[n]] for n in PROMPTS]
    for step in range(steps):
        rows = [(n + step, evict(t, n + step, 128)) for n, t in zip(PROMPTS, tables, strict=True)]
        control = engines.control([rows[0], None, rows[1], rows[2]])
        last = [t[-1] for t in tokens]
        call = engines.builder.build(token_ids=(last[0], 0, last[1], last[2]), control=control)
        best = logits(kernel.step(call=call), engines.model).argmax(dim=1).tolist()
        for row, token in zip(tokens, (best[0], best[2], best[3]), strict=True):
            row.append(token)
    return tokens


@pytest.mark.slow
def test_greedy_tokens_over_64_steps_equal_the_torch_kernels(checkpoint: Checkpoint) -> None:
    """Each kernel writes and reads its own cache; windows move over block borders on the way."""
    ours, theirs = (_engines(checkpoint.model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR) for _ in range(2))
    kernel = nki_kernel_from_checkpoint(checkpoint.path)(ours.kernel.contract, checkpoint.model)
    assert _greedy(ours, kernel, 64) == _greedy(theirs, theirs.kernel, 64)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_a_bfloat16_build_is_near_its_float32_self(checkpoint: Checkpoint, target: str) -> None:
    """Relative error over all active rows; the measure is float32 torch, whose weights are not rounded either."""
    narrow = load_torch_model(checkpoint.path, model_dtype="bfloat16")
    ours = _engines(narrow, KVDtype.BF16, KByteOrder.TOKEN_MAJOR)
    hidden = nki_kernel_from_checkpoint(checkpoint.path, target=target)(ours.kernel.contract, narrow).step(
        call=_call(ours)
    )
    theirs = _engines(checkpoint.model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    expected = theirs.kernel.step(call=_call(theirs))
    error = float((hidden.float() - expected).norm() / expected.norm())
    # MX matmuls quantise the experts' inputs to FP8, 3 mantissa bits, which is the larger error by far.
    quantised = target == "trn3" and checkpoint.model.config.expert_format is ExpertFormat.MXFP4
    assert error <= (4e-2 if quantised else 2e-2)


def test_a_stacked_cache_gives_what_per_buffer_caches_do(tmp_path: Path) -> None:
    """One K and one V tensor with a leading axis of buffers; written in place."""
    make_hf_checkpoint(tmp_path, num_hidden_layers=3)
    model = load_torch_model(tmp_path)
    engines = _engines(model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    kernel = nki_kernel_from_checkpoint(tmp_path)(engines.kernel.contract, model)
    stacked = StackedKV(k=torch.stack([b[0] for b in engines.buffers]), v=torch.stack([b[1] for b in engines.buffers]))
    call = _call(engines)
    hidden = kernel.step(call=evolve(call, per_buffer_kv=None, stacked_kv=stacked))
    assert torch.equal(hidden, kernel.step(call=call))
    theirs = _engines(model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    assert _relative(hidden, theirs.kernel.step(call=_call(theirs))) <= FLOAT32
    for mine, other in zip(engines.buffers, theirs.buffers, strict=True):
        assert _relative(mine, other) <= FLOAT32
    for i, buffer in enumerate(engines.buffers):
        assert torch.equal(stacked.k[i], buffer[0])
        assert torch.equal(stacked.v[i], buffer[1])


def test_more_rows_than_partitions_and_odd_block_sizes_are_refused(tmp_path: Path) -> None:
    """What the kernel was not built for is said when it is made, not in a trace."""
    engines, _ = _small(tmp_path)
    contract = engines.kernel.contract
    make = nki_kernel_from_checkpoint(tmp_path)
    with pytest.raises(UnsupportedError, match="128 rows per replica, got 129"):
        make(evolve(contract, shape=evolve(contract.shape, num_rows=129)), engines.model)
    odd = evolve(contract, layout=evolve(contract.layout, block_size=384), shape=evolve(contract.shape, block_size=384))
    with pytest.raises(UnsupportedError, match="powers of two, got 384"):
        make(odd, engines.model)
