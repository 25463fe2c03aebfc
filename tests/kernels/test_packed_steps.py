"""The whole giga kernel over packed FP8, step after step: every byte of the cache where the core's layout has it.

The reference keeps its own cache, token-major, and computes every step in NumPy; its bytes are put where the core says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.nki_kernel import NkiDecodeKernel
from gk_adapters.torch_dtypes import array_of
from gk_adapters.torch_giga import GigaBuild, giga_config, to_stored_order
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_adapters.torch_model import TorchModel, load_torch_model, torch_contract
from gk_adapters.torch_sampling import TorchCallBuilder
from gk_adapters.weight_stacks import build_stacks
from gk_core.block_table import NULL_BLOCK_ID, BlockId, BlockTable
from gk_core.decode_step import ControlShape, DecodeRow, build_attention_control
from gk_core.kernel_contract import DecodeCall, KVScales
from gk_core.kv_layout import KByteOrder, KVHalf, KVLayout, byte_address, layout_for
from gk_core.kv_spec import KVDtype, honest_specs
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import WeightLayout
from gk_kernels.reference.layer import decode_layer
from tests.hf_models import make_hf_checkpoint

Array = NDArray[Any]
FP8 = ml_dtypes.float8_e4m3fn
BLOCK, WINDOW, ROWS, NUM_BLOCKS, SCRATCH = 8, 12, 4, 131, 1
SCALES = KVScales(k=0.5, v=2.0)


class Requests:
    """Three requests that begin one after the other at position 0, over one pool; the fourth row stays idle."""

    def __init__(self) -> None:
        self.free = list(range(1, NUM_BLOCKS))
        self.full: list[list[int]] = [[], [], []]
        self.sliding: list[list[int]] = [[], [], []]

    def rows(self, step: int) -> list[DecodeRow | None]:
        """Rows of one step; a sliding block that the window has left goes back, to be used again at once."""
        rows: list[DecodeRow | None] = []
        for i in range(3):
            position = step - 3 * i
            if position < 0:
                rows.append(None)
                continue
            gone = max(position - WINDOW + 1, 0) // BLOCK - 1
            if gone >= 0 and self.sliding[i][gone] != NULL_BLOCK_ID:
                self.free.insert(0, self.sliding[i][gone])
                self.sliding[i][gone] = NULL_BLOCK_ID
            if position % BLOCK == 0:
                for table in (self.full[i], self.sliding[i]):
                    table.append(self.free.pop(0))
            rows.append(
                DecodeRow(position=position, full_table=_table(self.full[i]), sliding_table=_table(self.sliding[i]))
            )
        return [rows[0], None, *rows[1:]]


def _table(ids: list[int]) -> BlockTable:
    return BlockTable(block_ids=tuple(BlockId(i) for i in ids), block_size=BLOCK)


class Twin:
    """The kernel over its packed cache, and the reference over a plain one with the same noise in it."""

    def __init__(self, path: Path, max_model_len: int) -> None:
        make_hf_checkpoint(
            path, mxfp4=True, num_hidden_layers=2, sliding_window=WINDOW, num_attention_heads=4, num_local_experts=3,
            num_experts_per_tok=2,
        )  # fmt: skip
        self.model: TorchModel = load_torch_model(path)
        geometry = self.model.config.geometry
        specs = honest_specs(geometry, tp_size=1, block_size=BLOCK, dtype=KVDtype.FP8_E4M3FN)
        self.layout = layout_for(specs, num_blocks=NUM_BLOCKS, k_byte_order=KByteOrder.PAIR_PACKED)
        memory: KVLayout = evolve(self.layout, num_blocks=NUM_BLOCKS + SCRATCH)
        self.shape = ControlShape(
            num_rows=ROWS, block_size=BLOCK, sliding_window=WINDOW, max_model_len=max_model_len
        )  # fmt: skip
        contract = torch_contract(self.model, layout=memory, shape=self.shape)
        source = HFCheckpoint(path)
        self.stacks = build_stacks(
            source,
            build_stacked_weight_specs(
                geometry, self.model.mesh, 0, WeightLayout.NKI, source.config.expert_format, "float32"
            ),
        )
        build = GigaBuild(scratch_blocks=SCRATCH)
        self.kernel = NkiDecodeKernel(contract=contract, geometry=geometry, stacks=self.stacks, build=build)
        self.config = giga_config(geometry, contract, 0, SCALES, build, mx_matmul=False)
        (self.buffer,) = allocate_group_buffers(memory)
        self.builder = TorchCallBuilder(model=self.model, kv=per_buffer_kv((self.buffer,), memory))
        shape = self.layout.buffer_shape
        self.cache = np.random.default_rng(1).integers(0, 120, shape, dtype=np.uint8)
        self.bytes[:] = self.expected()
        self.flips = 0

    @property
    def bytes(self) -> Array:
        """The engine's part of the kernel's cache, [2, half]."""
        return array_of(self.buffer).view(np.uint8).reshape(2, -1)[:, : self.layout.half_bytes]

    def expected(self) -> Array:
        """The reference's tokens, byte for byte where `byte_address` has them."""
        layout, out = self.layout, np.empty((2, self.layout.half_bytes), np.uint8)
        first = np.arange(NUM_BLOCKS) * layout.block_bytes
        for half in KVHalf:
            for head in range(layout.num_kv_heads):
                for token in range(BLOCK):
                    for dim in range(layout.head_size):
                        at = byte_address(layout, layer=0, half=half, block=0, head=head, token=token, dim=dim)
                        places = first + at.byte_offset - half.value * layout.half_bytes
                        out[half.value, places] = self.cache[half.value, :, head, token, dim]
        return out

    def step(self, step: int, rows: list[DecodeRow | None]) -> None:
        """Both, one after the other: hidden states to 1e-4, new tokens to the byte."""
        control = build_attention_control(rows, self.shape)
        ids = tuple((7 * step + 31 * row) % 199 for row in range(ROWS))
        call = evolve(self.builder.build(token_ids=ids, control=control), scales=SCALES)
        found = array_of(self.kernel.step(call=call))
        wanted = self._reference(call)
        active = np.array(control.active)
        stored = to_stored_order(found, self.model.config.geometry.hidden_size)
        assert np.abs(stored - wanted)[active].max() <= 1e-4 * np.abs(wanted[active]).max()
        self._settle([s for i in (control.update_index, control.update_index_swa) for s in i if s >= 0])

    def _reference(self, call: DecodeCall[Any]) -> Array:
        c = call.control
        x = to_stored_order(array_of(call.hidden), self.model.config.geometry.hidden_size)
        for layer in range(2):
            sliding = layer == 0
            index = (c.update_index_swa if sliding else c.update_index).numpy()
            positions = (c.positions_swa if sliding else c.positions)[:, 0].int().tolist()
            starts = c.swa_start[:, 0].int().tolist() if sliding else [0] * ROWS
            table = (c.block_table_swa if sliding else c.block_table).numpy()
            k, v = (self.cache[half].view(FP8) for half in range(2))
            x = decode_layer(
                x, {name: stack[layer] for name, stack in self.stacks.items()}, k, v, table, positions, starts,
                index[:, 0], index[:, 0] >= 0, c.cos[:, :, 0].T.numpy(), c.sin[:, :, 0].T.numpy(),
                config=self.config, mx_terms=0,
            )  # fmt: skip
        return x

    def _settle(self, slots: list[int]) -> None:
        """A float between two FP8 numbers may fall either way: count such bytes, and go on with the kernel's."""
        for slot in slots:
            block, offset = divmod(int(slot), BLOCK)
            mine = self._read(block, offset)
            theirs = self.cache[:, block, :, offset]
            apart = np.abs(mine.astype(int) - theirs.astype(int))
            assert apart.max() <= 1
            self.flips += int(apart.sum())
            self.cache[:, block, :, offset] = mine

    def _read(self, block: int, offset: int) -> Array:
        """A token as the kernel stored it, [2, kv, d]: packed K is [blocks, kv, pairs, d, 2]."""
        layout = self.layout
        packed = self.bytes[0].reshape(layout.packed_k_shape)
        values = self.bytes[1].reshape(layout.buffer_shape[1:])
        return np.stack([packed[block, :, offset // 2, :, offset % 2], values[block, :, offset]])


def _run(path: Path, steps: int, every: int) -> Twin:
    twin, requests = Twin(path, steps), Requests()
    for step in range(steps):
        twin.step(step, requests.rows(step))
        if step % every == every - 1:
            assert np.array_equal(twin.bytes, twin.expected())
    assert np.array_equal(twin.bytes, twin.expected())
    written = 3 * steps * 2 * 2 * twin.layout.num_kv_heads * twin.layout.head_size
    assert twin.flips <= written // 5000
    assert NULL_BLOCK_ID in requests.sliding[0], "no block was left behind"
    return twin


def test_packed_bytes_of_the_whole_kernel_are_where_the_core_has_them(tmp_path: Path) -> None:
    """Steps over two block borders and past the window of 12, blocks used again; both lanes, and the null block."""
    _run(tmp_path, 22, 10)


@pytest.mark.slow
def test_packed_bytes_after_300_steps_are_where_the_core_has_them(tmp_path: Path) -> None:
    """37 blocks a request, the window wrapped 25 times."""
    _run(tmp_path, 300, 50)
