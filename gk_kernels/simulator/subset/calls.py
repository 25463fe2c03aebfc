"""One call of the API against its signature and its argument rules; yields (rule id, what was found)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gk_kernels.simulator.subset.scope import FunctionScope, Imports, Tensor, keyword_values
from gk_kernels.simulator.subset.signatures import (
    ENUM_MEMBERS,
    FUNCTIONS,
    OTHER_NAMES,
    TENSOR_ATTRIBUTES,
    TENSOR_METHODS,
    TILE_SIZE_NAMES,
    Signature,
)

Finding = tuple[str, str]

_ENUM_PARAMETERS = ("engine", "dge_mode", "oob_mode", "reduce_cmd", "perf_mode", "dma_engine")
_FOREIGN = ("np", "numpy", "jnp", "torch", "ml_dtypes", "jax")
_DEVICE_LOOPS = ("fori_loop", "while_loop", "dynamic_range")


def check_name(full: str) -> Iterator[Finding]:
    """Whether a full dotted name exists in the API."""
    parts = full.split(".")
    if parts[0] != "nki" or len(parts) == 1:
        return
    module = ".".join(parts[:2])
    if module not in FUNCTIONS:
        module, rest = "nki", parts[1:]
    else:
        rest = parts[2:]
    if not rest:
        return
    name = rest[0]
    if name not in FUNCTIONS[module] and name not in OTHER_NAMES[module]:
        yield "unknown-name", f"{module} has no {name}"
    elif len(rest) > 1 and name in ENUM_MEMBERS and module == "nki.isa":
        if rest[1] not in ENUM_MEMBERS[name]:
            yield "unknown-member", f"{name}.{rest[1]}, members are {', '.join(ENUM_MEMBERS[name])}"
    elif len(rest) > 1 and name == "tile_size" and rest[1] not in TILE_SIZE_NAMES:
        yield "unknown-name", f"tile_size has no {rest[1]}"


def signature_of(full: str | None) -> Signature | None:
    """The recorded signature of a full name, or None."""
    if full is None or "." not in full:
        return None
    module, name = full.rsplit(".", 1)
    return FUNCTIONS.get(module, {}).get(name)


def bind_arguments(call: ast.Call, signature: Signature) -> dict[str, ast.expr]:
    """Arguments by parameter name, positional ones included; surplus ones are left out."""
    bound = dict(zip(signature.names, call.args, strict=False))
    bound.update({k: v for k, v in keyword_values(call).items() if k in signature.names})
    return bound


def check_signature(call: ast.Call, signature: Signature) -> Iterator[Finding]:
    """Unknown keyword, too many positionals, missing or repeated argument."""
    if any(isinstance(a, ast.Starred) for a in call.args):
        return
    if any(k.arg is None for k in call.keywords):
        return
    names = signature.names
    shown = f"{signature.module}.{signature}"
    if len(call.args) > len(names):
        yield "too-many-arguments", f"{len(call.args)} positional arguments for {shown}"
    positional = set(names[: len(call.args)])
    for keyword in call.keywords:
        if keyword.arg not in names:
            yield "unknown-keyword", f"{keyword.arg}= in a call of {shown}"
        elif keyword.arg in positional:
            yield "repeated-argument", f"{keyword.arg} of {signature.name} by position and by name"
    given = positional | set(keyword_values(call))
    missing = [name for name in signature.required if name not in given]
    if missing:
        yield "missing-argument", f"{', '.join(missing)} left out of {shown}"


def check_tensor_method(call: ast.Call, scope: FunctionScope) -> Iterator[Finding]:
    """A method call whose owner is known to be a tensor."""
    assert isinstance(call.func, ast.Attribute)
    if not isinstance(scope.what(call.func.value), Tensor):
        return
    name = call.func.attr
    if name in TENSOR_METHODS:
        yield from check_signature(call, TENSOR_METHODS[name])
    elif name not in TENSOR_ATTRIBUTES:
        yield "unknown-name", f"a tensor has no method {name}"


def check_arguments(call: ast.Call, full: str, signature: Signature, scope: FunctionScope) -> Iterator[Finding]:
    """The rules about what an argument may be."""
    bound = bind_arguments(call, signature)
    for name, value in bound.items():
        constant = isinstance(value, ast.Constant) and isinstance(value.value, int | str)
        if name in _ENUM_PARAMETERS and constant:
            yield "enum-constant", f"{name}={ast.unparse(value)}"
        if name == "buffer" and constant:
            yield "buffer-constant", f"buffer={ast.unparse(value)}"
        if name == "dtype" and _is_foreign(value):
            yield "foreign-dtype", f"dtype={ast.unparse(value)}"
    short = full.rsplit(".", 1)[1]
    if short in _DEVICE_LOOPS:
        yield "device-loop", f"nl.{short}"
    if short in ("dma_copy", "dma_transpose", "dma_compute"):
        yield from _check_dma(short, bound, scope)
    if short == "memset":
        yield from _check_memset(bound, scope)
    if short == "ReplicaGroup" and "groups" in bound and _holds_list(bound["groups"]):
        yield "replica-group", ast.unparse(call)


def _check_dma(short: str, bound: dict[str, ast.expr], scope: FunctionScope) -> Iterator[Finding]:
    for side in ("dst", "src"):
        known = scope.what(bound[side]) if side in bound else None
        if isinstance(known, Tensor) and known.buffer == "psum":
            yield "dma-psum", f"{side} of {short} is {ast.unparse(bound[side])} in PSUM"


def _check_memset(bound: dict[str, ast.expr], scope: FunctionScope) -> Iterator[Finding]:
    known = scope.what(bound["dst"]) if "dst" in bound else None
    value = bound.get("value")
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if not isinstance(known, Tensor) or not isinstance(value, ast.Constant):
        return
    if known.dtype.endswith("_x4") and value.value != 0:
        yield "memset-type", f"{value.value!r} into packed {known.dtype}, which takes only 0"
    elif "int" in known.dtype and isinstance(value.value, float):
        yield "memset-type", f"float {value.value!r} into {known.dtype}"


def _is_foreign(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in _FOREIGN


def _holds_list(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_holds_list(element) for element in node.elts)
    return isinstance(node, ast.List | ast.ListComp)


def mentions_enum(full: str) -> bool:
    """Whether a full name is a member of one of nki.isa's enums."""
    parts = full.split(".")
    return len(parts) == 4 and parts[:2] == ["nki", "isa"] and parts[2] in ENUM_MEMBERS


def resolve_and_check(node: ast.expr, imports: Imports) -> Iterator[Finding]:
    """Check a dotted expression's name if it is one of the API's."""
    full = imports.resolve(node)
    if full is not None:
        yield from check_name(full)
