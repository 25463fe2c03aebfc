"""One refused source per rule, and the nearest accepted form beside it."""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

import pytest

from gk_kernels.simulator.subset import RULES, check_file, check_source
from gk_kernels.simulator.subset.functions import FunctionWalker, KernelFile
from gk_kernels.simulator.subset.scope import FunctionScope

HEADER = """\
import nki
import nki.language as nl
import nki.isa as nisa
import nki.collectives as ncc
"""


def make_part(body: str) -> str:
    """A module-level function with this body, after the usual imports."""
    return HEADER + "def part(x, y):\n" + textwrap.indent(textwrap.dedent(body), "    ")


# Rule, then a function body whose offending line ends in `# !`.
REFUSED_IN_A_FUNCTION = [
    ("nested-function", "def inner(): # !\n    return x\n"),
    ("nested-class", "class Inner: # !\n    a = 1\n"),
    ("lambda", "f = lambda: x # !"),
    ("comprehension", "a = [i for i in range(3)] # !"),
    ("comprehension", "a = {i: i for i in range(3)} # !"),
    ("generator", "a = tuple(i for i in range(3)) # !"),
    ("generator", "yield x # !"),
    ("set-literal", "a = {1, 2} # !"),
    ("walrus", "a = (b := 3) # !"),
    ("match", "match x: # !\n    case 1:\n        pass\n"),
    ("try", "try: # !\n    a = 1\nfinally:\n    b = 1\n"),
    ("raise", "raise ValueError # !"),
    ("del", "del x # !"),
    ("local-import", "import math # !"),
    ("local-import", "from math import sqrt # !"),
    ("global", "global x_count # !"),
    ("loop-else", "for i in range(3): # !\n    pass\nelse:\n    pass\n"),
    ("loop-else", "while False: # !\n    pass\nelse:\n    pass\n"),
    ("tuple-loop-target", "for i, j in y: # !\n    pass\n"),
    ("star-expansion", "nisa.max8(*y) # !"),
    ("star-expansion", "nisa.max8(**y) # !"),
    ("star-expansion", "a = [*y] # !"),
    ("star-expansion", "a = {**y} # !"),
    ("format-spec", "a = f'{x:03d}' # !"),
    ("matmul-operator", "a = x @ y # !"),
    ("with", "with open_it(x): # !\n    pass\n"),
    ("with", "with nl.no_reorder() as region: # !\n    pass\n"),
    ("identity", "a = x is True # !"),
    ("identity", "a = x is not y # !"),
    ("builtin", "a = sorted(y) # !"),
    ("builtin", "for i in enumerate(y): # !\n    pass\n"),
    ("string-method", "a = ','.join(y) # !"),
    ("int-range", "a = 4294967296 # !"),
    ("dict-key", "a = {1: x} # !"),
    ("constant-type", "a = 2j # !"),
    ("constant-type", "a = b'raw' # !"),
    ("enum-constant", "nisa.dma_copy(dst=x, src=y, oob_mode=1) # !"),
    ("enum-constant", "nisa.memset(x, 0, 'vector') # !"),
    ("buffer-constant", "a = nl.ndarray((128, 4), nl.float32, buffer='sbuf') # !"),
    ("foreign-dtype", "a = nl.ndarray((128, 4), dtype=np.float32) # !"),
    ("tensor-arithmetic", "a = nl.ndarray((128, 4), nl.float32)\nb = a + 1 # !\n"),
    ("tensor-arithmetic", "a = nl.ndarray((128, 4), nl.float32)\nb = 2 * a[:, 0:2] # !\n"),
    ("tensor-arithmetic", "a = nl.ndarray((128, 4), nl.float32)\nb = -a.reshape((64, 8)) # !\n"),
    ("tensor-arithmetic", "a = nl.ndarray((128, 4), nl.float32)\na += y # !\n"),
    ("register-arithmetic", "r = nisa.register_alloc(3)\nb = r + 1 # !\n"),
    ("tensor-assignment", "a = nl.zeros((128, 4), nl.float32)\na[0:64, :] = y # !\n"),
    ("tensor-assignment", "a = nl.zeros((128, 4), nl.float32)\na[...] += y # !\n"),
    ("tensor-branch", "a = nl.zeros((128, 4), nl.float32)\nif a[0, 0] > 3: # !\n    pass\n"),
    ("tensor-branch", "r = nisa.register_alloc(3)\nwhile r: # !\n    pass\n"),
    ("tensor-branch", "r = nisa.register_alloc(3)\nb = 1 if not r else 2 # !\n"),
    ("dma-psum", "a = nl.ndarray((128, 4), nl.float32, nl.psum)\nnisa.dma_copy(y, a) # !\n"),
    (
        "dma-psum",
        "a = nl.ndarray((128, 4), nl.float32, buffer=nl.psum)\nb = a[:, 0:2]\nnisa.dma_copy(dst=b, src=y) # !\n",
    ),
    ("memset-type", "a = nl.ndarray((128, 4), nl.int32)\nnisa.memset(a, 2.0) # !\n"),
    ("memset-type", "a = nl.ndarray((128, 4), dtype=nl.float4_e2m1fn_x4)\nnisa.memset(a, 1) # !\n"),
    (
        "duplicate-name",
        "a = nl.ndarray((128, 4), nl.int32, name='a')\nb = nl.ndarray((128, 4), nl.int32, name='a') # !",
    ),
    (
        "duplicate-name",
        "for i in range(2):\n    b = nl.ndarray((128, 4), nl.int32, name='a') # !\n",
    ),
    ("replica-group", "g = ncc.ReplicaGroup([[0, 1], [2, 3]]) # !"),
    ("replica-group", "g = ncc.ReplicaGroup(groups=((0, 1), [2, 3])) # !"),
    ("device-loop", "nl.fori_loop(0, 8, part) # !"),
    ("device-loop", "for i in nl.dynamic_range(0, 8): # !\n    pass\n"),
    (
        "shared-line",
        "a, b = nl.ndarray((128, 4), nl.int32), nl.ndarray((128, 4), nl.int32) # !",
    ),
    ("set-membership", "a = x in frozenset_of(y)\nb = x in {1, 2} # !\n"),
    ("unknown-name", "nisa.dma_move(dst=x, src=y) # !"),
    ("unknown-name", "a = nl.float64 # !"),
    ("unknown-name", "a = nl.tile_size.pmin # !"),
    ("unknown-name", "a = nl.zeros((128, 4), nl.int32)\nb = a.transpose() # !\n"),
    ("unknown-member", "a = nisa.oob_mode.ignore # !"),
    ("unknown-keyword", "nisa.dma_copy(dst=x, src=y, dst_rmw_op=nl.add) # !"),
    ("unknown-keyword", "a = nl.zeros((128, 4), nl.int32)\nb = a.ap(patterns=y, pattern=y) # !\n"),
    ("too-many-arguments", "a = nisa.register_alloc(1, 2) # !"),
    ("missing-argument", "nisa.dma_copy(dst=x) # !"),
    ("missing-argument", "a = nl.zeros((128, 4), nl.int32)\nb = a.permute() # !\n"),
    ("repeated-argument", "nisa.dma_copy(x, y, dst=x) # !"),
]

# Rule, then a whole module after the usual imports.
REFUSED_MODULES = [
    ("syntax-error", "def part(x: # !\n"),
    ("async", "async def part(x): # !\n    return x\n"),
    ("star-parameter", "def part(*xs): # !\n    return xs\n"),
    ("star-parameter", "def part(**xs): # !\n    return xs\n"),
    ("keyword-only", "def part(x, *, y): # !\n    return y\n"),
    ("class-keyword", "class Sizes(nl.NKIObject, frozen=True): # !\n    a: int = 1\n"),
    ("class-base", "class Sizes(dict): # !\n    a: int = 1\n"),
    ("class-base", "class Sizes: # !\n    a: int = 1\n"),
    ("nested-class", "class Sizes(nl.NKIObject):\n    class Inner: # !\n        a = 1\n"),
    ("decorator", "@cached # !\ndef part(x):\n    return x\n"),
    ("jit-argument", "@nki.jit(platform_target='trn2') # !\ndef part(x):\n    return x\n"),
    ("import", "import numpy as np # !\n"),
    ("import", "import nki.compiler # !\n"),
    ("import", "from torch import nn # !\n"),
    ("star-import", "from nki.language import * # !\n"),
    ("unknown-name", "from nki.isa import dma_move # !\n"),
    ("unknown-name", "SKIP = nisa.out_of_bounds.skip # !\n"),
    ("unknown-member", "SKIP = nisa.oob_mode.ignore # !\n"),
    ("replica-group", "GROUP = ncc.ReplicaGroup([[0, 1]]) # !\n"),
    ("replica-group", "RANKS = [(0, 1)]\ndef part(x):\n    g = ncc.ReplicaGroup(RANKS) # !\n"),
    ("list-argument", "@nki.jit\ndef part(x, sizes=[1, 2]): # !\n    return x\n"),
    ("list-argument", "@nki.jit\ndef part(x, sizes: list[int]): # !\n    return x\n"),
    ("set-membership", "OK = frozenset((1, 2))\ndef part(x):\n    return x in OK # !\n"),
    ("sub-kernel", "@nki.jit\ndef a(x):\n    return x\ndef b(x):\n    return a(x) # !\n"),
    ("sub-kernel", "@nki.jit\ndef a(x):\n    return x\ndef b(x):\n    return a[2](x) # !\n"),
    (
        "output-buffer",
        "@nki.jit\ndef part(x):\n    o = nl.ndarray((4, 4), nl.int32, nl.hbm)\n    return o # !\n",
    ),
    (
        "output-buffer",
        "@nki.jit\ndef part(x):\n    o = nl.ndarray((4, 4), nl.int32)\n    return x, o # !\n",
    ),
]

STRICT = [
    ("loop-allocation", "for i in range(2):\n    a = nl.ndarray((128, 4), nl.int32) # !\n"),
    ("enum-in-function", "nisa.dma_copy(dst=x, src=y, oob_mode=nisa.oob_mode.skip) # !"),
]

ACCEPTED = [
    "a = [1, 2]\na.append(3)\na[0] = 4\nb = a[1] + 5\n",
    "a = {'k': x}\na['k'] = y\nb = 'k' in a\n",
    "if x is None or y is not None:\n    a = 1\nelif x == 3:\n    a = 2\nelse:\n    a = 3\n",
    "for i in nl.affine_range(4):\n    if i == 2:\n        break\n",
    "for i in range(4):\n    a = nl.ndarray((128, 4), nl.int32, name=f'a{i}')\n",
    "with nl.no_reorder():\n    nisa.memset(x, 0)\n",
    "a = nl.ndarray((128, 4), nl.float32, buffer=nl.sbuf)\nnisa.memset(dst=a, value=0.0)\n",
    "a = nl.ndarray((128, 4), nl.int32)\nb = a.shape[0] * 2 if a.shape[1] > 3 else 4\n",
    "a = nl.ndarray((128, 4), nl.int32)\nassert a != None\na = 3\nb = a + 1\n",
    "g = ncc.ReplicaGroup(((0, 1), (2, 3)))\nncc.all_reduce([x], [y], g, op=nl.add)\n",
    "a = f'{x}_{y!r}'\nassert x > 0, f'got {x}'\nprint(a)\n",
    "a = -2147483648\nb = 4294967295\n",
    "nisa.dma_copy(x, y, None, nisa.oob_mode.skip)\n",
    "while x > 3:\n    x -= 1\n",
    "a = x.ap(pattern=[[4, 128], [1, 4]], offset=3)\nb = a[:, 0:2]\n",
    "def_ = nl.tile_size.pmax // 2\nx[0] = 1\n",
]


def marked_line(source: str) -> int:
    """The 1-based number of the line ending in `# !`."""
    return next(n for n, line in enumerate(source.split("\n"), 1) if line.endswith("# !"))


@pytest.mark.parametrize(
    ("rule", "source"),
    [(rule, make_part(body)) for rule, body in REFUSED_IN_A_FUNCTION]
    + [(rule, HEADER + text) for rule, text in REFUSED_MODULES],
)
def test_a_refused_form_gives_its_rule_at_its_line_and_nothing_else(rule: str, source: str) -> None:
    """Each negative fixture breaks exactly one rule, on the marked line."""
    found = check_source(source, "part.py")
    extra = {"device-loop-exit"} if rule == "device-loop" else set()
    assert [(v.rule, v.line) for v in found if v.rule not in extra] == [(rule, marked_line(source))]
    assert found[0].file == "part.py"
    assert found[0].advice == RULES[rule].advice


@pytest.mark.parametrize(("rule", "body"), STRICT)
def test_strict_rules_are_checked_on_request_only(rule: str, body: str) -> None:
    """Rules of one tracer version stay silent unless asked for."""
    source = make_part(body)
    assert check_source(source, "part.py") == ()
    found = check_source(source, "part.py", strict=True)
    assert [(v.rule, v.line) for v in found] == [(rule, marked_line(source))]


@pytest.mark.parametrize("body", ACCEPTED)
def test_a_plain_form_is_accepted(body: str) -> None:
    """The nearest legal forms raise nothing."""
    assert check_source(make_part(body), "part.py") == ()


@pytest.mark.parametrize("leave", ["break", "continue", "return x"])
def test_a_device_loop_runs_to_its_end(leave: str) -> None:
    """break, continue and return inside dynamic_range are refused beside the loop itself."""
    source = make_part(f"for i in nl.dynamic_range(4):\n    if x:\n        {leave}\n")
    assert [v.rule for v in check_source(source, "part.py")] == ["device-loop", "device-loop-exit"]


def test_the_environment_is_read_at_module_level() -> None:
    """os is no kernel import, and reading it inside a function is refused on its own."""
    source = "import os\nA = os.environ.get('A')\ndef part(x):\n    return os.environ['A']\n"
    found = [(v.rule, v.line) for v in check_source(source, "p.py", own_packages=("os",))]
    assert found == [("environment", 4)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type statements come with Python 3.12")
def test_a_type_statement_is_refused() -> None:
    """`type X = int` inside a function."""
    found = check_source(make_part("type X = int\n"), "part.py")
    assert [v.rule for v in found] == ["type-statement"]


def test_every_rule_has_a_negative_fixture() -> None:
    """No rule goes untested: the fixtures above name all of them."""
    tested = {rule for rule, _ in REFUSED_IN_A_FUNCTION + REFUSED_MODULES + STRICT}
    elsewhere = {"device-loop-exit", "environment", "type-statement", "unsupported-syntax"}
    assert tested | elsewhere == set(RULES)


class NewForm(ast.expr):
    """An expression of some later Python."""


def test_a_form_of_no_known_rule_is_refused() -> None:
    """Whatever syntax comes next is not let through silently."""
    file = KernelFile("k.py", strict=False)
    walker = FunctionWalker(file, FunctionScope(file.imports, is_kernel=False))
    walker.visit(ast.Expr(NewForm()))
    assert [(v.rule, v.found) for v in file.found] == [("unsupported-syntax", "NewForm")]


def test_a_violation_reads_as_file_line_rule_finding_and_advice() -> None:
    """The message names rule, place, finding and what to do."""
    found = check_source(make_part("a = lambda: x\n"), "k.py")
    assert str(found[0]) == "k.py:6: [lambda] lambda: x; name a module-level function"


def test_a_file_may_import_its_own_package_and_its_neighbours(tmp_path: Path) -> None:
    """Modules beside a kernel, and the packages around it, are kernel code."""
    package = tmp_path / "mykernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tiles.py").write_text("")
    kernel = package / "kernel.py"
    kernel.write_text("import tiles\nimport mykernels.tiles\nfrom . import tiles as t\nimport zlib\n")
    assert [(v.rule, v.line) for v in check_file(kernel)] == [("import", 4)]


def test_violations_come_in_line_order() -> None:
    """Two violations of one function are reported top to bottom."""
    source = make_part("a = lambda: x\nb = {1}\n")
    assert [v.line for v in check_source(source, "k.py")] == [6, 7]
