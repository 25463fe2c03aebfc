"""The rules inside one function: statements, expressions and calls.

Strategy: one visitor with an allow-list of node types; a type that is neither allowed nor named by a
rule is `unsupported-syntax`, so a new Python form is refused until somebody admits it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from dataclasses import dataclass, field

from gk_kernels.simulator.subset import calls
from gk_kernels.simulator.subset.rules import RULES, Violation
from gk_kernels.simulator.subset.scope import (
    FunctionScope,
    Imports,
    Register,
    Tensor,
    is_allocation,
    keyword_values,
)

_ALLOWED = "print min max abs str bool int float divmod tuple list dict len range isinstance type"
ALLOWED_BUILTINS = frozenset(_ALLOWED.split())
_BUILTIN_NAMES = frozenset(dir(builtins))

# Node types that one rule refuses outright.
_REFUSED: dict[str, str] = {
    "Lambda": "lambda",
    "ListComp": "comprehension",
    "SetComp": "comprehension",
    "DictComp": "comprehension",
    "GeneratorExp": "generator",
    "Yield": "generator",
    "YieldFrom": "generator",
    "Set": "set-literal",
    "NamedExpr": "walrus",
    "AsyncFunctionDef": "async",
    "AsyncFor": "async",
    "AsyncWith": "async",
    "Await": "async",
    "Match": "match",
    "Try": "try",
    "TryStar": "try",
    "Raise": "raise",
    "Delete": "del",
    "TypeAlias": "type-statement",
    "Import": "local-import",
    "ImportFrom": "local-import",
    "Global": "global",
    "Nonlocal": "global",
    "Starred": "star-expansion",
}
_PLAIN_NAMES = (
    "Expr Assign AugAssign AnnAssign Return Pass Break Continue Assert If IfExp Name Attribute "
    "Subscript Slice Tuple List Dict BinOp UnaryOp BoolOp Compare JoinedStr FormattedValue "
    "Constant keyword Load Store"
)
_PLAIN = frozenset(_PLAIN_NAMES.split())


@dataclass
class KernelFile:
    """What one file's module level says, and the violations found so far."""

    filename: str
    strict: bool
    imports: Imports = field(default_factory=Imports)
    found: list[Violation] = field(default_factory=list)
    jitted: set[str] = field(default_factory=set)
    module_names: set[str] = field(default_factory=set)
    module_sets: set[str] = field(default_factory=set)
    module_lists: set[str] = field(default_factory=set)

    def report(self, rule: str, node: ast.AST, found: str) -> None:
        if RULES[rule].strict and not self.strict:
            return
        line = getattr(node, "lineno", 1)
        self.found.append(Violation(rule, self.filename, line, found, RULES[rule].advice))

    def report_all(self, node: ast.AST, findings: Iterable[calls.Finding]) -> None:
        for rule, found in findings:
            self.report(rule, node, found)


class FunctionWalker(ast.NodeVisitor):
    """Walks one function's body; `scope` follows its tensors in source order."""

    def __init__(self, file: KernelFile, scope: FunctionScope) -> None:
        self.file = file
        self.scope = scope
        self.report = file.report
        self.report_all = file.report_all

    def visit(self, node: ast.AST) -> None:
        kind = type(node).__name__
        handler = getattr(self, f"visit_{kind}", None)
        if handler is not None:
            handler(node)
        elif kind in _REFUSED:
            self.report(_REFUSED[kind], node, ast.unparse(node).split("\n")[0])
        elif kind in _PLAIN or isinstance(node, ast.operator | ast.boolop | ast.unaryop | ast.cmpop):
            self.generic_visit(node)
        else:
            self.report("unsupported-syntax", node, kind)

    def what(self, node: ast.expr) -> Tensor | Register | None:
        return self.scope.what(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.report("nested-function", node, f"def {node.name}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.report("nested-class", node, f"class {node.name}")

    def visit_For(self, node: ast.For) -> None:
        if node.orelse:
            self.report("loop-else", node, "for ... else")
        if not isinstance(node.target, ast.Name):
            self.report("tuple-loop-target", node, f"for {ast.unparse(node.target)}")
        self.visit(node.iter)
        self.scope.bind(node.target, None)
        device = isinstance(node.iter, ast.Call) and (
            self.file.imports.resolve(node.iter.func) == "nki.language.dynamic_range"
        )
        self._loop_body(node.body, device)

    def visit_While(self, node: ast.While) -> None:
        if node.orelse:
            self.report("loop-else", node, "while ... else")
        self._branch(node.test)
        self.visit(node.test)
        self._loop_body(node.body, device=False)

    def _loop_body(self, body: list[ast.stmt], device: bool) -> None:
        self.scope.loop_depth += 1
        self.scope.device_loop_depth += device
        for statement in body:
            self.visit(statement)
        self.scope.loop_depth -= 1
        self.scope.device_loop_depth -= device

    def _leaves_loop(self, node: ast.stmt) -> None:
        if self.scope.device_loop_depth:
            self.report("device-loop-exit", node, ast.unparse(node))

    def visit_Break(self, node: ast.Break) -> None:
        self._leaves_loop(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._leaves_loop(node)

    def visit_Return(self, node: ast.Return) -> None:
        self._leaves_loop(node)
        if node.value is None:
            return
        self.visit(node.value)
        if not self.scope.is_kernel:
            return
        outputs = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for output in outputs:
            known = self.what(output)
            if isinstance(known, Tensor) and known.buffer not in ("", "shared_hbm"):
                self.report("output-buffer", node, f"{ast.unparse(output)} is in {known.buffer}")

    def visit_If(self, node: ast.If) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._branch(node.test)
        self.generic_visit(node)

    def _branch(self, test: ast.expr) -> None:
        if isinstance(test, ast.BoolOp):
            for value in test.values:
                self._branch(value)
        elif isinstance(test, ast.UnaryOp):
            self._branch(test.operand)
        elif isinstance(test, ast.Compare):
            against_none = isinstance(test.comparators[0], ast.Constant) and (test.comparators[0].value is None)
            for side in () if against_none else (test.left, *test.comparators):
                self._branch(side)
        elif self.what(test) is not None:
            self.report("tensor-branch", test, ast.unparse(test))

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            bare = (
                isinstance(call, ast.Call)
                and self.file.imports.resolve(call.func) == "nki.language.no_reorder"
                and item.optional_vars is None
            )
            if not bare:
                self.report("with", node, f"with {ast.unparse(item)}")
        for statement in node.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign_into(target)
            self.visit(target)
            self.scope.bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._assign_into(node.target)
        self.scope.bind(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Subscript) and self.what(node.target) is not None:
            self._assign_into(node.target)
        else:
            self._operands(node, node.op, (node.target, node.value))

    def _assign_into(self, target: ast.expr) -> None:
        if isinstance(target, ast.Subscript) and isinstance(self.what(target.value), Tensor):
            self.report("tensor-assignment", target, f"{ast.unparse(target)} = ...")

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._operands(node, node.op, (node.left, node.right))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.Not):
            self._operands(node, node.op, (node.operand,))
        self.generic_visit(node)

    def _operands(self, node: ast.AST, op: ast.operator | ast.unaryop, operands: tuple[ast.expr, ...]) -> None:
        if isinstance(op, ast.MatMult):
            self.report("matmul-operator", node, ast.unparse(node))
            return
        kinds = {type(self.what(operand)) for operand in operands}
        if Tensor in kinds:
            self.report("tensor-arithmetic", node, ast.unparse(node))
        elif Register in kinds:
            self.report("register-arithmetic", node, ast.unparse(node))

    def visit_Compare(self, node: ast.Compare) -> None:
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, ast.Is | ast.IsNot):
                if not (isinstance(right, ast.Constant) and right.value is None):
                    self.report("identity", node, ast.unparse(node))
            elif isinstance(op, ast.In | ast.NotIn) and (
                makes_set(right) or (isinstance(right, ast.Name) and right.id in self.file.module_sets)
            ):
                self.report("set-membership", node, ast.unparse(node))
                return
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if node.format_spec is not None:
            self.report("format-spec", node, ast.unparse(node.format_spec))
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, int) and not -(2**31) <= value < 2**32:
            self.report("int-range", node, repr(value))
        elif isinstance(value, bytes | complex):
            self.report("constant-type", node, repr(value))

    def visit_Dict(self, node: ast.Dict) -> None:
        for key in node.keys:
            if key is None:
                self.report("star-expansion", node, ast.unparse(node))
            elif isinstance(key, ast.Constant) and not isinstance(key.value, str):
                self.report("dict-key", node, f"key {key.value!r}")
        for child in [*(k for k in node.keys if k is not None), *node.values]:
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self.file.imports.resolve(node)
        if full is None:
            self.generic_visit(node)
            return
        if full.startswith("os.environ") or full == "os.getenv":
            self.report("environment", node, full)
        self.report_all(node, calls.check_name(full))
        if calls.mentions_enum(full):
            self.report("enum-in-function", node, full)

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg is None:
                self.report("star-expansion", node, ast.unparse(node))
        full = self.file.imports.resolve(node.func)
        signature = calls.signature_of(full)
        if full is not None and signature is not None:
            self.report_all(node, calls.check_signature(node, signature))
            self.report_all(node, calls.check_arguments(node, full, signature, self.scope))
            self._replica_group_by_name(node, full)
        if is_allocation(full):
            self._allocation(node)
        self._callee(node)
        self.visit(node.func)
        for child in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.visit(child)

    def _callee(self, node: ast.Call) -> None:
        callee = node.func
        if isinstance(callee, ast.Subscript):
            callee = callee.value
        if isinstance(callee, ast.Attribute):
            if isinstance(callee.value, ast.JoinedStr) or (
                isinstance(callee.value, ast.Constant) and isinstance(callee.value.value, str)
            ):
                self.report("string-method", node, ast.unparse(node))
            self.report_all(node, calls.check_tensor_method(node, self.scope))
        elif isinstance(callee, ast.Name):
            name = callee.id
            if name in self.file.jitted:
                self.report("sub-kernel", node, f"{name} has its own @nki.jit")
            elif name in _BUILTIN_NAMES and name not in self.file.module_names and name not in ALLOWED_BUILTINS:
                self.report("builtin", node, f"{name}(...)")

    def _replica_group_by_name(self, node: ast.Call, full: str) -> None:
        if full != "nki.collectives.ReplicaGroup":
            return
        for argument in [*node.args, *keyword_values(node).values()]:
            if isinstance(argument, ast.Name) and argument.id in self.file.module_lists:
                self.report("replica-group", node, f"{argument.id} is a list")

    def _allocation(self, node: ast.Call) -> None:
        if node.lineno in self.scope.allocation_lines:
            self.report("shared-line", node, "a second allocation on this line")
        self.scope.allocation_lines.add(node.lineno)
        name = keyword_values(node).get("name")
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value:
            if name.value in self.scope.tensor_names or self.scope.loop_depth:
                self.report("duplicate-name", node, f"name={name.value!r}")
            self.scope.tensor_names.add(name.value)
        elif name is None and self.scope.loop_depth:
            self.report("loop-allocation", node, ast.unparse(node))


def makes_set(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Set):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
