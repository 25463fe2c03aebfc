"""Collectives over ranks, a device-side loop and GpSimd's compaction in the library's kernels, unmodified."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from tests.simulator.conformance import references as ref
from tests.simulator.conformance.harness import Library, assert_within
from tests.simulator.conformance.references import BF16


@pytest.mark.parametrize(("kernel", "rows"), [("allgather_sb2sb", 96), ("allgather_sb2sb_tiled", 256)])
def test_sb2sb_allgather_concatenates_columns_of_all_ranks(library: Library, kernel: str, rows: int) -> None:
    """Four ranks, SBUF to SBUF, along the free dimension."""
    rng = np.random.default_rng(13)
    ranks, width = 4, 24
    parts = [rng.standard_normal((rows, width)).astype(np.float32) for _ in range(ranks)]
    group = importlib.import_module("nki.collectives").ReplicaGroup((tuple(range(ranks)),))
    spec = f"experimental.collectives.sb2sb_allgather:{kernel}"
    outputs = library.run_ranks(spec, [(part, group, ranks) for part in parts])
    for output in outputs:
        np.testing.assert_array_equal(output, np.concatenate(parts, axis=1))


def test_dynamic_elementwise_add_stops_where_its_input_says(library: Library) -> None:
    """A loop whose length is a tensor's value: two of three row tiles."""
    rng = np.random.default_rng(14)
    a, b = (rng.standard_normal((384, 512)).astype(BF16) for _ in range(2))
    (out,) = library.run(
        "experimental.dynamic_shapes.dynamic_elementwise_add:dynamic_elementwise_add",
        input_a=a,
        input_b=b,
        num_m_tiles=np.array([[2]], np.int32),
        poison="nan",  # the third tile is left unwritten on purpose
    )
    assert_within(out[:256], ref.wide(a[:256]) + ref.wide(b[:256]), rtol=1e-2, atol=1e-3)


def test_find_nonzero_indices_compacts_each_column(library: Library) -> None:
    """Row numbers of the nonzero elements, then -1, and how many; two cores over columns."""
    rng = np.random.default_rng(15)
    x = (rng.random((256, 16)) < 0.3).astype(np.float32)
    indices, counts = library.run(
        "core.subkernels.find_nonzero_indices:find_nonzero_indices",
        input_tensor=x,
        chunk_size=128,
        poison="nan",  # it transposes a whole tile of which it wrote the columns it has
        lnc=2,
    )
    for column in range(16):
        rows = np.flatnonzero(x[:, column])
        want = np.full(256, -1)
        want[: len(rows)] = rows
        np.testing.assert_array_equal(indices[column], want)
        assert counts.reshape(-1)[column] == len(rows)
