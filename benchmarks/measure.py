"""Measurements of compiled cases, alternately with a plain matmul."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Case, Sizes
from moelib.core.errors import UsageError
from moelib.core.table import Table

_WITH_EXPERTS = ("step", "gmm", "dispatch")
_WITH_HEADS = ("step", "attention")
_MATMUL = "a plain matmul"


def check_sizes(name: str, sizes: Sizes, num_devices: int) -> None:
    """Raises UsageError, with the flag to change, for sizes that a benchmark cannot have."""
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
            f"--num_heads={sizes.num_heads}: heads of {sizes.dim // sizes.num_heads} dimensions "
            "have no two halves to rotate; change it or --dim."
        )
    if name in _WITH_EXPERTS and sizes.num_experts_per_token > sizes.num_experts:
        raise UsageError(
            f"--num_experts_per_token={sizes.num_experts_per_token}: set it to at most "
            f"--num_experts={sizes.num_experts}."
        )
    if name == "step" and sizes.num_experts == 1:
        raise UsageError("--num_experts=1: load balancing needs 2 or more.")
    if name == "dispatch":
        for field in ("num_experts", "batch_size"):
            _check_multiple(field, getattr(sizes, field), num_devices, "the number of devices")


def _check_multiple(field: str, value: int, divisor: int, source: str) -> None:
    if value % divisor:
        raise UsageError(
            f"--{field}={value} is not a multiple of {divisor}, {source}; change one of them."
        )


def describe(name: str, sizes: Sizes, routing: str) -> str:
    """Returns the sizes, the routing and the dtype that a benchmark depends on."""
    parts = [f"{sizes.batch_size} x {sizes.seq_len} tokens", f"width {sizes.dim}"]
    if name in _WITH_HEADS:
        parts.append(f"{sizes.num_heads} heads, {sizes.num_kv_heads} KV heads")
    if name in _WITH_EXPERTS:
        parts.append(f"{sizes.num_experts} experts of width {sizes.hidden_dim}")
        parts.append(f"top-{sizes.num_experts_per_token}, {routing} routing")
    if name in ("step", "loss"):
        parts.append(f"vocabulary of {sizes.vocab_size:,}")
    return ", ".join([*parts, sizes.dtype])


def measure(cases: Mapping[str, Case], repeats: int, dtype: str) -> Table:
    """Returns a table of the least and median times of each case, its rates and its memory."""
    matmul, matmul_flops = _matmul(dtype)
    times = interleaved(
        {**{name: case.run for name, case in cases.items()}, _MATMUL: matmul}, repeats
    )
    rows = []
    for name, case in cases.items():
        for statistic, pick in (("least", min), ("median", statistics.median)):
            seconds, rate = pick(times[name]), case.flops / pick(times[name])
            share = rate * pick(times[_MATMUL]) / matmul_flops
            speed = (f"{1e3 * seconds:.1f}", f"{case.tokens / seconds:,.0f}", f"{rate / 1e9:,.1f}")
            rows.append((name, statistic, *speed, f"{share:.0%}", *memory(case.compiled)))
    columns = ("ms/step>", "tokens/s>", "GFLOP/s>", "of a plain matmul>")
    bytes_ = ("MiB held/device>", "MiB accessed/device>")
    return Table("", ("case", "time", *columns, *bytes_), rows)


def memory(compiled: Any) -> tuple[str, str]:
    """Returns the MiB that a program holds and accesses; "-" where the bytes are not counted."""
    analysis = compiled.memory_analysis()
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    held += analysis.temp_size_in_bytes - analysis.alias_size_in_bytes
    accessed = (compiled.cost_analysis() or {}).get("bytes accessed")
    return f"{held / 2**20:,.0f}", "-" if accessed is None else f"{accessed / 2**20:,.0f}"


def _matmul(dtype: str) -> tuple[Callable[[], Any], float]:
    """Returns a plain matmul of [4096, 1024] x [1024, 1024], and its FLOPs."""
    keys = jax.random.split(jax.random.key(0))
    shapes = (4096, 1024), (1024, 1024)
    x, w = (jax.random.normal(*pair, dtype) for pair in zip(keys, shapes, strict=True))
    multiply = jax.jit(jnp.matmul).lower(x, w).compile()
    return lambda: multiply(x, w), 2.0 * 4096 * 1024 * 1024


def interleaved(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each run, taken alternately; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, fn in runs.items():
            begin = time.perf_counter()
            jax.block_until_ready(fn())
            if repeat:
                times[name].append(time.perf_counter() - begin)
    return times
