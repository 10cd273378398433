"""Figures of matplotlib, as files and in notebooks."""

import io
import os
from typing import TYPE_CHECKING, Any

from moelib.runtime import storage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: Any, path: str) -> None:
    """Writes a figure in the format of the path's ending; an SVG has the same bytes every time."""
    import matplotlib as mpl

    form, content = os.path.splitext(path)[1].removeprefix("."), io.BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    with mpl.rc_context({"svg.hashsalt": "moelib"}):
        figure.savefig(content, format=form, dpi=120, metadata=metadata)
    storage.write_bytes(path, content.getvalue())


def shown_figure(**settings: Any) -> "Figure":
    """Returns a new figure of matplotlib, which notebooks show, although it is none of pyplot's."""
    import matplotlib.figure

    class Figure(matplotlib.figure.Figure):
        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            self.savefig(content, format="png", dpi=100)
            return content.getvalue()

    return Figure(**settings)
