"""What the commands share of talking to a terminal, a pipe or a file."""

import json
import math
import os
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tilegym_mamba2 import registry

_PIPE_WIDTH = 1000  # a pipe has no width: nothing is folded for it
_SECONDS_BEFORE_BAR = 1.0
_BROKEN_PIPE = 141  # 128 and the number of SIGPIPE


class UserError(Exception):
    """Something that the user can mend; the message says what to do."""


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Nobody reads on, as with `| head`: ends as a signal would end it, not with a status that says "wrong"."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        raise SystemExit(_BROKEN_PIPE)


def console() -> Console:
    """Where results go."""
    output = _Output(highlight=False)
    return output if output.is_terminal else _Output(highlight=False, width=_PIPE_WIDTH)


def table(*columns: str, numeric: Sequence[str] = ()) -> Table:
    """An empty table; on a narrow terminal its cells fold, but for those of the first column."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        justify = "right" if column in numeric else "left"
        result.add_column(column, justify=justify, overflow="fold", no_wrap=index == 0)
    return result


def verdict(text: str, good: bool | None) -> Text:
    """A cell that is green if good, red if not, and dim if it is neither."""
    return Text(text, style="dim" if good is None else "green" if good else "bold red")


def note(output: Console, text: str) -> None:
    """A paragraph below a table, folded at a terminal's width."""
    output.print(Text(text), soft_wrap=not output.is_terminal)


class Steps:
    """A progress bar on stderr, of steps that may each take long; it appears after a second, on a terminal only."""

    def __init__(self, progress: Progress, task: TaskID):
        self._progress, self._task = progress, task

    def start(self, doing: str) -> None:
        """Says what is being done now."""
        self._progress.update(self._task, description=doing)

    def done(self) -> None:
        """Counts one step as done."""
        self._progress.advance(self._task)

    def at(self, done: int, total: int) -> None:
        """Sets how many steps are done, of how many."""
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def steps(total: int) -> Generator[Steps, None, None]:
    """Context manager: a bar of so many steps, gone when the block ends."""
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = progress.add_task("", total=total)
    ended = threading.Event()

    def appear() -> None:
        if not ended.wait(_SECONDS_BEFORE_BAR):
            progress.start()

    waiting = threading.Thread(target=appear, daemon=True)
    if progress.console.is_terminal:
        waiting.start()
    try:
        yield Steps(progress, task)
    finally:
        ended.set()
        if progress.console.is_terminal:
            waiting.join()
            progress.stop()


def check_backend_name(option: str, name: str, explained: Mapping[str, str]) -> None:
    """Refuses a backend that there is not, or that can't run; `explained` maps each name to "available" or why not."""
    try:
        with registry.use_backend(name):
            pass
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None
    if explained[name] != "available":
        raise UserError(f"{option} {name} can't run here: {explained[name]}")


def check_json_path(path: Path | None) -> None:
    """Refuses a file that can't be written, before the work whose result it is to hold."""
    if path is None:
        return
    try:
        exists = path.exists()
    except OSError as error:  # a name that is too long, say
        raise UserError(f"--json {path} can't be written ({error.strerror or error}): give another name") from None
    if path.is_dir():
        raise UserError(f"--json {path} is a directory: give a file's name")
    if not path.parent.is_dir():
        raise UserError(f"--json {path}: there is no directory {path.parent}: make it, or give another name")
    if not os.access(path if exists else path.parent, os.W_OK):
        raise UserError(f"--json {path} can't be written: give a name in a directory that you may write to")


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} can't be written: {error.strerror or error}") from None


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as strings, for which JSON has no numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in cast(Sequence[Any], value)]
    return value


def seconds(value: float) -> str:
    """A time in three digits and a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:#.3g} {unit}".replace(". ", " ")
    return f"{value / 1e-6:#.3g} us".replace(". ", " ")


def one_line(error: BaseException) -> str:
    """An exception as one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text}" if text else name
