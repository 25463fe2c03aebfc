"""On a Neuron device, with the SDK: the launch for real. Skipped elsewhere; nobody has run it yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from gk_adapters.neuron.environment import examine_machine
from gk_adapters.neuron.holder import GigaModelHolder
from gk_adapters.neuron.launch import load_wrap_nki
from gk_core.errors import MissingDependencyError, UnsupportedError
from gk_core.kv_spec import KVDtype, honest_specs
from tests.neuron.stand_ins import control_of
from tests.neuron.test_launch import World

pytestmark = pytest.mark.neuron
DEVICE = os.environ.get("GK_NEURON_DEVICE", "neuron:0")
TOLERANCE = 2e-2
"""Of the largest hidden value: the device multiplies in bfloat16 where the torch kernel has float32."""


@pytest.fixture
def wrap_nki() -> Any:
    if not examine_machine(os.environ).num_devices:
        pytest.skip("no Neuron device")
    try:
        return load_wrap_nki()
    except (MissingDependencyError, UnsupportedError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_on_the_device_equals_the_torch_kernels(tmp_path: Path, wrap_nki: Any, compiled: bool) -> None:
    """One active row of a two-layer model, FP8 cache, packed K: hidden states, and every other byte untouched."""
    world = World(tmp_path, wrap=wrap_nki, environ=dict(os.environ))
    specs = honest_specs(world.kernel.geometry, tp_size=1, block_size=128, dtype=KVDtype.FP8_E4M3FN)
    holder = GigaModelHolder(contract=world.contract, specs=specs, kernel=world.kernel)
    holder.load_weights(world.stacks.items(), device=DEVICE)
    before = [b.clone() for b in world.engines.buffers]
    buffers = [b.to(DEVICE) for b in before]
    holder.set_kv_cache_buffers(buffers)
    call = evolve(world.call())
    control = {n: getattr(call.control, n).to(DEVICE) for n in control_of(world.contract)}
    step: Any = torch.compile(holder, backend="neuron") if compiled else holder
    found = step(call.hidden.to(DEVICE), **control).cpu()[0]
    wanted = world.engines.kernel.step(call=call)[0]
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE
    for now, old, theirs in zip(buffers, before, world.engines.buffers, strict=True):
        changed = now.cpu().view(torch.uint8) != old.view(torch.uint8)
        allowed = theirs.view(torch.uint8) != old.view(torch.uint8)
        assert not bool((changed & ~allowed).any())
