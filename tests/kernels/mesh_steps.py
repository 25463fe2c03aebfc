"""One decode step of a whole mesh in the simulator, beside the torch kernel of each replica."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from numpy.typing import NDArray

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.nki_kernel import simulate_mesh
from gk_adapters.torch_giga import GigaBuild
from gk_adapters.torch_model import TorchModel, load_torch_model
from gk_adapters.weight_stacks import build_stacks
from gk_core.decode_mesh import DecodeMesh
from gk_core.kernel_contract import DecodeCall, KernelContract, PerBufferKV
from gk_core.kv_layout import layout_for
from gk_core.kv_spec import honest_specs
from gk_core.stacked_weights import build_stacked_weight_specs
from gk_core.weight_layouts import WeightLayout
from tests.torch_engines import TorchEngines, evict, make_engines, make_tables

__all__ = ["MeshStep", "nki_stacks", "run_mesh_step"]

VOCABULARY = 199


@frozen(kw_only=True, eq=False)
class MeshStep:
    """What a step gave: hidden states of all active rows, ours and torch's, and the caches' largest difference."""

    hidden: torch.Tensor
    expected: torch.Tensor
    cache_difference: float


def nki_stacks(path: Path, mesh: DecodeMesh, rank: int, dtype: str) -> Mapping[str, NDArray[Any]]:
    """One rank's stacks in the NKI layout."""
    source = HFCheckpoint(path)
    specs = build_stacked_weight_specs(
        source.config.geometry, mesh, rank, WeightLayout.NKI, source.config.expert_format, dtype
    )
    return build_stacks(source, specs)


def _replica(model: TorchModel, index: int, num_rows: int) -> tuple[TorchEngines, DecodeCall[torch.Tensor]]:
    """Engines with prefilled prompts of several lengths, the last row inactive, and the call of their next token."""
    engines = make_engines(model, num_rows=num_rows, max_model_len=256, block_size=64, num_blocks=8 * num_rows)
    tables = make_tables(engines, num_rows - 1, 192, seed=index)
    ids = torch.randint(0, VOCABULARY, (256,), generator=torch.Generator().manual_seed(index)).tolist()
    lengths = [(37 * (i + 3 * index) + 5) % 170 + 1 for i in range(num_rows - 1)]
    for length, table in zip(lengths, tables, strict=True):
        engines.prefill_logits(ids[:length], 0, table)
    rows = [(n, evict(t, n, engines.shape.sliding_window)) for n, t in zip(lengths, tables, strict=True)]
    control = engines.control([*rows, None])
    return engines, engines.builder.build(token_ids=(*(ids[n] for n in lengths), 0), control=control)


def run_mesh_step(
    path: Path, mesh: DecodeMesh, *, rows_per_rank: int = 1, dtype: str = "float32", fp8: bool = False
) -> MeshStep:
    """One step of every replica, on every rank of the mesh and on one torch kernel per replica.

    fp8: the experts' sums go over the wire as FP8.
    """
    model = load_torch_model(path, model_dtype=dtype)
    geometry = model.config.geometry
    num_rows = mesh.tp_size * rows_per_rank
    replicas = [_replica(model, i, num_rows) for i in range(mesh.dp_size)]
    layout = layout_for(
        honest_specs(geometry, tp_size=mesh.tp_size, block_size=64, dtype=replicas[0][0].layout.dtype),
        num_blocks=replicas[0][0].layout.num_blocks,
        k_byte_order=replicas[0][0].layout.k_byte_order,
    )
    contract = KernelContract(
        layout=layout, shape=replicas[0][0].shape, mesh=mesh, hidden_size=geometry.hidden_size, model_dtypes=(dtype,),
        weights=(),
    )  # fmt: skip
    calls = []
    for rank in range(mesh.world_size):
        engines, call = replicas[mesh.dp_rank(rank)]
        heads = mesh.kv_heads(rank, geometry.num_kv_heads)
        first = mesh.tp_rank(rank) * rows_per_rank
        own = [b[:, :, heads.start : heads.stop].clone() for b in engines.buffers]
        kv = PerBufferKV(k=tuple(b[0] for b in own), v=tuple(b[1] for b in own))
        hidden = call.hidden[first : first + rows_per_rank].contiguous()
        calls.append(evolve(call, hidden=hidden, weights={}, per_buffer_kv=kv, rank=rank))
    stacks = [nki_stacks(path, mesh, rank, dtype) for rank in range(mesh.world_size)]
    shards = simulate_mesh(calls, stacks, contract, geometry, build=GigaBuild(fp8_reduce_scatter=fp8))

    active = torch.cat([call.control.active[:, 0] for _, call in replicas]) != 0
    ours = torch.cat([torch.from_numpy(s.astype("float32")) for s in shards])[active]
    theirs = torch.cat([engines.kernel.step(call=call).float() for engines, call in replicas])[active]
    largest = 0.0
    for rank, call in enumerate(calls):
        heads = mesh.kv_heads(rank, geometry.num_kv_heads)
        assert call.per_buffer_kv is not None
        for buffer, k, v in zip(
            replicas[mesh.dp_rank(rank)][0].buffers, call.per_buffer_kv.k, call.per_buffer_kv.v, strict=True
        ):
            for half, written in ((0, k), (1, v)):
                wanted = buffer[half][:, heads.start : heads.stop]
                largest = max(largest, float((written.float() - wanted.float()).abs().max()))
    return MeshStep(hidden=ours, expected=theirs, cache_difference=largest)
