"""Device or simulator: by what is installed and what the machine has; the device's path run over stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attrs import evolve

from gk_adapters.neuron.device_kernel import CacheMirror, DeviceDecodeKernel
from gk_adapters.neuron.where import Site, Where, choose_where
from gk_adapters.nki_kernel import NkiDecodeKernel, NkiKernelFactory, giga_kernel
from gk_adapters.torch_kv import allocate_group_buffers, per_buffer_kv
from gk_core.block_table import PAD_SLOT_ID
from gk_core.errors import LayoutError, MissingDependencyError, UnsupportedError
from gk_core.kernel_contract import PerBufferKV, StackedKV
from gk_core.kv_layout import KByteOrder
from gk_core.kv_spec import KVDtype
from gk_kernels.simulator import language
from gk_kernels.simulator.install import real_nki_present, simulated_nki
from tests.hf_models import make_hf_checkpoint
from tests.neuron.stand_ins import WrapNki
from tests.torch_engines import TorchEngines, make_engines, make_tables

LNC1 = {"NEURON_LOGICAL_NC_CONFIG": "1"}


def install(site: Path, name: str, version: str, files: tuple[str, ...] = ("__init__.py", "more.py")) -> None:
    """A distribution's metadata, as an installer leaves it."""
    folder = name.replace("-", "_")
    info = site / f"{folder}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n")
    (info / "RECORD").write_text("".join(f"{folder}/{f},,\n" for f in files))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Both packages, real by version, and one device on a Trn3 instance."""
    packages, root = tmp_path / "packages", tmp_path / "root"
    install(packages, "nki", "0.6.0")
    install(packages, "torch-neuronx", "2.8.0")
    (root / "dev").mkdir(parents=True)
    (root / "dev" / "neuron0").touch()
    product = root / "sys/devices/virtual/dmi/id"
    product.mkdir(parents=True)
    (product / "product_name").write_text("trn3.48xlarge\n")
    return Site(environ=LNC1, search_path=[str(packages)], root=root)


def test_packages_and_a_device_make_it_the_device(site: Site, tmp_path: Path) -> None:
    """AUTO takes what is there; by force either."""
    assert choose_where(Where.AUTO, site) is Where.DEVICE
    assert choose_where(Where.DEVICE, site) is Where.DEVICE
    assert choose_where(Where.SIMULATOR, site) is Where.SIMULATOR
    assert choose_where(Where.AUTO, Site(environ={}, search_path=[], root=tmp_path)) is Where.SIMULATOR


@pytest.mark.parametrize(
    ("name", "version", "files", "said"),
    [
        ("nki", "0.0.1", ("__init__.py",), "nki is placeholder"),
        ("nki", "0.5.9", ("__init__.py", "more.py"), "nki is too old"),
        ("torch-neuronx", "1.0", ("__init__.py",), "torch-neuronx is placeholder"),
        ("torch-neuronx", "2.6.9", ("__init__.py", "more.py"), "torch-neuronx is too old"),
    ],
)
def test_a_placeholder_or_an_old_release_is_no_device(
    site: Site, tmp_path: Path, name: str, version: str, files: tuple[str, ...], said: str
) -> None:
    """AUTO goes to the simulator; force says what to install."""
    others = {"nki": "0.6.0", "torch-neuronx": "2.8.0"}
    folder = tmp_path / "mixed"
    for other in others.keys() - {name}:
        install(folder, other, others[other])
    install(folder, name, version, files)
    mixed = evolve(site, search_path=[str(folder)])
    assert choose_where(Where.AUTO, mixed) is Where.SIMULATOR
    with pytest.raises(MissingDependencyError, match=f"{said}; install the Neuron SDK's packages"):
        choose_where(Where.DEVICE, mixed)


def test_packages_without_a_device_are_refused_by_force(site: Site, tmp_path: Path) -> None:
    """The SDK on a machine that only compiles."""
    lonely = evolve(site, root=tmp_path / "nothing")
    assert choose_where(Where.AUTO, lonely) is Where.SIMULATOR
    with pytest.raises(UnsupportedError, match="no Neuron device; use the simulator"):
        choose_where(Where.DEVICE, lonely)


class World:
    """A random two-layer model over packed FP8; buffers with a scratch block; one row at 140, one idle, one at 17."""

    def __init__(self, path: Path) -> None:
        make_hf_checkpoint(path, num_hidden_layers=2)
        from gk_adapters.torch_model import load_torch_model

        self.path, self.model = path, load_torch_model(path)
        self.engines = self._engines()
        layout = evolve(self.engines.layout, num_blocks=self.engines.layout.num_blocks + 1)
        self.contract = evolve(self.engines.kernel.contract, layout=layout)
        self.buffers = allocate_group_buffers(layout)
        for whole, part in zip(self.buffers, self.engines.buffers, strict=True):
            whole.view(torch.uint8)[:, :-1] = part.view(torch.uint8)
        control = self.engines.control([(140, self.tables[0]), None, (17, self.tables[1])])
        self.theirs = self.engines.builder.build(token_ids=(9, 0, 7), control=control)
        self.call = evolve(self.theirs, per_buffer_kv=per_buffer_kv(self.buffers, layout))

    def _engines(self) -> TorchEngines:
        engines = make_engines(
            self.model, dtype=KVDtype.FP8_E4M3FN, k_byte_order=KByteOrder.PAIR_PACKED, max_model_len=256, num_blocks=9,
            num_rows=3,
        )  # fmt: skip
        self.tables = make_tables(engines, 2, 256)
        for length, table in zip((140, 17), self.tables, strict=True):
            engines.prefill_logits([3 + i % 90 for i in range(length)], 0, table)
        return engines

    def check(self, found: torch.Tensor) -> None:
        """Hidden states to 1e-5 of the torch kernel's, idle row zero, and its bytes in the engine's blocks."""
        before = [b.view(torch.uint8).clone() for b in self.engines.buffers]
        wanted = self.engines.kernel.step(call=self.theirs)
        assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-5
        assert not found[1].any()
        for mine, other, old in zip(self.buffers, self.engines.buffers, before, strict=True):
            changed = other.view(torch.uint8) != old
            ours = mine.view(torch.uint8)[:, :-1]
            assert changed.any()
            assert torch.equal(ours[~changed], old[~changed])
            assert float((mine[:, :-1].float() - other.float()).abs().max()) <= 0.07 * float(other.float().abs().max())


@pytest.fixture
def torch_neuronx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in wrapper under the package's name."""
    if real_nki_present():
        pytest.skip("the kernel is bound to the real nki here; test_device.py launches it")
    package = ModuleType("torch_neuronx")
    package.wrap_nki = WrapNki  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_neuronx", package)


@pytest.mark.usefixtures("torch_neuronx")
def test_with_the_sdk_the_adapter_launches_through_torch(site: Site, tmp_path: Path) -> None:
    """The stand-in runs what a device would be given; the caches are the kernel's own operands."""
    world = World(tmp_path / "model")
    factory = NkiKernelFactory(checkpoint=world.path, site=site, device="cpu")
    kernel = factory(world.contract, world.model, 1)
    assert isinstance(kernel, DeviceDecodeKernel)
    assert kernel.label == factory.label == "nki on a device"
    assert kernel.kernel.build.target == "trn3"
    world.check(kernel.step(call=world.call))


@pytest.mark.usefixtures("torch_neuronx")
def test_caches_elsewhere_are_mirrored_block_by_block(site: Site, tmp_path: Path) -> None:
    """What a step reads goes there, what it wrote comes back, and nothing else: other blocks change meanwhile."""
    world = World(tmp_path / "model")
    direct = NkiKernelFactory(checkpoint=world.path, site=site, device="cpu")(world.contract, world.model, 1)
    assert isinstance(direct, DeviceDecodeKernel)
    stacks = {name: t.numpy() for name, t in direct._stacks.items()}
    kernel = DeviceDecodeKernel(kernel=direct.kernel, stacks=stacks, device="cpu", mirror=True)
    world.check(kernel.step(call=world.call))
    # The next step sees bytes that arrived in the engine's memory after the first one.
    for buffer in world.buffers:
        buffer.view(torch.uint8)[:, int(world.tables[0].full.block_ids[0])] = 0x30
    once, again = kernel.step(call=world.call), direct.step(call=world.call)
    assert torch.equal(once, again)


def test_the_mirror_copies_named_blocks_only() -> None:
    """Blocks 2 and 0 go there; block 1 comes back."""
    kv = PerBufferKV(k=(torch.arange(12.0).view(3, 2, 2),), v=(torch.arange(100.0, 112.0).view(3, 2, 2),))
    mirror = CacheMirror(torch.device("cpu"))
    there = mirror.bring(kv, torch.tensor([2, 0]))
    assert there.k[0][:, 0, 0].tolist() == [0.0, 0.0, 8.0]
    assert there.v[0][:, 0, 0].tolist() == [100.0, 0.0, 108.0]
    there.k[0].fill_(-1.0)
    there.v[0].fill_(-2.0)
    mirror.take_back(kv, torch.tensor([1]))
    assert kv.k[0][:, 0, 0].tolist() == [0.0, -1.0, 8.0]
    assert kv.v[0][:, 0, 0].tolist() == [100.0, -2.0, 108.0]


@pytest.mark.usefixtures("torch_neuronx")
def test_what_a_device_is_not_launched_with(site: Site, tmp_path: Path) -> None:
    """Stacked caches, a table that names scratch, another lnc; a step of idle rows launches nothing."""
    world = World(tmp_path / "model")
    factory = NkiKernelFactory(checkpoint=world.path, site=site, device="cpu")
    kernel = factory(world.contract, world.model, 1)
    kv = world.call.per_buffer_kv
    assert kv is not None
    stacked = StackedKV(k=kv.k[0][None], v=kv.v[0][None])
    with pytest.raises(LayoutError, match="per-buffer"):
        kernel.step(call=evolve(world.call, per_buffer_kv=None, stacked_kv=stacked))
    control = world.call.control
    table = control.block_table.clone()
    table[0, 0] = 9
    with pytest.raises(LayoutError, match="9"):
        kernel.step(call=evolve(world.call, control=evolve(control, block_table=table)))
    idle = evolve(
        control, active=torch.zeros_like(control.active),
        update_index=torch.full_like(control.update_index, PAD_SLOT_ID),
        update_index_swa=torch.full_like(control.update_index_swa, PAD_SLOT_ID),
    )  # fmt: skip
    assert not kernel.step(call=evolve(world.call, control=idle)).any()
    with pytest.raises(UnsupportedError, match="export NEURON_LOGICAL_NC_CONFIG=1"):
        evolve(factory, site=evolve(site, environ={}))(world.contract, world.model, 1)


def test_the_simulator_by_force_stays_the_simulator(site: Site, tmp_path: Path) -> None:
    """Even where SDK and device are there."""
    make_hf_checkpoint(tmp_path / "model", num_hidden_layers=2)
    factory = NkiKernelFactory(checkpoint=tmp_path / "model", site=site, where=Where.SIMULATOR)
    assert factory.label == "nki on the simulator"
    world = World(tmp_path / "other")
    assert isinstance(evolve(factory, checkpoint=world.path)(world.contract, world.model, 1), NkiDecodeKernel)


def test_the_simulator_takes_nkis_place_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the real nki imported; afterwards it has it again."""
    real, inner = ModuleType("nki"), ModuleType("nki.language")
    real.language = inner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nki", real)
    monkeypatch.setitem(sys.modules, "nki.language", inner)
    assert real_nki_present()
    with simulated_nki() as found:
        assert found is real
    with simulated_nki(force=True) as found:
        assert found.language is language
        assert sys.modules["nki.language"] is language
    assert sys.modules["nki.language"] is inner


def test_a_kernel_loaded_for_a_device_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, one binding."""
    giga_kernel(simulated=True)
    entry = sys.modules["gk_kernels.giga_decode.entry"]
    monkeypatch.setattr(entry, "nl", ModuleType("nki.language"))
    with pytest.raises(UnsupportedError, match="another process"):
        giga_kernel(simulated=True)
