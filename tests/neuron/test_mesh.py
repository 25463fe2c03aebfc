"""neuronx-distributed's groups against the core's, on a stand-in that groups ranks as its documents say."""

from __future__ import annotations

import pytest
from attrs import frozen

from gk_adapters.neuron.mesh import load_parallel_state, mesh_of, require_same_mesh
from gk_core.decode_mesh import DecodeMesh
from gk_core.errors import GkError, LayoutError, MissingDependencyError, UnsupportedError

Groups = list[list[int]]


@frozen
class State:
    """Replica groups as lists of lists; None before initialisation, when asking is an assertion there."""

    tp: Groups | None
    ep: Groups | None

    def get_tensor_model_parallel_replica_groups(self) -> Groups:
        """TP groups."""
        assert self.tp is not None, "intra_layer_model parallel group is not initialized"
        return self.tp

    def get_expert_model_parallel_replica_groups(self) -> Groups:
        """EP groups."""
        assert self.ep is not None, "expert model parallel group is not initialized"
        return self.ep


def state(world: int, tp: int, ep: int = 1) -> State:
    """Ranks laid out [DP_exp, EP, TP], row-major; EP groups have stride TP (`parallel_state.py`)."""
    block = ep * tp
    ep_groups = [[b * block + e * tp + t for e in range(ep)] for b in range(world // block) for t in range(tp)]
    return State([list(range(i, i + tp)) for i in range(0, world, tp)], ep_groups)


def test_consecutive_groups_are_the_cores_mesh() -> None:
    """128 ranks at tp 8: 16 replicas; the first group is 0..7."""
    found = mesh_of(state(128, 8))
    assert found == DecodeMesh(tp_size=8, dp_size=16, ep_size=128)
    require_same_mesh(found, state(128, 8))
    assert found.tp_groups[1] == (8, 9, 10, 11, 12, 13, 14, 15)


def test_another_size_is_refused() -> None:
    """Both meshes are named."""
    with pytest.raises(LayoutError, match=r"tp 8 x dp 2.*tp 4 x dp 4"):
        require_same_mesh(DecodeMesh(tp_size=8, dp_size=2, ep_size=16), state(16, 4))


RINGS = [[*range(16), *range(48, 64)], [*range(16, 48)]]
"""Ring order of 64 ranks in groups of 32, first row with the last: what Trn2 is given at lnc 2."""


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (RINGS, "must be"),
        ([[1, 0], [2, 3]], "must be"),
        ([[0, 1], [1, 2]], "every rank"),
        ([[0, 2], [3, 4]], "every rank"),
        ([[0, 1, 2], [3]], "must be|dp"),
        ([], "every rank"),
    ],
)
def test_groups_in_another_order_are_refused(groups: Groups, words: str) -> None:
    """Rings, swapped ranks, doubled and missing ones."""
    world = sum(map(len, groups))
    with pytest.raises(GkError, match=words):
        mesh_of(State(groups, [[r] for r in range(world)]))


def test_expert_groups_of_its_own_are_refused() -> None:
    """tp 8, ep 16 over 128 ranks: sixteen ranks with stride 8 are not all ranks."""
    with pytest.raises(UnsupportedError, match="expert_model_parallel_size at 1"):
        mesh_of(state(128, 8, 16))


def test_at_tp_one_its_expert_group_is_ours() -> None:
    """Stride 1: all ranks."""
    assert mesh_of(state(4, 1, 4)) == DecodeMesh(tp_size=1, dp_size=4, ep_size=4)


@pytest.mark.parametrize("empty", [State(None, None), State([[0]], None)])
def test_an_uninitialised_state_is_a_typed_error(empty: State) -> None:
    """Its assertion does not get out."""
    with pytest.raises(LayoutError, match="not initialised"):
        mesh_of(empty)


def test_without_the_package_the_error_says_so() -> None:
    """Here it is absent."""
    with pytest.raises(MissingDependencyError, match="neuronx-distributed"):
        load_parallel_state()
