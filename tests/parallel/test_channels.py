"""Collectives of a program for simulated devices have different channels."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from moelib.parallel.channels import own_channels


def channels(compiled):
    """Returns how many collectives have each channel."""
    return collections.Counter(re.findall(r"channel_id=(\d+)", compiled.as_text()))


def test_a_gather_in_a_loop_and_one_after_it_have_different_channels():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    gather = lambda x: lax.all_gather(x, "fsdp", tiled=True)

    def local(x, layers, head):
        return lax.scan(lambda x, layer: (x @ gather(layer), None), x, layers)[0] @ gather(head)

    specs = (PartitionSpec(), PartitionSpec(None, "fsdp"), PartitionSpec("fsdp"))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    x, layers, head = jnp.ones((2, 8)), jnp.full((3, 8, 8), 0.125), jnp.full((8, 4), 2.0)
    assert channels(jax.jit(mapped).lower(x, layers, head).compile()) == {"1": 2}  # Else no need.
    jax.clear_caches()
    compiled = own_channels(jax.jit(mapped).lower(x, layers, head), mesh).compile()
    assert list(channels(compiled).values()) == [1, 1]
    np.testing.assert_array_equal(compiled(x, layers, head), np.full((2, 4), 16.0))
