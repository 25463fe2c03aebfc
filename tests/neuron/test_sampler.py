"""Greedy sampling over shards, on real process groups: one token, the same on every rank, by the core's rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.neuron.grid import kernel_grid, require_grid, row_chunks
from gk_adapters.neuron.sampler import NeuronGreedySampler, ShardedArgmax, launch_max
from gk_core.errors import LayoutError
from gk_core.greedy import local_maximum, reduce_argmax, vocab_shard
from tests.neuron.ranks import run_ranks

WORLDS = [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)]
VOCAB = 10
NAN, INF = float("nan"), float("inf")


def row(**logits: float) -> list[float]:
    """A row of -1 with some ids set: row(t2=5.0)."""
    return [logits.get(f"t{i}", -1.0) for i in range(VOCAB)]


LITERAL = [
    (row(t2=5.0, t4=5.0, t9=5.0), 2),
    (row(t4=5.0, t9=5.0), 4),
    (row(t9=7.0), 9),
    ([-INF] * VOCAB, 0),
    (row(t0=INF, t9=INF), 0),
    (row(t7=-0.5, t8=-0.5), 7),
    ([0.0] * 5 + [-0.0] * 5, 0),
]
"""A row, and the one token that every rank must give."""


def shard_of(rows: list[list[float]], vocab: int, shards: int, index: int, padding: float) -> torch.Tensor:
    """[rows, W] of one shard, columns past the vocabulary filled with `padding`."""
    width = -(-vocab // shards)
    out = torch.full((len(rows), width), padding)
    ids = vocab_shard(vocab, shards, index)
    out[:, : len(ids)] = torch.tensor(rows)[:, ids.start : ids.stop]
    return out


def world_group(world: int) -> dist.ProcessGroup | None:
    return dist.group.WORLD if world > 1 else None


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return "no error"


def sample_everything(rank: int, world: int) -> dict[str, Any]:
    """All cases of one rank over one process group."""
    argmax = ShardedArgmax(vocab_size=VOCAB, num_shards=world, index=rank, group=world_group(world))
    rows = [r for r, _ in LITERAL]

    def tokens(some: list[list[float]], padding: float = INF) -> list[int]:
        return [int(t) for t in argmax(shard_of(some, VOCAB, world, rank, padding))]

    broken = [row(t1=3.0), row(t8=NAN), row(t2=1.0)]
    generator = torch.Generator().manual_seed(3)
    big = torch.randint(-3, 4, (5, 201), generator=generator).float()
    wide = ShardedArgmax(vocab_size=201, num_shards=world, index=rank, group=world_group(world))

    # Hidden rows are this rank's share; the projection gives its columns: hidden [R, 3] times [3, 10].
    hidden = torch.arange(world * 2 * 3).view(world * 2, 3).to(torch.bfloat16)
    matrix = torch.randint(-4, 5, (3, VOCAB), generator=generator).float()
    padded = torch.zeros(3, argmax.columns * world)
    padded[:, :VOCAB] = matrix
    mine = padded[:, rank * argmax.columns : (rank + 1) * argmax.columns]
    sampler = NeuronGreedySampler(project=lambda h: h.float() @ mine, argmax=argmax)
    active = tuple(i % 3 != 1 for i in range(world * 2))
    return {
        "literal": tokens(rows),
        "padding_nan": tokens(rows, NAN),
        "one": [tokens([r]) for r in rows],
        "odd": tokens(rows[:3]),
        "bfloat16": [int(t) for t in argmax(shard_of(rows, VOCAB, world, rank, INF).bfloat16())],
        "nan": error_of(lambda: tokens(broken)),
        "nan_inactive": [int(t) for t in argmax(shard_of(broken, VOCAB, world, rank, INF), (True, False, True))][::2],
        "after_nan": tokens(rows),
        "big": [int(t) for t in wide(shard_of(big.tolist(), 201, world, rank, INF))],
        "sampler": sampler.sample(hidden=hidden[rank * 2 : rank * 2 + 2], active=active),
        "sampler_wanted": [
            int(t) if on else 0 for t, on in zip((hidden.float() @ matrix).argmax(1), active, strict=True)
        ],
        "wrong_group": error_of(
            lambda: ShardedArgmax(vocab_size=VOCAB, num_shards=world + 1, index=rank, group=dist.group.WORLD)
        ),
    }


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_gives_the_cores_token(tmp_path: Path, world: int) -> None:
    """Ties to the lowest id, padding of +inf and NaN never chosen, any batch, NaN refused everywhere at once."""
    results = run_ranks(tmp_path, world, sample_everything)
    refusals = [r.pop("wrong_group") for r in results]
    assert [f"got rank {rank} of {world}" in words for rank, words in enumerate(refusals)] == [True] * world
    assert all(r == results[0] for r in results)
    found = results[0]
    wanted = [token for _, token in LITERAL]
    assert found["literal"] == found["padding_nan"] == found["bfloat16"] == found["after_nan"] == wanted
    assert found["one"] == [[token] for token in wanted]
    assert found["odd"] == wanted[:3]
    assert found["nan"] == "row 1: a logit is NaN; no token can be chosen"
    assert found["nan_inactive"] == [1, 2]
    big = torch.randint(-3, 4, (5, 201), generator=torch.Generator().manual_seed(3)).tolist()
    assert found["big"] == [row_.index(max(row_)) for row_ in big]
    assert found["sampler"] == found["sampler_wanted"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([-INF, -1.0, 0.0, 2.0, INF]), min_size=7, max_size=7), min_size=1, max_size=4),
    st.integers(1, 9),
)
def test_local_halves_reduce_to_the_cores_answer(rows: list[list[float]], shards: int) -> None:
    """For any logits and any number of shards, also more than tokens: what a rank sends is `local_maximum`."""
    pairs = []
    for index in range(shards):
        local = ShardedArgmax(vocab_size=7)
        local.shard, local.columns = vocab_shard(7, shards, index), -(-7 // shards)
        values, ids = local._local(shard_of(rows, 7, shards, index, INF))
        pairs.append(list(zip(values.tolist(), ids.tolist(), strict=True)))
        for i, r in enumerate(rows):
            best = local_maximum(r[local.shard.start : local.shard.stop], local.shard)
            assert pairs[-1][i] == (best.value, best.token_id)
    for r in rows:
        whole = [local_maximum(r[s.start : s.stop], s) for s in (vocab_shard(7, shards, i) for i in range(shards))]
        assert int(ShardedArgmax(vocab_size=7)(torch.tensor([r]))[0]) == reduce_argmax(whole) == r.index(max(r))


def test_shards_without_a_group_are_refused() -> None:
    """Two shards and nobody to ask."""
    with pytest.raises(LayoutError, match="need the process group"):
        ShardedArgmax(vocab_size=VOCAB, num_shards=2, index=0)


@pytest.mark.parametrize("shape", [(2, 9), (10,), (0, 10), (1, 2, 10)])
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """[rows, 10], at least one row."""
    with pytest.raises(LayoutError, match=r"\[rows, 10\]"):
        ShardedArgmax(vocab_size=VOCAB)(torch.zeros(shape))


def test_rows_that_do_not_divide_are_refused() -> None:
    """Neither all rows nor this rank's share; and activity of another length."""
    sampler = NeuronGreedySampler(project=lambda h: h, argmax=ShardedArgmax(vocab_size=3))
    with pytest.raises(LayoutError, match="pad the batch"):
        sampler.sample(hidden=torch.zeros(3, 3), active=(True, True))
    with pytest.raises(LayoutError, match="of activity"):
        ShardedArgmax(vocab_size=3)(torch.zeros(3, 3), (True,))


# ---- the kernel's grid


class RowMaxKernel:
    """A kernel that splits rows as cascaded max kernels do: each program writes its own rows, the rest is stale.

    A device of lnc 1 runs program 0 alone. Refuses more than 128 rows per program, the partitions of on-chip memory
    (aws-neuron-sdk, `nki.language.tile_size.pmax`).
    """

    def __init__(self, device_lnc: int) -> None:
        self.device_lnc = device_lnc
        self.grids: list[int] = []

    def __call__(self, logits: torch.Tensor, grid: int) -> torch.Tensor:
        """Largest logit per row, stale (1e9) where no program wrote."""
        self.grids.append(grid)
        out = torch.full((logits.shape[0],), 1e9)
        per = -(-logits.shape[0] // grid)
        assert per <= 128
        for program in range(min(grid, self.device_lnc)):
            mine = slice(program * per, (program + 1) * per)
            out[mine] = logits[mine].max(dim=1).values
        return out


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 128, 129, 300])
@pytest.mark.parametrize("lnc", [1, 2])
def test_the_grid_follows_the_devices_lnc_for_any_batch(num_rows: int, lnc: int) -> None:
    """1, even, odd and more rows than programs hold: every row is written."""
    kernel = RowMaxKernel(lnc)
    logits = torch.randn(num_rows, 150, generator=torch.Generator().manual_seed(num_rows))
    argmax = ShardedArgmax(vocab_size=150, lnc=lnc, kernel=kernel)
    assert argmax(logits).tolist() == logits.argmax(dim=1).tolist()
    assert set(kernel.grids) <= {1, lnc}


def test_a_hard_coded_grid_of_two_at_lnc_one_is_refused() -> None:
    """It would leave the second half unwritten, and look right for one row."""
    kernel, logits = RowMaxKernel(1), torch.zeros(5, 150)
    with pytest.raises(LayoutError, match="5 rows at lnc 1 take a grid of 1, got 2; 2 rows would stay unwritten"):
        launch_max(kernel, logits, lnc=1, grid=2)
    assert kernel.grids == []
    assert kernel(logits, 2).tolist() == [0, 0, 0, 1e9, 1e9]


def test_a_grid_of_one_at_lnc_two_is_refused_and_one_row_takes_one_program() -> None:
    """Half the device would idle; a single row cannot be split."""
    with pytest.raises(LayoutError, match="take a grid of 2, got 1; 0 rows"):
        require_grid(1, num_rows=4, lnc=2)
    assert kernel_grid(1, 2) == 1
    assert [kernel_grid(n, 1) for n in (1, 2, 9)] == [1, 1, 1]
    assert list(row_chunks(129, 1)) == [range(128), range(128, 129)]


@pytest.mark.parametrize(("rows", "lnc"), [(0, 1), (4, 0), (4, 3), (4, 8)])
def test_no_rows_and_other_lncs_are_refused(rows: int, lnc: int) -> None:
    """Degrees are 1 and 2."""
    with pytest.raises(LayoutError, match=r"must be 1 or 2|at least one row"):
        kernel_grid(rows, lnc)


def test_narrow_shards_do_not_use_the_kernel() -> None:
    """Below 128 columns torch's own op is used."""
    kernel = RowMaxKernel(1)
    ShardedArgmax(vocab_size=127, kernel=kernel)(torch.zeros(2, 127))
    assert kernel.grids == []
