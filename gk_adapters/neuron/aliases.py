"""Which tensors share memory, judged the way a device allows: by the base of a view, not by its storage.

On a Neuron device a storage's id does not identify an allocation. What does is the tensor that a view was made of: all
views of one base, with their offsets, shapes and strides, describe one allocation. A dtype view starts a base of its
own, so all views of one raw buffer must come from one dtype view.
"""

from __future__ import annotations

import torch

__all__ = ["root_of", "same_memory"]


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at the end of the chain of view bases; the tensor itself where it is no view."""
    while tensor._base is not None:
        tensor = tensor._base
    return tensor


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same base."""
    if a is b:
        return True
    return (
        root_of(a) is root_of(b)
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )
