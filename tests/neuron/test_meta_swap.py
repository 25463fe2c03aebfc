"""The meta swap: everything reachable the documented way is swapped, aliases stay, the rest is named by path."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attrs import define, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from gk_adapters.neuron.aliases import root_of
from gk_adapters.neuron.meta_swap import MetaSwap, off_meta, require_meta, unwrap
from gk_adapters.torch_kv import allocate_group_buffers
from gk_core.errors import LayoutError
from tests.neuron.stand_ins import MetaKernel, control_of
from tests.neuron.test_holder import bound_holder


def storage(tensor: torch.Tensor) -> int:
    handle: Any = tensor.untyped_storage()
    return int(handle._cdata)


class Leaf(torch.nn.Module):
    """A parameter, a buffer, a plain attribute, and a view of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 5))
        self.register_buffer("table", torch.zeros(4, 6))
        self.plain = torch.zeros(7)
        self.row = self.get_buffer("table")[2]


class Tree(torch.nn.Module):
    """Two leaves, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Leaf()
        self.two = Leaf()
        self.again = self.one


def test_parameters_buffers_and_attributes_of_every_submodule_are_swapped() -> None:
    """Two leaves of four tensors each; the third name is the first leaf."""
    tree = Tree()
    assert MetaSwap().swap([tree]) == 8
    assert off_meta(tree, "tree") == ()
    assert isinstance(tree.one.weight, torch.nn.Parameter)
    assert [tuple(t.shape) for t in (tree.two.weight, tree.two.plain, tree.two.row)] == [(3, 5), (7,), (6,)]
    assert list(dict(tree.named_parameters())) == ["one.weight", "two.weight"]


def test_a_view_stays_a_view_of_its_base() -> None:
    """Same offset, shape and stride, over the base's own meta tensor."""
    leaf = Leaf()
    MetaSwap().swap([leaf])
    table = leaf.get_buffer("table")
    assert root_of(leaf.row) is table
    assert (leaf.row.storage_offset(), leaf.row.stride()) == (12, (1,))
    assert storage(leaf.row) == storage(table)


def test_both_halves_of_a_buffer_stay_in_one_allocation() -> None:
    """Two buffers of the holder stay two allocations, with V 288 elements behind K."""
    holder = bound_holder()
    MetaSwap().swap([holder])
    k, v = holder.__dict__["K_cache_buf_1"], holder.__dict__["V_cache_buf_1"]
    assert (k.is_meta, v.is_meta, v.storage_offset() - k.storage_offset()) == (True, True, 288)
    assert storage(k) == storage(v)
    assert len({storage(t) for n, t in holder.held().items() if "_cache_" in n}) == 2


def test_the_swapped_holder_still_steps() -> None:
    """On meta inputs, to a meta result of the right shape."""
    holder = bound_holder()
    MetaSwap().swap([holder])
    out = holder(torch.zeros(3, 6, device="meta"), **control_of(holder.contract, "meta"))
    assert (out.is_meta, tuple(out.shape)) == (True, (3, 6))
    assert isinstance(holder.kernel, MetaKernel)


def test_the_same_tensor_in_two_modules_stays_one() -> None:
    """Identity survives, over separate calls too."""
    one, two = Leaf(), Leaf()
    two.plain = one.plain
    swap = MetaSwap()
    swap.swap([one])
    swap.swap([two])
    assert two.plain is one.plain


def test_originals_stay_alive() -> None:
    """Their memory must not be freed, nor reused."""
    leaf = Leaf()
    ids = {leaf.weight.data_ptr(), leaf.plain.data_ptr(), leaf.get_buffer("table").data_ptr()}
    swap = MetaSwap()
    swap.swap([leaf])
    assert ids <= {t.data_ptr() for t in swap.kept}


def test_wrappers_of_torch_compile_are_looked_through() -> None:
    """The module inside is swapped once, however often it is wrapped."""
    leaf = Leaf()
    wrapped: Any = torch.compile(leaf)
    assert unwrap(wrapped) is leaf
    assert MetaSwap().swap([wrapped, leaf]) == 4
    assert leaf.plain.is_meta


class ListHolder(torch.nn.Module):
    """The mistake: caches in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.caches = [torch.zeros(2), torch.zeros(3)]


def test_a_buffer_in_a_list_is_missed_by_the_swap_and_named_by_the_check() -> None:
    """This is why every cache is an attribute of its own."""
    holder = ListHolder()
    assert MetaSwap().swap([holder]) == 0
    with pytest.raises(LayoutError, match=r"holder\.caches\[0\], holder\.caches\[1\]; hold each"):
        require_meta(holder, "holder")


def test_two_dtype_views_of_one_buffer_are_refused() -> None:
    """Each would become an input of its own; one dtype view for all is right."""
    raw = torch.zeros(64, dtype=torch.int8)
    bad, good = Leaf(), Leaf()
    bad.plain, bad.row = raw.view(torch.float8_e4m3fn)[:32], raw.view(torch.float8_e4m3fn)[32:]
    with pytest.raises(LayoutError, match="plain and row share memory but not a base"):
        MetaSwap().swap([bad])
    assert not bad.weight.is_meta
    whole = raw.view(torch.float8_e4m3fn)
    good.plain, good.row = whole[:32], whole[32:]
    MetaSwap().swap([good])
    assert storage(good.plain) == storage(good.row)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), min_size=1, max_size=6))
def test_any_set_of_views_keeps_its_aliasing(cuts: list[tuple[int, int, bool]]) -> None:
    """Views of one base, however cut: one storage, and offset, shape and stride as before."""
    base = torch.zeros(6, 4)
    module = torch.nn.Module()
    views = [base[row:, col:].t() if turned else base[row:, col:] for row, col, turned in cuts]
    for i, view in enumerate(views):
        setattr(module, f"v{i}", view)
    MetaSwap().swap([module])
    metas = [getattr(module, f"v{i}") for i in range(len(views))]
    assert len({storage(m) for m in metas}) == 1
    assert [(m.shape, m.stride(), m.storage_offset()) for m in metas] == [
        (v.shape, v.stride(), v.storage_offset()) for v in views
    ]


# ---- the check


@frozen
class Frozen:
    """Slots."""

    inner: object


@define
class Defined:
    """Slots, and a cycle."""

    inner: object = None


REAL = torch.zeros(1)


def _closure() -> Any:
    held = REAL
    return lambda: held


def _default(x: object = REAL) -> object:
    return x


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (REAL, ["in"]),
        ({"a": {"b": REAL}}, ["in['a']['b']"]),
        ([(1, REAL), REAL], ["in[0][1]", "in[1]"]),
        (Frozen({"k": (REAL,)}), ["in.inner['k'][0]"]),
        (_closure(), ["in.<held>"]),
        (_default, ["in.<default 0>"]),
        (partial(len, REAL), ["in.args[0]"]),
        (partial(_default, x=REAL).keywords, ["in['x']"]),
        (torch.zeros(2, device="meta"), []),
        ("text", []),
        (None, []),
    ],
    ids=range(11),
)
def test_every_tensor_off_meta_is_named_by_its_path(value: object, paths: list[str]) -> None:
    """Containers, attributes, and what functions hold."""
    assert list(off_meta(value, "in")) == paths


def test_the_check_ends_on_cycles() -> None:
    """A structure that holds itself is walked once."""
    loop = Defined()
    loop.inner = [loop, REAL]
    assert off_meta(loop, "loop") == ("loop.inner[1]",)


def test_a_module_off_meta_is_named_like_its_attributes() -> None:
    """Paths read as one would write them."""
    tree = Tree()
    found = off_meta(tree, "tree")
    assert found[:2] == ("tree.one.weight", "tree.one.table")
    assert len(found) == 8


def test_buffers_allocated_as_the_runner_does_have_one_base_each() -> None:
    """What `allocate_group_buffers` gives passes the check for second bases."""
    holder = bound_holder()
    assert len(allocate_group_buffers(holder.contract.layout)) == 2
    assert MetaSwap().swap([holder]) == 7
