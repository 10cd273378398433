"""Figures as files."""

from matplotlib.figure import Figure

from moelib.runtime.figures import save_figure


def test_an_svg_has_the_same_bytes_every_time(tmp_path):
    texts = []
    for name in ("a.svg", "b.svg"):
        figure = Figure()
        figure.subplots().plot([1, 2], [3, 4])
        save_figure(figure, str(tmp_path / name))
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
