"""`gk check peers A.json B.json`: how a decode engine would read a prefill engine, or every reason why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
from attrs import evolve
from rich.table import Table

from gk_adapters.cli.common import console, emit_json, json_option
from gk_adapters.peer_codec import MAX_LAYOUT_JSON_BYTES, decode_layout_json
from gk_core.disaggregation import Role
from gk_core.errors import LayoutError, Mismatch
from gk_core.handshake import check_peer
from gk_core.peer_layout import PeerLayout
from gk_core.peer_map import MappedRank, PeerMap, head_map, map_peer, target_ranks

__all__ = ["peers"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("first", metavar="A.json", type=_FILE)
@click.argument("second", metavar="B.json", type=_FILE)
@json_option
@click.pass_context
def peers(context: click.Context, first: Path, second: Path, as_json: bool) -> None:
    """Say which ranks of a prefill engine each rank of a decode engine reads, and which bytes of each block.

    Each file describes one rank of one engine; the engine's other ranks are taken to be like it. Exit code 1 when the
    two cannot exchange blocks, with every field that differs.
    """
    a, b = _read(first), _read(second)
    found = check_peer(a, b)
    if found:
        _report_mismatches(found, (first, second), as_json)
        context.exit(1)
    decode, prefill = (a, b) if a.role is Role.DECODE else (b, a)
    maps = {rank: _map_rank(decode, prefill, rank) for rank in range(decode.tp_size)}
    _report_maps(decode, prefill, maps, as_json)


def _read(path: Path) -> PeerLayout:
    try:
        with path.open("rb") as file:
            return decode_layout_json(file.read(MAX_LAYOUT_JSON_BYTES + 1))
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from None


def _rank(layout: PeerLayout, rank: int) -> PeerLayout:
    return evolve(layout, tp_rank=rank, dcp_rank=rank % layout.dcp_size)


def _map_rank(decode: PeerLayout, prefill: PeerLayout, rank: int) -> PeerMap:
    ours = _rank(decode, rank)
    return map_peer(ours, {target: _rank(prefill, target) for target in target_ranks(ours, prefill)})


def _report_mismatches(found: tuple[Mismatch, ...], files: tuple[Path, Path], as_json: bool) -> None:
    if as_json:
        rows = [{"field": m.field, "ours": m.ours, "theirs": m.theirs} for m in found]
        emit_json({"compatible": False, "mismatches": rows})
        return
    table = Table(title="These peers cannot exchange blocks")
    for column in ("field", files[0].name, files[1].name):
        table.add_column(column, overflow="fold")
    for m in found:
        table.add_row(m.field, m.ours, m.theirs)
    console().print(table)


def _report_maps(decode: PeerLayout, prefill: PeerLayout, maps: Mapping[int, PeerMap], as_json: bool) -> None:
    heads = head_map(local_block_bytes=decode.block_bytes[0], remote_block_bytes=prefill.block_bytes[0])
    if as_json:
        emit_json(
            {
                "compatible": True,
                "decode_engine": decode.engine_id,
                "prefill_engine": prefill.engine_id,
                "heads": {"relation": heads.relation.value, "factor": heads.factor},
                "dcp": {"prefill": prefill.dcp_size, "decode": decode.dcp_size},
                "num_regions": decode.num_regions,
                "ranks": [
                    {"rank": rank, "reads": [_read_as_dict(r) for r in m.ranks if not r.notify_only],
                     "notifies": [r.tp_rank for r in m.ranks if r.notify_only]}
                    for rank, m in maps.items()
                ],
            }
        )  # fmt: skip
        return
    factor = "" if heads.factor == 1 else f" by {heads.factor}"
    table = Table(
        title=f"{decode.engine_id} reads {prefill.engine_id}: heads {heads.relation.value}{factor}, "
        f"{decode.num_regions} regions, DCP {prefill.dcp_size} to {decode.dcp_size}"
    )
    for column in ("decode rank", "reads rank", "bytes there", "bytes here", "blocks", "notifies"):
        table.add_column(column)
    for rank, m in maps.items():
        only = ", ".join(str(r.tp_rank) for r in m.ranks if r.notify_only)
        for i, r in enumerate(r for r in m.ranks if not r.notify_only):
            s = r.head_slice
            table.add_row(
                str(rank) if i == 0 else "",
                str(r.tp_rank),
                f"{s.remote_offset_bytes}..{s.remote_offset_bytes + s.length_bytes - 1}",
                f"{s.local_offset_bytes}..{s.local_offset_bytes + s.length_bytes - 1}",
                _blocks_read(m, r),
                only if i == 0 else "",
            )
    console().print(table)


def _read_as_dict(rank: MappedRank) -> dict[str, int]:
    return {
        "rank": rank.tp_rank,
        "dcp_rank": rank.dcp_rank,
        "remote_offset_bytes": rank.head_slice.remote_offset_bytes,
        "local_offset_bytes": rank.head_slice.local_offset_bytes,
        "length_bytes": rank.head_slice.length_bytes,
    }


def _blocks_read(m: PeerMap, rank: MappedRank) -> str:
    """Which of a request's blocks this read brings: all, or every n-th from one on."""
    period = max(m.local_dcp_size, m.remote_dcp_size)
    if period == 1:
        return "all"
    first = m.local_dcp_rank if m.local_dcp_size >= m.remote_dcp_size else rank.dcp_rank
    return f"{first}, {first + period}, ..."
