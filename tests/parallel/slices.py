"""Two described slices of TPUs."""

from moelib.runtime.platforms import describe_absent_tpus


def two_slices():
    """Returns the eight devices of two v6e slices of 2x2 chips. Requires libtpu."""
    describe_absent_tpus()
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="tpu", topology_name="v6e:2x2x1", num_slices=2
    )
    return tuple(description.devices)
