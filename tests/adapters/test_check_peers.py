"""`gk check peers`: the mapping, or every reason why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner, Result

from gk_adapters.cli.check_peers import peers
from gk_adapters.cli.show import show
from gk_adapters.peer_codec import decode_layout_json, encode_layout_json
from gk_core.disaggregation import Role
from gk_core.errors import LayoutError
from gk_core.kv_spec import KVDtype
from gk_core.peer_layout import PeerLayout
from tests.core.peer_builders import make_peer


def run(folder: Path, a: PeerLayout, b: PeerLayout, *options: str) -> Result:
    for name, layout in (("A.json", a), ("B.json", b)):
        (folder / name).write_bytes(encode_layout_json(layout))
    return CliRunner().invoke(peers, [str(folder / "A.json"), str(folder / "B.json"), *options])


def test_the_mapping_is_printed_rank_by_rank(tmp_path: Path) -> None:
    """TP4 to TP8: two decode ranks read the two halves of each block."""
    result = run(tmp_path, make_peer(Role.PREFILL, tp=4), make_peer(Role.DECODE, tp=8), "--json")
    assert result.exit_code == 0
    answer = json.loads(result.output)
    assert (answer["compatible"], answer["heads"]) == (True, {"relation": "split", "factor": 2})
    assert answer["ranks"][5] == {
        "rank": 5,
        "reads": [
            {"rank": 2, "dcp_rank": 0, "remote_offset_bytes": 8192, "local_offset_bytes": 0, "length_bytes": 8192}
        ],
        "notifies": [],
    }
    assert len(answer["ranks"]) == 8


def test_the_order_of_the_files_does_not_matter(tmp_path: Path) -> None:
    """Their roles say who reads."""
    p, d = make_peer(Role.PREFILL, tp=32, dcp=2), make_peer(Role.DECODE, tp=8)
    one, other = (json.loads(run(tmp_path, *pair, "--json").output) for pair in ((p, d), (d, p)))
    assert one == other
    assert [r["rank"] for r in one["ranks"][1]["reads"]] == [4, 5]
    assert one["ranks"][1]["notifies"] == [6, 7]


def test_people_get_a_table(tmp_path: Path) -> None:
    """Which ranks, which bytes, which blocks."""
    result = run(tmp_path, make_peer(Role.DECODE, tp=8), make_peer(Role.PREFILL, tp=16, dcp=2))
    assert result.exit_code == 0
    assert "D reads P: heads match, 36 regions, DCP 2 to 1" in result.output
    assert "0, 2, ..." in result.output
    assert "1, 3, ..." in result.output
    result = run(tmp_path, make_peer(Role.DECODE, tp=8), make_peer(Role.PREFILL, tp=4))
    assert "heads split by 2" in result.output
    assert "8192..16383" in result.output


MISMATCH: dict[str, Any] = {"kv_dtype": KVDtype.FP8_E4M3, "k_scale": 2.0}


def test_every_reason_is_named_with_both_values_and_the_code_is_1(tmp_path: Path) -> None:
    """As JSON."""
    theirs = evolve(make_peer(Role.PREFILL), **MISMATCH)
    result = run(tmp_path, make_peer(Role.DECODE), theirs, "--json")
    assert result.exit_code == 1
    assert json.loads(result.output) == {
        "compatible": False,
        "mismatches": [
            {"field": "kv_dtype", "ours": "float8_e4m3fn", "theirs": "float8_e4m3"},
            {"field": "k_scale", "ours": "1.0", "theirs": "2.0"},
        ],
    }


def test_people_get_the_reasons_as_a_table(tmp_path: Path) -> None:
    """With the files' names over the values."""
    result = run(tmp_path, make_peer(Role.DECODE), evolve(make_peer(Role.PREFILL), **MISMATCH))
    assert result.exit_code == 1
    for text in ("cannot exchange blocks", "A.json", "B.json", "kv_dtype", "float8_e4m3fn", "k_scale", "2.0"):
        assert text in result.output


MODEL = Path(__file__).parents[2] / "models" / "tiny-recall"


def written(path: Path, *flags: str) -> PeerLayout:
    """What `gk show peer` writes, flags before and after the word."""
    result = CliRunner().invoke(show, flags, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    path.write_text(result.output)
    return decode_layout_json(path.read_bytes())


def test_a_layout_is_written_for_any_rank_of_a_model(tmp_path: Path) -> None:
    """120B at TP16 and DCP 2, rank 5: one KV head of 8192 bytes, dcp rank 1; the checks read it."""
    flags = ("--num-blocks", "3000", "--tp", "16", "peer", "--dcp", "2", "--rank", "5")
    layout = written(tmp_path / "A.json", *flags, "--role", "prefill", "--engine-id", "P")
    assert layout == make_peer(Role.PREFILL, tp=16, dcp=2, rank=5)
    assert written(tmp_path / "B.json", "peer", "--role", "decode").engine_id == "decode"
    result = CliRunner().invoke(peers, [str(tmp_path / "A.json"), str(tmp_path / "B.json"), "--json"])
    assert [r["rank"] for r in json.loads(result.output)["ranks"][2]["reads"]] == [4, 5]


def test_a_written_layout_is_what_a_running_node_says(tmp_path: Path) -> None:
    """Geometry, weights, scales and cache of a checkpoint, for both roles."""
    from gk_adapters.nodes import CacheSettings, DecodeNode, PrefillNode, local_wirings
    from gk_adapters.torch_model import load_torch_model
    from gk_core.metrics import NullMetrics

    model, (to_prefill, to_decode) = load_torch_model(MODEL, model_dtype="float32"), local_wirings()
    cache, count = CacheSettings(num_blocks=9, block_size=64), NullMetrics()
    nodes: tuple[PrefillNode | DecodeNode, ...] = (
        PrefillNode(model=model, cache=cache, wiring=to_prefill, metrics=count, engine_id="prefill-1"),
        DecodeNode(model=model, cache=cache, wiring=to_decode, metrics=count, engine_id="decode-1"),
    )
    flags = ("--model", str(MODEL), "--num-blocks", "9", "--block-size", "64", "--kv-dtype", "bf16", "--tp", "1")
    for node, role in zip(nodes, ("prefill", "decode"), strict=True):
        layout = written(tmp_path / "A.json", *flags, "peer", "--role", role, "--engine-id", f"{role}-1")
        assert layout == node.peer_layout
        assert len(layout.weights_id) == 32
        node.close()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tp", "8", "peer", "--role", "decode", "--rank", "8"), "tp_rank 8 of 8"),
        (("--tp", "8", "peer", "--role", "decode", "--dcp", "3"), "dcp_size must divide tp_size"),
    ],
)
def test_a_rank_that_cannot_be_is_not_written(flags: tuple[str, ...], message: str) -> None:
    """Outside the ranks, or a share that does not come out."""
    result = CliRunner().invoke(show, flags)
    assert message in str(result.exception)


def test_a_file_that_is_no_layout_is_named(tmp_path: Path) -> None:
    """Path and reason."""
    (tmp_path / "A.json").write_text('{"schema_version": "1"}')
    result = CliRunner().invoke(peers, [str(tmp_path / "A.json")] * 2)
    with pytest.raises(LayoutError, match=r"A\.json: not a peer layout: Expected `int`, got `str`"):
        raise result.exception or AssertionError(result.output)


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    """Before anything is read."""
    result = CliRunner().invoke(peers, [str(tmp_path / "A.json"), str(tmp_path / "B.json")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
