"""Tables on stdout."""

import sys
from typing import Any


def show(table: Any) -> None:
    """Prints a `rich` table, as wide as the terminal; a file gets it whole."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not sys.stdout.isatty():
        console.width = console.measure(table, options=console.options.update(width=1000)).maximum
    console.print(table)
