"""The command line: `info`, `run`, `check`, `bench`, `report` and `tune`, one module each.

A command returns its exit status: 0, or 1 if something that it measured is wrong. Whatever the user can mend is a
`UserError`: one line on stderr and status 2.
"""

import sys
from collections.abc import Sequence

import typer

from tilegym_mamba2.cli import bench, check, info, report, run, tune
from tilegym_mamba2.cli.terminal import UserError

_PROGRAM = "tilegym-mamba2"
# What typer raises for wrong arguments: BadParameter's public siblings have this base alone in common.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="The Mamba-2 (SSD) forward pass on cuTile, Triton and plain torch.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (info, run, check, bench, report, tune):
    app.command(module.__name__.rpartition(".")[2])(module.command)


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns the exit status: 0, 1 (something is wrong), 2 (wrong use) or 130 (interrupted)."""
    try:
        status = app(list(arguments) or ["--help"], prog_name=_PROGRAM, standalone_mode=False)
    except UserError as error:
        return _complain(str(error))
    except _UsageError as error:
        message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        context = getattr(error, "ctx", None)
        return _complain(f"{message} (try '{context.command_path if context else _PROGRAM} --help')")
    except typer.Abort:  # what some versions make of an interrupt; the others return 130 themselves
        return 130
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    sys.stderr.write(f"{_PROGRAM}: {' '.join(message.split())}\n")
    return 2
