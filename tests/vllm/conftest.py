"""Shared by the vLLM tests: a BF16 copy of the shipped checkpoint, and one deployment of real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.deployment import Deployment, running_deployment

SHIPPED = Path(__file__).resolve().parents[2] / "models" / "tiny-recall"


@pytest.fixture(scope="session")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped checkpoint with its experts written out; vLLM on a CPU has no MXFP4 path."""
    from tools.dequantize_checkpoint import dequantize_checkpoint

    out = tmp_path_factory.mktemp("checkpoint") / "tiny-recall-bf16"
    dequantize_checkpoint(SHIPPED, out)
    return out


@pytest.fixture(scope="session")
def deployment(bf16_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A native prefill server, a giga-kernel decode server and the proxy, started once."""
    with running_deployment(bf16_checkpoint, tmp_path_factory.mktemp("servers")) as running:
        yield running
