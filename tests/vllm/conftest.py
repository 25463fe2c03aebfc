"""Shared by the vLLM tests: a BF16 copy of the shipped checkpoint, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny-recall"


@pytest.fixture(scope="session")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint with its experts written out; vLLM on a CPU has no MXFP4 path."""
    from tools.dequantize_checkpoint import dequantize_checkpoint

    out = tmp_path_factory.mktemp("checkpoint") / "tiny-recall-bf16"
    dequantize_checkpoint(SHIPPED, out)
    return out
