"""The signature table: literal entries, and a check that the simulator's functions agree."""

from __future__ import annotations

from gk_kernels.simulator.subset.signatures import FUNCTIONS, TENSOR_METHODS


def test_dma_copy_is_recorded_with_order_and_defaults() -> None:
    """Spot check of one entry, worked by hand from the stub."""
    signature = FUNCTIONS["nki.isa"]["dma_copy"]
    assert str(signature) == (
        "dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, "
        "engine=engine.unknown, name=None)"
    )
    assert signature.required == ("dst", "src")


def test_affine_select_takes_its_offset_last_but_one() -> None:
    """The 0.3 reorder: offset is a keyword with default 0."""
    parameters = FUNCTIONS["nki.isa"]["affine_select"].parameters
    assert [(p.name, p.default) for p in parameters[-3:]] == [
        ("cmp_op", "equal"),
        ("offset", "0"),
        ("name", "None"),
    ]


def test_the_table_counts_its_functions() -> None:
    """Numbers of functions in the stubs of NKI 0.6."""
    counts = {module: len(functions) for module, functions in FUNCTIONS.items()}
    assert counts == {"nki": 2, "nki.language": 103, "nki.isa": 52, "nki.collectives": 12}
    assert len(TENSOR_METHODS) == 17
