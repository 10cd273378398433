"""Tables on stdout."""

import sys
from typing import Any


def show(table: Any) -> None:
    """Prints a `rich` table, as wide as the terminal; a file gets it whole."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    Console(highlight=False, markup=False, width=width).print(table)
