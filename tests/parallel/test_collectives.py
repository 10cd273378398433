import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.core.errors import UserError
from moelib.parallel.collectives import gather
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes

_SPLIT = PartitionSpec(None, ("model", "fsdp"))


def _gathered(keep, kept):
    """Returns rows 0..7 gathered on a mesh of model=2, fsdp=2, from the sharding `_SPLIT`."""
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(data=2, model=2, fsdp=2))):
        fn = functools.partial(gather, spec=_SPLIT, keep=keep)
        fn = jax.shard_map(fn, in_specs=_SPLIT, out_specs=kept, check_vma=False)
        return fn(jnp.arange(8.0)[None])


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), PartitionSpec()),
        (("model",), PartitionSpec(None, "model")),
        (("model", "fsdp"), _SPLIT),
    ],
)
def test_the_axes_not_kept_are_gathered_in_order(keep, kept):
    np.testing.assert_array_equal(_gathered(keep, kept), np.arange(8.0)[None])


def test_an_axis_to_keep_comes_first():
    with pytest.raises(UserError, match=r"dimension 1 .*\('fsdp',\) are kept"):
        _gathered(("fsdp",), PartitionSpec(None, "fsdp"))
