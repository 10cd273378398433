"""Benchmarks on this machine: `python -m benchmarks NAME [flags]`.

    step          one training step of a 17.6M-parameter Mixture-of-Experts model
    gmm           grouped matmuls of experts, compared with a loop over experts
    attention     attention, compared with jax.nn.dot_product_attention
    dispatch      a layer of experts with each dispatcher, on all devices
    loss          head and cross-entropy, compared with one that holds all logits
    transformers  `step` with 16, 64 and 128 experts (or as many as the flags set) and generation,
                  compared with Hugging Face transformers, on CPU (needs the extra transformers)

All but generation include gradients. Every case runs alternately with what it is compared with, and
all but the last also with a plain matmul, in the same process, so that a busy machine slows both.
Memory is that of one device: the bytes that the program holds, and the bytes accessed in one run by
XLA's count, which counts the body of a loop once.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Literal

from benchmarks.sizes import Sizes, check_sizes, describe
from moelib.core.errors import UsageError
from moelib.launch import DeviceFlags
from moelib.runtime import platforms
from moelib.runtime.command_line import flag, run_command

BENCHMARKS = ("step", "gmm", "attention", "dispatch", "loss", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags, Sizes):
    """Flags of the benchmarks."""

    repeats: int = flag(20, "Number of measurements of each case.", lower_bound=1)
    routing: Literal["learned", "balanced", "skewed"] = flag(
        "learned", "Routing of tokens: by random weights, even or uneven."
    )


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Runs the benchmark that the argument names.

    Raises:
        UsageError: If there is no such benchmark, or its sizes are impossible.
    """
    if len(arguments) != 1 or arguments[0] not in BENCHMARKS:
        raise UsageError(f"benchmark {' '.join(arguments)!r}: name one of {', '.join(BENCHMARKS)}.")
    (name,) = arguments
    flags.set_up()
    import jax

    from benchmarks import cases
    from benchmarks.measure import measure
    from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
    from moelib.runtime.table import print_table

    if name == "transformers":
        from benchmarks import transformers_comparison

        transformers_comparison.check(flags)
        for table in transformers_comparison.compare(flags, flags.repeats):
            print_table(table)
        return
    num_devices = len(jax.devices())
    check_sizes(name, flags, num_devices)
    begin = time.perf_counter()
    mesh = contextlib.nullcontext()
    if name == "dispatch" and num_devices > 1:
        mesh = jax.set_mesh(create_device_mesh(mesh_shape_from_axes(expert=-1)))
    with mesh:
        compiled = cases.CASES[name](flags, flags.routing)
    print(
        f"{name}: {describe(name, flags, flags.routing)}, {num_devices} device(s); "
        f"compiled in {time.perf_counter() - begin:.1f} s"
    )
    print_table(measure(compiled, flags.repeats, flags.dtype))


if __name__ == "__main__":
    platforms.hide_absent_tpus()
    sys.exit(run_command("benchmarks", Flags, run, sys.argv[1:], __doc__ or ""))
