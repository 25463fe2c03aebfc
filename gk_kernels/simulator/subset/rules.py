"""The rules a kernel's source obeys: id, what is refused, what to do instead.

Sources: the open NKI front end (KLR), the language guide and migration notes of NKI 0.3 to 0.6, and
field reports of the newer tracer. Rules marked `strict` come from one tracer version only and are
checked on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Rule:
    """One rule; `advice` is the sentence that a violation ends with."""

    id: str
    refused: str
    advice: str
    strict: bool = False


@dataclass(frozen=True)
class Violation:
    """One place in a kernel's source that a front end would refuse.

    Attributes:
        rule: id of the rule, a key of `RULES`.
        file, line: where; the line counts from 1.
        found: what stands there.
        advice: what to write instead.
    """

    rule: str
    file: str
    line: int
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: [{self.rule}] {self.found}; {self.advice}"


_TABLE = (
    # Statements and expressions that the parser refuses.
    Rule("syntax-error", "source that is not Python", "correct the syntax"),
    Rule("unsupported-syntax", "a form no front end is known to take", "write it with plain calls"),
    Rule("nested-function", "def inside a function", "move it to module level"),
    Rule("nested-class", "class inside a function or class", "move it to module level"),
    Rule("lambda", "lambda", "name a module-level function"),
    Rule("comprehension", "a comprehension", "write a for loop that appends"),
    Rule("generator", "a generator", "build a list in a for loop"),
    Rule("set-literal", "a set", "use a tuple"),
    Rule("walrus", "the := operator", "assign on a line of its own"),
    Rule("async", "async or await", "kernels are plain functions"),
    Rule("match", "match", "use if and elif"),
    Rule("try", "try", "check beforehand; a kernel handles no exceptions"),
    Rule("raise", "raise", "use assert, or check before the launch"),
    Rule("del", "del", "let the name go out of scope"),
    Rule("type-statement", "a type statement", "annotate with the type itself"),
    Rule("local-import", "import inside a function", "import at module level"),
    Rule("global", "global or nonlocal", "pass the value and return it"),
    Rule("loop-else", "else on a loop", "keep a flag"),
    Rule("tuple-loop-target", "several loop variables", "loop over an index and unpack inside"),
    Rule("star-expansion", "* or ** expansion", "write each argument out"),
    Rule("star-parameter", "*args or **kwargs", "name each parameter"),
    Rule("keyword-only", "the bare * separator", "drop it and put defaults last"),
    Rule("format-spec", "a format specification in an f-string", "use {x} or {x!r}"),
    Rule("matmul-operator", "the @ operator", "call nisa.nc_matmul"),
    Rule("with", "with", "only a bare `with nl.no_reorder():` is known"),
    Rule("identity", "is or is not with something else than None", "compare with == or !="),
    Rule("class-keyword", "a keyword in a class header", "drop it"),
    Rule("class-base", "a base class", "derive from NKIObject, Enum or NamedTuple only"),
    Rule("decorator", "a decorator", "only nki.jit, dataclass and staticmethod are known"),
    Rule("jit-argument", "an argument of nki.jit", "drop it; the target comes from outside"),
    Rule("import", "an import", "kernels import nki, math, dataclasses and their own modules"),
    Rule("star-import", "from ... import *", "import the module or name each name"),
    Rule("builtin", "a builtin", "use print, min, max, abs, len, range, list, tuple, dict, ..."),
    Rule("string-method", "a method of a string", "use an f-string"),
    Rule("int-range", "an integer beyond 32 bits", "keep values within -2**31 to 2**32-1"),
    Rule("dict-key", "a dict key that is no string", "use string keys or a list"),
    Rule("constant-type", "a constant", "use None, bool, int, float or str"),
    # From NKI 0.3 on.
    Rule("list-argument", "a list as a kernel's argument", "take a tuple"),
    Rule("sub-kernel", "a call of another @nki.jit function", "take @nki.jit off the inner one"),
    Rule("enum-constant", "a number or string where an enum is due", "name the enum's member"),
    Rule("buffer-constant", "a number or string as a buffer", "use nl.sbuf, nl.psum, ..."),
    Rule("foreign-dtype", "another library's dtype", "use nl.float32, nl.bfloat16, ..."),
    Rule("tensor-arithmetic", "an operator on a tensor", "call the instruction"),
    Rule("register-arithmetic", "an operator on a register", "compute in a tensor and load it"),
    Rule("tensor-assignment", "assignment into a tensor", "call nisa.tensor_copy or dma_copy"),
    Rule("tensor-branch", "a branch on a tensor or register", "branch on compile-time values"),
    Rule("dma-psum", "DMA to or from PSUM", "go through SBUF with nisa.tensor_copy"),
    Rule("memset-type", "a memset value of another kind", "match the tensor's dtype"),
    Rule("output-buffer", "an output outside shared_hbm", "allocate with buffer=nl.shared_hbm"),
    Rule("duplicate-name", "a tensor name used twice", "make each name unique, f-strings in loops"),
    Rule("replica-group", "a ReplicaGroup of lists", "use a tuple of tuples"),
    Rule("device-loop", "a device-side loop", "unroll with nl.affine_range or range"),
    Rule("device-loop-exit", "leaving a device-side loop early", "let the loop run to its end"),
    Rule("set-membership", "`in` with a set", "use a tuple"),
    Rule("environment", "reading the environment in a function", "read it at module level"),
    Rule("shared-line", "two allocations on one line", "give each its own line"),
    Rule("loop-allocation", "an unnamed allocation in a loop", "pass name=f'...{i}'", strict=True),
    Rule("enum-in-function", "an enum named in a function", "bind it at module level", strict=True),
    # Calls, against the table of signatures.
    Rule("unknown-name", "a name that the API has not", "see subset/signatures.py for NKI 0.6"),
    Rule("unknown-member", "an enum member that does not exist", "see subset/signatures.py"),
    Rule("unknown-keyword", "a keyword that the function has not", "see its signature"),
    Rule("too-many-arguments", "more positional arguments than parameters", "see its signature"),
    Rule("missing-argument", "a required argument left out", "pass it"),
    Rule("repeated-argument", "an argument given twice", "pass it once"),
)

RULES: Mapping[str, Rule] = MappingProxyType({rule.id: rule for rule in _TABLE})
