"""attention_tkg and gen_mask_tkg of the library, unmodified: paged, sink, window, one and two cores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.simulator.conformance import references as ref
from tests.simulator.conformance.harness import Library, assert_within
from tests.simulator.conformance.references import BF16, Array

PARTITIONS = 128


@dataclass(frozen=True)
class Case:
    """One shape of decode attention; block_size 0 is a flat cache, window 0 sees everything."""

    batch: int
    heads: int
    active: int
    context: int
    head: int
    block_size: int = 0
    window: int = 0
    sink: bool = False
    made_mask: bool = False
    turn_k: bool = True
    strided: bool = True

    @property
    def lengths(self) -> Array:
        """Filled context slots of each request, all different."""
        return (3 * self.context // 4 + 5 * np.arange(self.batch)) % (self.context - self.active)

    def positions(self) -> tuple[Array, Array | None]:
        """End and, with a window, start of what each new token sees; [batch, active]."""
        if not self.window:
            return np.repeat(self.lengths[:, None], self.active, axis=1), None
        ends = self.lengths[:, None] + np.arange(self.active)
        starts = ends - self.window + 1
        return ends, np.maximum(starts, 0) if self.block_size else starts % self.context


CASES = [
    Case(4, 1, 5, 512, 128),
    Case(2, 8, 1, 256, 64, sink=True),
    Case(3, 8, 1, 768, 64, window=128),
    Case(2, 5, 2, 512, 64, window=64, sink=True),
    Case(3, 2, 3, 256, 64, made_mask=True),
    Case(2, 4, 1, 512, 64, turn_k=False),
    Case(2, 8, 1, 512, 64, block_size=16, strided=False),
    Case(2, 8, 1, 2048, 64, block_size=32, sink=True, strided=False),
    Case(3, 4, 2, 4096, 64, block_size=128, window=128, sink=True, strided=False),
]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.block_size}_{c.window}_{c.sink}_{c.context}")
def test_attention_tkg_matches_plain_attention(library: Library, case: Case, lnc: int) -> None:
    """New tokens over a cache, within the library's own tolerance."""
    rng = np.random.default_rng(9)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(BF16)

    q = (normal(case.batch, case.heads, case.active, case.head) / 8).astype(BF16)
    k_new, v_new = (normal(case.batch, case.active, case.head) for _ in "kv")
    k, v = (normal(case.batch, case.context, case.head) for _ in "kv")
    sink = rng.standard_normal((case.heads, 1)).astype(np.float32) if case.sink else None
    ends, starts = case.positions()
    mask = ref.decode_mask(ends, starts, case.context, case.active, case.heads)

    if case.block_size:
        blocks = case.context // case.block_size
        table = rng.permutation(case.batch * blocks).reshape(case.batch, blocks).astype(np.uint32)
        cached = {}
        for name, values in (("k_prior", k), ("v_prior", v)):
            pool = np.empty((case.batch * blocks, case.block_size, case.head), BF16)
            pool[table] = values.reshape(case.batch, blocks, case.block_size, case.head)
            cached[name] = pool
    else:
        table = None
        flat = k[:, None] if case.turn_k else k.transpose(0, 2, 1)[:, None]
        cached = {"k_prior": np.ascontiguousarray(flat), "v_prior": v[:, None]}
    given = mask if case.made_mask else mask[..., case.context - case.active :]
    cfg = library.value("core.attention.attention_tkg_utils:AttnTKGConfig")(
        bs=case.batch,
        q_head=case.heads,
        s_active=case.active,
        curr_sprior=case.context,
        full_sprior=case.context,
        d_head=case.head,
        block_len=case.block_size,
        tp_k_prior=case.turn_k,
        strided_mm1=case.strided,
        use_pos_id=not case.made_mask,
        qk_in_sb=True,
    )
    (out,) = library.run(
        library.wrapper("run_attention"),
        q=np.ascontiguousarray(q.transpose(3, 0, 1, 2).reshape(case.head, -1)),
        k_active=np.ascontiguousarray(k_new.transpose(2, 0, 1).reshape(case.head, -1)),
        v_active=v_new[:, None],
        mask=np.ascontiguousarray(given.transpose(3, 0, 1, 2)).astype(np.uint8),
        rope_pos_ids=None if case.made_mask else ends.astype(np.float32),
        start_pos_ids=None if starts is None else starts.astype(np.float32),
        sink=sink,
        active_blocks_table=table,
        cfg=cfg,
        lnc=lnc,
        # Two cores exchange their maxima padded to 16 partitions.
        poison="nan" if lnc == 2 else "error",
        **cached,
    )
    k_full, v_full = ref.wide(k), ref.wide(v)
    k_full[:, case.context - case.active :] = ref.wide(k_new)
    v_full[:, case.context - case.active :] = ref.wide(v_new)
    want = ref.decode_attention(q, k_full, v_full, mask, sink).transpose(0, 1, 3, 2)
    assert_within(out, want, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        Case(4, 2, 3, 512, 64),
        Case(3, 2, 1, 768, 64, window=64),
        Case(2, 8, 2, 2048, 64, block_size=8),
    ],
    ids=lambda c: f"{c.block_size}_{c.window}_{c.context}",
)
def test_gen_mask_tkg_gives_the_mask_in_tile_order(library: Library, case: Case, lnc: int) -> None:
    """Exact: zeros and ones, slots ordered tile by tile, partition inside."""
    ends, starts = case.positions()
    mask = ref.decode_mask(ends, starts, case.context, case.active, case.heads)
    active = mask[..., case.context - case.active :].transpose(3, 0, 1, 2)
    (out,) = library.run(
        "core.attention.gen_mask_tkg:gen_mask_tkg_hbm",
        pos_ids_hbm=ends.reshape(1, -1).astype(np.float32),
        bs=case.batch,
        q_head=case.heads,
        s_active=case.active,
        s_prior=case.context,
        start_pos_hbm=None if starts is None else starts.reshape(1, -1).astype(np.float32),
        block_len=case.block_size,
        active_mask=np.ascontiguousarray(active).astype(np.float32),
        lnc=lnc,
    )
    tiles = case.context // PARTITIONS
    slots = mask.transpose(3, 0, 1, 2).astype(np.float32)
    if case.block_size:
        blocks = slots.reshape(tiles // case.block_size, PARTITIONS, case.block_size, *slots.shape[1:])
        want = blocks.swapaxes(1, 2)
    else:
        want = slots.reshape(PARTITIONS, tiles, *slots.shape[1:]).swapaxes(0, 1)
    np.testing.assert_array_equal(out.astype(np.float32), want.reshape(slots.shape))
