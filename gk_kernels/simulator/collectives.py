"""nki.collectives over simulated ranks.

Operands are whole dense tensors, all in HBM or all in SBUF, and not fp8 (bit-cast them to bfloat16). The order of a
group decides who comes first, not the rank number. More than one tensor per call (coalesced) works in HBM only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from gk_kernels.simulator.context import Core
from gk_kernels.simulator.dtypes import FP8, Array, DType
from gk_kernels.simulator.errors import UsageError, refuse
from gk_kernels.simulator.isa.check import core_of, tensor
from gk_kernels.simulator.isa.dma_checks import check_priority
from gk_kernels.simulator.memory import MemoryRegion
from gk_kernels.simulator.ops import as_op
from gk_kernels.simulator.program import Collective
from gk_kernels.simulator.tensor import NKIObject, NkiTensor, VirtualRegister

_REDUCTIONS = ("add", "minimum", "maximum")
Combine = Callable[[list[list[Array]]], list[list[Array]]]


@dataclass
class ReplicaGroup(NKIObject):
    """Disjoint groups of ranks, as tuples of ranks (lists are taken too)."""

    groups: Any

    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The groups as tuples."""
        return tuple(tuple(int(rank) for rank in group) for group in self.groups)


def _groups(rule: str, group: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(group, ReplicaGroup):
        refuse(f"{rule}: replica_group", repr(group), "a ReplicaGroup", UsageError)
    return group.ranks()


def _check_operand(rule: str, label: str, value: Any) -> NkiTensor:
    found = tensor(rule, label, value)
    if found.buffer is MemoryRegion.psum:
        refuse(f"{rule}: {label} buffer", "psum", "HBM or SBUF")
    if found.dtype in FP8:
        refuse(f"{rule}: {label} dtype", found.dtype, "no fp8 (view the bytes as bfloat16)")
    if found.indirect_index is not None:
        refuse(f"{rule}: {label}", "an indirect view", "a whole dense tensor")
    covered = found.size * found.dtype.itemsize
    if not found.is_contiguous() or found.offset != 0 or covered != found.storage.nbytes:
        refuse(
            f"{rule}: {label} layout",
            f"{covered} of {found.storage.nbytes} bytes at offset {found.offset}, strides {found.strides}",
            "a whole dense tensor (a slice, bit-cast or not, is refused or silently wrong on devices)",
        )
    return found


def _check(rule: str, srcs: Any, dsts: Any, *, sbuf: bool = True) -> tuple[list[NkiTensor], list[NkiTensor], bool]:
    for label, values in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(values, (list, tuple)) or not values:
            refuse(f"{rule}: {label}", repr(values), "a list of tensors", UsageError)
    if len(srcs) != len(dsts):
        refuse(f"{rule}: srcs and dsts", f"{len(srcs)} and {len(dsts)} tensors", "equally many", UsageError)
    sources = [_check_operand(rule, "src", value) for value in srcs]
    targets = [_check_operand(rule, "dst", value) for value in dsts]
    on_chip = {value.on_chip for value in (*sources, *targets)}
    if len(on_chip) > 1:
        refuse(f"{rule}: memory", "HBM and SBUF operands in one call", "all in HBM or all in SBUF")
    in_sbuf = on_chip == {True}
    if in_sbuf and not sbuf:
        refuse(f"{rule}: memory", "sbuf", "HBM")
    if in_sbuf and len(sources) > 1:
        refuse(f"{rule}: coalesced tensors in SBUF", len(sources), "1 (coalescing works in HBM)")
    for src, dst in zip(sources, targets, strict=True):
        if src.dtype != dst.dtype:
            refuse(f"{rule}: dtypes", f"src {src.dtype}, dst {dst.dtype}", "equal dtypes")
        if in_sbuf and max(src.ndim, dst.ndim) > 2:
            refuse(f"{rule}: SBUF operand dimensions", max(src.ndim, dst.ndim), 2)
    return sources, targets, in_sbuf


def _shape(rule: str, dst: NkiTensor, want: tuple[int, ...]) -> None:
    if dst.shape != want:
        refuse(f"{rule}: dst shape", dst.shape, want)


def _own_group(rule: str, core: Core, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    own = [group for group in groups if core.rank in group]
    if not own:
        refuse(f"{rule}: replica_group", groups, f"a group that holds rank {core.rank}")
    return own[0]


def _member_count(rule: str, core: Core, groups: Sequence[tuple[int, ...]]) -> int:
    return len(_own_group(rule, core, groups))


def _run(
    rule: str,
    core: Core,
    groups: tuple[tuple[int, ...], ...],
    sources: list[NkiTensor],
    targets: list[NkiTensor],
    extra: tuple[Any, ...],
    combine: Combine,
    priority: Any,
) -> None:
    check_priority(core, rule, priority)
    if core.in_loop:
        refuse(f"{rule}: place", "inside a device loop", "outside nl.fori_loop and nl.while_loop")
    sent = sum(prod(src.shape) * src.dtype.itemsize for src in sources)
    stat = core.retire(rule, "collective", 0, 0, targets[0], *sources, *targets[1:])
    if core.core_id == 0:
        stat.bytes += sent
    else:
        stat.count -= 1
    signature = (
        *((src.shape, str(src.dtype), src.buffer.value) for src in sources),
        *((dst.shape, str(dst.dtype), dst.buffer.value) for dst in targets),
        *extra,
    )
    values = None if core.trace else [src.read() for src in sources]
    assert core.rendezvous is not None
    results = core.rendezvous(Collective(rule, groups, signature, values, combine))
    if core.trace or not results:  # no results: a permutation that sends nothing to this rank
        return
    for dst, result in zip(targets, results, strict=True):
        dst.write_target()[...] = result
        dst.wrote()


def _reduction(rule: str, op: Any, dtypes: Sequence[DType]) -> Callable[[list[Array], DType], Array]:
    found = as_op(op, rule)
    if found.name not in _REDUCTIONS:
        refuse(f"{rule}: op", repr(found), ", ".join(_REDUCTIONS))
    for dtype in dtypes:
        if dtype.kind == "x":
            refuse(f"{rule}: dtype", dtype, "a dtype with arithmetic")

    def reduce(parts: list[Array], dtype: DType) -> Array:
        alu = found.alu
        assert alu is not None
        if dtype.kind in "iu":
            total = parts[0].astype(np.int64)
            for part in parts[1:]:
                total = alu(total, part.astype(np.int64))
            return total.astype(dtype.np)
        total = dtype.to_f32(parts[0])
        for part in parts[1:]:
            total = alu(total, dtype.to_f32(part))
        return dtype.from_f32(total).copy() if total is parts[0] else dtype.from_f32(total)

    return reduce


def all_reduce(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank of a group gets op over the group's inputs."""
    rule = "all_reduce"
    core = core_of(rule)
    groups = _groups(rule, replica_group)
    sources, targets, _ = _check(rule, srcs, dsts)
    for src, dst in zip(sources, targets, strict=True):
        _shape(rule, dst, src.shape)
    dtypes = [src.dtype for src in sources]
    reduce = _reduction(rule, op, dtypes)

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        return [[reduce([part[i] for part in inputs], dtype) for i, dtype in enumerate(dtypes)]] * len(inputs)

    _run(rule, core, groups, sources, targets, (repr(as_op(op, rule)),), combine, priority)


def all_gather(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank of a group gets the group's inputs, one after another along a dimension, in the group's order."""
    rule = "all_gather"
    core = core_of(rule)
    groups = _groups(rule, replica_group)
    sources, targets, in_sbuf = _check(rule, srcs, dsts)
    if collective_dim not in ((0, 1) if in_sbuf else (0,)):
        refuse(f"{rule}: collective_dim", collective_dim, "0 or 1 in SBUF, 0 in HBM")
    members = _member_count(rule, core, groups)
    for src, dst in zip(sources, targets, strict=True):
        want = list(src.shape)
        want[collective_dim] *= members
        _shape(rule, dst, tuple(want))

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        joined = [np.concatenate([part[i] for part in inputs], axis=collective_dim) for i in range(len(sources))]
        return [joined] * len(inputs)

    _run(rule, core, groups, sources, targets, (collective_dim,), combine, priority)


def reduce_scatter(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """The i-th rank of a group gets the i-th part, along dimension 0, of op over the group's inputs."""
    rule = "reduce_scatter"
    core = core_of(rule)
    groups = _groups(rule, replica_group)
    sources, targets, _ = _check(rule, srcs, dsts)
    if collective_dim != 0:
        refuse(f"{rule}: collective_dim", collective_dim, 0)
    members = _member_count(rule, core, groups)
    for src, dst in zip(sources, targets, strict=True):
        if src.shape[0] % members:
            refuse(f"{rule}: src.shape[0]", src.shape[0], f"a multiple of the {members} ranks of a group")
        _shape(rule, dst, (src.shape[0] // members, *src.shape[1:]))
    dtypes = [src.dtype for src in sources]
    reduce = _reduction(rule, op, dtypes)

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        totals = [reduce([part[i] for part in inputs], dtype) for i, dtype in enumerate(dtypes)]
        return [list(parts) for parts in zip(*(np.split(total, members) for total in totals), strict=True)]

    _run(rule, core, groups, sources, targets, (0, repr(as_op(op, rule))), combine, priority)


def all_to_all(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Part j of rank i's input becomes part i of rank j's output, along dimension 0. HBM only."""
    rule = "all_to_all"
    core = core_of(rule)
    groups = _groups(rule, replica_group)
    sources, targets, _ = _check(rule, srcs, dsts, sbuf=False)
    if collective_dim != 0:
        refuse(f"{rule}: collective_dim", collective_dim, 0)
    members = _member_count(rule, core, groups)
    for src, dst in zip(sources, targets, strict=True):
        if src.shape[0] % members:
            refuse(f"{rule}: src.shape[0]", src.shape[0], f"a multiple of the {members} ranks of a group")
        _shape(rule, dst, src.shape)

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        parts = [[np.split(tensor, members) for tensor in part] for part in inputs]
        return [
            [np.concatenate([sender[i][position] for sender in parts]) for i in range(len(sources))]
            for position in range(members)
        ]

    _run(rule, core, groups, sources, targets, (0,), combine, priority)


def collective_permute(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    source_target_pairs: list[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each (source, target) pair sends one HBM tensor; a rank that is no target keeps its dst."""
    rule = "collective_permute"
    core = core_of(rule)
    sources, targets, _ = _check(rule, srcs, dsts, sbuf=False)
    if len(sources) != 1:
        refuse(f"{rule}: tensors", len(sources), 1)
    _shape(rule, targets[0], sources[0].shape)
    pairs = tuple((int(a), int(b)) for a, b in source_target_pairs)
    for label, side in (("sources", [a for a, _ in pairs]), ("targets", [b for _, b in pairs])):
        if len(set(side)) != len(side):
            refuse(f"{rule}: source_target_pairs", pairs, f"distinct {label}")
        if any(not 0 <= rank < core.ranks for rank in side):
            refuse(f"{rule}: source_target_pairs", pairs, f"{label} below {core.ranks}")
    from_rank = {b: a for a, b in pairs}

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        return [[inputs[from_rank[r]][0].copy()] if r in from_rank else [] for r in range(len(inputs))]

    everyone = (tuple(range(core.ranks)),)
    _run(rule, core, everyone, sources, targets, (pairs,), combine, priority)


def _ring(rule: str, srcs: Any, dsts: Any, channel_ids: Sequence[int]) -> tuple[list[NkiTensor], list[NkiTensor]]:
    if list(channel_ids) != list(range(len(channel_ids))) or not 1 <= len(channel_ids) <= 4:
        refuse(f"{rule}: channel_ids", list(channel_ids), "consecutive from 0, at most 4")
    for label, values in (("srcs_by_channel", srcs), ("dsts_by_channel", dsts)):
        if len(values) != len(channel_ids) or any(len(inner) != 1 for inner in values):
            refuse(f"{rule}: {label}", f"{[len(v) for v in values]} tensors", "one tensor per channel")
    sources, targets, _ = _check(rule, [v[0] for v in srcs], [v[0] for v in dsts])
    for src, dst in zip(sources, targets, strict=True):
        _shape(rule, dst, src.shape)
    return sources, targets


def collective_permute_implicit(
    srcs_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    channel_ids: Sequence[int] = (0,),
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each rank receives its predecessor's tensors in the ring of its group."""
    rule = "collective_permute_implicit"
    core = core_of(rule)
    groups = _groups(rule, replica_group)
    sources, targets = _ring(rule, srcs_by_channel, dsts_by_channel, channel_ids)

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        return [[value.copy() for value in inputs[position - 1]] for position in range(len(inputs))]

    _run(rule, core, groups, sources, targets, (tuple(channel_ids),), combine, priority)


def collective_permute_implicit_reduce(
    srcs0_by_channel: list[list[NkiTensor]],
    srcs1_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: Sequence[int] = (0,),
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each rank receives op(srcs0, srcs1) of its predecessor in the ring of its group."""
    rule = "collective_permute_implicit_reduce"
    core = core_of(rule)
    groups = _groups(rule, replica_group)
    left, targets = _ring(rule, srcs0_by_channel, dsts_by_channel, channel_ids)
    right, _ = _ring(rule, srcs1_by_channel, dsts_by_channel, channel_ids)
    dtypes = [src.dtype for src in left]
    reduce = _reduction(rule, op, dtypes)
    n = len(left)

    def combine(inputs: list[list[Array]]) -> list[list[Array]]:
        sums = [[reduce([part[i], part[n + i]], dtypes[i]) for i in range(n)] for part in inputs]
        return [sums[position - 1] for position in range(len(inputs))]

    _run(rule, core, groups, [*left, *right], targets, (tuple(channel_ids), repr(as_op(op, rule))), combine, priority)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Register with the rank whose data a ring algorithm processes in this iteration: its own at iteration 0."""
    rule = "collective_permute_implicit_current_processing_rank_id"
    core = core_of(rule)
    group = _own_group(rule, core, _groups(rule, replica_group))
    return VirtualRegister(group[(group.index(core.rank) - iteration_id) % len(group)])


def rank_id(name: str | None = None) -> VirtualRegister:
    """Register with this rank's number."""
    return VirtualRegister(core_of("rank_id").rank)


def _not_simulated(rule: str) -> Callable[..., None]:
    def refused(*_: Any, **__: Any) -> None:
        refuse(rule, "a call", "not simulated (variable-length collectives)", UsageError)

    refused.__name__ = rule
    return refused


all_gather_v = _not_simulated("all_gather_v")
all_to_all_v = _not_simulated("all_to_all_v")
