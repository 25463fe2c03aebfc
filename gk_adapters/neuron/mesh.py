"""neuronx-distributed's replica groups held against the core's: one mesh, or none.

Its tensor-parallel groups are consecutive ranks, as ours are, except where it picks another order for the hardware's
rings (Trn2, lnc 1, 64 ranks per group). Its expert groups take every tp-th rank, so only with tp 1 can they be all
ranks, as the giga kernel's are; experts over a TP mesh therefore stay out of it, and our group of all ranks is used.

Source: neuronx-distributed, "Distributed Strategies APIs" and `parallel_layers/parallel_state.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from gk_core.decode_mesh import DecodeMesh, Groups
from gk_core.errors import LayoutError, MissingDependencyError, UnsupportedError

__all__ = ["ParallelState", "load_parallel_state", "mesh_of", "require_same_mesh"]


class ParallelState(Protocol):
    """What is asked of `neuronx_distributed.parallel_layers.parallel_state`."""

    def get_tensor_model_parallel_replica_groups(self) -> Sequence[Sequence[int]]:
        """Groups of ranks that share one replica."""
        ...

    def get_expert_model_parallel_replica_groups(self) -> Sequence[Sequence[int]]:
        """Groups of ranks over which experts are dealt."""
        ...


def load_parallel_state() -> Any:
    """The module that neuronx-distributed keeps its groups in.

    Raises:
        MissingDependencyError: not installed, or only a placeholder of its name.
    """
    try:
        return import_module("neuronx_distributed.parallel_layers.parallel_state")
    except ImportError as error:
        raise MissingDependencyError(
            "neuronx-distributed is not installed (a placeholder of its name does not count); see gk doctor"
        ) from error


def mesh_of(state: ParallelState) -> DecodeMesh:
    """The mesh that neuronx-distributed was initialised with.

    Raises:
        LayoutError: its groups are not initialised, overlap, leave ranks out, or are not consecutive ranks in order.
        UnsupportedError: expert groups that the giga kernel does not have.
    """
    try:
        tp = _groups(state.get_tensor_model_parallel_replica_groups())
        ep = _groups(state.get_expert_model_parallel_replica_groups())
    except AssertionError as error:
        raise LayoutError(
            f"neuronx-distributed is not initialised: {error}; initialise model parallelism first"
        ) from None
    world = sum(map(len, tp))
    if not tp or sorted(r for group in tp for r in group) != list(range(world)):
        raise LayoutError(f"tensor-parallel groups must hold every rank from 0 once, got {_shown(tp)}")
    mesh = DecodeMesh(tp_size=len(tp[0]), dp_size=len(tp), ep_size=world)
    if tp != mesh.tp_groups:
        raise LayoutError(f"tensor-parallel groups must be {_shown(mesh.tp_groups)}, got {_shown(tp)}")
    none = tuple((rank,) for rank in range(world))
    if ep not in (none, mesh.ep_groups):
        raise UnsupportedError(
            f"experts are dealt over all {world} ranks, neuronx-distributed has {_shown(ep)}; leave its "
            "expert_model_parallel_size at 1"
        )
    return mesh


def require_same_mesh(mesh: DecodeMesh, state: ParallelState) -> None:
    """Refuse to run where neuronx-distributed groups ranks otherwise than the core.

    Raises:
        LayoutError: another mesh; or see `mesh_of`.
        UnsupportedError: see `mesh_of`.
    """
    theirs = mesh_of(state)
    if theirs != mesh:
        raise LayoutError(
            f"the mesh is tp {mesh.tp_size} x dp {mesh.dp_size}, neuronx-distributed was initialised for "
            f"tp {theirs.tp_size} x dp {theirs.dp_size}"
        )


def _groups(groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(tuple(int(rank) for rank in group) for group in groups)


def _shown(groups: Groups) -> str:
    return str(groups) if len(groups) <= 4 else f"{str(groups[:3])[:-1]}, ... {len(groups)} groups)"
