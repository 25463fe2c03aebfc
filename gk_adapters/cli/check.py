"""`gk check`: why two caches cannot exchange blocks, and which prompt lengths a deployment gets wrong."""

from __future__ import annotations

from gk_adapters.cli.main import LazyGroup

__all__ = ["check"]

check = LazyGroup(
    commands_by_name={
        "peers": ("gk_adapters.cli.check_peers", "peers", "Map two peers' layouts, or say why not."),
        "boundary": ("gk_adapters.cli.boundary", "boundary", "Compare prefill + decode with one engine, by length."),
    },
    name="check",
    help="Check a deployment before, or while, it serves.",
)
