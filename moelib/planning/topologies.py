"""TPU topologies by name, and what a device of each generation has.

libtpu describes and compiles for topologies of which no device is there.
"""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from moelib.core.config import did_you_mean

EXAMPLE = "v6e:2x2x1"

_GIB = 2**30


class PlanError(ValueError):
    """What is asked for cannot be planned; the message is all one needs."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """What one device of a TPU generation has.

    Attributes:
        name: As it stands before the colon of a topology's name.
        device_kind: What JAX calls a device.
        hbm_bytes: Bytes that the compiler may hand out.
        flops_per_second: Peak in bfloat16.
        hbm_bytes_per_second: To and from HBM.
        cycles_per_second: Clock of the TensorCore, which turns cycles into time.
    """

    name: str
    device_kind: str
    hbm_bytes: int
    flops_per_second: float
    hbm_bytes_per_second: float
    cycles_per_second: float


# FLOP/s and HBM bandwidth: Google Cloud's documentation, pages "TPU v5e", "TPU v5p", "TPU v6e" and
# "TPU7x (Ironwood)". A device of tpu7x is half a chip. Bytes of HBM are what the compiler's own
# out-of-memory message says is available (libtpu 0.0.51), of 16, 95, 32 and 96 GB a device. Clocks
# follow from peak FLOP/s over what the matrix units do in a cycle; that of tpu7x is a guess.
#
# v4 is left out: libtpu describes it as two devices a chip, but runs join the two.
GENERATIONS = {
    generation.name: generation
    for generation in (
        Generation("v5e", "TPU v5 lite", int(15.75 * _GIB), 197e12, 819e9, 1.5e9),
        Generation("v5p", "TPU v5", int(95.73 * _GIB), 459e12, 2765e9, 1.75e9),
        Generation("v6e", "TPU v6 lite", int(31.24 * _GIB), 918e12, 1640e9, 1.75e9),
        Generation("tpu7x", "TPU7x", int(94.74 * _GIB), 1153.5e12, 3690e9, 1.75e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that are wired together, though they are not here."""

    name: str
    generation: Generation
    devices: Sequence[Any]


def topology(name: str) -> Topology:
    """Returns the topology of a name such as v6e:2x2x1: a generation, and its chips on a torus.

    Raises:
        PlanError: If the generation is not known, libtpu refuses the shape, or libtpu is
            not installed.
    """
    generation_name = name.partition(":")[0]
    if generation_name not in GENERATIONS or ":" not in name:
        raise PlanError(
            f"topology {name!r} is not known: write a generation ({', '.join(GENERATIONS)}), a "
            f"colon and a shape, such as {EXAMPLE}; {did_you_mean(generation_name, GENERATIONS)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            f"topology {name!r}: libtpu, which compiles for TPUs, is not installed; "
            "pip install 'moelib[tpu]'."
        )
    prepare_libtpu()
    import jax
    from jax.experimental import topologies

    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise PlanError(
            f"topology {name!r}: {said.rstrip('.')}; write a shape that {generation_name} is built "
            f"in, as in {EXAMPLE}."
        ) from None
    return Topology(name, GENERATIONS[generation_name], tuple(description.devices))


def prepare_libtpu() -> None:
    """Sets what libtpu reads from the environment once, when it is loaded."""
    # No cloud's metadata server is asked which TPU this machine has, for it has none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # What the server would have said; without them libtpu complains on stderr.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v6e-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # A TPU is one process's, and a lock file sees to that; compiling needs no TPU.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
