"""The torch kernel over a mesh of ranks (threads): the same results and caches as one rank, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from gk_adapters.control_tensors import arrays_of
from gk_adapters.torch_collectives import Collectives, run_ranks
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_adapters.torch_mesh import TorchMeshKernel
from gk_adapters.torch_model import TorchModel, load_torch_model, torch_contract
from gk_adapters.torch_sampling import control_tensors
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import LayoutError, TransferError
from gk_core.kernel_contract import DecodeCall
from gk_core.ports import GroupTables
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import TorchEngines, make_engines, make_tables

MESHES = {
    "tp2": DecodeMesh(tp_size=2, ep_size=2),
    "dp2": DecodeMesh(tp_size=1, dp_size=2, ep_size=2),
    "tp2-dp2": DecodeMesh(tp_size=2, dp_size=2, ep_size=4),
    # Two KV heads over four ranks: each held twice.
    "tp4": DecodeMesh(tp_size=4, ep_size=4),
}
IDS = torch.randint(0, 199, (300,), generator=torch.Generator().manual_seed(2)).tolist()
LENGTHS = (3, 126, 200, 129)
"""Tokens before the step, by row of a replica; row 1 of replica 1 is inactive."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_hf_checkpoint(path, mxfp4=True, num_attention_heads=12)
    return path


class _Replica:
    """One replica's requests, prefilled by one rank that holds all heads."""

    def __init__(self, model: TorchModel, index: int) -> None:
        self.engines = make_engines(model, num_rows=4)
        self.tables = make_tables(self.engines, 4, 256, seed=index)
        self.offset = 7 * index
        for tables, length in zip(self.tables, LENGTHS, strict=True):
            prompt = IDS[self.offset : self.offset + length]
            self.engines.prefill.prefill(token_ids=prompt, start_position=0, tables=tables)
        self.live = [not (index == 1 and row == 1) for row in range(4)]

    def rows(self, step: int) -> list[tuple[int, int, GroupTables] | None]:
        return [
            (IDS[self.offset + length + step], length + step, tables) if live else None
            for tables, length, live in zip(self.tables, LENGTHS, self.live, strict=True)
        ]


class _Rank:
    """One rank's weights, its heads' share of the replica's cache, and its calls."""

    def __init__(self, directory: Path, mesh: DecodeMesh, rank: int, replica: _Replica) -> None:
        self.model = load_torch_model(directory, mesh=mesh, rank=rank)
        self.replica, self.mesh = replica, mesh
        engines: TorchEngines = replica.engines
        heads = mesh.kv_heads(rank, 2)
        self.layout = evolve(engines.layout, num_kv_heads=len(heads))
        self.buffers = allocate_group_buffers(self.layout)
        for mine, whole in zip(self.buffers, engines.buffers, strict=True):
            mine.copy_(whole[:, :, heads.start : heads.stop])
        self.contract = torch_contract(self.model, layout=self.layout, shape=engines.shape)

    def call(self, step: int) -> DecodeCall[torch.Tensor]:
        rows = self.replica.rows(step)
        control = self.replica.engines.control([None if r is None else r[1:] for r in rows])
        share = self.contract.shard_rows
        first = self.mesh.tp_rank(self.model.rank) * share
        ids = torch.tensor([0 if r is None else r[0] for r in rows])[first : first + share]
        return DecodeCall(
            hidden=self.model.embedding[ids],
            weights=self.model.stacks,
            per_buffer_kv=per_buffer_kv(self.buffers, self.layout),
            stacked_kv=None,
            control=control_tensors(arrays_of(control), self.model),
            scales=self.model.scales,
            rank=self.model.rank,
        )

    def body(self, steps: int) -> Callable[[Collectives], list[torch.Tensor]]:
        def run(collectives: Collectives) -> list[torch.Tensor]:
            kernel = TorchMeshKernel(
                contract=self.contract, geometry=self.model.config.geometry, collectives=collectives
            )
            return [kernel.step(call=self.call(step)) for step in range(steps)]

        return run


def _make(directory: Path, mesh: DecodeMesh) -> tuple[list[_Replica], list[_Rank]]:
    model = load_torch_model(directory)
    replicas = [_Replica(model, i) for i in range(mesh.dp_size)]
    ranks = [_Rank(directory, mesh, rank, replicas[mesh.dp_rank(rank)]) for rank in range(mesh.world_size)]
    return replicas, ranks


def _groups(mesh: DecodeMesh) -> list[tuple[int, ...]]:
    return [*mesh.tp_groups, *mesh.ep_groups]


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_hidden_states_and_the_cache_of_one_rank(name: str, directory: Path) -> None:
    """Three steps, rows at different lengths, one of them inactive, across a block's and the window's edge."""
    mesh = MESHES[name]
    replicas, ranks = _make(directory, mesh)
    got = run_ranks(_groups(mesh), [rank.body(3) for rank in ranks])
    for step in range(3):
        for index, replica in enumerate(replicas):
            wanted = replica.engines.step(replica.rows(step))
            shards = [got[r][step] for r in range(mesh.world_size) if mesh.dp_rank(r) == index]
            assert torch.allclose(torch.cat(shards), wanted, atol=1e-4, rtol=1e-4)
    for rank in ranks:
        heads = mesh.kv_heads(rank.model.rank, 2)
        for mine, whole in zip(rank.buffers, rank.replica.engines.buffers, strict=True):
            assert torch.allclose(mine, whole[:, :, heads.start : heads.stop], atol=1e-4, rtol=1e-4)


def test_nan_where_nothing_is_read_costs_one_replica_a_second_try_that_all_ranks_take(directory: Path) -> None:
    """The null block and the tail of a request's own block hold NaN on one rank only."""
    mesh = MESHES["tp2-dp2"]
    replicas, ranks = _make(directory, mesh)
    tables = replicas[1].tables[3]
    for buffer in ranks[3].buffers:
        buffer[:, 0] = float("nan")
        buffer[:, [tables.full.block_ids[1], tables.sliding.block_ids[1]], :, 2:] = float("nan")
    got = run_ranks(_groups(mesh), [rank.body(1) for rank in ranks])
    for index, replica in enumerate(replicas):
        wanted = replica.engines.step(replica.rows(0))
        assert torch.allclose(torch.cat([got[2 * index][0], got[2 * index + 1][0]]), wanted, atol=1e-4, rtol=1e-4)


def test_a_replica_without_active_rows_still_takes_its_part(directory: Path) -> None:
    """Its ranks hold experts that the other replica's tokens need."""
    mesh = MESHES["dp2"]
    replicas, ranks = _make(directory, mesh)
    replicas[1].live = [False] * 4
    got = run_ranks(_groups(mesh), [rank.body(1) for rank in ranks])
    assert torch.allclose(got[0][0], replicas[0].engines.step(replicas[0].rows(0)), atol=1e-4, rtol=1e-4)
    assert got[1][0].abs().max() == 0


def test_a_refused_call_on_one_rank_releases_the_others(directory: Path) -> None:
    """The refusal comes out; nobody waits for ever."""
    mesh = MESHES["tp2"]
    _, ranks = _make(directory, mesh)

    def bad(collectives: Collectives) -> list[torch.Tensor]:
        call = ranks[1].call(0)
        call.control.block_table[2, 0] = 0
        kernel = TorchMeshKernel(
            contract=ranks[1].contract, geometry=ranks[1].model.config.geometry, collectives=collectives
        )
        return [kernel.step(call=call)]

    with pytest.raises(LayoutError, match="block_table has block 0"):
        run_ranks(_groups(mesh), [ranks[0].body(1), bad])


def test_collectives_gather_in_group_order_and_scatter_sums() -> None:
    """Three ranks of four; the fourth is a group of its own."""
    groups = [(0, 1, 2), (3,)]

    def body(rank: int) -> Callable[[Collectives], Any]:
        group = groups[rank // 3]

        def run(collectives: Collectives) -> tuple[list[int], list[int]]:
            gathered = collectives.all_gather(torch.tensor([rank, 10 * rank]), group)
            summed = collectives.reduce_scatter(torch.arange(2 * len(group))[:, None] + rank, group)
            return gathered.tolist(), summed.flatten().tolist()

        return run

    assert run_ranks(groups, [body(r) for r in range(4)]) == [
        ([0, 0, 1, 10, 2, 20], [3, 6]),
        ([0, 0, 1, 10, 2, 20], [9, 12]),
        ([0, 0, 1, 10, 2, 20], [15, 18]),
        ([3, 30], [3, 4]),
    ]


def test_a_rank_that_does_not_come_is_an_error() -> None:
    """Rather than a wait without end."""

    def waits(collectives: Collectives) -> int:
        return len(collectives.all_gather(torch.zeros(1), (0, 1)))

    with pytest.raises(TransferError, match=r"rank 0: a rank of group \(0, 1\) failed or did not come"):
        run_ranks([(0, 1)], [waits, lambda _: 0], timeout_seconds=0.2)
