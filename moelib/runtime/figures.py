"""Figures of matplotlib as files."""

import io
import os
from typing import Any

from moelib.runtime import storage


def save_figure(figure: Any, path: str) -> None:
    """Writes a figure in the format of the path's ending; an SVG has the same bytes every time."""
    import matplotlib as mpl

    form, content = os.path.splitext(path)[1].removeprefix("."), io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    with mpl.rc_context({"svg.hashsalt": "moelib"}):
        figure.savefig(content, format=form, dpi=120, metadata=metadata)
    storage.write_bytes(path, content.getvalue())
