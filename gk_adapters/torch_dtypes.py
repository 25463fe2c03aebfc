"""Torch dtypes by the names that the core uses, and NumPy views of torch memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import torch
from numpy.typing import NDArray

from gk_core.errors import UnsupportedError
from gk_core.kv_spec import KVDtype

__all__ = ["array_of", "kv_torch_dtype", "torch_dtype"]

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name.

    Raises:
        UnsupportedError: torch on the CPU has no such dtype.
    """
    if name not in _BY_NAME:
        raise UnsupportedError(f"torch on the CPU has no dtype {name}; use one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def kv_torch_dtype(dtype: KVDtype) -> torch.dtype:
    """What torch stores a KV element as.

    The e4m3 dialect with maximum 240 has no torch dtype of its own. Up to 240 its bytes are those of e4m3fn (same bias
    7, same 3 mantissa bits; they part at byte 0x78), and writers clamp at 240, so it is stored as e4m3fn.
    """
    return torch.float8_e4m3fn if dtype is KVDtype.FP8_E4M3 else torch_dtype(dtype.dtype_name)


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """A NumPy array over the tensor's own memory; bfloat16 as ml_dtypes has it."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    array: NDArray[Any] = tensor.numpy()
    return array
