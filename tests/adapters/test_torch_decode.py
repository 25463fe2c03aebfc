"""The torch decode kernel: which bytes it writes, what it must not read, every form of the cache, every refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.utils._python_dispatch import TorchDispatchMode

from gk_adapters.torch_decode import TorchDecodeKernel
from gk_adapters.torch_kv import stacked_kv
from gk_adapters.torch_math import PackedMatrix
from gk_adapters.torch_model import TorchModel, load_torch_model, torch_contract
from gk_adapters.torch_sampling import TorchCallBuilder, logits
from gk_core.block_table import PAD_SLOT_ID, BlockId, BlockTable
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import LayoutError, UnsupportedError
from gk_core.kernel_contract import DecodeCall, KVScales
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_core.model_geometry import AttentionKind
from gk_core.ports import GroupTables
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import TorchEngines, evict, make_engines, make_tables

Call = DecodeCall[torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _model(directory: Path, **changes: Any) -> TorchModel:
    make_hf_checkpoint(directory, mxfp4=True, **changes)
    return load_torch_model(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    return _model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    """A window of 64 tokens: half a block."""
    return _model(tmp_path_factory.mktemp("narrow"), sliding_window=64)


IDS = torch.randint(0, 199, (400,), generator=torch.Generator().manual_seed(9)).tolist()


def _prefilled(engines: TorchEngines, length: int, count: int = 1) -> list[GroupTables]:
    tables = make_tables(engines, count, 400)
    for t in tables:
        engines.prefill.prefill(token_ids=IDS[:length], start_position=0, tables=t)
    return tables


def _call(engines: TorchEngines, rows: list[Any]) -> Call:
    padded = rows + [None] * (engines.shape.num_rows - len(rows))
    control = engines.control([None if r is None else r[1:] for r in padded])
    return engines.builder.build(token_ids=tuple(0 if r is None else r[0] for r in padded), control=control)


def _bytes(engines: TorchEngines) -> list[torch.Tensor]:
    return [b.view(torch.uint8).clone() for b in engines.buffers]


def test_a_null_block_full_of_nan_and_three_idle_rows_change_nothing(narrow: TorchModel) -> None:
    """N = 200, sliding row [0, 9], one active row of four: finite, right, and only its own blocks are written.

    With a window of 64 the query at 199 reads positions 136.., all in block 9; block 0 stands where an old one was.
    """
    engines = make_engines(narrow)
    block = {name: BlockId(i) for name, i in (("full0", 4), ("full1", 5), ("old", 8), ("new", 9))}
    whole = GroupTables(
        full=BlockTable(block_ids=(block["full0"], block["full1"]), block_size=128),
        sliding=BlockTable(block_ids=(block["old"], block["new"]), block_size=128),
    )
    engines.prefill.prefill(token_ids=IDS[:199], start_position=0, tables=whole)
    wanted = engines.step_logits([None, None, (IDS[199], 199, whole)])[2]
    for buffer in engines.buffers:
        buffer[:, 0] = float("nan")
        buffer[:, block["old"]] = float("nan")
        buffer[:, [block["full1"], block["new"]], :, 71] = 0.0  # written by the step above; to be written again
    held = GroupTables(
        full=whole.full, sliding=BlockTable(block_ids=(BlockId(0), BlockId(9)), block_size=128)
    )  # fmt: skip
    before = _bytes(engines)
    call = _call(engines, [None, None, (IDS[199], 199, held)])
    assert call.control.block_table_swa[2].tolist() == [0, 9]
    # Idle rows name blocks too, as stale rows do, and their embeddings are not numbers.
    for row, stale in ((0, 4), (1, 11), (3, 0)):
        call.control.block_table[row] = call.control.block_table_swa[row] = stale
        call.control.positions[row] = call.control.positions_swa[row] = 77.0
        call.hidden[row] = float("nan")
    hidden = engines.kernel.step(call=call)
    assert torch.isfinite(hidden).all()
    assert hidden[[0, 1, 3]].abs().max() == 0
    assert torch.allclose(logits(hidden[2:3], narrow)[0], wanted, atol=2e-5)
    changed = {
        (i, int(half), int(blk))
        for i, (a, b) in enumerate(zip(before, _bytes(engines), strict=True))
        for half, blk in (a != b).flatten(2).any(-1).nonzero().tolist()
    }
    # Even layers write block 9, odd layers block 5, in both buffers and halves.
    assert changed == {(i, half, blk) for i in (0, 1) for half in (0, 1) for blk in (5, 9)}


def test_a_step_without_active_rows_writes_and_returns_nothing(model: TorchModel) -> None:
    """Zeros out, bytes as they were."""
    engines = make_engines(model)
    _prefilled(engines, 50)
    before = _bytes(engines)
    hidden = engines.kernel.step(call=_call(engines, [None]))
    assert hidden.shape == (4, 96)
    assert hidden.abs().max() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, _bytes(engines), strict=True))


def test_exactly_the_new_tokens_slots_are_written(model: TorchModel) -> None:
    """Position 130: slot 2 of its second block, in every layer's group and half."""
    engines = make_engines(model)
    tables = _prefilled(engines, 130)[0]
    before = _bytes(engines)
    engines.step([(IDS[130], 130, tables)])
    for i, (a, b) in enumerate(zip(before, _bytes(engines), strict=True)):
        places = (a != b).view(*engines.layout.buffer_shape, 4).any(-1).any(-1).nonzero().tolist()
        full, sliding = tables.full.block_ids[1], tables.sliding.block_ids[1]
        wanted = {(half, blk, head, 2) for half in (0, 1) for blk in (full, sliding) for head in (0, 1)}
        assert {tuple(p) for p in places} == wanted, i


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_slots_of_the_rows_own_blocks_that_hold_no_key_are_not_read(model: TorchModel, poison: float) -> None:
    """Past the position in the last block, before the window in the first, whatever stands there."""
    clean, dirty = make_engines(model), make_engines(model)
    tables = _prefilled(clean, 300)[0]
    _prefilled(dirty, 300)
    wanted = clean.step_logits([(IDS[300], 300, tables)])[0]
    for buffer in dirty.buffers:
        buffer[:, tables.full.block_ids[2], :, 45:] = poison
        buffer[:, tables.sliding.block_ids[2], :, 45:] = poison
        buffer[:, tables.sliding.block_ids[1], :, : 300 - 127 - 128] = poison
    assert torch.allclose(dirty.step_logits([(IDS[300], 300, tables)])[0], wanted, atol=2e-5)


@pytest.mark.parametrize("stale", [-1, 0, 40, 2**31 - 1])
def test_table_entries_that_are_not_needed_may_hold_anything(model: TorchModel, stale: int) -> None:
    """Before the window, and past the position: other adapters pad with -1, and freed rows keep old ids."""
    engines = make_engines(model)
    tables = _prefilled(engines, 383)[0]
    rows: list[Any] = [(IDS[383], 383, tables)]
    wanted = engines.step(rows)
    call = _call(engines, rows)
    call.control.block_table[0, 3:] = stale
    call.control.block_table_swa[0, 0] = stale  # the window of 383 begins with its last block
    assert torch.equal(engines.kernel.step(call=call), wanted)


def test_nan_in_a_key_that_is_read_is_not_hidden(model: TorchModel) -> None:
    """A damaged cache must show, not be smoothed over."""
    engines = make_engines(model)
    tables = _prefilled(engines, 300)[0]
    engines.buffers[0][1, tables.full.block_ids[0], 1, 7] = float("nan")
    assert torch.isnan(engines.step([(IDS[300], 300, tables)])[0]).any()


def test_one_rows_nan_stays_in_its_row(model: TorchModel) -> None:
    """Its neighbours come out as if it were not there."""
    engines = make_engines(model)
    a, b = _prefilled(engines, 140, count=2)
    wanted = engines.step_logits([None, (IDS[140], 140, b)])[1]
    engines.buffers[0][0, a.full.block_ids[0], 0, 3] = float("nan")
    got = engines.step_logits([(IDS[140], 140, a), (IDS[140], 140, b)])
    assert torch.isnan(got[0]).any()
    assert torch.allclose(got[1], wanted, atol=2e-5)


@pytest.mark.parametrize("field", ["update_index", "update_index_swa"])
def test_an_update_index_of_minus_one_writes_nothing_but_the_token_attends_to_itself(
    model: TorchModel, field: str
) -> None:
    """On an active row: same output, that group's blocks untouched, though its own slot holds NaN."""
    engines = make_engines(model)
    a, b = _prefilled(engines, 200, count=2)
    rows = [(IDS[200], 200, a), (IDS[200], 200, b)]
    wanted = engines.step_logits(rows)
    for buffer in engines.buffers:
        for blk in (a.full.block_ids[1], a.sliding.block_ids[1]):
            buffer[:, blk, :, 72] = float("nan")
    before = _bytes(engines)
    call = _call(engines, rows)
    getattr(call.control, field)[0] = PAD_SLOT_ID
    got = logits(engines.kernel.step(call=call), model)
    assert torch.allclose(got[:2], wanted[:2], atol=2e-5)
    untouched = a.full.block_ids[1] if field == "update_index" else a.sliding.block_ids[1]
    for x, y in zip(before, _bytes(engines), strict=True):
        assert torch.equal(x[:, untouched], y[:, untouched])


def test_weights_are_not_copied_or_changed_by_a_step(model: TorchModel) -> None:
    """The kernel's per-layer weights are views of the stacks' own memory."""
    engines = make_engines(model)
    tables = _prefilled(engines, 20)[0]
    before = {name: stack.clone() for name, stack in model.stacks.items()}
    engines.step([(IDS[20], 20, tables)])
    bound = engines.kernel._binder.bind(_call(engines, [(IDS[21], 21, tables)]))
    storages = {stack.untyped_storage().data_ptr() for stack in model.stacks.values()}
    for layer in bound.layers:
        views = (layer.qkv, layer.out, layer.sink, layer.router, *layer.experts.gate_up, *layer.experts.down)
        assert {v.untyped_storage().data_ptr() for v in views if isinstance(v, torch.Tensor)} <= storages
        # One matrix for gate and up, and still a view.
        assert [v.dim() for v in views if isinstance(v, torch.Tensor)] == [2, 2, 4, 2, *[2] * 10]
    assert all(torch.equal(before[name], stack) for name, stack in model.stacks.items())


class _WeightReaders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation that reads a weight matrix and makes a new tensor: name, matrix elements, new elements."""

    def __init__(self, stacks: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {stack.untyped_storage().data_ptr() for stack in stacks.values()}
        self.seen: list[tuple[str, int, int]] = []

    def _is_weight(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # The smallest matrix is the router's, 96 x 5; sinks and biases of one layer are smaller.
        read = [a.numel() for a in args if self._is_weight(a) and a.numel() >= 96 * 5]
        outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor)]
        made = [o.numel() for o in outs if not self._is_weight(o)]
        if read and made:
            self.seen.append((func.name(), max(read), max(made)))
        return out


def test_no_operation_of_a_step_makes_a_tensor_as_large_as_a_matrix_it_reads(model: TorchModel) -> None:
    """Counted at the dispatcher: products only, no copies, casts or stacks of weights."""
    engines = make_engines(model)
    tables = _prefilled(engines, 20)[0]
    call = _call(engines, [(IDS[20], 20, tables)])
    with _WeightReaders(model.stacks) as readers:
        engines.kernel.step(call=call)
    # Per layer: qkv, output and router products, and up to four experts twice.
    products = [name for name, _, _ in readers.seen if "mv" in name or "mm" in name]
    assert len(products) == 4 * (3 + 2 * 4)
    assert [entry for entry in readers.seen if entry[2] >= entry[1]] == []


def test_prepacked_matrices_give_the_same_result(tmp_path: Path) -> None:
    """bfloat16, one row and three; the caller's stacks stay as they are."""
    make_hf_checkpoint(tmp_path)
    model = load_torch_model(tmp_path, model_dtype="bfloat16")
    engines = make_engines(model, dtype=KVDtype.BF16)
    packing = TorchDecodeKernel(
        contract=torch_contract(model, layout=engines.layout, shape=engines.shape),
        geometry=model.config.geometry,
        prepack=True,
    )
    a, b, c = _prefilled(engines, 150, count=3)
    for rows in ([(IDS[150], 150, a)], [(IDS[150], 150, a), (IDS[9], 150, b), None, (IDS[7], 150, c)]):
        call = _call(engines, rows)
        wanted, got = engines.kernel.step(call=call).float(), packing.step(call=call).float()
        assert got.abs().max() > 1
        assert (got - wanted).norm() < 0.08 * wanted.norm()  # bfloat16 rounds at other places; a wrong matrix gives 1
    bound = packing._binder.bind(call)
    assert isinstance(bound.layers[0].qkv, PackedMatrix)
    assert isinstance(bound.layers[3].experts.gate_up[4], PackedMatrix)


def test_prepacking_another_dtype_is_refused(model: TorchModel) -> None:
    """float32 has no such order here."""
    engines = make_engines(model)
    kernel = TorchDecodeKernel(
        contract=torch_contract(model, layout=engines.layout, shape=engines.shape),
        geometry=model.config.geometry,
        prepack=True,
    )
    with pytest.raises(UnsupportedError, match="prepacked matrices need bfloat16"):
        kernel.step(call=_call(engines, [(IDS[0], 0, make_tables(engines, 1, 9)[0])]))


def test_a_weight_whose_leading_axis_is_one_serves_all_layers(model: TorchModel) -> None:
    """As the contract allows."""
    engines = make_engines(model)
    tables = _prefilled(engines, 20)[0]
    call = _call(engines, [(IDS[20], 20, tables)])
    same = dict(model.stacks) | {"sink": model.stacks["sink"][:1].expand(4, -1).contiguous()}
    shared = dict(model.stacks) | {"sink": model.stacks["sink"][:1]}
    a, b = (engines.kernel.step(call=evolve(call, weights=w)) for w in (same, shared))
    assert torch.equal(a, b)


def test_swapped_parity_shows_past_the_window_and_only_there(tmp_path: Path) -> None:
    """Two layers: layer 0 slides, layer 1 is full. Inverting them changes the result at N = 200, not at N <= 128."""
    right = _model(tmp_path, num_hidden_layers=2)
    assert right.config.geometry.attention_kinds == (AttentionKind.SLIDING, AttentionKind.FULL)
    geometry = evolve(right.config.geometry, attention_kinds=(AttentionKind.FULL, AttentionKind.SLIDING))
    swapped = evolve(right, config=evolve(right.config, geometry=geometry))
    with pytest.raises(UnsupportedError, match="layer 0 is full_attention, must be sliding_attention"):
        make_engines(swapped)
    results = {}
    for name, model in (("right", right), ("swapped", swapped)):
        engines = make_engines(right)
        prefill = type(engines.prefill)(model=model, layout=engines.layout, buffers=engines.buffers)
        tables = make_tables(engines, 1, 400)[0]
        results[name] = logits(prefill.forward(token_ids=IDS[:200], start_position=0, tables=tables), model)
    difference = (results["right"] - results["swapped"]).abs().amax(dim=1)
    assert difference[:128].max() < 2e-5
    assert difference[199] > 1e-2


# ---- forms of the cache


def _stacked(engines: TorchEngines) -> Any:
    """The engines' cache as one stacked K and one stacked V (copies)."""
    kv = stacked_kv(engines.layout)
    for i, (k, v) in enumerate(zip(engines.kv.k, engines.kv.v, strict=True)):
        kv.k[i], kv.v[i] = k, v
    return kv


FORMS = [
    (KVDtype.FP32, KByteOrder.TOKEN_MAJOR),
    (KVDtype.BF16, KByteOrder.TOKEN_MAJOR),
    (KVDtype.FP8_E4M3FN, KByteOrder.TOKEN_MAJOR),
    (KVDtype.FP8_E4M3FN, KByteOrder.PAIR_PACKED),
    (KVDtype.FP8_E4M3, KByteOrder.PAIR_PACKED),
]


@pytest.mark.parametrize(("dtype", "order"), FORMS)
def test_stacked_and_per_buffer_caches_give_the_same_bytes_and_results(
    model: TorchModel, dtype: KVDtype, order: KByteOrder
) -> None:
    """Three steps of each."""
    engines = make_engines(model, dtype=dtype, k_byte_order=order)
    tables = _prefilled(engines, 126)[0]
    kv = _stacked(engines)
    builder = TorchCallBuilder(model=model, kv=kv)
    kernel = TorchDecodeKernel(
        contract=torch_contract(model, layout=engines.layout, shape=engines.shape), geometry=model.config.geometry
    )
    for position in range(126, 129):
        control = engines.control([(position, tables)])
        ids = (IDS[position], 0, 0, 0)
        a = engines.kernel.step(call=engines.builder.build(token_ids=ids, control=control))
        b = kernel.step(call=builder.build(token_ids=ids, control=control))
        assert torch.equal(a, b)
    for i, (k, v) in enumerate(zip(engines.kv.k, engines.kv.v, strict=True)):
        assert torch.equal(k.view(torch.uint8), kv.k[i].view(torch.uint8))
        assert torch.equal(v.view(torch.uint8), kv.v[i].view(torch.uint8))


@pytest.mark.parametrize("dtype", [KVDtype.FP8_E4M3FN, KVDtype.FP8_E4M3])
def test_packed_and_token_major_k_hold_the_same_numbers_in_another_order(model: TorchModel, dtype: KVDtype) -> None:
    """Results are equal; unpacking the packed bytes by (pair, dim, lane) gives the token-major ones."""
    plain = make_engines(model, dtype=dtype)
    packed = make_engines(model, dtype=dtype, k_byte_order=KByteOrder.PAIR_PACKED)
    tables = _prefilled(plain, 130)[0]
    _prefilled(packed, 130)
    for position in range(130, 134):
        row: list[Any] = [(IDS[position], position, tables)]
        assert torch.equal(plain.step(row), packed.step(row))
    for a, b in zip(plain.kv.k, packed.kv.k, strict=True):
        unpacked = b.view(torch.uint8).transpose(-1, -2).reshape(a.shape)
        assert torch.equal(a.view(torch.uint8), unpacked)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(plain.kv.v, packed.kv.v, strict=True)
    )


def test_fp8_bytes_are_the_casts_of_the_float_values(model: TorchModel) -> None:
    """Layer 0's K and V depend on the token alone, so float and FP8 engines computed the same numbers there."""
    exact = make_engines(model)
    quantised = make_engines(model, dtype=KVDtype.FP8_E4M3FN)
    tables = make_tables(exact, 1, 10)[0]
    for engines in (exact, quantised):
        engines.step([(IDS[0], 0, tables)])
    block = tables.sliding.block_ids[0]
    for half in (0, 1):
        values = exact.buffers[0][half, block, :, 0]
        assert values.abs().max() > 0.5
        wanted = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        got = quantised.buffers[0][half, block, :, 0]
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


def _scaled(model: TorchModel, k: float, v: float) -> TorchModel:
    return evolve(model, scales=KVScales(k=k, v=v))


def test_no_scale_is_exactly_one_and_scales_undo_themselves(model: TorchModel) -> None:
    """Float cache, K scale 4 and V scale .5: stored values are x / scale, results are those of scale 1."""
    assert (model.scales.k, model.scales.v) == (1.0, 1.0)
    plain, scaled = make_engines(model), make_engines(_scaled(model, 4.0, 0.5))
    tables = _prefilled(plain, 135)[0]
    _prefilled(scaled, 135)
    row: list[Any] = [(IDS[135], 135, tables)]
    assert torch.allclose(plain.step_logits(row), scaled.step_logits(row), atol=2e-5)
    for a, b in zip(plain.kv.k, scaled.kv.k, strict=True):
        assert torch.allclose(a, b * 4.0, atol=1e-5)
    for a, b in zip(plain.kv.v, scaled.kv.v, strict=True):
        assert torch.allclose(a, b * 0.5, atol=1e-5)


def test_fp8_with_scale_four_is_as_good_as_with_scale_one(model: TorchModel) -> None:
    """Both within FP8's error of the float result; neither equal to it."""
    exact = make_engines(model)
    tables = _prefilled(exact, 150)[0]
    row: list[Any] = [(IDS[150], 150, tables)]
    wanted = exact.step_logits(row)[0]
    for scale in (1.0, 4.0):
        engines = make_engines(_scaled(model, scale, scale), dtype=KVDtype.FP8_E4M3FN)
        _prefilled(engines, 150)
        got = engines.step_logits(row)[0]
        error = (got - wanted).norm() / wanted.norm()
        assert 1e-4 < error < 0.15, scale
        # The two best tokens may lie closer together than FP8 can tell apart.
        assert wanted.argmax() in got.topk(3).indices, scale


# ---- refusals


def _changed(field: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call], Call]:
    def apply(call: Call) -> Call:
        return evolve(call, control=evolve(call.control, **{field: change(getattr(call.control, field))}))

    return apply


def _put(field: str, row: int, column: int, value: float) -> Callable[[Call], Call]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[row, column] = value
        return tensor

    return _changed(field, change)


REFUSALS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "hidden dtype": (lambda c: evolve(c, hidden=c.hidden.double()), "hidden must be float32, got float64"),
    "hidden shape": (lambda c: evolve(c, hidden=c.hidden[:3]), r"hidden must have shape \[4, 96\], got \[3, 96\]"),
    "table dtype": (_changed("block_table", lambda t: t.long()), "block_table must be int32, got int64"),
    "table width": (_changed("block_table_swa", lambda t: t[:, :1]), r"block_table_swa must have shape \[4, 2\]"),
    "a missing weight": (
        lambda c: evolve(c, weights={k: v for k, v in c.weights.items() if k != "sink"}), "missing .'sink'.",
    ),
    "an unknown weight": (lambda c: evolve(c, weights={**c.weights, "rope": c.hidden}), "unknown .'rope'."),
    "no cache": (lambda c: evolve(c, per_buffer_kv=None), "exactly one KV form"),
    "a buffer left out": (
        lambda c: evolve(c, per_buffer_kv=evolve(c.per_buffer_kv, k=c.per_buffer_kv.k[:1])),  # type: ignore[union-attr,misc]
        "needs 2 K and 2 V tensors, got 1 and 2",
    ),
    "a rank outside": (lambda c: evolve(c, rank=1), "rank 1 is outside 0..0"),
    "a null block that is read": (_put("block_table", 1, 0, 0), "row 1: block_table has block 0 at entry 0"),
    "a null block in the window": (_put("block_table_swa", 1, 0, 0), "row 1: block_table_swa has block 0 at entry 0"),
    "a block past the cache": (_put("block_table", 1, 1, 40), "block 40 at entry 1.* must be 1..39"),
    "a negative block": (_put("block_table", 1, 1, -1), "has block -1 at entry 1"),
    "a position past the table": (_put("positions", 1, 0, 1024), "position 1024 is outside block_table's 1024 slots"),
    "a negative position": (_put("positions", 1, 0, -1), "row 1: position -1 is outside"),
    "a slot of another block": (_put("update_index", 1, 0, 3 * 128), "update index 384 is not the slot"),
    "a slot past the cache": (_put("update_index", 1, 0, 40 * 128), "update index 5120 is not the slot"),
    "a slot below the pad": (_put("update_index_swa", 1, 0, -2), "update index -2 is not the slot"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_call_outside_the_contract_is_refused_and_writes_nothing(model: TorchModel, case: str) -> None:
    """Also when the kernel has run good calls of the same shape before."""
    change, message = REFUSALS[case]
    engines = make_engines(model)
    a, b = _prefilled(engines, 130, count=2)
    rows = [(IDS[130], 130, a), (IDS[130], 130, b)]
    engines.step(rows)
    before = _bytes(engines)
    with pytest.raises(LayoutError, match=message):
        engines.kernel.step(call=change(_call(engines, rows)))
    assert all(torch.equal(x, y) for x, y in zip(before, _bytes(engines), strict=True))
    engines.step(rows)


def test_two_rows_that_write_one_slot_are_refused(model: TorchModel) -> None:
    """The same request twice in a batch."""
    engines = make_engines(model)
    a = _prefilled(engines, 130)[0]
    with pytest.raises(LayoutError, match="two rows write slot"):
        engines.step([(IDS[130], 130, a), (IDS[130], 130, a)])


def test_rows_may_share_full_blocks_that_neither_writes(model: TorchModel) -> None:
    """A common prefix: first block shared, own last blocks."""
    engines = make_engines(model)
    a, b = _prefilled(engines, 200, count=2)
    wanted = engines.step_logits([None, (IDS[200], 200, b)])[1]
    shared = GroupTables(
        full=BlockTable(block_ids=(a.full.block_ids[0], *b.full.block_ids[1:]), block_size=128), sliding=b.sliding
    )
    got = engines.step_logits([(IDS[200], 200, a), (IDS[200], 200, shared)])
    assert torch.allclose(got[1], wanted, atol=2e-5)


def test_a_kernel_and_a_model_that_do_not_fit_are_refused(model: TorchModel) -> None:
    """Mesh, window and heads."""
    engines = make_engines(model)
    geometry = model.config.geometry
    contract = torch_contract(model, layout=engines.layout, shape=engines.shape)
    with pytest.raises(LayoutError, match="sliding_window of the model is 64, the contract has 128"):
        TorchDecodeKernel(contract=contract, geometry=evolve(geometry, sliding_window=64))
    with pytest.raises(UnsupportedError, match="got a mesh of 2; use TorchMeshKernel"):
        TorchDecodeKernel(contract=evolve(contract, mesh=DecodeMesh(tp_size=2, ep_size=2)), geometry=geometry)


def test_evicted_and_kept_sliding_blocks_give_the_same_result(model: TorchModel) -> None:
    """What the window has left behind does not matter."""
    engines = make_engines(model)
    tables = _prefilled(engines, 383)[0]
    held = evict(tables, 383, 128)
    assert held.sliding.block_ids[:2] == (0, 0)
    kept = engines.step([(IDS[383], 383, tables)])
    assert torch.equal(engines.step([(IDS[383], 383, held)]), kept)
