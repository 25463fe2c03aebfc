"""The torch prefill engine: which bytes it writes, in which order, independent of chunks; and its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve

from gk_adapters.torch_model import TorchModel, load_torch_model
from gk_adapters.torch_prefill import TorchPrefillModel
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import AttentionKind
from gk_core.ports import GroupTables
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import TorchEngines, evict, make_engines, make_tables

IDS = torch.randint(0, 199, (400,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    directory = tmp_path_factory.mktemp("model")
    make_hf_checkpoint(directory)
    return load_torch_model(directory)


def _bytes(engines: TorchEngines) -> list[torch.Tensor]:
    return [b.view(torch.uint8).clone() for b in engines.buffers]


@pytest.mark.parametrize("order", list(KByteOrder))
def test_prefill_and_decode_write_the_same_cache(model: TorchModel, order: KByteOrder) -> None:
    """FP8, 140 tokens: prefilled at once, or decoded one by one from nothing; bytes equal but for rounding flips."""
    at_once = make_engines(model, dtype=KVDtype.FP8_E4M3FN, k_byte_order=order)
    stepped = make_engines(model, dtype=KVDtype.FP8_E4M3FN, k_byte_order=order)
    tables = make_tables(at_once, 1, 140)[0]
    at_once.prefill.prefill(token_ids=IDS[:140], start_position=0, tables=tables)
    for position in range(140):
        stepped.step([(IDS[position], position, tables)])
    for a, b in zip(_bytes(at_once), _bytes(stepped), strict=True):
        written = (a != 0) | (b != 0)
        assert written.any()
        differing = (a != b)[written].float().mean()
        assert differing < 0.002


@pytest.mark.parametrize("dtype", [KVDtype.FP32, KVDtype.FP8_E4M3FN])
def test_the_cache_does_not_depend_on_how_a_prompt_is_cut(model: TorchModel, dtype: KVDtype) -> None:
    """Chunks of 512, of 37, and two calls that meet inside a block."""
    whole, cut = make_engines(model, dtype=dtype), make_engines(model, dtype=dtype, max_chunk_tokens=37)
    tables = make_tables(whole, 1, 400)[0]
    whole.prefill.prefill(token_ids=IDS[:300], start_position=0, tables=tables)
    cut.prefill.prefill(token_ids=IDS[:201], start_position=0, tables=tables)
    cut.prefill.prefill(token_ids=IDS[201:300], start_position=201, tables=tables)
    for a, b in zip(whole.buffers, cut.buffers, strict=True):
        if dtype is KVDtype.FP32:
            assert torch.allclose(a, b, atol=1e-5)
        else:
            assert (a.view(torch.uint8) != b.view(torch.uint8)).float().mean() < 0.002


def test_only_the_tables_blocks_are_written(model: TorchModel) -> None:
    """And of them only the prompt's slots; the null block never."""
    engines = make_engines(model)
    tables = make_tables(engines, 1, 200)[0]
    engines.prefill.prefill(token_ids=IDS[:200], start_position=0, tables=tables)
    for buffer in engines.buffers:
        used = {tuple(p) for p in (buffer != 0).any(-1).any(2).nonzero().tolist()}
        blocks = [*tables.full.block_ids, *tables.sliding.block_ids]
        assert used == {
            (half, blk, t)
            for half in (0, 1)
            for j, blk in enumerate(blocks)
            for t in range(128)
            if j % 2 == 0 or t < 72
        }


def test_sliding_tokens_without_a_block_are_computed_but_not_stored(model: TorchModel) -> None:
    """A table whose first block is gone already: full layers are filled, the null block stays clean, logits agree."""
    kept, gone = make_engines(model), make_engines(model)
    tables = make_tables(kept, 1, 400)[0]
    wanted = kept.prefill_logits(IDS[:300], 0, tables)
    held = evict(tables, 299, 128)
    assert held.sliding.block_ids[0] == NULL_BLOCK_ID
    assert torch.equal(gone.prefill_logits(IDS[:300], 0, held), wanted)
    for buffer in gone.buffers:
        assert buffer[:, 0].abs().max() == 0
        assert buffer[:, tables.sliding.block_ids[0]].abs().max() == 0
        assert buffer[:, tables.full.block_ids[0]].abs().max() > 0


def _tables(full: tuple[int, ...], sliding: tuple[int, ...], block_size: int = 128) -> GroupTables:
    def table(ids: tuple[int, ...]) -> BlockTable:
        return BlockTable(block_ids=tuple(map(BlockId, ids)), block_size=block_size)

    return GroupTables(full=table(full), sliding=table(sliding))


@pytest.mark.parametrize(
    ("ids", "start", "tables", "message"),
    [
        ([], 0, _tables((1,), (2,)), "prefill of 0 tokens from position 0 must cover at least one"),
        ([5], -1, _tables((1,), (2,)), "from position -1"),
        ([5] * 30, 1000, _tables((1,) * 9, (2,) * 9), "within 0..1023"),
        ([5, 199], 0, _tables((1,), (2,)), "token 1 of the prefill has id 199, outside the vocabulary 0..198"),
        ([5] * 129, 0, _tables((1,), (2, 3)), "full table has 128 slots, the prefill ends at position 129"),
        ([5] * 129, 0, _tables((1, 2), (3,)), "sliding table has 128 slots"),
        ([5], 0, _tables((40,), (2,)), "full table has block 40, the cache has 40 blocks"),
        ([5], 0, _tables((0,), (2,)), "full table has the null block at logical block 0"),
        ([5], 140, _tables((1, 2), (0, 3)), "sliding table has the null block at logical block 0"),
        ([5], 0, _tables((1,), (2,), 64), "full table has block_size 64, the cache has 128"),
    ],
)
def test_a_prefill_that_cannot_be_done_is_refused_and_writes_nothing(
    model: TorchModel, ids: list[int], start: int, tables: GroupTables, message: str
) -> None:
    """Everything is checked before the first layer."""
    engines = make_engines(model)
    before = _bytes(engines)
    with pytest.raises(LayoutError, match=message):
        engines.prefill.prefill(token_ids=ids, start_position=start, tables=tables)
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(engines), strict=True))


def test_models_and_caches_that_do_not_fit_are_refused(model: TorchModel) -> None:
    """Kinds that share a buffer and a table, ranks, layers, buffers, chunks."""
    engines = make_engines(model)
    arguments: dict[str, Any] = {"model": model, "layout": engines.layout, "buffers": engines.buffers}

    def changed(**geometry: Any) -> TorchModel:
        return evolve(model, config=evolve(model.config, geometry=evolve(model.config.geometry, **geometry)))

    kinds = (AttentionKind.SLIDING, AttentionKind.FULL, AttentionKind.FULL, AttentionKind.FULL)
    with pytest.raises(UnsupportedError, match="layers 2 and 3 share a buffer and one block table"):
        TorchPrefillModel(**arguments | {"model": changed(attention_kinds=kinds)})
    with pytest.raises(UnsupportedError, match="prefill runs on one rank, got a mesh of 2"):
        TorchPrefillModel(**arguments | {"model": evolve(model, mesh=DecodeMesh(tp_size=2, ep_size=2))})
    with pytest.raises(LayoutError, match="the layout has 2 group buffers, got 1"):
        TorchPrefillModel(**arguments | {"buffers": engines.buffers[:1]})
    with pytest.raises(LayoutError, match="group buffer 0 must have shape"):
        TorchPrefillModel(**arguments | {"buffers": tuple(b[:, :5] for b in engines.buffers)})
    with pytest.raises(LayoutError, match="max_chunk_tokens must be >= 1"):
        TorchPrefillModel(**arguments | {"max_chunk_tokens": 0})
    with pytest.raises(LayoutError, match="the layout"):
        TorchPrefillModel(**arguments | {"layout": evolve(engines.layout, num_layers=6)})
