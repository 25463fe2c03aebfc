"""The giga kernel behind the decode port, in the simulator, against the torch kernel on the same calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from gk_adapters.nki_kernel import NkiKernelFactory, nki_kernel_from_checkpoint
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_giga import (
    GigaBuild,
    from_stored_order,
    require_kernel_limits,
    scratch_blocks,
    scratch_slots,
    to_stored_order,
)
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_adapters.torch_model import TorchModel, load_torch_model
from gk_adapters.torch_sampling import logits
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KernelContract, StackedKV
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


@frozen(kw_only=True, eq=False)
class WideCache:
    """Buffers with scratch blocks behind the engine's, as a decode node allocates them, filled from engines."""

    contract: KernelContract
    buffers: tuple[torch.Tensor, ...]
    blocks: int

    @classmethod
    def of(cls, engines: TorchEngines) -> WideCache:
        """Scratch is NaN at first."""
        layout, scratch = engines.layout, scratch_blocks(engines.shape.num_rows, engines.layout.block_size)
        wide = evolve(layout, num_blocks=layout.num_blocks + scratch)
        buffers = allocate_group_buffers(wide)
        for whole, part in zip(buffers, engines.buffers, strict=True):
            whole.fill_(float("nan"))
            whole[:, : layout.num_blocks] = part
        return cls(contract=evolve(engines.kernel.contract, layout=wide), buffers=buffers, blocks=scratch)

    @property
    def engines_part(self) -> list[torch.Tensor]:
        """What the engine knows of each buffer."""
        return [b[:, : -self.blocks] for b in self.buffers]

    def call(self, engines: TorchEngines) -> DecodeCall[torch.Tensor]:
        """`_call` over these buffers."""
        return evolve(_call(engines), per_buffer_kv=per_buffer_kv(self.buffers, self.contract.layout))


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
    cache = WideCache.of(ours)
    kernel = NkiKernelFactory(checkpoint=checkpoint.path)(cache.contract, checkpoint.model, cache.blocks)
    before = [b.clone() for b in ours.buffers]
    hidden = kernel.step(call=cache.call(ours))
    expected = theirs.kernel.step(call=_call(theirs))
    assert _relative(hidden, expected) <= FLOAT32
    assert (hidden[1] == 0).all()
    for mine, other, old in zip(cache.engines_part, theirs.buffers, before, strict=True):
        assert _relative(mine.float(), other.float()) <= FLOAT32
        assert not torch.equal(mine.float(), old.float())


def _small(tmp_path: Path) -> tuple[TorchEngines, DecodeKernel[torch.Tensor]]:
    make_hf_checkpoint(tmp_path, num_hidden_layers=2)
    model = load_torch_model(tmp_path)
    engines = _engines(model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    return engines, nki_kernel_from_checkpoint(tmp_path)(engines.kernel.contract, model)


@pytest.mark.parametrize(
    ("dtype", "order"),
    [(KVDtype.FP32, KByteOrder.TOKEN_MAJOR), (KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED)],
    ids=["plain", "packed"],
)
def test_inactive_rows_write_to_the_scratch_blocks_and_nowhere_else(
    tmp_path: Path, dtype: KVDtype, order: KByteOrder
) -> None:
    """Null block and scratch full of NaN: results right, and of the engine's bytes six slots of each half change."""
    make_hf_checkpoint(tmp_path, num_hidden_layers=2)
    model = load_torch_model(tmp_path)
    engines = _engines(model, dtype, order)
    expected = engines.kernel.step(call=_call(engines))
    engines = _engines(model, dtype, order)
    for buffer in engines.buffers:
        buffer[:, 0] = float("nan")
    cache = WideCache.of(engines)
    before = [b.clone() for b in cache.buffers]
    kernel = NkiKernelFactory(checkpoint=tmp_path)(cache.contract, model, cache.blocks)
    call = cache.call(engines)
    hidden = kernel.step(call=call)
    assert _relative(hidden, expected) <= FLOAT32
    block = engines.layout.block_size
    indices = (call.control.update_index, call.control.update_index_swa)
    slots = {int(s) for index in indices for s in index[:, 0] if s >= 0}
    assert len(slots) == 6
    for buffer, old in zip(cache.buffers, before, strict=True):
        for half in range(2):
            packed = half == 0 and order is KByteOrder.PAIR_PACKED
            now, then = (_by_slot(b[half], packed) for b in (buffer, old))
            changed = set(np.flatnonzero((now != then).any(axis=1)).tolist())
            # Row 1 is the inactive one; a pair write merges nothing for it.
            scratch = set() if packed else {engines.layout.num_blocks * block + 2}
            assert changed == slots | scratch


def _by_slot(half: torch.Tensor, packed: bool) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Bytes [slots, kv * d * itemsize] of one half, whatever its order."""
    blocks, kv, block, d = half.shape
    raw = array_of(half).view(np.uint8).reshape(blocks, kv, block, -1)
    if packed:
        raw = raw.reshape(blocks, kv, block // 2, d, 2).swapaxes(3, 4).reshape(blocks, kv, block, d)
    return np.ascontiguousarray(raw.swapaxes(1, 2)).reshape(blocks * block, -1)


def test_a_table_that_names_a_scratch_block_is_refused(tmp_path: Path) -> None:
    """Scratch is nobody's to read: the engine's blocks are those before it."""
    engines, _ = _small(tmp_path)
    cache = WideCache.of(engines)
    kernel = NkiKernelFactory(checkpoint=tmp_path)(cache.contract, engines.model, cache.blocks)
    call = cache.call(engines)
    table = call.control.block_table.clone()
    table[0, 0] = engines.layout.num_blocks
    before = [array_of(b).tobytes() for b in cache.buffers]
    with pytest.raises(LayoutError, match=f"{engines.layout.num_blocks}"):
        kernel.step(call=evolve(call, control=evolve(call.control, block_table=table)))
    assert [array_of(b).tobytes() for b in cache.buffers] == before


def test_without_scratch_blocks_inactive_rows_change_no_byte(tmp_path: Path) -> None:
    """A cache from outside, its null block full of NaN: results stay finite and right, its bytes stay as they are."""
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


@pytest.mark.parametrize(
    ("scratch_slot", "wanted"), [(5120, [5120, 900, 5124, 257]), (0, [0, 900, 2, 257])], ids=["scratch", "null block"]
)
def test_rows_that_write_nothing_get_slots_of_their_own(scratch_slot: int, wanted: list[int]) -> None:
    """All indices are valid: none is a skip-me value beside those that write. Block 40 of 128 tokens is scratch."""
    slots, writes = scratch_slots(np.array([[-1], [900], [-1], [257]], np.int32), 128, scratch_slot)
    assert slots.dtype == np.int32
    assert slots[:, 0].tolist() == wanted
    assert writes[:, 0].tolist() == [0, 1, 0, 1]


@given(
    rows=st.integers(1, 128), log_block=st.integers(1, 8), blocks=st.integers(1, 50), seed=st.integers(0, 99),
    share=st.floats(0, 1),
)  # fmt: skip
def test_slots_are_distinct_in_the_cache_and_in_pairs(
    rows: int, log_block: int, blocks: int, seed: int, share: float
) -> None:
    """Scratch slots lie in the scratch blocks, two apart, so that the pair passes of packed K never meet."""
    block, rng = 1 << log_block, np.random.default_rng(seed)
    inside = blocks * block
    taken = rng.permutation(inside)[: int(rows * share)]
    index = np.concatenate([taken, np.full(rows - len(taken), -1)])[:, None]
    slots, writes = scratch_slots(index, block, inside)
    own = slots[writes == 0]
    assert len(np.unique(slots)) == rows
    assert len(np.unique(own // 2)) == len(own)
    assert ((own >= inside) & (own < inside + scratch_blocks(rows, block) * block)).all()
    assert (slots[writes == 1] < inside).all()


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
    assert _bfloat16_error(checkpoint, target, mx_terms=2) <= 2e-2


def test_one_mx_term_is_nearer_to_four_percent(checkpoint: Checkpoint) -> None:
    """Activations of MX matmuls rounded to 4 significant bits; with two terms they are what widened weights meet."""
    if checkpoint.model.config.expert_format is not ExpertFormat.MXFP4:
        pytest.skip("float experts have no MX matmuls")
    one, two = (_bfloat16_error(checkpoint, "trn3", mx_terms=terms) for terms in (1, 2))
    widened = _bfloat16_error(checkpoint, "trn2", mx_terms=2)
    assert 1.5 * two < one <= 4e-2
    assert two == pytest.approx(widened, rel=1e-2)


def _bfloat16_error(checkpoint: Checkpoint, target: str, *, mx_terms: int) -> float:
    narrow = load_torch_model(checkpoint.path, model_dtype="bfloat16")
    ours = _engines(narrow, KVDtype.BF16, KByteOrder.TOKEN_MAJOR)
    factory = NkiKernelFactory(checkpoint=checkpoint.path, target=target, mx_terms=mx_terms)
    hidden = factory(ours.kernel.contract, narrow).step(call=_call(ours))
    theirs = _engines(checkpoint.model, KVDtype.FP32, KByteOrder.TOKEN_MAJOR)
    expected = theirs.kernel.step(call=_call(theirs))
    return float((hidden.float() - expected).norm() / expected.norm())


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
    with pytest.raises(LayoutError, match="128 rows need 2 scratch blocks"):
        require_kernel_limits(
            evolve(contract, shape=evolve(contract.shape, num_rows=128)), GigaBuild(scratch_blocks=1)
        )  # fmt: skip
