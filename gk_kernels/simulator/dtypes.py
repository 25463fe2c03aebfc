"""NKI dtypes as strings that know their NumPy form, and the casts an engine makes when it writes.

Rounding is to nearest even. To an integer it saturates and NaN becomes 0. To a narrow float, a value out of
range becomes what the format has for it: infinity (float16, bfloat16, float8_e5m2, float8_e4m3) or NaN
(float8_e4m3fn, which has no infinity).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gk_kernels.simulator.errors import UsageError, refuse

Array = npt.NDArray[Any]
F32 = np.dtype(np.float32)


class DType(str):
    """A dtype name with its layout. Equal to, and hashed as, the plain string.

    Attributes:
        np: the NumPy dtype of one stored element (an unsigned integer for the packed x4 types).
        itemsize: bytes of one element.
        kind: "f" float, "i" signed, "u" unsigned, "b" boolean, "x" packed by four.
    """

    np: np.dtype[Any]
    itemsize: int
    kind: str
    to_f32: Callable[[Array], Array]
    from_f32: Callable[[Array], Array]

    def __repr__(self) -> str:
        return f"nl.{self}"


def _identity(values: Array) -> Array:
    return values


def _round_tf32(values: Array) -> Array:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0xFFF + ((bits >> 13) & 1)).astype(np.uint32)) & np.uint32(0xFFFFE000)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    return np.where(special, bits, rounded).view(np.float32)


def _to_int(np_dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    info = np.iinfo(np_dtype)
    low, end = float(info.min), float(info.max) + 1.0  # exact in fp32

    def cast(values: Array) -> Array:
        rounded = np.rint(values)
        if low <= rounded.min() and rounded.max() < end:  # false when there is a NaN
            return rounded.astype(np_dtype)
        wide = np.clip(rounded.astype(np.float64), info.min, info.max)
        return np.where(np.isnan(wide), 0, wide).astype(np_dtype)

    return cast


def _to_float(values: Array) -> Array:
    return values.astype(np.float32)


def _byte_table(np_dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    """A look-up of all 256 values: several times faster than a cast."""
    table = np.arange(256, dtype=np.uint8).view(np_dtype).astype(np.float32)
    return lambda values: table.take(values.view(np.uint8))


def _packed(_: Array) -> Array:
    refuse("arithmetic on packed x4 elements", "an x4 dtype", "quantize_mx, nc_matmul_mx or a bit view", UsageError)


def _make(name: str, np_dtype: npt.DTypeLike, kind: str) -> DType:
    made = DType(name)
    made.np = np.dtype(np_dtype)
    made.itemsize = made.np.itemsize
    made.kind = kind
    if kind == "x":
        made.to_f32 = made.from_f32 = _packed
    elif name == "float32":
        made.to_f32 = made.from_f32 = _identity
    elif name == "tfloat32":
        made.to_f32, made.from_f32 = _identity, _round_tf32
    else:
        made.to_f32 = _byte_table(made.np) if made.itemsize == 1 and kind == "f" else _to_float
        if kind in "iu":
            made.from_f32 = _to_int(made.np)
        elif kind == "b":
            made.from_f32 = lambda values: values != 0
        else:
            made.from_f32 = lambda values: values.astype(made.np)
    return made


bool_ = _make("bool", np.bool_, "b")
int8 = _make("int8", np.int8, "i")
int16 = _make("int16", np.int16, "i")
int32 = _make("int32", np.int32, "i")
uint8 = _make("uint8", np.uint8, "u")
uint16 = _make("uint16", np.uint16, "u")
uint32 = _make("uint32", np.uint32, "u")
float16 = _make("float16", np.float16, "f")
float32 = _make("float32", np.float32, "f")
bfloat16 = _make("bfloat16", ml_dtypes.bfloat16, "f")
tfloat32 = _make("tfloat32", np.float32, "f")
float8_e4m3 = _make("float8_e4m3", ml_dtypes.float8_e4m3, "f")
float8_e4m3fn = _make("float8_e4m3fn", ml_dtypes.float8_e4m3fn, "f")
float8_e5m2 = _make("float8_e5m2", ml_dtypes.float8_e5m2, "f")
float8_e8m0fnu = _make("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, "f")
float8_e4m3fn_x4 = _make("float8_e4m3fn_x4", np.uint32, "x")
float8_e5m2_x4 = _make("float8_e5m2_x4", np.uint32, "x")
float4_e2m1fn_x4 = _make("float4_e2m1fn_x4", np.uint16, "x")

ALL: dict[str, DType] = {
    d: d
    for d in (
        bool_, int8, int16, int32, uint8, uint16, uint32, float16, float32, bfloat16, tfloat32,
        float8_e4m3, float8_e4m3fn, float8_e5m2, float8_e8m0fnu,
        float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4,
    )
}  # fmt: skip
FP8 = frozenset({float8_e4m3, float8_e4m3fn, float8_e5m2})
MX_ELEMENTS = frozenset({float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4})
INTEGER_KINDS = frozenset("iub")


def as_dtype(value: object) -> DType:
    """The DType of an `nl` dtype or its name.

    Raises:
        UsageError: anything else, NumPy dtypes included (NKI takes nl dtypes only).
    """
    if type(value) is DType:
        return value
    if not isinstance(value, str) or value not in ALL:
        refuse("dtype must be an nki.language dtype", repr(value), ", ".join(ALL), UsageError)
    return ALL[value]


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """The DType in which an HBM input of this NumPy dtype appears in the kernel."""
    found = ALL.get(dtype.name)
    if found is None or found.kind == "x":
        refuse("a kernel input's dtype must exist on the device", dtype.name, ", ".join(ALL), UsageError)
    return found
