import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moelib.core.errors import UserError
from moelib.core.precision import reduce_dtype
from moelib.core.varying import vary
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


@pytest.mark.parametrize("axes", [("fsdp",), ("fsdp", "data")])
def test_gradients_are_summed_in_the_reduce_dtype(axes):
    """256 + 7 is 264 in bfloat16, but a sum in bfloat16 stays at 256 from one 1 to the next."""
    split = PartitionSpec("fsdp")

    def gradient(x):
        first = jax.lax.axis_index(axes) == 0
        factor = jnp.where(first, 256, 7 / (jax.lax.axis_size(axes) - 1)).astype(jnp.bfloat16)
        loss = lambda x: jnp.sum(gather(x, split, axes) * vary(factor, axes))
        return jax.grad(lambda x: jax.lax.psum(loss(x), axes))(x)

    sizes = dict.fromkeys(axes, 8 // 2 ** (len(axes) - 1)) | dict.fromkeys(axes[1:], 2)
    x = jnp.ones(8, jnp.bfloat16)
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(**sizes))), reduce_dtype("float32"):
        lowered = jax.jit(jax.shard_map(gradient, in_specs=split, out_specs=split)).lower(x)
        found = lowered.compile()(x)
    np.testing.assert_array_equal(found.astype(np.float32), 264)
    sums = re.findall(r"\^bb0\(%arg\d+: tensor<(\w+)>, %arg\d+", lowered.as_text())
    assert set(sums) == {"f32"}
    assert len(sums) == len(axes)


def test_an_axis_to_keep_comes_first():
    with pytest.raises(UserError, match=r"dimension 1 .*\('fsdp',\) are kept"):
        _gathered(("fsdp",), PartitionSpec(None, "fsdp"))


@pytest.mark.parametrize("dim", [0, 1])
def test_gpus_lay_out_a_weight_for_its_gather_along_an_inner_dimension(dim):
    split = PartitionSpec(*[None] * dim, "fsdp")
    with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(fsdp=8))):
        whole = functools.partial(gather, spec=split)
        whole = jax.shard_map(whole, in_specs=split, out_specs=PartitionSpec(), check_vma=False)
        traced = jax.jit(whole).trace(jnp.ones((8, 8)))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("@LayoutConstraint" in text) == (dim > 0)
