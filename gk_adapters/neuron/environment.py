"""What the machine and its environment variables say: devices, target, and the one logical NeuronCore config (lnc).

Everything that depends on lnc (the kernel's grid, the compiler's option, the contract) reads it here and nowhere else.

Sources: aws-neuron-sdk documents "Logical NeuronCore configuration" (the runtime variable, the compiler's options and
that the two may not differ) and "Using Logical NeuronCores (LNC) with NKI" (degree 1 or 2; a kernel's degree must
match the graph's).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from gk_core.errors import LayoutError, UnsupportedError

__all__ = [
    "CC_FLAGS",
    "LNC",
    "Machine",
    "compiler_lnc",
    "environment_problems",
    "examine_machine",
    "logical_cores",
    "require_gk_lnc",
]

LNC = "NEURON_LOGICAL_NC_CONFIG"
CC_FLAGS = "NEURON_CC_FLAGS"
_TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
_EFA_SHM = "FI_EFA_ENABLE_SHM_TRANSFER"
_LNC_OPTIONS = ("--logical-nc-config", "--lnc", "-lnc")
_DEGREES = (1, 2)


@frozen(kw_only=True)
class Machine:
    """What this machine offers.

    Attributes:
        num_devices: Neuron devices that the driver shows.
        target: "trn2", "trn3" or another family's name; None when nothing says.
    """

    num_devices: int
    target: str | None


def examine_machine(environ: Mapping[str, str], *, root: Path = Path("/")) -> Machine:
    """Look for the driver's device files and for the instance's family.

    Args:
        root: of the file system looked at.
    """
    devices = [p for p in (root / "dev").glob("neuron*") if re.fullmatch(r"neuron\d+", p.name)]
    target = environ.get(_TARGET)
    if not target:
        product = root / "sys/devices/virtual/dmi/id/product_name"
        name = product.read_text(errors="replace").strip() if product.is_file() else ""
        target = name.partition(".")[0][:4] if re.match(r"(trn|inf)\d", name) else None
    return Machine(num_devices=len(devices), target=target)


def logical_cores(environ: Mapping[str, str]) -> int | None:
    """The runtime's lnc; None where the variable is not set.

    Raises:
        LayoutError: neither 1 nor 2.
    """
    text = environ.get(LNC)
    return None if text is None else _degree(text, LNC)


def compiler_lnc(flags: str) -> int | None:
    """lnc among compiler flags; None where they do not say.

    >>> compiler_lnc("--target trn3 --lnc=1"), compiler_lnc("-lnc 2"), compiler_lnc("-O1")
    (1, 2, None)

    Raises:
        LayoutError: a degree that is neither 1 nor 2, or two that differ.
    """
    words = shlex.split(flags)
    found = set()
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _LNC_OPTIONS:
            found.add(_degree(value if equals else words[i + 1] if i + 1 < len(words) else "", name))
    if len(found) > 1:
        raise LayoutError(f"compiler flags give lnc {sorted(found)}; give one")
    return found.pop() if found else None


def require_gk_lnc(environ: Mapping[str, str]) -> int:
    """The lnc that this process runs at, which must be said and must be 1.

    Raises:
        LayoutError: runtime and compiler differ, or a value that is no degree.
        UnsupportedError: not said, or not 1. Unset is refused because newer targets default to 2.
    """
    runtime, compiler = logical_cores(environ), compiler_lnc(environ.get(CC_FLAGS, ""))
    if runtime is not None and compiler is not None and runtime != compiler:
        raise LayoutError(f"{LNC} is {runtime} but {CC_FLAGS} compiles for lnc {compiler}; they must not differ")
    if runtime is None:
        raise UnsupportedError(f"{LNC} is not set and the device's default may be 2; export {LNC}=1")
    if runtime != 1:
        raise UnsupportedError(f"the giga kernel is built for lnc 1, {LNC} is {runtime}; export {LNC}=1")
    return runtime


def environment_problems(environ: Mapping[str, str], machine: Machine) -> tuple[str, ...]:
    """Every reason why this environment would not launch the kernel as it should; none on a machine without devices."""
    if not machine.num_devices:
        return ()
    problems = []
    try:
        require_gk_lnc(environ)
    except (LayoutError, UnsupportedError) as error:
        problems.append(str(error))
    if machine.target not in ("trn2", "trn3"):
        problems.append(f"the giga kernel is built for trn2 and trn3, this machine says {machine.target}")
    if environ.get(_EFA_SHM) != "0":
        problems.append(f"two engines on one node that move KV over EFA need {_EFA_SHM}=0, or bytes come out wrong")
    return tuple(problems)


def _degree(text: str, name: str) -> int:
    if text not in [str(d) for d in _DEGREES]:
        raise LayoutError(f"{name} must be 1 or 2, got {text!r}")
    return int(text)
