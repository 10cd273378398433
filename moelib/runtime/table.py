"""Tables as values, written to a terminal or as Markdown."""

import dataclasses
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str  # May be empty.
    # Names of the columns; a name that ends with ">" (removed when shown) aligns its column to the
    # right. No header is shown if all names are empty.
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]  # Cells of each row; an empty row separates sections.
    footnotes: Sequence[str] = ()  # Lines shown below.

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) in (0, len(self.columns)), row


def print_table(shown: Table) -> None:
    """Prints a table to stdout, as wide as the terminal; a file gets it unfolded."""
    from rich import box, console, table

    names = [name.removesuffix(">") for name in shown.columns]
    drawn = table.Table(
        title=shown.title or None,
        box=box.SIMPLE_HEAD,
        show_header=any(names),
        title_justify="left",
    )
    for column, name in zip(shown.columns, names, strict=True):
        justify = "right" if column.endswith(">") else "left"
        drawn.add_column(name, justify=justify, overflow="fold")
    for row in shown.rows:
        drawn.add_row(*row) if row else drawn.add_section()
    output = console.Console(highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty():
        wide = output.options.update(width=1000)
        output.width = max(output.measure(drawn, options=wide).maximum, 1)
    output.print(drawn)
    for line in shown.footnotes:
        output.print(line, soft_wrap=True)


def to_markdown(shown: Table) -> str:
    """Returns a table in Markdown, without its title; "None." and the footnotes without rows."""
    lines = [_markdown_row(row) for row in shown.rows if row]
    if lines:
        names = [name.removesuffix(">") for name in shown.columns]
        ruler = ["---:" if column.endswith(">") else "---" for column in shown.columns]
        lines = [_markdown_row(names), f"| {' | '.join(ruler)} |", *lines]
    return "\n".join([*(lines or ["None."]), *(f"\n{line}" for line in shown.footnotes)])


def _markdown_row(cells: Sequence[str]) -> str:
    clean = (cell.replace("|", r"\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(clean)} |"
