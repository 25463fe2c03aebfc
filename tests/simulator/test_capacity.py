"""SBUF and PSUM by lifetimes, explicit addresses, and poison of fresh memory."""

from __future__ import annotations

import linecache
from typing import Any

import numpy as np
import pytest

from gk_kernels.simulator import CapacityError, PoisonError, simulate
from gk_kernels.simulator import isa as nisa
from gk_kernels.simulator import language as nl
from tests.simulator.support import empty, filled

KIB = 1024


def tile_of(kib: int) -> Any:
    """A [2, ...] bfloat16 tile of so many KiB per partition."""
    return nl.ndarray((2, kib * 512), nl.bfloat16)


def alive_together(*sizes: int) -> Any:
    """Tiles that are all written before the first is read again."""

    def kernel() -> None:
        tiles = [tile_of(kib) for kib in sizes]
        for tile in tiles:
            nisa.memset(tile, 0.0)
        for tile in tiles:
            nisa.tensor_copy(tile[:, 0:1], tile[:, 1:2])

    return kernel


def one_after_the_other(*sizes: int) -> Any:
    """Tiles each of which is done with before the next is written."""

    def kernel() -> None:
        for kib in sizes:
            nisa.memset(tile_of(kib), 0.0)

    return kernel


@pytest.mark.parametrize(("target", "usable"), [("trn2", 208), ("trn3", 240)])
def test_the_usable_size_fits_and_one_byte_more_does_not(target: str, usable: int) -> None:
    """208 KiB per partition on trn2, 240 on trn3."""
    fits = simulate(alive_together(usable - 100, 100), target=target)
    assert fits.peaks[0][0].bytes_per_partition == usable * KIB
    with pytest.raises(CapacityError, match=f"{usable * KIB} usable bytes per partition") as caught:
        simulate(alive_together(usable - 100, 101), target=target)
    assert f"{(usable + 1) * KIB} bytes per partition alive at once" in caught.value.got
    path, line = caught.value.site.split(" in ")[0].rsplit(":", 1)
    assert "nl.ndarray((2, kib * 512)" in linecache.getline(path, int(line))


def test_capacity_goes_by_lifetimes() -> None:
    """Three tiles of 100 KiB, one after the other: the peak is one, side by side it is three."""
    peak = simulate(one_after_the_other(100, 100, 100)).peaks[0][0]
    assert peak.bytes_per_partition == 100 * KIB
    assert peak.no_reuse_bytes_per_partition == 300 * KIB


def test_a_second_destination_lives_from_when_it_is_written() -> None:
    """The scales of quantize_mx (100 bytes) are alive under a tile (1000 bytes) written before they are used."""

    def kernel() -> None:
        packed, scale = nl.ndarray((32, 100), nl.float8_e4m3fn_x4), nl.ndarray((4, 100), nl.uint8)
        nisa.quantize_mx(packed, filled(32, 400, dtype=nl.bfloat16), scale)
        nisa.memset(packed[0:32, 0:1], 0)
        nisa.memset(nl.ndarray((4, 500), nl.bfloat16), 0.0)
        nisa.tensor_copy(nl.ndarray((4, 100), nl.uint8), scale)

    lives = {life.row_bytes: life for life in simulate(kernel).peaks[0][0].lives}
    assert simulate(kernel).peaks[0][0].bytes_per_partition == 800 + 400 + 100
    assert lives[100].first == 2


def test_capacity_can_be_only_noted() -> None:
    """capacity="warn"."""
    result = simulate(alive_together(200, 100), capacity="warn")
    assert "SBUF capacity on trn3" in result.warnings[0]
    assert result.peaks[0][0].bytes_per_partition == 300 * KIB


def test_a_trace_measures_the_same() -> None:
    """Lifetimes need no data."""
    for kernel in (alive_together(60, 70), one_after_the_other(60, 70)):
        traced, run = simulate(kernel, trace=True).peaks[0][0], simulate(kernel).peaks[0][0]
        assert traced.bytes_per_partition == run.bytes_per_partition
        assert traced.tensors == run.tensors


def test_psum_is_counted_in_whole_banks() -> None:
    """Eight small tensors fill PSUM; nine do not fit."""

    def make(count: int) -> Any:
        def kernel() -> None:
            tiles = [nl.ndarray((2, 3), nl.float32, nl.psum) for _ in range(count)]
            for tile in tiles:
                nisa.memset(tile, 0.0)
            for tile in tiles:
                nisa.tensor_copy(empty(2, 3), tile)

        return kernel

    assert simulate(make(8)).peaks[0][1].banks == 8
    with pytest.raises(CapacityError, match="9 banks alive at once"):
        simulate(make(9))


def test_tensors_with_addresses_must_not_overlap_while_alive() -> None:
    """Bytes 0 to 399 and 396 to 795 of the same partitions."""

    def make(start: int, partition: int, sequential: bool) -> Any:
        def kernel() -> None:
            a = nl.ndarray((32, 100), nl.float32, address=(0, 0))
            b = nl.ndarray((32, 100), nl.float32, address=(partition, start))
            nisa.memset(a, 0.0)
            if sequential:
                nisa.tensor_copy(filled(32, 100), a)
            nisa.memset(b, 0.0)
            if not sequential:
                nisa.tensor_copy(filled(32, 100), a)
            nisa.tensor_copy(filled(32, 100), b)

        return kernel

    simulate(make(400, 0, False))
    simulate(make(396, 32, False), capacity="error")
    simulate(make(396, 0, True))
    with pytest.raises(CapacityError, match="two sbuf tensors with explicit addresses are alive at once"):
        simulate(make(396, 0, False))


def test_overlaps_can_be_only_noted() -> None:
    """capacity="warn"."""

    def kernel() -> None:
        tiles = [nl.ndarray((2, 4), nl.float32, address=(0, 0)) for _ in range(2)]
        for tile in (*tiles, *tiles):
            nisa.memset(tile, 0.0)

    assert "explicit addresses" in simulate(kernel, capacity="warn").warnings[0]


def test_an_address_places_the_start_partition() -> None:
    """A tensor at partition 32 starts there, so two inputs may disagree."""

    def kernel() -> None:
        a = nl.ndarray((32, 4), nl.float32, address=(32, 0))
        nisa.memset(a, 0.0)
        nisa.tensor_tensor(empty(32, 4), a, filled(32, 4), nl.add)

    with pytest.raises(Exception, match="32 and 0; limit: two SBUF inputs start on the same partition"):
        simulate(kernel)


def test_poison_can_be_nan_instead_of_an_error() -> None:
    """Floats read as NaN, and the read is noted with the allocation's line."""

    def kernel() -> Any:
        tile = empty(1, 3)
        nisa.memset(tile[:, 0:1], 2.0)
        nisa.tensor_scalar(tile, tile, nl.multiply, 3.0)
        out = nl.ndarray((1, 3), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    result = simulate(kernel, poison="nan")
    assert result.output[0, 0] == 6.0
    assert np.isnan(result.output[0, 1:]).all()
    assert "read of never-written bytes: got 2 of 3 elements" in result.warnings[0]
    with pytest.raises(PoisonError, match=r"allocated at .*support.py"):
        simulate(kernel)


def test_an_output_that_is_not_fully_written_is_refused() -> None:
    """Half of the rows."""

    def kernel() -> Any:
        out = nl.ndarray((2, 3), nl.float32, nl.shared_hbm)
        nisa.dma_copy(out[0:1], filled(1, 3))
        return out

    with pytest.raises(PoisonError, match="3 of 6 elements") as caught:
        simulate(kernel)
    assert "in kernel" in caught.value.site


def test_a_tile_filled_piece_by_piece_is_whole() -> None:
    """The marks go when the last byte is written, in any order and dtype."""

    def kernel() -> None:
        tile = empty(4, 6)
        for column in (5, 0, 3):
            nisa.memset(tile[:, column : column + 1], 0.0)
        rest = tile.view(nl.bfloat16)
        for first in (2, 8):
            nisa.memset(rest[:, first : first + 4 if first == 2 else first + 2], 0.0)
        nisa.tensor_copy(empty(4, 6), tile)
        assert tile.storage.unwritten is None

    simulate(kernel)
