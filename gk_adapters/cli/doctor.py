"""`gk doctor`: what is installed here, what is a placeholder package, and what will therefore run where."""

from __future__ import annotations

import os

import click
from rich.markup import escape
from rich.table import Table

from gk_adapters.cli.common import console, emit_json, json_option
from gk_adapters.neuron.report import examine

__all__ = ["doctor"]


@click.command()
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what is installed, what only carries a package's name, what is missing, and what will run where.

    Imports none of the packages it reports on. Exit code 1 when something is wrong rather than absent: a placeholder,
    a version too old, or an environment that contradicts itself.
    """
    found = examine(environ=os.environ)
    if as_json:
        emit_json(found.as_json())
    else:
        devices = found.machine.num_devices
        out = console()
        out.print(f"Python {found.python}; Neuron devices: {devices or 'none'}; target: {found.machine.target or '-'}")
        packages = Table(title="Packages", title_justify="left", box=None)
        for column in ("package", "version", "state", "extra", ""):
            packages.add_column(column)
        for p in found.packages:
            packages.add_row(p.name, p.version or "-", p.state.value, p.extra, escape(p.why))
        out.print(packages)
        runs = Table(title="What runs where", title_justify="left", box=None)
        for column in ("part", "where", "because"):
            runs.add_column(column)
        for r in found.runs:
            runs.add_row(r.part, r.where, escape(r.why))
        out.print(runs)
        for problem in found.problems:
            out.print(f"problem: {problem}", markup=False)
    if found.problems:
        context.exit(1)
