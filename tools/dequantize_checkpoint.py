"""Copy a GPT-OSS checkpoint with its MXFP4 experts written out as BF16, value for value.

    python -m tools.dequantize_checkpoint DIR OUT

For engines and comparisons without an MXFP4 path. Nothing is rounded: BF16 holds every FP4 value
times a power of two exactly. Expert matrices become `gate_up_proj` and `down_proj` [E, in, out],
the orientation that BF16 checkpoints of GPT-OSS have.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tools.mxfp4 import dequantize


def dequantize_checkpoint(source: Path, out: Path) -> None:
    """Write the BF16 copy of the checkpoint folder `source` to the new folder `out`.

    Raises:
        ValueError: `source` is not an MXFP4 checkpoint, a block or scale tensor has no partner, or
            `out` exists already.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; name a new folder")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    method = config.pop("quantization_config", {}).get("quant_method")
    if method != "mxfp4":
        raise ValueError(f"{source} has quant_method {method!r}; only 'mxfp4' can be written out")
    tensors = _written_out(_read_tensors(source))
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in source.iterdir():
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if path.is_file() and path.name != "config.json" and not weights:
            shutil.copy(path, out / path.name)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return tensors


def _written_out(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, value in tensors.items():
        stem = name.removesuffix("_blocks").removesuffix("_scales")
        if name == stem:
            out[name] = value
            continue
        partner = f"{stem}_scales" if name.endswith("_blocks") else f"{stem}_blocks"
        if partner not in tensors:
            raise ValueError(f"{name} has no {partner} beside it; the checkpoint is incomplete")
        if name.endswith("_blocks"):
            weight = dequantize(value, tensors[partner], torch.bfloat16)
            out[stem] = weight.transpose(-1, -2).contiguous()
    return out


def main() -> int:
    """Command line: exit code 2 and one line where the checkpoint does not fit."""
    parser = argparse.ArgumentParser(description="Write a GPT-OSS MXFP4 checkpoint out as BF16.")
    parser.add_argument("source", type=Path, metavar="DIR")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args()
    try:
        dequantize_checkpoint(args.source, args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
