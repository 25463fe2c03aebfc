"""Moves a model's tensors to torch's meta device in place, keeping who is a view of whom.

A graph is captured in a forked child, where the device may neither allocate nor free. So every tensor that the graph
could see is replaced by one without storage, and the originals stay alive until the child exits.

Walked, per submodule: parameters, buffers, and attributes that are tensors. Not walked: lists, dicts, tuples, closures.
What hides in those stays on its device; `off_meta` finds it and says where it is.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gk_adapters.neuron.aliases import root_of
from gk_core.errors import LayoutError

__all__ = ["MetaSwap", "off_meta", "require_meta", "unwrap"]

_MAX_DEPTH = 30
_CODE_TYPES = (type, types.ModuleType, torch.dtype, torch.device)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside the wrappers that `torch.compile` puts around it."""
    while isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
        module = inner
    return module


class MetaSwap:
    """Replaces tensors by meta tensors of the same shape, stride, offset and dtype.

    Views of one base become views of one meta tensor; the same tensor in two places becomes one. `kept` holds the
    originals.
    """

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self._roots: dict[int, torch.Tensor] = {}
        self._dtype_views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._swapped: dict[int, torch.Tensor] = {}
        self._storages: dict[int, tuple[int, str]] = {}

    def swap(self, modules: Iterable[torch.nn.Module]) -> int:
        """Swap every distinct module of these and return how many places were changed.

        Raises:
            LayoutError: two tensors of different bases share memory, so the graph would see two inputs for one
                allocation. Nothing was swapped.
        """
        distinct = list({id(m): m for m in map(unwrap, modules)}.values())
        places = [place for module in distinct for place in _places(module)]
        for owner, key, tensor, path in places:
            self._refuse_second_base(tensor, path)
            del owner, key
        for owner, key, tensor, _ in places:
            owner[key] = self.meta_of(tensor)
        return len(places)

    def meta_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The meta tensor in this one's place; the same one every time."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._swapped:
            self.kept.append(tensor)
            meta = self._view(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                meta = torch.nn.Parameter(meta, requires_grad=tensor.requires_grad)
            self._swapped[id(tensor)] = meta
        return self._swapped[id(tensor)]

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        root = root_of(tensor)
        if id(root) not in self._roots:
            self.kept.append(root)
            self._roots[id(root)] = torch.empty_strided(
                root.shape, root.stride(), dtype=root.dtype, device="meta", requires_grad=False
            )
        meta = self._roots[id(root)]
        if tensor is root:
            return meta
        key = (id(root), tensor.dtype)
        if key not in self._dtype_views:
            self._dtype_views[key] = meta if tensor.dtype == root.dtype else meta.view(tensor.dtype)
        return self._dtype_views[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _refuse_second_base(self, tensor: torch.Tensor, path: str) -> None:
        if tensor.is_meta or tensor.device.type != "cpu" or not tensor.numel():
            return  # elsewhere a storage's address says nothing
        root = id(root_of(tensor))
        first, where = self._storages.setdefault(tensor.untyped_storage().data_ptr(), (root, path))
        if first != root:
            raise LayoutError(
                f"{where} and {path} share memory but not a base, so a graph would see two allocations; "
                "make one dtype view of the raw buffer and take all views from it"
            )


def _places(module: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, str]]:
    """(dict, key, tensor, path) of every place that is walked."""
    for prefix, sub in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        tables: tuple[dict[str, Any], ...] = (sub._parameters, sub._buffers, sub.__dict__)
        for table in tables:
            for key, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    yield table, key, value, f"{dot}{key}"


def off_meta(value: object, path: str) -> tuple[str, ...]:
    """Paths of all tensors under a value that are not on meta.

    Goes into dicts, lists, tuples, sets, attributes of objects, and what functions hold: closures, defaults, the parts
    of a partial, the object of a method.

    >>> off_meta({"kv": [torch.zeros(2), torch.zeros(2, device="meta")]}, "inputs")
    ("inputs['kv'][0]",)
    """
    return tuple(_off_meta(value, path, set(), 0))


def require_meta(value: object, path: str) -> None:
    """Refuse tensors that are not on meta.

    Raises:
        LayoutError: naming the path of every one.
    """
    found = off_meta(value, path)
    if found:
        raise LayoutError(
            f"not on meta: {', '.join(found)}; hold each tensor in an attribute of its own, lists are not swapped"
        )


def _off_meta(value: object, path: str, seen: set[int], depth: int) -> Iterator[str]:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield path
        return
    if depth > _MAX_DEPTH or id(value) in seen or isinstance(value, (str, bytes, int, float, *_CODE_TYPES)):
        return
    seen.add(id(value))
    for part, child in _children(value):
        yield from _off_meta(child, f"{path}{part}", seen, depth + 1)


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (Sequence, set, frozenset)):
        yield from ((f"[{i}]", child) for i, child in enumerate(value))
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _function_children(value)
    elif isinstance(value, torch.nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            yield from ((f".{name}", child) for name, child in table.items())
        yield from ((f".{n}", c) for n, c in vars(value).items() if n not in ("_parameters", "_buffers", "_modules"))
    else:
        yield from ((f".{name}", child) for name, child in getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and name not in ("__dict__", "__weakref__"):
                    yield f".{name}", getattr(value, name)


def _function_children(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from ((f".<default {i}>", v) for i, v in enumerate(function.__defaults__ or ()))
    yield from ((f".<default {n}>", v) for n, v in (function.__kwdefaults__ or {}).items())
