"""The signature table: literal entries, and a check that the simulator's functions agree."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest

from gk_kernels.simulator import simulated_nki
from gk_kernels.simulator.ops import Op
from gk_kernels.simulator.subset.signatures import (
    ENUM_MEMBERS,
    FUNCTIONS,
    OTHER_NAMES,
    TENSOR_ATTRIBUTES,
    TENSOR_METHODS,
    TILE_SIZE_NAMES,
    Signature,
)

# Documented, and refused by the simulator with a message of its own or left out; ReplicaGroup's constructor is not.
NOT_SIMULATED = {
    "nki.collectives": {
        "ReplicaGroup",
        "all_gather_v",
        "all_to_all_v",
        "collective_permute",
        "collective_permute_implicit",
        "collective_permute_implicit_reduce",
        "collective_permute_implicit_current_processing_rank_id",
    },
    # Small wrappers of nki.language over nki.isa that no kernel here or in AWS's library calls.
    "nki.language": {
        "ceil",
        "cos",
        "dropout",
        "floor",
        "fmod",
        "gather_flattened",
        "mod",
        "rand",
        "random_seed",
        "rms_norm",
        "tan",
        "trunc",
        "var",
    },
}


def load(module: str) -> ModuleType:
    """A module of the simulator under its nki name."""
    with simulated_nki():
        return importlib.import_module(module)


def default_value(text: str, module: ModuleType) -> Any:
    """What a default's source text means in a module; enums by their home, operators by nki.language."""
    names = {**vars(load("nki.language")), **vars(module)}
    return eval(text, {"__builtins__": {}}, names)


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """A function's parameters; an operator's are those of its form for tiles."""
    if isinstance(function, Op):
        assert function.tile is not None
        return list(inspect.signature(function.tile).parameters.values())[1:]
    return list(inspect.signature(function).parameters.values())


def differences(signature: Signature, function: Any, module: ModuleType) -> list[str]:
    """Where a function's own signature departs from the recorded one."""
    own = [p for p in parameters_of(function) if p.name != "self"]
    if tuple(p.name for p in own) != signature.names:
        return [f"{signature} has {', '.join(p.name for p in own)}"]
    found = []
    for recorded, parameter in zip(signature.parameters, own, strict=True):
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            found.append(f"{signature.name}.{recorded.name} is {parameter.kind.description}")
        if recorded.required != (parameter.default is parameter.empty):
            found.append(f"{signature.name}.{recorded.name} default {parameter.default!r}")
        elif recorded.default is not None and recorded.default != "...":
            want = default_value(recorded.default, module)
            if parameter.default is not want and parameter.default != want:
                found.append(f"{signature.name}.{recorded.name} is {parameter.default!r}, not {want!r}")
    return found


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


@pytest.mark.parametrize("module_name", ["nki.language", "nki.isa", "nki.collectives"])
def test_the_simulator_has_exactly_these_signatures(module_name: str) -> None:
    """Every recorded function exists with the same parameters, order and defaults."""
    module = load(module_name)
    found: list[str] = []
    for name, signature in FUNCTIONS[module_name].items():
        if name in NOT_SIMULATED.get(module_name, ()):
            continue
        function = getattr(module, name, None)
        found += [f"{name} is missing"] if function is None else differences(signature, function, module)
    assert found == []


def test_the_simulator_s_tensor_has_exactly_these_methods() -> None:
    """View methods and attributes of NkiTensor."""
    language = load("nki.language")
    found: list[str] = []
    for name, signature in TENSOR_METHODS.items():
        found += differences(signature, getattr(language.NkiTensor, name), language)
    assert found == []


def test_the_simulator_has_every_enum_member_and_name() -> None:
    """Enums, dtypes, buffers and tile sizes."""
    isa, language = load("nki.isa"), load("nki.language")
    for enum, members in ENUM_MEMBERS.items():
        assert [member.name for member in getattr(isa, enum)] == list(members)
    assert [n for n in sorted(OTHER_NAMES["nki.language"]) if not hasattr(language, n)] == []
    assert [n for n in sorted(OTHER_NAMES["nki.isa"]) if not hasattr(isa, n)] == []


def test_the_checker_knows_the_tile_sizes_and_attributes_of_the_simulator() -> None:
    """tile_size and NkiTensor offer what the table lists."""
    language = load("nki.language")
    assert [
        n
        for n in sorted(TILE_SIZE_NAMES)
        if not hasattr(type(language.tile_size), n) and n not in dir(language.tile_size)
    ] == []
    names = TENSOR_ATTRIBUTES - {"reinterpret_cast"}
    assert [n for n in sorted(names) if n not in dir(language.NkiTensor)] == []
