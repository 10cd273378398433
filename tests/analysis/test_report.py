"""The files of an analysis."""

import json
import math
import pathlib

import numpy as np
from matplotlib.figure import Figure

from moelib.analysis.report import write_files


def test_numbers_that_are_not_finite_become_null(tmp_path):
    numbers = {"losses": np.array([2.5, math.inf]), "gains": [(1, math.nan)], "name": "moe"}
    paths = write_files(str(tmp_path / "new"), {"twins": (numbers, Figure())}, ["# Twins", "Text."])
    data, image, page = map(pathlib.Path, paths)
    want = {"losses": [2.5, None], "gains": [[1, None]], "name": "moe"}
    assert json.loads(data.read_text()) == want
    assert (image.name, page.read_text()) == ("twins.svg", "# Twins\n\nText.\n")
