"""`gk simulate`: run an NKI kernel of the user's, or the giga kernel, in the simulator.

`gk simulate FILE.py:function ...` runs any kernel; `gk simulate giga ...` is a subcommand, there when
gk_adapters/cli/simulate_giga.py has a click command named `giga`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util

import click

from gk_adapters.cli.common import console, emit_json, json_option

__all__ = ["simulate"]

_SUBCOMMANDS = {"giga": "gk_adapters.cli.simulate_giga"}


class KernelOrSubcommand(click.Group):
    """A group whose own arguments, where they do not begin with a subcommand, are those of `kernel`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """A subcommand by its name, otherwise `kernel` with every argument."""
        if args[0] in _SUBCOMMANDS:
            return super().resolve_command(ctx, args)
        return "", kernel_command, args

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands that are installed."""
        return [name for name, module in _SUBCOMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A subcommand from its own module."""
        if cmd_name not in self.list_commands(ctx):
            raise click.UsageError(f"gk simulate {cmd_name} is not in this installation")
        command = getattr(importlib.import_module(_SUBCOMMANDS[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The kernel command's own help, then the subcommands."""
        kernel_command.format_help(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.command(
    cls=KernelOrSubcommand, name="simulate", context_settings={"ignore_unknown_options": True}, no_args_is_help=False
)
def simulate() -> None:
    """Run an NKI kernel in the simulator and say what it would cost."""


@click.command(name="simulate")
@click.argument("kernel", metavar="FILE.py:function")
@click.option(
    "--inputs", required=True, type=click.Path(dir_okay=False), help="NPZ file; names are parameters, x@1 is rank 1's."
)
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="NAME=DTYPE", help="An input's narrow float, such as x=bfloat16."
)
@click.option(
    "--arg", "values", multiple=True, metavar="NAME=VALUE", help="A compile-time value, such as epsilon=1e-6."
)
@click.option("--ranks", type=click.IntRange(1, 128), default=1, show_default=True, help="Ranks that run in lockstep.")
@click.option("--lnc", type=click.Choice(["1", "2"]), default="1", show_default=True, help="Physical cores per rank.")
@click.option("--target", type=click.Choice(["trn2", "trn3"]), default="trn3", show_default=True)
@click.option(
    "--section", "sections", multiple=True, metavar="FUNCTION", help="Count costs under these functions only."
)
@click.option("--report", type=click.Path(dir_okay=False), help="Write the cost report as one HTML file.")
@click.option("--outputs", type=click.Path(dir_okay=False), help="Write the results as an NPZ file.")
@click.option(
    "--check/--no-check", "check", default=True, show_default=True, help="Check the source against the NKI subset."
)
@json_option
def kernel_command(
    kernel: str,
    inputs: str,
    dtypes: tuple[str, ...],
    values: tuple[str, ...],
    ranks: int,
    lnc: str,
    target: str,
    sections: tuple[str, ...],
    report: str | None,
    outputs: str | None,
    check: bool,
    as_json: bool,
) -> None:
    """Run a kernel of yours on NumPy inputs: results, memory peaks, warnings, and a cost report.

    Runs in the simulator, not on a device; costs are a model from counted work.
    """
    try:
        launch = importlib.import_module("gk_kernels.simulator.launch")
        errors = importlib.import_module("gk_kernels.simulator.errors")
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed; pip install 'gk-decode[kernels,cli]'") from error
    try:
        run = launch.run_file(
            kernel,
            inputs,
            dtypes=dict(_pairs("--dtype", dtypes)),
            values={name: _literal(name, text) for name, text in _pairs("--arg", values)},
            ranks=ranks,
            lnc=int(lnc),
            target=target,
            sections=sections,
        )
        if outputs is not None:
            run.save_outputs(outputs)
        if report is not None:
            run.report.write_html(report)
    except (launch.LaunchError, errors.SimulationError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error
    violations = run.violations if check else ()
    if as_json:
        emit_json({**run.to_json(), **({} if check else {"violations": []})})
        return
    out = console()
    for line in run.output_lines:
        out.print(line, markup=False)
    for title, lines in (("warning", run.warnings), ("not in the NKI subset", violations)):
        for line in lines:
            out.print(f"{title}: {line}", markup=False)
    out.print(run.report.table(), markup=False, end="")


def _pairs(option: str, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or not value:
            raise click.ClickException(f"{option} takes NAME=VALUE, got {text!r}")
        pairs.append((name, value))
    return pairs


def _literal(name: str, text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise click.ClickException(f"--arg {name} takes a Python literal (a string in quotes), got {text!r}") from None
