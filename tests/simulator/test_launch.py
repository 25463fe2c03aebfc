"""`gk simulate` on a user's own kernel file: results, ranks, reports, and every refusal in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from gk_adapters.cli.simulate import simulate
from gk_kernels.examples.catalogue import EXAMPLES, Example
from gk_kernels.simulator.launch import LaunchError, load_inputs

KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl
from scale_by import factor


@nki.jit
def doubled(x, times=2.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor(times))
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def unwritten(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def wrong(x):
    return {}["no such key"]
"""


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with a helper module beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "scale_by", raising=False)
    (tmp_path / "scale_by.py").write_text("def factor(times):\n    return times\n")
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    np.savez(tmp_path / "in.npz", x=np.arange(6, dtype=np.float32).reshape(2, 3))
    return path


def save(path: Path, arrays: dict[str, Any]) -> None:
    """An .npz of these arrays."""
    np.savez(path, **arrays)


def run(*arguments: Any) -> Result:
    """The command with these arguments."""
    return CliRunner().invoke(simulate, [str(a) for a in arguments])


def refusal(*arguments: Any) -> str:
    """The message of a run that must fail."""
    result = run(*arguments)
    assert result.exit_code != 0
    assert result.exception is not None
    lines = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.output
    return lines[0]


def inputs_beside(kernel: Path) -> Path:
    return kernel.with_name("in.npz")


def test_a_kernel_file_runs_and_its_results_are_saved(kernel_file: Path) -> None:
    """Twice the input, by the default of `times`, with a helper module imported from beside the file."""
    saved = kernel_file.with_name("out.npz")
    result = run(f"{kernel_file}:doubled", "--inputs", inputs_beside(kernel_file), "--outputs", saved)
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(np.load(saved)["output_0"], [[0, 2, 4], [6, 8, 10]])
    assert "output_0: float32 [2, 3]" in result.output
    assert "doubled on trn3" in result.output


def test_options_may_come_before_the_kernel(kernel_file: Path) -> None:
    """`--inputs F.npz KERNEL.py:f` is the same command."""
    result = run("--inputs", inputs_beside(kernel_file), f"{kernel_file}:doubled", "--arg", "times=3.0", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["outputs"] == {"output_0": {"shape": [2, 3], "dtype": "float32"}}


def test_json_carries_costs_peaks_and_violations(kernel_file: Path) -> None:
    """24 bytes in, 24 bytes out, 12 bytes of one partition, and no violation in this file."""
    result = run(f"{kernel_file}:doubled", "--inputs", inputs_beside(kernel_file), "--json", "--target", "trn2")
    data = json.loads(result.output)
    assert data["kernel"] == "doubled"
    assert (data["cost"]["target"], data["cost"]["hbm_read_bytes"], data["cost"]["hbm_write_bytes"]) == ("trn2", 24, 24)
    assert data["cost"]["peaks"]["sbuf_peak_bytes_per_partition"] == 12
    assert data["violations"] == []


def test_a_report_is_written_as_html(kernel_file: Path) -> None:
    """--report gives one file with both pictures."""
    report = kernel_file.with_name("report.html")
    result = run(f"{kernel_file}:doubled", "--inputs", inputs_beside(kernel_file), "--report", report)
    assert result.exit_code == 0, result.output
    assert report.read_text().count("<svg") == 2


def test_source_outside_the_subset_is_named_and_runs_all_the_same(kernel_file: Path) -> None:
    """A lambda is reported with its line."""
    kernel_file.write_text(KERNEL + "\n\ndef extra(x):\n    return lambda: x\n")
    text = run(f"{kernel_file}:doubled", "--inputs", inputs_beside(kernel_file)).output
    assert "not in the NKI subset" in text
    assert "[lambda]" in text


def run_example(example: Example, folder: Path, *more: Any) -> dict[str, np.ndarray]:
    """One worked example through the command line, inputs and outputs as files."""
    inputs = example.make_inputs(np.random.default_rng(23))
    arrays, dtypes = {}, {}
    for rank, one in enumerate(inputs):
        for name, array in one.items():
            if array.dtype == ml_dtypes.bfloat16:
                dtypes[name] = "bfloat16"
                array = array.view(np.uint16)
            arrays[f"{name}@{rank}" if len(inputs) > 1 else name] = array
    save(folder / "in.npz", arrays)
    options = [f"--dtype={name}={dtype}" for name, dtype in dtypes.items()]
    result = run(
        f"{example.path}:{example.name}",
        *("--inputs", folder / "in.npz", "--outputs", folder / "out.npz", "--ranks", example.ranks),
        *options,
        *more,
    )
    assert result.exit_code == 0, result.output
    return dict(np.load(folder / "out.npz"))


def test_ranks_take_their_own_inputs_and_give_their_own_outputs(tmp_path: Path) -> None:
    """The four-rank MLP: x@0 to x@3 in, output_0@0 to output_0@3 out."""
    example = next(e for e in EXAMPLES if e.name == "tp_mlp")
    outputs = run_example(example, tmp_path)
    expected = example.expected(example.make_inputs(np.random.default_rng(23)))
    assert sorted(outputs) == [f"output_0@{rank}" for rank in range(4)]
    for rank, want in enumerate(expected):
        np.testing.assert_allclose(outputs[f"output_0@{rank}"], want, rtol=1e-4, atol=1e-3)


def test_narrow_floats_go_in_as_bytes_and_come_out_widened(tmp_path: Path) -> None:
    """bfloat16 RMSNorm: uint16 in with --dtype, float32 out."""
    example = next(e for e in EXAMPLES if e.name == "rmsnorm")
    got = run_example(example, tmp_path)["output_0"]
    want = example.expected(example.make_inputs(np.random.default_rng(23)))[0]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want.astype(np.float32), rtol=1e-2)


def test_a_broken_rule_is_one_line_with_the_kernel_s_own_line(kernel_file: Path) -> None:
    """A read of memory that nothing wrote names kernel.py and the function."""
    message = refusal(f"{kernel_file}:unwritten", "--inputs", inputs_beside(kernel_file))
    assert "never-written" in message
    assert "kernel.py:22 in unwritten" in message


@pytest.mark.parametrize(
    ("spec", "arguments", "said"),
    [
        ("kernel.py", [], "FILE.py:function"),
        ("absent.py:doubled", [], "there is no file"),
        ("kernel.py:tripled", [], "has no function tripled; it has doubled, unwritten, wrong"),
        ("kernel.py:wrong", [], "wrong failed: KeyError"),
        ("kernel.py:doubled", ["--arg", "epsilon=1e-6"], "there is no epsilon"),
        ("kernel.py:doubled", ["--arg", "times=two"], "takes a Python literal"),
        ("kernel.py:doubled", ["--arg", "times"], "NAME=VALUE"),
        ("kernel.py:doubled", ["--dtype", "y=bfloat16"], "a dtype is given for y"),
        ("kernel.py:doubled", ["--dtype", "x=bfloat16"], "4-byte elements, bfloat16 has 2"),
        ("kernel.py:doubled", ["--dtype", "x=float64"], "must be one of"),
        ("broken.py:doubled", [], "does not import: SyntaxError"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    kernel_file: Path, spec: str, arguments: list[str], said: str
) -> None:
    """Each message names the thing that is wrong."""
    kernel_file.with_name("broken.py").write_text("def doubled(:\n")
    where = kernel_file.with_name(spec)
    assert said in refusal(where, "--inputs", inputs_beside(kernel_file), *arguments)


def test_missing_and_surplus_inputs_are_named(kernel_file: Path) -> None:
    """A name that the kernel has not, and one that it needs."""
    np.savez(kernel_file.with_name("other.npz"), y=np.zeros((2, 3), np.float32))
    message = refusal(f"{kernel_file}:doubled", "--inputs", kernel_file.with_name("other.npz"))
    assert "do not fit doubled(x, times): there is no y; x is missing" in message


def test_inputs_are_an_npz_file_of_plain_arrays(tmp_path: Path) -> None:
    """A missing file, a text file, and a rank that does not run."""
    with pytest.raises(LaunchError, match="not a readable"):
        load_inputs(tmp_path / "absent.npz", {}, 1)
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(LaunchError, match="not a readable"):
        load_inputs(tmp_path / "text.npz", {}, 1)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(LaunchError, match="not a readable"):
        load_inputs(tmp_path / "one.npy", {}, 1)
    np.savez(tmp_path / "pickle.npz", x=np.array([{}], dtype=object))
    with pytest.raises(LaunchError, match="not a readable"):
        load_inputs(tmp_path / "pickle.npz", {}, 1)
    save(tmp_path / "ranks.npz", {"x@2": np.zeros(3)})
    with pytest.raises(LaunchError, match="ranks are 0 to 1"):
        load_inputs(tmp_path / "ranks.npz", {}, 2)
    np.savez(tmp_path / "raw.npz", x=np.zeros((2, 2), ml_dtypes.bfloat16))
    with pytest.raises(LaunchError, match="name its dtype"):
        load_inputs(tmp_path / "raw.npz", {}, 1)


def test_scalars_become_python_values_and_ranks_override(tmp_path: Path) -> None:
    """0-dimensional arrays are numbers; x@1 replaces x on rank 1."""
    save(tmp_path / "in.npz", {"n": np.int64(7), "x": np.zeros(2), "x@1": np.ones(2)})
    first, second = load_inputs(tmp_path / "in.npz", {}, 2)
    assert first["n"] == 7
    assert type(first["n"]) is int
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 0], [1, 1])


def test_help_shows_the_kernel_s_options() -> None:
    """`gk simulate --help` is the kernel command's help."""
    result = run("--help")
    assert result.exit_code == 0
    assert "FILE.py:function" in result.output
    assert "--inputs" in result.output


def test_a_kernel_must_be_named() -> None:
    """No arguments at all."""
    assert run().exit_code == 2
