"""One safetensors file, memory-mapped: header checked whole before any byte of data is believed.

Format: 8 bytes little-endian header length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, then data.
Reads are views of the map: no copy, and only the pages that are touched are loaded.

Source: huggingface/safetensors README, "Format".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gk_core.errors import CheckpointError
from gk_core.ports import WeightInfo

__all__ = ["SafetensorsFile"]

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "I16": np.dtype(np.int16), "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64), "U32": np.dtype(np.uint32), "U16": np.dtype(np.uint16), "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}  # fmt: skip


class SafetensorsFile:
    """Tensors of one file by name.

    Raises:
        CheckpointError: the file is missing, its header is corrupt, or its length is not what the header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos: dict[str, WeightInfo] = {}
        self._places: dict[str, tuple[int, np.dtype[Any]]] = {}
        header, data_start, size = _read_header(path)
        spans = [self._add(name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
        _require_tiling(path, spans, size - data_start)
        # The map stays open for as long as any view of it lives.
        self._bytes: NDArray[np.uint8] = (
            np.memmap(path, dtype=np.uint8, mode="r") if size > data_start else np.empty(0, np.uint8)
        )

    def view(self, name: str) -> NDArray[Any]:
        """One tensor, read-only, without copying."""
        start, dtype = self._places[name]
        shape = self.infos[name].shape
        flat = self._bytes[start : start + math.prod(shape) * dtype.itemsize]
        return np.asarray(flat).view(dtype).reshape(shape)

    def _add(self, name: str, entry: object, data_start: int) -> tuple[int, int, str]:
        where = f"{self.path.name}: tensor {name}"
        if not isinstance(entry, dict):
            raise CheckpointError(f"{where}: header entry must be an object, got {type(entry).__name__}")
        dtype = _DTYPES.get(str(entry.get("dtype")))
        shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
        if dtype is None:
            raise CheckpointError(f"{where}: unknown dtype {entry.get('dtype')!r}, known are {sorted(_DTYPES)}")
        if shape is None or offsets is None or len(offsets) != 2:
            raise CheckpointError(
                f"{where}: corrupt header, shape {entry.get('shape')!r} and data_offsets {entry.get('data_offsets')!r}"
            )
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(
                f"{where}: shape {shape} of {dtype.name} needs {math.prod(shape) * dtype.itemsize} bytes, "
                f"data_offsets give {end - begin}"
            )
        self.infos[name] = WeightInfo(shape=tuple(shape), dtype=dtype.name)
        self._places[name] = (data_start + begin, dtype)
        return begin, end, name


def _counts(value: object) -> list[int] | None:
    if isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value):
        return value
    return None


def _read_header(path: Path) -> tuple[Mapping[str, object], int, int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path.name}: corrupt or truncated header: it says {length} bytes, the file has {size}"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path.name} in {path.parent} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name}: corrupt header, not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: corrupt header, must be an object, got {type(header).__name__}")
    return header, 8 + length, size


def _require_tiling(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Tensors lie one after the other from 0 to the end of the file, as the format demands."""
    at, last = 0, "the header"
    for begin, end, name in sorted(spans):
        if end > data_bytes:
            raise CheckpointError(
                f"{path.name} is truncated: tensor {name} ends at data byte {end}, the file has {data_bytes}"
            )
        if begin != at:
            raise CheckpointError(f"{path.name}: tensor {name} starts at data byte {begin}, {last} ends at {at}")
        at, last = end, name
    if at != data_bytes:
        raise CheckpointError(f"{path.name}: {data_bytes - at} bytes after the last tensor, must be none")
