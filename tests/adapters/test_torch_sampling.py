"""Both ends of a torch step: embedding and control in, greedy tokens out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from gk_adapters.control_tensors import TrackedControl
from gk_adapters.torch_model import TorchModel, load_torch_model
from gk_adapters.torch_sampling import TorchCallBuilder, TorchSampler, logits
from gk_core.errors import LayoutError
from tests.hf_models import make_hf_checkpoint
from tests.torch_engines import make_engines, make_tables


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    directory = tmp_path_factory.mktemp("model")
    make_hf_checkpoint(directory)
    return load_torch_model(directory)


def _heads(model: TorchModel, rows: list[list[float]]) -> tuple[TorchSampler, torch.Tensor]:
    """A sampler whose logits are `rows`: one hidden state per row, a head that copies them."""
    width = len(rows[0])
    toy = evolve(model, final_norm=torch.ones(width), lm_head=torch.eye(width))
    return TorchSampler(model=toy), torch.tensor(rows)


def test_the_lowest_id_wins_a_tie(model: TorchModel) -> None:
    """Equal maxima at 2, 4 and 9."""
    row = [0.0] * 10
    row[2] = row[4] = row[9] = 5.0
    sampler, hidden = _heads(model, [row, row[::-1]])
    assert sampler.sample(hidden=hidden, active=(True, True)) == (2, 0)


def test_a_row_with_nan_is_an_error_and_not_token_0(model: TorchModel) -> None:
    """Unless the row is inactive."""
    sampler, hidden = _heads(model, [[1.0, 2.0, 3.0], [float("nan")] * 3])
    with pytest.raises(LayoutError, match="row 1: the logit of token 0 is NaN"):
        sampler.sample(hidden=hidden, active=(True, True))
    assert sampler.sample(hidden=hidden, active=(True, False)) == (2, 0)
    assert sampler.sample(hidden=hidden, active=(False, False)) == (0, 0)


def test_logits_are_those_of_the_models_own_head(model: TorchModel, tmp_path: Path) -> None:
    """Final norm, then the vocabulary projection, in float32."""
    hf = make_hf_checkpoint(tmp_path)
    hidden = torch.randn(3, 96)
    with torch.no_grad():
        wanted = hf.lm_head(hf.model.norm(hidden))
    assert torch.allclose(logits(hidden, model), wanted, atol=1e-5)


def test_a_call_holds_the_embedding_of_each_rows_token(model: TorchModel) -> None:
    """Rows in order; an inactive row's id is not looked at."""
    engines = make_engines(model)
    table = make_tables(engines, 1, 10)[0]
    control = engines.control([(3, table), None])
    call = engines.builder.build(token_ids=(198, -7, 5, 5), control=control)
    assert torch.equal(call.hidden[0], model.embedding[198])
    assert call.control.positions[:, 0].tolist() == [3, 0, 0, 0]
    assert call.per_buffer_kv is engines.kv
    assert call.stacked_kv is None


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((199, 0, 0, 0), "row 0: token id 199 is outside the vocabulary 0..198"),
        ((-1, 0, 0, 0), "row 0: token id -1"),
        ((1, 2, 3), "a step of 4 rows needs as many token ids, got 3"),
    ],
)
def test_token_ids_that_cannot_be_embedded_are_refused(model: TorchModel, ids: tuple[int, ...], message: str) -> None:
    """By row."""
    engines = make_engines(model)
    control = engines.control([(0, make_tables(engines, 1, 10)[0])])
    with pytest.raises(LayoutError, match=message):
        engines.builder.build(token_ids=ids, control=control)


def test_tracked_control_gives_the_same_call_without_copies(model: TorchModel) -> None:
    """The tensors of a step lie over the tracked arrays; values as ever."""
    engines = make_engines(model)
    table = make_tables(engines, 1, 200)[0]
    tracked = TrackedControl(engines.shape)
    builder = TorchCallBuilder(model=model, kv=engines.kv, tracked=tracked)
    rows = engines.rows([(130, table), None])
    control = tracked(rows, engines.shape)
    fast = builder.build(token_ids=(1, 0, 0, 0), control=control).control
    slow = engines.builder.build(token_ids=(1, 0, 0, 0), control=engines.control([(130, table)])).control
    for name in ("block_table", "block_table_swa", "positions", "positions_swa", "swa_start", "active", "cos", "sin"):
        assert torch.equal(getattr(fast, name), getattr(slow, name)), name
    assert fast.block_table.data_ptr() == tracked.arrays_of(control).block_table.ctypes.data
