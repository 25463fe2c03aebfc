"""The kernel's sources stay inside the language that kernels are written in."""

from __future__ import annotations

from pathlib import Path

import pytest

import gk_kernels.giga_decode
from gk_kernels.simulator.subset import check_file

FOLDER = Path(gk_kernels.giga_decode.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[f.stem for f in FILES])
def test_every_file_of_the_kernel_is_inside_the_nki_subset(path: Path) -> None:
    """No violation of any rule."""
    assert [str(v) for v in check_file(path)] == []


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    """A part is at most 260 lines; the checker saw them all."""
    assert len(FILES) >= 15
    assert max(len(f.read_text().splitlines()) for f in FILES) <= 260
