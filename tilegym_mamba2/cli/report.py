"""`tilegym-mamba2 report`: tables and pictures from stored results, comparisons, and figures in documents."""

from pathlib import Path
from typing import Annotated

import typer

from tilegym_mamba2.bench import pictures, report, results
from tilegym_mamba2.cli import terminal


def command(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE...", help="Results of `bench --json`.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Older results: what is slower beyond noise gives status 1.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw FILE-time, FILE-gain, FILE-models: .png and .svg.")
    ] = None,
    markdown: Annotated[bool, typer.Option(help="Print the tables as Markdown.")] = False,
    update: Annotated[
        list[Path] | None,
        typer.Option(metavar="DOCUMENT", help="Make a document's figures anew from its result files."),
    ] = None,
) -> int:
    """Show stored results, draw them, compare them with older ones, or put them into documents."""
    try:
        for document in update or []:
            document.write_text(report.updated(document.read_text("utf-8"), document.parent), encoding="utf-8")
        if not files:
            if update:
                return 0
            raise terminal.UserError("no result files were given: name some that `bench --json` wrote")
        found = results.merged([results.load(file) for file in files])
        changes = results.compare(results.load(against), found) if against is not None else None
    except (OSError, ValueError) as error:
        raise terminal.UserError(str(error)) from None
    if changes is None:
        show(found, markdown)
    else:
        _show_changes(changes)
    if plot is not None:
        draw(found, plot)
    return int(any(change.slower for change in changes or []))


def show(found: results.Results, markdown: bool = False) -> None:
    """Prints times, then everything else that was measured, then why the rest was not."""
    output = terminal.console()
    tables = [report.times(found), report.details(found)]
    if found.first_calls:
        tables.append(report.first_calls(found))
    for table in tables:
        if markdown:
            output.print(table.markdown() + "\n", markup=False, soft_wrap=True)
        else:
            listing = terminal.table(*table.columns, numeric=table.columns[table.text_columns :])
            for row in table.rows:
                listing.add_row(*row)
            output.print(listing)
    for reason, names in report.failures(found).items():
        terminal.note(output, f"not measured: {reason} ({', '.join(names)})")


def draw(found: results.Results, stem: Path) -> None:
    """Draws all pictures and says where they are."""
    try:
        files = pictures.draw(found, stem)
    except (pictures.NoPictures, OSError) as error:
        raise terminal.UserError(f"--plot {stem}: {error}") from None
    terminal.note(terminal.console(), f"pictures: {', '.join(map(str, files)) or 'none, for want of results'}")


def _show_changes(changes: list[results.Change]) -> None:
    listing = terminal.table(
        "workload", "implementation", "old", "new", "new / old", "noise", "", numeric=("old", "new")
    )
    for change in sorted(changes, key=lambda change: -change.ratio):
        word = "slower" if change.slower else "faster" if change.faster else "the same"
        listing.add_row(
            change.workload,
            change.implementation,
            report.seconds(change.old),
            report.seconds(change.new),
            f"{change.ratio:.3f}",
            report.percent(change.allowed),
            terminal.verdict(word, None if word == "the same" else change.faster),
        )
    terminal.console().print(listing)
