"""The record of a checkpoint."""

import numpy as np

from moelib.checkpoint import contents


def test_record_describes_arrays_and_libraries():
    assert contents.describe_arrays({"w": np.ones((2, 3), np.float32)}) == {
        "w": ["float32", [2, 3]]
    }
    assert {"python", "jax", "orbax-checkpoint"} <= contents.library_versions().keys()
