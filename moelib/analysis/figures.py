"""Pictures of analyses."""

from typing import Any


def save_figure(figure: Any, path: str) -> None:
    """Writes a matplotlib figure; an SVG has the same bytes every time."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "moelib"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.endswith(".svg") else None)
