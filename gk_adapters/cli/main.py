"""The `gk` command: subcommands load when they are called, errors are one line and exit code 2."""

from __future__ import annotations

import importlib
import sys

import click

from gk_core.errors import GkError

__all__ = ["COMMANDS", "LazyGroup", "main", "run"]

COMMANDS = {
    "plan": ("gk_adapters.cli.plan", "plan", "How many blocks, requests and tokens a KV budget holds."),
    "show": ("gk_adapters.cli.show", "show", "Draw the KV layout, or give one element's address."),
    "decode": ("gk_adapters.cli.decode", "decode", "Prefill, hand over, decode: the main job."),
    "prefill-server": ("gk_adapters.cli.servers", "prefill_server", "Run a prefill engine."),
    "decode-server": ("gk_adapters.cli.servers", "decode_server", "Run a decode engine."),
    "weights": ("gk_adapters.cli.weights", "weights", "A rank's stacked weights: list or build them."),
    "check": ("gk_adapters.cli.check", "check", "Check peers, or a deployment's window boundaries."),
    "simulate": ("gk_adapters.cli.simulate", "simulate", "Run an NKI kernel in the simulator."),
    "serve": ("gk_adapters.cli.serve", "serve", "Print and run the vLLM command of a prefill or decode server."),
    "proxy": ("gk_adapters.cli.proxy", "proxy", "One server in front of prefill and decode servers."),
    "doctor": ("gk_adapters.cli.doctor", "doctor", "What is installed here, and what will therefore run where."),
    "bench": ("gk_adapters.cli.bench", "bench", "Benchmarks, each with a peer in the same run."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand's module only when that subcommand runs."""

    def __init__(self, *, commands_by_name: dict[str, tuple[str, str, str]], name: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._lazy = commands_by_name

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one subcommand."""
        if cmd_name not in self._lazy:
            return None
        module_name, attribute, _ = self._lazy[cmd_name]
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in self._lazy.items()])


main = LazyGroup(
    commands_by_name=COMMANDS,
    name="gk",
    help="Giga-kernel decode for GPT-OSS: plan, show, decode, check, simulate and measure.",
)


def run() -> None:
    """Console entry point. Exit codes: 0 done, 1 the job ran and its answer is no, 2 it could not run."""
    try:
        code = main.main(standalone_mode=False)
    except click.exceptions.Abort:
        _fail("interrupted")
    except click.ClickException as error:
        _fail(error.format_message())
    except GkError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is not installed; install the extra that this command needs: pip install 'gk-decode[cpu]'")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    click.echo("gk: error: " + " ".join(message.split()), err=True)
    sys.exit(2)
