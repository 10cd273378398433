"""Benchmarks on this machine: `python -m benchmarks NAME [flags]`.

    step        one training step of a 17.6M-parameter Mixture-of-Experts model
    gmm         grouped matmuls of experts, compared with a loop over experts
    attention   attention, compared with jax.nn.dot_product_attention
    dispatch    a layer of experts with each dispatcher, on all devices
    loss        head and cross-entropy, compared with one that holds all logits

All include gradients. Every case runs alternately with a plain matmul in the same process, so that
a busy machine slows both. Memory is that of one device: the bytes that the program holds, and the
bytes accessed in one run by XLA's count, which counts the body of a loop once.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence

from absl import app, flags

from moelib.core.errors import UsageError, UserError
from moelib.launch import define_device_flags, set_up_devices

FLAGS = flags.FLAGS

BENCHMARKS = ("step", "gmm", "attention", "dispatch", "loss")
_DTYPES = ("float32", "bfloat16")
_ROUTINGS = ("learned", "balanced", "skewed")


def define_flags() -> None:
    """Defines the flags; defaults are those of `cases.Sizes`."""
    define_device_flags()
    flags.DEFINE_integer("repeats", 20, "Number of measurements of each case.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 8, "Sequences per step.")
    flags.DEFINE_integer("seq_len", 256, "Tokens per sequence.")
    flags.DEFINE_integer("num_experts", 16, "Experts per layer.")
    flags.DEFINE_integer("num_experts_per_token", 2, "Experts per token.")
    flags.DEFINE_integer("num_heads", 8, "Attention heads.")
    flags.DEFINE_integer("num_kv_heads", 4, "Key and value heads.")
    flags.DEFINE_integer("vocab_size", 8192, "Size of the vocabulary.")
    flags.DEFINE_integer("num_layers", 4, "Layers of the model.")
    flags.DEFINE_integer("dim", 256, "Width of the model.")
    flags.DEFINE_integer("hidden_dim", 256, "Hidden width of an expert.")
    flags.DEFINE_float(
        "buffer_factor",
        None,
        "Receive capacity per device, as a multiple of the balanced load; by default enough for "
        "any routing.",
    )
    flags.DEFINE_enum(
        "dtype",
        "float32",
        _DTYPES,
        "Dtype of the forward and backward pass of a step, and of inputs and weights elsewhere.",
    )
    flags.DEFINE_enum("routing", "learned", _ROUTINGS, "Routing: random weights, even or uneven.")


def run(args: Sequence[str]) -> None:
    """Runs the benchmark that the argument names.

    Raises:
        UsageError: If there is no such benchmark, or its sizes are impossible.
    """
    if len(args) != 1 or args[0] not in BENCHMARKS:
        raise UsageError(f"benchmark {' '.join(args)!r}: name one of {', '.join(BENCHMARKS)}.")
    (name,) = args
    set_up_devices()
    import jax

    from benchmarks import cases, measure
    from moelib.core.table import print_table
    from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes

    fields = [field.name for field in dataclasses.fields(cases.Sizes)]
    sizes = cases.Sizes(**{field: getattr(FLAGS, field) for field in fields})
    num_devices = len(jax.devices())
    measure.check_sizes(name, sizes, num_devices)
    begin = time.perf_counter()
    mesh = contextlib.nullcontext()
    if name == "dispatch" and num_devices > 1:
        mesh = jax.set_mesh(create_device_mesh(mesh_shape_from_axes(expert=-1)))
    with mesh:
        compiled = cases.CASES[name](sizes, FLAGS.routing)
    print(
        f"{name}: {measure.describe(name, sizes, FLAGS.routing)}, {num_devices} device(s); "
        f"compiled in {time.perf_counter() - begin:.1f} s"
    )
    print_table(measure.measure(compiled, FLAGS.repeats, sizes.dtype))


def _main(argv: Sequence[str]) -> None:
    try:
        run(argv[1:])
    except UserError as error:
        sys.exit(f"benchmarks: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(_main)
