"""What a name stands for in a kernel file: an API name, a tensor, a register, or something else.

Tensors are followed through one function in source order, from the call that allocates them through
indexing and views. That is enough to catch the forms a kernel author would write, and never guesses:
a name of unknown origin is not a tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from gk_kernels.simulator.subset.signatures import TENSOR_METHODS

_ALLOCATORS = ("ndarray", "zeros", "ones", "full", "rand", "zeros_like", "empty_like")
_TENSOR_ANNOTATIONS = ("nki.language.NkiTensor", "nki.language.ndarray")
_NOT_VIEWS = ("is_contiguous", "get_pattern", "is_indirect")


@dataclass(frozen=True)
class Tensor:
    """A tensor known at this point; buffer and dtype are nl names, empty where not known."""

    buffer: str
    dtype: str


@dataclass(frozen=True)
class Register:
    """A value of nisa.register_alloc."""


Known = Tensor | Register


class Imports:
    """Local name to full name, for everything imported from nki."""

    def __init__(self) -> None:
        self._full: dict[str, str] = {}

    def add(self, statement: ast.Import | ast.ImportFrom) -> None:
        for alias in statement.names:
            if isinstance(statement, ast.ImportFrom):
                if statement.level == 0:
                    self._full[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
            elif alias.asname:
                self._full[alias.asname] = alias.name
            else:
                root = alias.name.split(".")[0]
                self._full[root] = root

    def resolve(self, node: ast.expr) -> str | None:
        """Full dotted name of `nl.x.y`, or None where the root is not an imported name."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._full:
            return None
        return ".".join([self._full[node.id], *reversed(parts)])


@dataclass
class FunctionScope:
    """The tensors and registers of one function, and where it has allocated so far."""

    imports: Imports
    is_kernel: bool
    known: dict[str, Known] = field(default_factory=dict)
    tensor_names: set[str] = field(default_factory=set)
    allocation_lines: set[int] = field(default_factory=set)
    loop_depth: int = 0
    device_loop_depth: int = 0

    def annotate(self, argument: ast.arg) -> None:
        if argument.annotation is None:
            return
        if self.imports.resolve(argument.annotation) in _TENSOR_ANNOTATIONS:
            self.known[argument.arg] = Tensor("", "")

    def bind(self, target: ast.expr, value: ast.expr | None) -> None:
        """Note what `target = value` makes of a plain name; anything else forgets it."""
        if isinstance(target, ast.Tuple | ast.List):
            values: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                values = list(value.elts)
            for one, its in zip(target.elts, values, strict=True):
                self.bind(one, its)
        elif isinstance(target, ast.Name):
            found = None if value is None else self.what(value)
            if found is None:
                self.known.pop(target.id, None)
            else:
                self.known[target.id] = found

    def what(self, node: ast.expr) -> Known | None:
        """The tensor or register that an expression is, or None."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Subscript):
            inner = self.what(node.value)
            return inner if isinstance(inner, Tensor) else None
        if isinstance(node, ast.Call):
            return self._what_call(node)
        return None

    def _what_call(self, node: ast.Call) -> Known | None:
        full = self.imports.resolve(node.func)
        if full == "nki.isa.register_alloc":
            return Register()
        if full is not None and full.startswith("nki.language."):
            name = full.rsplit(".", 1)[1]
            return self._allocated(name, node) if name in _ALLOCATORS else None
        if isinstance(node.func, ast.Attribute):
            owner = self.what(node.func.value)
            if isinstance(owner, Tensor) and node.func.attr in TENSOR_METHODS and node.func.attr not in _NOT_VIEWS:
                return owner
        return None

    def _allocated(self, name: str, node: ast.Call) -> Tensor:
        given = keyword_values(node)
        position = {"ndarray": 2, "zeros": 2, "ones": 2, "full": 3, "rand": 2}.get(name, 9)
        positional = node.args[position] if len(node.args) > position else None
        dtype_node = given.get("dtype", node.args[1] if len(node.args) > 1 else None)
        buffer = self._short(given.get("buffer", positional))
        if not buffer and "buffer" not in given and positional is None:
            buffer = "" if name.endswith("_like") else "sbuf"
        return Tensor(buffer, self._short(dtype_node))

    def _short(self, node: ast.expr | None) -> str:
        full = None if node is None else self.imports.resolve(node)
        if full is None or not full.startswith("nki.language."):
            return ""
        return full.rsplit(".", 1)[1]


def keyword_values(node: ast.Call) -> Mapping[str, ast.expr]:
    """The call's keyword arguments by name."""
    return {k.arg: k.value for k in node.keywords if k.arg is not None}


def is_allocation(full: str | None) -> bool:
    """Whether a full name allocates a tensor."""
    return full is not None and full.startswith("nki.language.") and full.rsplit(".", 1)[1] in _ALLOCATORS
