"""Both ends of a step in torch: token ids to a `DecodeCall`, hidden states to token ids.

Dims: R rows, H hidden, V vocabulary, d head size.
"""

from __future__ import annotations

import numpy as np
import torch

from gk_adapters.control_tensors import ControlArrays, TrackedControl, arrays_of
from gk_adapters.torch_math import rms_norm, rope_tables
from gk_adapters.torch_model import TorchModel
from gk_core.decode_step import AttentionControl
from gk_core.errors import LayoutError
from gk_core.kernel_contract import ControlTensors, DecodeCall, PerBufferKV, StackedKV
from gk_core.ports import CallBuilder, Sampler

__all__ = ["TorchCallBuilder", "TorchSampler", "control_tensors", "logits"]


class TorchCallBuilder(CallBuilder[torch.Tensor]):
    """Builds the calls of one decode engine.

    Args:
        model: weights, embedding and scales.
        kv: the cache, in one of its two forms.
        tracked: what built the control, if it was one of these; its arrays are then used in place, and a call is good
            until the next one is built.
    """

    def __init__(
        self,
        *,
        model: TorchModel,
        kv: PerBufferKV[torch.Tensor] | StackedKV[torch.Tensor],
        tracked: TrackedControl | None = None,
    ) -> None:
        self._model = model
        self._arrays_of = arrays_of if tracked is None else tracked.arrays_of
        self._per_buffer = kv if isinstance(kv, PerBufferKV) else None
        self._stacked = kv if isinstance(kv, StackedKV) else None

    def build(self, *, token_ids: tuple[int, ...], control: AttentionControl) -> DecodeCall[torch.Tensor]:
        """One call; token_ids has one entry per row, anything for inactive rows.

        Raises:
            LayoutError: as many ids as rows are needed; an active row's id is outside the vocabulary.
        """
        model = self._model
        ids = _embeddable(token_ids, control.active, model.embedding.shape[0])
        return DecodeCall(
            hidden=model.embedding.index_select(0, torch.tensor(ids)),
            weights=model.stacks,
            per_buffer_kv=self._per_buffer,
            stacked_kv=self._stacked,
            control=control_tensors(self._arrays_of(control), model),
            scales=model.scales,
            rank=model.rank,
        )


def _embeddable(token_ids: tuple[int, ...], active: tuple[bool, ...], vocab_size: int) -> list[int]:
    if len(token_ids) != len(active):
        raise LayoutError(f"a step of {len(active)} rows needs as many token ids, got {len(token_ids)}")
    for row, (token_id, on) in enumerate(zip(token_ids, active, strict=True)):
        if on and not 0 <= token_id < vocab_size:
            raise LayoutError(f"row {row}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}")
    return [t if on else 0 for t, on in zip(token_ids, active, strict=True)]


def control_tensors(arrays: ControlArrays, model: TorchModel) -> ControlTensors[torch.Tensor]:
    """The arrays as tensors over the same memory, with this step's rotary tables."""
    geometry = model.config.geometry
    positions = torch.from_numpy(arrays.positions)
    cos, sin = rope_tables(geometry.rope, geometry.head_size, positions[:, 0], model.dtype)
    return ControlTensors(
        block_table=torch.from_numpy(arrays.block_table),
        block_table_swa=torch.from_numpy(arrays.block_table_swa),
        positions=positions,
        positions_swa=torch.from_numpy(arrays.positions_swa),
        swa_start=torch.from_numpy(arrays.swa_start),
        update_index=torch.from_numpy(arrays.update_index),
        update_index_swa=torch.from_numpy(arrays.update_index_swa),
        active=torch.from_numpy(arrays.active),
        cos=cos,
        sin=sin,
    )


def logits(hidden: torch.Tensor, model: TorchModel) -> torch.Tensor:
    """float32 logits [T, V] of hidden states [T, H]: final norm, then the vocabulary projection."""
    with torch.inference_mode():
        normed = rms_norm(hidden, model.final_norm, model.config.geometry.rms_norm_eps)
        return torch.nn.functional.linear(normed, model.lm_head).float()


class TorchSampler(Sampler[torch.Tensor]):
    """Greedy: the lowest id among the largest logits."""

    def __init__(self, *, model: TorchModel) -> None:
        self._model = model

    def sample(self, *, hidden: torch.Tensor, active: tuple[bool, ...]) -> tuple[int, ...]:
        """One token id per row; 0 for inactive rows.

        Raises:
            LayoutError: an active row's logits hold NaN.
        """
        rows = [row for row, on in enumerate(active) if on]
        chosen = [0] * len(active)
        if rows:
            values = logits(hidden[rows] if len(rows) < len(active) else hidden, self._model).numpy()
            # NumPy promises the first of equal maxima, and takes NaN for the largest of all.
            best = values.argmax(axis=1)
            for i, row in enumerate(rows):
                if np.isnan(values[i, best[i]]):
                    raise LayoutError(f"row {row}: the logit of token {best[i]} is NaN; no token can be chosen")
                chosen[row] = int(best[i])
        return tuple(chosen)
