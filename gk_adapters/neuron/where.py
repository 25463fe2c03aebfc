"""Where the giga kernel runs: on a Neuron device if this machine has one and the SDK, else in our simulator.

Standard library only, nothing is imported: a placeholder of a package's name counts as absent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from attrs import field, frozen

from gk_adapters.neuron.environment import examine_machine
from gk_adapters.neuron.packages import NEURON, PackageState, examine_package
from gk_core.errors import MissingDependencyError, UnsupportedError

__all__ = ["Site", "Where", "choose_where"]

_NEEDED = ("nki", "torch-neuronx")


class Where(Enum):
    """What runs the giga kernel; AUTO takes the device where it can."""

    AUTO = "auto"
    SIMULATOR = "simulator"
    DEVICE = "device"


@frozen(kw_only=True)
class Site:
    """The machine that is looked at; this one by default.

    Attributes:
        environ: environment variables.
        search_path: where distributions are looked for; None: this interpreter's.
        root: of the file system whose devices are looked at.
    """

    environ: Mapping[str, str] = field(factory=lambda: os.environ)
    search_path: Sequence[str] | None = None
    root: Path = Path("/")


def choose_where(wanted: Where, site: Site) -> Where:
    """SIMULATOR or DEVICE.

    Raises:
        MissingDependencyError: the device is asked for, but a package is missing, a placeholder or too old.
        UnsupportedError: the device is asked for, and the packages are there, but no device.
    """
    if wanted is Where.SIMULATOR:
        return Where.SIMULATOR
    packages = [examine_package(w, search_path=site.search_path) for w in NEURON if w.name in _NEEDED]
    gaps = [f"{p.name} is {p.state.value}" for p in packages if p.state is not PackageState.INSTALLED]
    devices = examine_machine(site.environ, root=site.root).num_devices
    if not gaps and devices:
        return Where.DEVICE
    if wanted is Where.AUTO:
        return Where.SIMULATOR
    if gaps:
        raise MissingDependencyError(
            f"the giga kernel cannot run on a device here: {', '.join(gaps)}; install the Neuron SDK's packages from "
            "its own index, then pip install 'gk-decode[neuron]'; see gk doctor"
        )
    raise UnsupportedError("the giga kernel cannot run on a device here: no Neuron device; use the simulator")
