"""The ten worked examples: each runs in the simulator, equals NumPy, and stays inside the NKI subset."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gk_kernels.examples.catalogue import EXAMPLES, Example, decode_fp4
from gk_kernels.simulator import ConstraintError, SimulationResult, simulate, simulated_nki
from gk_kernels.simulator.subset import RULES, check_file


def run(example: Example, target: str = "trn3") -> tuple[SimulationResult, list[np.ndarray]]:
    """One example's result and what NumPy expects of every rank."""
    inputs = example.make_inputs(np.random.default_rng(17))
    with simulated_nki():
        kernel = example.load()
    arguments = [tuple(one.values()) for one in inputs]
    result = simulate(kernel, ranks=example.ranks, rank_args=arguments, target=target)
    return result, list(example.expected(inputs))


@pytest.mark.parametrize(
    ("example", "target"),
    [(example, target) for example in EXAMPLES for target in example.targets],
    ids=lambda value: getattr(value, "name", value),
)
def test_an_example_equals_numpy_on_every_rank(example: Example, target: str) -> None:
    """Exactly where nothing is rounded, within the example's tolerance elsewhere."""
    result, expected = run(example, target)
    assert len(result.outputs) == example.ranks == len(expected)
    for got, want in zip(result.outputs, expected, strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        wide = got.astype(np.float32), want.astype(np.float32)
        np.testing.assert_allclose(*wide, rtol=example.rtol, atol=example.atol)
    if example.warning:
        assert all(example.warning in line for line in result.warnings)
        assert result.warnings
    else:
        assert result.warnings == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_stays_inside_the_subset(example: Example) -> None:
    """No violation in its source."""
    assert check_file(example.path) == ()


def test_the_mx_example_is_refused_on_trn2() -> None:
    """trn2 has no MX instructions."""
    example = next(e for e in EXAMPLES if e.name == "mx_matmul")
    with pytest.raises(ConstraintError):
        run(example, "trn2")


def test_the_copy_example_moves_every_byte_once_each_way() -> None:
    """300 x 70 float32: 84,000 B read and 84,000 B written, in 3 + 3 DMAs."""
    result, _ = run(EXAMPLES[0])
    counters = result.counters[0]
    assert (counters.hbm_read_bytes, counters.hbm_write_bytes) == (84_000, 84_000)
    assert counters.total(op="dma_copy").count == 6


def test_the_scatter_example_skips_its_inactive_rows() -> None:
    """Rows 2 and 5 are not written, and are counted as skipped."""
    example = next(e for e in EXAMPLES if e.name == "paged_scatter")
    result, _ = run(example)
    assert result.counters[0].skipped_rows == 2


def test_the_mlp_example_uses_one_collective_of_each_kind() -> None:
    """Per rank: one all-gather and one reduce-scatter."""
    example = next(e for e in EXAMPLES if e.name == "tp_mlp")
    result, _ = run(example)
    for counters in result.counters:
        counts = {kind: entry["count"] for kind, entry in counters.collectives.items()}
        assert counts == {"all_gather": 1, "reduce_scatter": 1}


def test_fp4_codes_have_their_ocp_values() -> None:
    """The sixteen values of e2m1."""
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = decode_fp4(np.arange(16, dtype=np.uint16)).tolist()
    assert got == positive + [-value for value in positive]


GUIDE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_the_guide_names_every_example_and_every_rule() -> None:
    """docs/simulator.md keeps up with the catalogue and the rule table."""
    text = GUIDE.read_text(encoding="utf-8")
    assert [e.name for e in EXAMPLES if f"| `{e.name}` |" not in text] == []
    assert [rule for rule in RULES if f"`{rule}`" not in text] == []


def test_the_guide_s_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block of the guide, as it stands, from the repository's root."""
    monkeypatch.chdir(GUIDE.parents[1])
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), {})
