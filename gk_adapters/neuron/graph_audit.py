"""Watches what a graph does with weights and caches: the kernel may have them, nothing else may copy them.

Stacking layers inside the graph, or making a tensor contiguous on the way to the kernel, copies hundreds of megabytes
per token and doubles peak memory on the device. It computes the right thing, so only a look at the operations shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gk_core.errors import UnsupportedError

__all__ = ["Finding", "GraphAudit"]

_VIEWS = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default", "aten._unsafe_view.default"}


@frozen(kw_only=True)
class Finding:
    """One operation that reads or copies a held tensor outside the kernel."""

    operation: str
    held: str


class GraphAudit(TorchDispatchMode):
    """While active, notes every operation other than a view that takes a held tensor or a view of one.

    The kernel must not pass through here: a stand-in for it returns its result without touching what it was given.

    Args:
        held: weights and caches by name; on any device, meta included.
    """

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {_storage(tensor): name for name, tensor in held.items()}
        self.findings: list[Finding] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (getattr(func, "is_view", False) or str(func) in _VIEWS):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and (name := self._names.get(_storage(leaf))):
                    self.findings.append(Finding(operation=str(func), held=name))
        return result

    def require_clean(self) -> None:
        """Refuse a graph in which anything was found.

        Raises:
            UnsupportedError: naming each operation and tensor.
        """
        if self.findings:
            found = ", ".join(sorted({f"{f.operation} on {f.held}" for f in self.findings}))
            raise UnsupportedError(f"the graph works on held tensors outside the kernel: {found}; stack on the host")


def _storage(tensor: torch.Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)
