"""Checkpoint folders: lazy reads of the right bytes, and every damage refused by the name of what is damaged."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gk_adapters.hf_checkpoint import HFCheckpoint, layer_prefix, read_kv_scales, weights_id_of
from gk_core.errors import CheckpointError
from gk_core.ports import WeightInfo
from gk_core.weight_layouts import ExpertFormat
from tests.hf_models import make_hf_checkpoint, rewrite_json, to_shards
from tools.dequantize_checkpoint import dequantize_checkpoint

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
ROUTER = "model.layers.2.mlp.router.weight"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A float and an MXFP4 checkpoint in one file each, and the MXFP4 one in shards."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("bf16", "mxfp4", "shards")}
    make_hf_checkpoint(made["bf16"], mxfp4=False)
    for name in ("mxfp4", "shards"):
        make_hf_checkpoint(made[name], mxfp4=True)
    to_shards(made["shards"])
    return made


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of one of them."""

    def copy(name: str) -> Path:
        for path in originals[name].iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    return copy


def _rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def _refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        HFCheckpoint(directory)


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "shards"])
def test_every_tensor_reads_as_the_file_has_it(name: str, originals: dict[str, Path]) -> None:
    """Against the safetensors library's own reader, whole and in part."""
    checkpoint = HFCheckpoint(originals[name])
    wanted: dict[str, torch.Tensor] = {}
    for path in originals[name].glob("*.safetensors"):
        wanted |= load_file(path)
    assert checkpoint.tensors().keys() == wanted.keys()
    for key, tensor in wanted.items():
        array = checkpoint.read(name=key)
        assert not array.flags.writeable
        assert np.array_equal(array, tensor.numpy()), key
        part = checkpoint.read_slice(name=key, index=(slice(1, 3),))
        assert np.array_equal(part, tensor[1:3].numpy()), key
    assert checkpoint.config.expert_format is (ExpertFormat.BF16 if name == "bf16" else ExpertFormat.MXFP4)


def test_names_shapes_and_dtypes_are_those_of_the_public_checkpoints(originals: dict[str, Path]) -> None:
    """MXFP4 experts [E, out, in / 32, 16]; hidden 96, intermediate 64, 5 experts."""
    tensors = HFCheckpoint(originals["mxfp4"]).tensors()
    prefix = layer_prefix(3) + "mlp.experts."
    assert tensors[prefix + "gate_up_proj_blocks"] == WeightInfo(shape=(5, 128, 3, 16), dtype="uint8")
    assert tensors[prefix + "gate_up_proj_scales"] == WeightInfo(shape=(5, 128, 3), dtype="uint8")
    assert tensors[prefix + "down_proj_blocks"] == WeightInfo(shape=(5, 96, 2, 16), dtype="uint8")
    assert tensors[layer_prefix(0) + "self_attn.sinks"] == WeightInfo(shape=(6,), dtype="float32")
    assert len(tensors) == 3 + 4 * 19
    assert HFCheckpoint(originals["bf16"]).tensors()[GATE_UP] == WeightInfo(shape=(5, 96, 128), dtype="float32")


def test_bfloat16_reads_as_bfloat16(folder: Callable[[str], Path]) -> None:
    """Not as its bits."""
    directory = folder("bf16")
    wanted = load_file(directory / SINGLE)[ROUTER].bfloat16()
    _rewrite(directory, lambda t: t.update({ROUTER: wanted}))
    array = HFCheckpoint(directory).read(name=ROUTER)
    assert array.dtype == ml_dtypes.bfloat16
    assert np.array_equal(array.astype(np.float32), wanted.float().numpy())


def test_reads_are_lazy_and_copy_nothing(originals: dict[str, Path]) -> None:
    """A slice shares memory with the whole; the map is shared by all tensors of the file."""
    checkpoint = HFCheckpoint(originals["bf16"])
    assert np.shares_memory(checkpoint.read(name=GATE_UP), checkpoint.read_slice(name=GATE_UP, index=3))


def test_a_shard_is_known_by_name(originals: dict[str, Path]) -> None:
    """For readers that go file by file."""
    checkpoint = HFCheckpoint(originals["shards"])
    index = json.loads((originals["shards"] / INDEX).read_text())["weight_map"]
    assert {name: checkpoint.shard_of(name) for name in checkpoint.tensors()} == index
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.shard_of("nothing")


def test_unknown_names_and_indices_outside_are_refused(originals: dict[str, Path]) -> None:
    """By name, with the shape."""
    checkpoint = HFCheckpoint(originals["bf16"])
    with pytest.raises(CheckpointError, match=r"no tensor model\.bogus"):
        checkpoint.read(name="model.bogus")
    with pytest.raises(CheckpointError, match=r"gate_up_proj has shape \[5, 96, 128\]: .*out of bounds"):
        checkpoint.read_slice(name=GATE_UP, index=5)


def _set(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


DAMAGES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": ("bf16", lambda t: t.pop(ROUTER), f"lacks tensor {ROUTER}"),
    "missing head": ("bf16", lambda t: t.pop("lm_head.weight"), "lacks tensor lm_head.weight"),
    "extra": ("bf16", _set("model.layers.4.mlp.router.bias", torch.zeros(5)), "holds tensor model.layers.4.mlp.router"),
    "dtype": ("bf16", _set(ROUTER, torch.zeros(5, 96, dtype=torch.float64)), f"{ROUTER} must be bfloat16 or .*float64"),
    "integer blocks": (
        "mxfp4", _set(f"{GATE_UP}_blocks", torch.zeros(5, 128, 3, 16, dtype=torch.int8)), "must be uint8, got int8",
    ),
    "shape": ("bf16", _set(ROUTER, torch.zeros(96, 5)), rf"{ROUTER} must have shape \[5, 96\], got \[96, 5\]"),
    "transposed experts": (
        "bf16", _set(GATE_UP, torch.zeros(5, 128, 96)), r"gate_up_proj must have shape \[5, 96, 128\], got \[5, 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_tensor_that_is_not_what_the_config_promises_is_named(case: str, folder: Callable[[str], Path]) -> None:
    """Missing, extra, wrong dtype, wrong shape."""
    name, change, message = DAMAGES[case]
    directory = folder(name)
    _rewrite(directory, change)
    _refused(directory, message)


def test_an_mxfp4_config_with_float_experts_is_a_contradiction_and_so_is_the_reverse(
    folder: Callable[[str], Path],
) -> None:
    """Named as such, not as missing tensors."""
    directory = folder("bf16")
    rewrite_json(directory / "config.json", quantization_config={"quant_method": "mxfp4"})
    _refused(directory, r"says mxfp4, but the checkpoint holds .*mlp.experts.(gate_up|down)_proj \(float32\)")
    for path in directory.iterdir():
        path.unlink()
    directory = folder("mxfp4")
    rewrite_json(directory / "config.json", quantization_config=None)
    _refused(directory, r"says no quantisation, but .*_proj_(blocks|scales) \(uint8\)")


def test_nan_scales_are_refused_when_read_by_tensor_and_place(folder: Callable[[str], Path]) -> None:
    """Only where they are: another expert's slice reads well."""
    directory = folder("mxfp4")
    _rewrite(directory, lambda t: t[f"{GATE_UP}_scales"][3, 7].fill_(255))
    checkpoint = HFCheckpoint(directory)
    with pytest.raises(CheckpointError, match=rf"{GATE_UP}_scales\[3, 7, 0\] has scale byte 255"):
        checkpoint.read(name=f"{GATE_UP}_scales")
    with pytest.raises(CheckpointError, match="scale byte 255"):
        checkpoint.read_slice(name=f"{GATE_UP}_scales", index=3)
    assert checkpoint.read_slice(name=f"{GATE_UP}_scales", index=2).shape == (128, 3)


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1, -4096])
def test_a_truncated_file_is_refused(cut: int, folder: Callable[[str], Path]) -> None:
    """Anywhere: in the length, in the header, in the data."""
    directory = folder("bf16")
    data = (directory / SINGLE).read_bytes()
    (directory / SINGLE).write_bytes(data[:cut])
    _refused(directory, f"{SINGLE}.*truncated|truncated.*{SINGLE}")


def _header(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a file's header in place, keeping the data."""
    data = (directory / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    (directory / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown dtype": (lambda h: h[ROUTER].update(dtype="F4"), "unknown dtype 'F4'"),
    "no shape": (lambda h: h[ROUTER].update(shape=None), f"{ROUTER}: corrupt header"),
    "a negative shape": (lambda h: h[ROUTER].update(shape=[-5, -96]), f"{ROUTER}: corrupt header"),
    "one offset": (lambda h: h[ROUTER].update(data_offsets=[3]), f"{ROUTER}: corrupt header"),
    "a shape of other size": (lambda h: h[ROUTER].update(shape=[5, 97]), rf"{ROUTER}: shape \[5, 97\] of float32"),
    "offsets moved": (
        lambda h: h[ROUTER].update(data_offsets=[o + 4 for o in h[ROUTER]["data_offsets"]]), "starts at data byte",
    ),
    "overlapping tensors": (
        lambda h: h[ROUTER].update(data_offsets=h[ROUTER.replace("2", "1")]["data_offsets"]), "starts at data byte",
    ),
    "a list for an entry": (lambda h: h.update({ROUTER: [1]}), f"{ROUTER}: header entry must be an object"),
    "a list for the header": (lambda h: [1, 2], "corrupt header, must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_corrupt_header_is_refused(case: str, folder: Callable[[str], Path]) -> None:
    """By tensor where there is one."""
    change, message = HEADERS[case]
    directory = folder("bf16")
    _header(directory, change)
    _refused(directory, message)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, struct.pack("<Q", 20) + b"{" * 20, struct.pack("<Q", 2**60)])
def test_a_file_of_noise_is_refused(data: bytes, folder: Callable[[str], Path]) -> None:
    """Nothing is allocated for what a length claims."""
    directory = folder("bf16")
    (directory / SINGLE).write_bytes(data)
    _refused(directory, "corrupt")


def test_bytes_after_the_last_tensor_are_refused(folder: Callable[[str], Path]) -> None:
    """A file that was appended to."""
    directory = folder("bf16")
    with (directory / SINGLE).open("ab") as file:
        file.write(b"tail")
    _refused(directory, "4 bytes after the last tensor")


def _index(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


INDICES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "the wrong shard": (
        lambda m: m.update({ROUTER: next(f for f in set(m.values()) if f != m[ROUTER])}), f"puts tensor {ROUTER} in",
    ),
    "a tensor left out": (lambda m: m.pop(ROUTER), f"holds tensor {ROUTER}, which .* puts in no file"),
    "a shard that is not there": (
        lambda m: m.update({ROUTER: "model-9-of-3.safetensors"}), "model-9-of-3.safetensors in .* cannot be read",
    ),
    "a path out of the folder": (lambda m: m.update({ROUTER: "../x.safetensors"}), "must name a file of this folder"),
    "an absolute path": (lambda m: m.update({ROUTER: "/etc/x.safetensors"}), "must name a file of this folder"),
    "a pickle": (lambda m: m.update({ROUTER: "pytorch_model.bin"}), "which is not safetensors and is never loaded"),
    "no file name": (lambda m: m.update({ROUTER: 3}), "must name a file of this folder, got 3"),
    "nothing": (lambda m: m.clear(), "weight_map must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_a_wrong_shard_index_is_refused(case: str, folder: Callable[[str], Path]) -> None:
    """Index and headers must tell the same story."""
    change, message = INDICES[case]
    directory = folder("shards")
    _index(directory, change)
    _refused(directory, message)


def test_a_missing_shard_is_named(folder: Callable[[str], Path]) -> None:
    """The index lists it, the folder lacks it."""
    directory = folder("shards")
    (directory / SHARD).unlink()
    _refused(directory, SHARD)


class _Bomb:
    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (Path("was-unpickled"),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickle_is_never_loaded(name: str, folder: Callable[[str], Path]) -> None:
    """Its code would run; the refusal says so."""
    directory = folder("bf16")
    (directory / SINGLE).unlink()
    (directory / name).write_bytes(pickle.dumps(_Bomb()))
    _refused(directory, f"only pickle files .{name}., which are never loaded")
    assert not Path("was-unpickled").exists()


def test_folders_that_hold_no_checkpoint_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """No weights, no folder."""
    directory = folder("bf16")
    (directory / SINGLE).unlink()
    _refused(directory, "has neither model.safetensors.index.json nor model.safetensors")
    _refused(tmp_path / "nowhere", "is not a directory")


def test_mxfp4_needs_whole_blocks(folder: Callable[[str], Path]) -> None:
    """A hidden size of 100 has no 32-value blocks."""
    directory = folder("mxfp4")
    rewrite_json(directory / "config.json", hidden_size=100)
    _refused(directory, "hidden_size in whole blocks of 32, got 100")


def test_a_head_saved_beside_a_tied_embedding_is_allowed(folder: Callable[[str], Path]) -> None:
    """Some writers save both."""
    directory = folder("bf16")
    rewrite_json(directory / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight" in HFCheckpoint(directory).tensors()


def _with_scales(directory: Path, values: dict[int, float], kinds: str = "kv", shape: tuple[int, ...] = (1,)) -> None:
    scales = {f"{layer_prefix(i)}self_attn.{k}_scale": torch.full(shape, v) for i, v in values.items() for k in kinds}
    _rewrite(directory, lambda t: t.update(scales))


@pytest.mark.parametrize("shape", [(1,), ()])
def test_kv_scales_of_all_layers_are_read_as_one(shape: tuple[int, ...], folder: Callable[[str], Path]) -> None:
    """stored = x / scale, as the checkpoint has it."""
    directory = folder("bf16")
    _with_scales(directory, dict.fromkeys(range(4), 0.5), kinds="k", shape=shape)
    scales = read_kv_scales(HFCheckpoint(directory))
    assert (scales.k, scales.v) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({0: 0.5, 1: 0.5, 2: 0.25, 3: 0.5}, "layers.0.self_attn.k_scale is 0.5, .*layers.2.self_attn.k_scale is 0.25"),
        ({0: 0.5, 1: 0.5}, "has model.layers.0.self_attn.k_scale but not model.layers.2.self_attn.k_scale"),
        (dict.fromkeys(range(4), 0.0), "k_scale must be a positive finite number, got 0.0"),
        (dict.fromkeys(range(4), float("nan")), "k_scale must be a positive finite number, got nan"),
    ],
)  # fmt: skip
def test_kv_scales_that_the_kernel_cannot_take_are_refused(
    values: dict[int, float], message: str, folder: Callable[[str], Path]
) -> None:
    """One value for all layers, or none."""
    directory = folder("bf16")
    _with_scales(directory, values)
    with pytest.raises(CheckpointError, match=message):
        read_kv_scales(HFCheckpoint(directory))


def test_weights_have_one_name_wherever_they_lie(originals: dict[str, Path], folder: Callable[[str], Path]) -> None:
    """Another folder, and shards instead of one file: 32 hex digits, the same."""
    name = weights_id_of(HFCheckpoint(originals["mxfp4"]))
    assert re.fullmatch(r"[0-9a-f]{32}", name)
    assert weights_id_of(HFCheckpoint(folder("mxfp4"))) == name
    assert weights_id_of(HFCheckpoint(originals["shards"])) == name


@pytest.mark.parametrize(
    "tensor",
    [
        "model.norm.weight", "model.layers.1.self_attn.sinks", "model.layers.2.self_attn.q_proj.weight", ROUTER,
        "model.layers.3.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj",
    ],
)  # fmt: skip
def test_other_weights_have_another_name(folder: Callable[[str], Path], tensor: str) -> None:
    """One number of a vector, and one of the first row of a matrix, as any merged adapter changes it."""
    directory = folder("bf16")
    before = weights_id_of(HFCheckpoint(directory))
    _rewrite(directory, lambda tensors: tensors[tensor].view(-1)[:1].add_(1.0))
    assert weights_id_of(HFCheckpoint(directory)) != before


@pytest.mark.parametrize("part", ["blocks", "scales"])
@pytest.mark.parametrize("matrix", ["gate_up_proj", "down_proj"])
def test_the_last_expert_alone_makes_another_name(folder: Callable[[str], Path], matrix: str, part: str) -> None:
    """In either half of MXFP4."""
    directory = folder("mxfp4")
    before = weights_id_of(HFCheckpoint(directory))
    name = f"model.layers.3.mlp.experts.{matrix}_{part}"
    _rewrite(directory, lambda tensors: tensors[name][-1].view(-1)[:1].add_(1))
    assert weights_id_of(HFCheckpoint(directory)) != before


def _set_corner(tensors: dict[str, torch.Tensor], *, value: float) -> None:
    tensors["model.layers.2.mlp.experts.down_proj"][1, 3, 7] = value


def test_both_forms_of_a_checkpoint_have_one_name(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """MXFP4, and the same numbers written out as BF16; with another number the names differ, zero's sign is none."""
    directory, floats = folder("mxfp4"), tmp_path / "floats"
    dequantize_checkpoint(directory, floats)
    name = weights_id_of(HFCheckpoint(directory))
    assert weights_id_of(HFCheckpoint(floats)) == name
    names = []
    for value in (9.0, 0.0, -0.0):
        _rewrite(floats, partial(_set_corner, value=value))
        names.append(weights_id_of(HFCheckpoint(floats)))
    assert names[0] not in (name, names[1])
    assert names[1] == names[2]
