"""The made-up small checkpoint: whole, the same each time, and a model that transformers runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from gk_adapters.hf_checkpoint import HFCheckpoint
from gk_adapters.hf_config import read_hf_config
from gk_adapters.random_checkpoint import SMALL, write_random_checkpoint


def test_a_random_checkpoint_reads_back_as_the_geometry_it_was_made_of(tmp_path: Path) -> None:
    """Every tensor is there, with the spread of its kind."""
    write_random_checkpoint(tmp_path / "a")
    assert read_hf_config(tmp_path / "a").geometry == SMALL
    read = HFCheckpoint(tmp_path / "a")
    assert len(read.tensors()) == 4 * 17 + 3
    norm = np.asarray(read.read(name="model.norm.weight")).astype(np.float32)
    assert (norm.mean(), norm.std()) == (pytest.approx(1, abs=0.05), pytest.approx(0.1, abs=0.03))
    heads = np.asarray(read.read(name="lm_head.weight")).astype(np.float32)
    assert (heads.mean(), heads.std()) == (pytest.approx(0, abs=0.005), pytest.approx(0.15, abs=0.005))


def test_the_same_seed_is_the_same_file(tmp_path: Path) -> None:
    """And another seed is another."""
    small = evolve(SMALL, vocab_size=64)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_checkpoint(tmp_path / name, small, seed=seed)
    a, b, c = (next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "abc")
    assert a == b
    assert a != c
