"""`moelib bench`: measures on this machine, beside what the machine can do at best.

    moelib bench step        one training step of a 17.6M-parameter Mixture-of-Experts model
    moelib bench gmm         the experts' grouped matmuls, beside a loop over experts
    moelib bench attention   beside jax.nn.dot_product_attention
    moelib bench dispatch    a layer of experts by each dispatcher, on all devices
    moelib bench loss        head and cross-entropy, beside one that holds all logits

All with gradients. Every figure is measured by turns with the rate of a plain matmul in the same
process, so that a busy machine slows both; least and median times are given. Memory is that of
one device: what the program holds, and what a turn reads and writes by XLA's count, in which the
body of a loop counts once.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from moelib.core.errors import UsageError
from moelib.launch import define_device_flags, set_up_devices

FLAGS = flags.FLAGS

BENCHMARKS = ("step", "gmm", "attention", "dispatch", "loss")
_WITH_EXPERTS = ("step", "gmm", "dispatch")
_WITH_HEADS = ("step", "attention")
DTYPES = ("float32", "bfloat16")
ROUTINGS = ("learned", "balanced", "skewed")


def define_flags() -> None:
    """Defines the flags of the command."""
    define_device_flags()
    flags.DEFINE_integer("repeats", 20, "How often each thing is measured.")
    flags.DEFINE_integer("batch_size", 8, "Rows of a step.")
    flags.DEFINE_integer("seq_len", 256, "Tokens of a row.")
    flags.DEFINE_integer("num_experts", 16, "Experts of each layer.")
    flags.DEFINE_integer("num_experts_per_token", 2, "How many of them a token goes to.")
    flags.DEFINE_integer("num_heads", 8, "Heads of attention.")
    flags.DEFINE_integer("num_kv_heads", 4, "Heads of keys and values.")
    flags.DEFINE_integer("vocab_size", 8192, "Tokens that there are.")
    flags.DEFINE_integer("num_layers", 4, "Layers of the model.")
    flags.DEFINE_integer("dim", 256, "Width of the model.")
    flags.DEFINE_integer("hidden_dim", 256, "Width of an expert.")
    flags.DEFINE_float(
        "buffer_factor",
        None,
        "Rows that a device has room for, over those of an even load; by default for the worst.",
    )
    flags.DEFINE_enum(
        "dtype", "float32", DTYPES, "What a step computes in; elsewhere inputs and weights too."
    )
    flags.DEFINE_enum(
        "routing", "learned", ROUTINGS, "Where tokens go: by random weights, evenly, or unevenly."
    )


def run(args: Sequence[str]) -> None:
    """Runs the benchmark that the argument names."""
    if len(args) != 1 or args[0] not in BENCHMARKS:
        raise UsageError(f"name one benchmark: {', '.join(BENCHMARKS)}.")
    set_up_devices()
    import jax

    from moelib.cli import bench_cases
    from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes

    names = [field.name for field in dataclasses.fields(bench_cases.Sizes)]
    sizes = bench_cases.Sizes(**{name: getattr(FLAGS, name) for name in names})
    if FLAGS.repeats < 1:
        raise UsageError(f"--repeats={FLAGS.repeats}: set it to 1 or more.")
    check_sizes(args[0], sizes, len(jax.devices()))
    begin = time.perf_counter()
    if args[0] == "dispatch" and len(jax.devices()) > 1:
        with jax.set_mesh(create_device_mesh(mesh_shape_from_axes(expert=-1))):
            cases = bench_cases.CASES[args[0]](sizes, FLAGS.routing)
    else:
        cases = bench_cases.CASES[args[0]](sizes, FLAGS.routing)
    print(
        f"{args[0]}: {described(args[0], sizes, FLAGS.routing)}, {len(jax.devices())} device(s); "
        f"compiled in {time.perf_counter() - begin:.1f} s\n"
        "Accessed is what XLA counts as read and written, the body of a loop once."
    )
    print_table(cases, FLAGS.repeats, sizes.dtype)


def check_sizes(name: str, sizes: Any, num_devices: int) -> None:
    """Raises UsageError, with the flag to change, for sizes that the benchmark cannot have."""
    for field, value in dataclasses.asdict(sizes).items():
        if isinstance(value, int) and value < 1:
            raise UsageError(f"--{field}={value}: set it to 1 or more.")
    if sizes.buffer_factor is not None and not 0 < sizes.buffer_factor < math.inf:
        raise UsageError(f"--buffer_factor={sizes.buffer_factor}: set a finite number above 0.")
    if name in _WITH_HEADS:
        _check_multiple("dim", sizes.dim, sizes.num_heads, "--num_heads")
        _check_multiple("num_heads", sizes.num_heads, sizes.num_kv_heads, "--num_kv_heads")
    if name == "step" and sizes.dim // sizes.num_heads % 2:
        raise UsageError(
            f"--num_heads={sizes.num_heads}: a head of {sizes.dim // sizes.num_heads} has no two "
            "halves to rotate; change it or --dim."
        )
    if name in _WITH_EXPERTS and sizes.num_experts_per_token > sizes.num_experts:
        raise UsageError(
            f"--num_experts_per_token={sizes.num_experts_per_token}: set it to at most the "
            f"{sizes.num_experts} of --num_experts."
        )
    if name == "step" and sizes.num_experts == 1:
        raise UsageError("--num_experts=1: there is nothing to balance; set it to 2 or more.")
    if name == "dispatch":
        for field in ("num_experts", "batch_size"):
            _check_multiple(field, getattr(sizes, field), num_devices, "the number of devices")


def _check_multiple(field: str, value: int, divisor: int, of_what: str) -> None:
    if value % divisor:
        raise UsageError(
            f"--{field}={value}: it is not a multiple of {divisor}, {of_what}; change one of them."
        )


def described(name: str, sizes: Any, routing: str) -> str:
    """Returns the sizes, the routing and the dtype that the benchmark depends on."""
    parts = [f"{sizes.batch_size} x {sizes.seq_len} tokens", f"width {sizes.dim}"]
    if name in _WITH_HEADS:
        parts.append(f"{sizes.num_heads} heads on {sizes.num_kv_heads}")
    if name in _WITH_EXPERTS:
        parts.append(f"{sizes.num_experts} experts of width {sizes.hidden_dim}")
        parts.append(f"top-{sizes.num_experts_per_token}, {routing} routing")
    if name in ("step", "loss"):
        parts.append(f"vocabulary of {sizes.vocab_size:,}")
    return ", ".join([*parts, sizes.dtype])


def print_table(cases: dict[str, Any], repeats: int, dtype: str) -> None:
    """Measures the cases by turns with a plain matmul of the dtype, and prints lines for each."""
    matmul, matmul_flops = _matmul(dtype)
    runs = {name: case.run for name, case in cases.items()}
    times = interleaved({**runs, "a plain matmul": matmul}, repeats)
    width = max(map(len, cases))
    for name, case in cases.items():
        memory = described_memory(case.compiled)
        for which, pick in (("best", min), ("median", statistics.median)):
            seconds = pick(times[name])
            at_most = matmul_flops / pick(times["a plain matmul"])
            rate = case.flops / seconds
            print(
                f"{name:<{width}} {which:<7}{1e3 * seconds:8.1f} ms a step "
                f"{case.tokens / seconds:10,.0f} tokens/s {described_rate(rate):>14}, "
                f"{rate / at_most:.0%} of a plain matmul's {described_rate(at_most)}; {memory}"
            )


def described_rate(flops_per_second: float) -> str:
    """Returns the rate in GFLOP/s, from 1000 of them on in TFLOP/s."""
    giga = flops_per_second / 1e9
    return f"{giga:.1f} GFLOP/s" if giga < 1000 else f"{giga / 1000:.2f} TFLOP/s"


def described_memory(compiled: Any) -> str:
    """Returns what a program holds and, where it is counted, what a turn reads and writes."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    accessed = (compiled.cost_analysis() or {}).get("bytes accessed")
    parts = [f"{held / 2**20:,.0f} MiB held"]
    if accessed is not None:
        parts.append(f"{accessed / 2**20:,.0f} MiB accessed a turn")
    return f"{', '.join(parts)}, a device"


def _matmul(dtype: str) -> tuple[Callable[[], Any], float]:
    """Returns a plain matmul of [4096, 1024] x [1024, 1024], and its FLOPs."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0))
    shapes = (4096, 1024), (1024, 1024)
    x, w = (jax.random.normal(*pair, dtype) for pair in zip(keys, shapes, strict=True))
    multiply = jax.jit(jnp.matmul).lower(x, w).compile()
    return lambda: multiply(x, w), 2.0 * 4096 * 1024 * 1024


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each run, all taken by turns; the first turn is not counted."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, fn in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(fn())
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times
