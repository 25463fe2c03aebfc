"""Check a kernel file: its module level here, its functions in `functions.py`.

Module level is executed by Python itself, so there only imports, classes, decorators and API names
are looked at; the rest of the rules hold inside functions. Every function of the file counts as kernel
code.
"""

from __future__ import annotations

import ast
from pathlib import Path

from gk_kernels.simulator.subset import calls
from gk_kernels.simulator.subset.functions import FunctionWalker, KernelFile, makes_set
from gk_kernels.simulator.subset.rules import RULES, Violation
from gk_kernels.simulator.subset.scope import FunctionScope

ALLOWED_IMPORTS = ("nki", "math", "dataclasses", "enum", "typing", "__future__")
_NKI_MODULES = ("nki", "nki.language", "nki.isa", "nki.collectives")
_BASES = ("NKIObject", "Enum", "NamedTuple")
_DECORATORS = ("nki.jit", "dataclasses.dataclass", "staticmethod")


class _ModuleWalker:
    """Walks the module level and hands each function to a FunctionWalker."""

    def __init__(self, file: KernelFile, own_packages: tuple[str, ...]) -> None:
        self.file = file
        self.own_packages = own_packages
        self.report = file.report
        self.report_all = file.report_all

    def walk_module(self, tree: ast.Module) -> None:
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(statement)
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.file.module_names.add(statement.name)
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                self._module_assignment(statement)
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef) and self._is_jitted(statement):
                self.file.jitted.add(statement.name)
        for statement in tree.body:
            if isinstance(statement, ast.AsyncFunctionDef):
                self.report("async", statement, f"async def {statement.name}")
            elif isinstance(statement, ast.FunctionDef):
                self._function(statement)
            elif isinstance(statement, ast.ClassDef):
                self._class(statement)
            else:
                self._module_expressions(statement)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        self.file.imports.add(statement)
        for alias in statement.names:
            self.file.module_names.add(alias.asname or alias.name.split(".")[0])
        relative = isinstance(statement, ast.ImportFrom) and statement.level > 0
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        else:
            modules = [statement.module or ""]
            if any(alias.name == "*" for alias in statement.names):
                self.report("star-import", statement, ast.unparse(statement))
        for module in () if relative else modules:
            root = module.split(".")[0]
            known = root in ALLOWED_IMPORTS or root in self.own_packages
            if not known or (root == "nki" and module not in _NKI_MODULES):
                self.report("import", statement, f"import of {module}")
            elif root == "nki" and isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if alias.name != "*":
                        self.report_all(statement, calls.check_name(f"{module}.{alias.name}"))

    def _module_assignment(self, statement: ast.Assign | ast.AnnAssign) -> None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {name.id for t in targets for name in ast.walk(t) if isinstance(name, ast.Name)}
        self.file.module_names |= names
        if makes_set(statement.value):
            self.file.module_sets |= names
        if isinstance(statement.value, ast.List):
            self.file.module_lists |= names

    def _module_expressions(self, statement: ast.stmt) -> None:
        nodes = list(ast.walk(statement))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        scope = FunctionScope(self.file.imports, is_kernel=False)
        for node in nodes:
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                self.report_all(node, calls.resolve_and_check(node, self.file.imports))
            elif isinstance(node, ast.Call):
                full = self.file.imports.resolve(node.func)
                signature = calls.signature_of(full)
                if full is not None and signature is not None:
                    self.report_all(node, calls.check_signature(node, signature))
                    self.report_all(node, calls.check_arguments(node, full, signature, scope))

    def _is_jitted(self, function: ast.FunctionDef) -> bool:
        for node in function.decorator_list:
            call = node.func if isinstance(node, ast.Call) else node
            if self.file.imports.resolve(call) == "nki.jit":
                return True
        return False

    def _decorators(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = self.file.imports.resolve(call) or ast.unparse(call)
            if name not in _DECORATORS:
                self.report("decorator", decorator, f"@{ast.unparse(decorator)} on {node.name}")
            elif name == "nki.jit" and isinstance(decorator, ast.Call):
                for keyword in decorator.keywords:
                    self.report("jit-argument", decorator, f"nki.jit({keyword.arg}=...)")

    def _class(self, node: ast.ClassDef) -> None:
        self._decorators(node)
        for keyword in node.keywords:
            self.report("class-keyword", node, f"{keyword.arg}= in the header of {node.name}")
        for base in node.bases:
            if (self.file.imports.resolve(base) or ast.unparse(base)).rsplit(".", 1)[-1] not in _BASES:
                self.report("class-base", node, f"{node.name} derives from {ast.unparse(base)}")
        if not node.bases and not node.decorator_list:
            self.report("class-base", node, f"{node.name} derives from nothing")
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self._function(statement)
            elif isinstance(statement, ast.ClassDef):
                self.report("nested-class", statement, f"class {statement.name} in {node.name}")
            else:
                self._module_expressions(statement)

    def _function(self, node: ast.FunctionDef) -> None:
        self._decorators(node)
        arguments = node.args
        if arguments.vararg or arguments.kwarg:
            self.report("star-parameter", node, f"* or ** in the header of {node.name}")
        if arguments.kwonlyargs:
            self.report("keyword-only", node, f"keyword-only parameters of {node.name}")
        is_kernel = self._is_jitted(node)
        scope = FunctionScope(self.file.imports, is_kernel)
        everything = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in everything:
            scope.annotate(argument)
        if is_kernel:
            self._kernel_parameters(node, everything)
        walker = FunctionWalker(self.file, scope)
        for statement in node.body:
            walker.visit(statement)

    def _kernel_parameters(self, node: ast.FunctionDef, everything: list[ast.arg]) -> None:
        for argument in everything:
            shown = "" if argument.annotation is None else ast.unparse(argument.annotation)
            if shown.split("[")[0].rsplit(".", 1)[-1] in ("list", "List"):
                self.report("list-argument", argument, f"{argument.arg}: {shown} of {node.name}")
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if isinstance(default, ast.List):
                self.report("list-argument", default, f"default {ast.unparse(default)}")


def check_source(
    text: str,
    filename: str,
    *,
    own_packages: tuple[str, ...] = ("gk_kernels",),
    strict: bool = False,
) -> tuple[Violation, ...]:
    """Every violation in one kernel file's source, by line.

    own_packages: root packages whose modules are kernel code too; relative imports always are.
    strict: also the rules that only one tracer version has.

    >>> check_source("def k(x):\\n    return lambda: x\\n", "k.py")[0].rule
    'lambda'
    """
    try:
        tree = ast.parse(text, filename)
    except SyntaxError as error:
        advice = RULES["syntax-error"].advice
        return (Violation("syntax-error", filename, error.lineno or 1, str(error.msg), advice),)
    file = KernelFile(filename, strict)
    _ModuleWalker(file, own_packages).walk_module(tree)
    return tuple(sorted(file.found, key=lambda violation: violation.line))


def check_file(path: str | Path, *, strict: bool = False) -> tuple[Violation, ...]:
    """`check_source` of a file; its own package, and modules beside it, are kernel code too.

    Raises:
        OSError: the file cannot be read.
    """
    where = Path(path)
    own = {"gk_kernels", *(beside.stem for beside in where.parent.glob("*.py"))}
    folder = where.resolve().parent
    while (folder / "__init__.py").exists():
        own.add(folder.name)
        folder = folder.parent
    text = where.read_text(encoding="utf-8")
    return check_source(text, str(path), own_packages=tuple(sorted(own)), strict=strict)
