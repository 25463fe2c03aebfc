"""Operators that instructions take as `op`: their fp32 (or bit) meaning, and where they may be used.

An operator is also callable on tiles, as in `nl.add(x, y)`; language.py says how.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gk_kernels.simulator.dtypes import Array
from gk_kernels.simulator.errors import UsageError, refuse

Function = Callable[..., Array]
_F = np.float32


_P = inspect.Parameter
_DTYPE = _P("dtype", _P.POSITIONAL_OR_KEYWORD, default=None)
_X, _Y = _P("x", _P.POSITIONAL_OR_KEYWORD), _P("y", _P.POSITIONAL_OR_KEYWORD)
_BINARY, _UNARY = inspect.Signature([_X, _Y, _DTYPE]), inspect.Signature([_X, _DTYPE])
_CONSTANTS = ("bypass", "prelu", "average")


class Op:
    """One operator.

    Attributes:
        alu: (a, b) -> result, for tensor_tensor, tensor_scalar and their kin.
        alu_unary: a -> result, for the unary ALU operators.
        act: a -> result, for the Scalar Engine's activation.
        reduce: the NumPy ufunc of a legal reduction operator.
        identity: what a reduction starts from.
        bitwise: whether operands are bit patterns of integers.
        domain: (low, high) of the magnitude, or of the value when `signed`, that `activation` accepts.
    """

    def __init__(
        self,
        name: str,
        *,
        alu: Function | None = None,
        alu_unary: Function | None = None,
        act: Function | None = None,
        reduce: Any = None,
        identity: float = 0.0,
        bitwise: bool = False,
        domain: tuple[float, float] | None = None,
        magnitude: bool = False,
    ) -> None:
        self.name = name
        self.alu, self.alu_unary, self.act = alu, alu_unary, act
        self.reduce, self.identity, self.bitwise = reduce, identity, bitwise
        self.domain, self.magnitude = domain, magnitude
        self.tile: Callable[..., Any] | None = None
        self.__name__ = name
        two = alu is not None or name == "divide"
        self.__signature__ = _BINARY if two and name not in _CONSTANTS else _UNARY

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.tile is not None  # language.py gives every operator one
        return self.tile(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _f32(values: Any) -> Array:
    return np.asarray(values, np.float32)


def _flag(compare: Function) -> Function:
    return lambda a, b: compare(a, b).astype(_F)


_erf = np.frompyfunc(math.erf, 1, 1)


def erf_f32(x: Array) -> Array:
    """erf, correctly rounded to fp32."""
    return _f32(_erf(x.astype(np.float64)))


def sigmoid_f32(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    return _f32(np.where(x >= 0, 1 / (1 + e), e / (1 + e)))


def _softplus(x: Array) -> Array:
    return _f32(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


def _gelu(x: Array) -> Array:
    return _f32(x * _F(0.5) * (1 + erf_f32(x * _F(math.sqrt(0.5)))))


def _gelu_dx(x: Array) -> Array:
    density = np.exp(-0.5 * x * x) * _F(1 / math.sqrt(2 * math.pi))
    return _f32(_F(0.5) * (1 + erf_f32(x * _F(math.sqrt(0.5)))) + x * density)


def _gelu_tanh(x: Array) -> Array:
    return _f32(_F(0.5) * x * (1 + np.tanh(_F(math.sqrt(2 / math.pi)) * (x + _F(0.044715) * x * x * x))))


def _gelu_sigmoid(x: Array) -> Array:
    return _f32(x * sigmoid_f32(_F(1.702) * x))


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = sigmoid_f32(_F(1.702) * x)
    return _f32(s + _F(1.702) * x * s * (1 - s))


def _silu(x: Array) -> Array:
    return _f32(x * sigmoid_f32(x))


def _silu_dx(x: Array) -> Array:
    s = sigmoid_f32(x)
    return _f32(s + x * s * (1 - s))


def _prelu(x: Array, slope: Any = 0.0) -> Array:
    return _f32(np.where(x >= 0, x, x * _f32(slope)))


def _abs_max(a: Array, b: Array) -> Array:
    return np.where(np.abs(a) > np.abs(b), a, b)


def _abs_min(a: Array, b: Array) -> Array:
    return np.where(np.abs(a) < np.abs(b), a, b)


def _shift(function: Any) -> Function:
    def shift(a: Array, b: Array) -> Array:
        unsigned = a.view(f"u{a.dtype.itemsize}")
        result: Array = function(unsigned, b.astype(unsigned.dtype)).view(a.dtype)
        return result

    return shift


def _logic(function: Any) -> Function:
    return lambda a, b: function(a != 0, b != 0).astype(_F)


_PI = math.pi
_ALL: list[Op] = [
    Op("add", alu=np.add, reduce=np.add),
    Op("subtract", alu=np.subtract, reduce=np.subtract),
    Op("multiply", alu=np.multiply, reduce=np.multiply, identity=1.0),
    Op("divide"),
    Op("maximum", alu=np.maximum, reduce=np.maximum, identity=-math.inf),
    Op("minimum", alu=np.minimum, reduce=np.minimum, identity=math.inf),
    Op("abs_max", alu=_abs_max),
    Op("abs_min", alu=_abs_min, identity=math.inf),
    Op("power", alu=np.power),
    Op("equal", alu=_flag(np.equal)),
    Op("not_equal", alu=_flag(np.not_equal)),
    Op("less", alu=_flag(np.less)),
    Op("less_equal", alu=_flag(np.less_equal)),
    Op("greater", alu=_flag(np.greater)),
    Op("greater_equal", alu=_flag(np.greater_equal)),
    Op("logical_and", alu=_logic(np.logical_and), reduce=np.logical_and, identity=1.0),
    Op("logical_or", alu=_logic(np.logical_or), reduce=np.logical_or),
    Op("logical_xor", alu=_logic(np.logical_xor), reduce=np.logical_xor),
    Op("logical_not"),
    Op("bitwise_and", alu=np.bitwise_and, reduce=np.bitwise_and, bitwise=True),
    Op("bitwise_or", alu=np.bitwise_or, reduce=np.bitwise_or, bitwise=True),
    Op("bitwise_xor", alu=np.bitwise_xor, reduce=np.bitwise_xor, bitwise=True),
    Op("invert", alu_unary=np.invert, bitwise=True),
    Op("left_shift", alu=_shift(np.left_shift), bitwise=True),
    Op("right_shift", alu=_shift(np.right_shift), bitwise=True),
    Op("abs", alu_unary=np.abs, act=np.abs),
    Op("square", alu_unary=np.square, act=np.square),
    Op("relu", alu_unary=lambda a: np.maximum(a, 0), act=lambda a: np.maximum(a, 0)),
    Op("rsqrt", alu_unary=lambda a: 1 / np.sqrt(a), act=lambda a: 1 / np.sqrt(a), domain=(2.0**-87, 2.0**97)),
    Op("reciprocal", alu_unary=lambda a: 1 / a, act=lambda a: 1 / a, domain=(2.0**-42, 2.0**42), magnitude=True),
    Op("bypass", alu=lambda a, b: a, alu_unary=lambda a: a),
    Op("copy", act=lambda a: a),
    Op("sqrt", act=np.sqrt, domain=(2.0**-116, 2.0**118)),
    Op("exp", act=np.exp),
    Op("log", act=np.log, domain=(2.0**-64, 2.0**64)),
    Op("sin", act=np.sin, domain=(-_PI, _PI)),
    Op("arctan", act=np.arctan, domain=(-_PI / 2, _PI / 2)),
    Op("tanh", act=np.tanh),
    Op("sigmoid", act=sigmoid_f32),
    Op("sign", act=np.sign),
    Op("negative"),
    Op("erf", act=erf_f32),
    Op("erf_dx", act=lambda x: (_F(2 / math.sqrt(_PI)) * np.exp(-x * x)).astype(_F)),
    Op("gelu", act=_gelu),
    Op("gelu_dx", act=_gelu_dx),
    Op("gelu_apprx_tanh", act=_gelu_tanh),
    Op("gelu_apprx_sigmoid", act=_gelu_sigmoid),
    Op("gelu_apprx_sigmoid_dx", act=_gelu_sigmoid_dx),
    Op("silu", act=_silu),
    Op("silu_dx", act=_silu_dx),
    Op("softplus", act=_softplus),
    Op("mish", act=lambda x: x * np.tanh(_softplus(x))),
    Op("prelu", act=_prelu),
    Op("average", reduce=np.add),
]
OPS: dict[str, Op] = {op.name: op for op in _ALL}
COMPARISONS = frozenset({"equal", "not_equal", "less", "less_equal", "greater", "greater_equal"})


def as_op(op: object, rule: str) -> Op:
    """The operator behind `op`.

    Raises:
        UsageError: not an operator of nki.language.
    """
    if type(op) is Op:
        return op
    alias = getattr(op, "alu_op", None)
    if not isinstance(alias, Op):
        refuse(f"{rule}: op", repr(op), "an operator of nki.language", UsageError)
    return alias


def binary(op: object, rule: str) -> Op:
    """A two-operand ALU operator."""
    found = as_op(op, rule)
    if found.alu is None:
        refuse(f"{rule}: op", repr(found), "a binary operator")
    return found


def reducer(op: object, rule: str, legal: frozenset[str] | None = None) -> Op:
    """A legal reduction operator."""
    found = as_op(op, rule)
    if found.reduce is None or (legal is not None and found.name not in legal):
        refuse(
            f"{rule}: reduction op",
            repr(found),
            ", ".join(sorted(legal))
            if legal
            else "add, subtract, multiply, maximum, minimum, logical or bitwise and/or/xor",
        )
    return found
