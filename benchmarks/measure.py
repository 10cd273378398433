"""Measurements of compiled cases, alternately with a plain matmul."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Case
from moelib.runtime.table import Table

_MATMUL = "a plain matmul"


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
