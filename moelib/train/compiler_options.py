"""Options of XLA's compiler for training steps, for each kind of device."""

import re
from collections.abc import Mapping

import jax

from moelib.core.errors import UserError
from moelib.runtime import memory_maps

# Without these, an all-gather or a reduce-scatter over the whole torus is an all-reduce of a buffer
# filled with zeros, or is synchronous: 172,411 MiB of all-reduce in a step of qwen3-30b-a3b on 64
# v5p, 594 with them.
_WHOLE_TORUS = {
    "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": "True",
    "xla_tpu_prefer_async_allgather_to_allreduce": "True",
}

# All-gathers, reduce-scatters and all-reduces run on the SparseCores, concurrently with the
# TensorCore; without these options every all-gather is synchronous.
_V6E = _WHOLE_TORUS | {
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": "True",
    "xla_tpu_scoped_vmem_limit_kib": "81920",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "True",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "True",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "True",
    "xla_tpu_use_tc_device_shape_on_sc": "True",
    "xla_sc_enable_instruction_fusion": "False",
    "xla_sc_disable_megacore_partitioning": "True",
    "xla_tpu_enable_data_parallel_all_reduce_opt": "True",
    "xla_tpu_data_parallel_opt_different_sized_ops": "True",
}

_V5P = _WHOLE_TORUS | {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "True",
    "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": "True",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "True",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": "True",
    "xla_tpu_use_tc_device_shape_on_sc": "True",
    "xla_sc_enable_instruction_fusion": "False",
    "xla_sc_disable_megacore_partitioning": "True",
}

# XLA recomputes what exceeds this percentage of (0.8 M - A) in addition to A, where M is a GPU's
# memory and A the step's arguments. With the default, 95, that is at most 0.76 M; with 115 at most
# the 0.92 M that a process takes. The step of qwen3-30b-a3b on eight H100 moves 52,291 GiB instead
# of 56,910, for 0.1 GiB more memory.
#
# Without its latency-hiding scheduler, which is off by default for programs with a
# ragged-all-to-all, XLA waits for most collectives where they start: 4 of the 29 of that step are
# asynchronous, all 29 with it, for 0.1 GiB more memory.
_GPU = {
    "xla_gpu_memory_limit_slop_factor": "115",
    "xla_gpu_enable_latency_hiding_scheduler": "True",
}

# A tpu7x gathers and scatters asynchronously without options, and a v5e has no SparseCores.
# Pipelined all-gathers and reduce-scatters (xla_gpu_pipeline_all_gather and _reduce_scatter) leave
# 11 of the 120 MiB that a layer of deepseek-v2-lite gathers on eight H100 asynchronous, as without
# them, for 0.8 GiB more memory and a third more compile time.

BY_DEVICE_KIND: Mapping[str, Mapping[str, str]] = {"TPU v5": _V5P, "TPU v6 lite": _V6E}


def default_options(device_kind: str) -> Mapping[str, str]:
    """Returns the options for a kind of device, named as JAX names it."""
    return _GPU if device_kind.startswith("NVIDIA") else BY_DEVICE_KIND.get(device_kind, {})


# Operations add in one order, and no kernel is chosen by its speed in this process. Ahead of time,
# XLA has no deterministic kernel of Triton for a matmul.
_DETERMINISTIC_GPU = {
    "xla_gpu_deterministic_ops": "True",
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": "False",
}


def deterministic_options(device_kind: str) -> Mapping[str, str]:
    """Returns the options that make steps deterministic; those of TPUs and CPUs always are."""
    return _DETERMINISTIC_GPU if device_kind.startswith("NVIDIA") else {}


def step_options(device_kind: str, own: Mapping[str, str], deterministic: bool) -> dict[str, str]:
    """Returns the options for a step on a kind of device; `own` overrides the defaults.

    Raises:
        UserError: If one of `own` contradicts `deterministic`.
    """
    fixed = deterministic_options(device_kind) if deterministic else {}
    for name, value in spelled(own).items():
        if value != fixed.get(name, value):
            raise UserError(
                f"compiler_options: {name}={value}, which deterministic=True sets to "
                f"{fixed[name]}; remove one of them."
            )
    return spelled({**default_options(device_kind), **fixed, **own})


def spelled(options: Mapping[str, str]) -> dict[str, str]:
    """Returns options with `true` and `false` as True and False, which every compiler reads."""
    return {k: v.title() if v in ("true", "false") else v for k, v in options.items()}


def compile_with(lowered: jax.stages.Lowered, options: Mapping[str, str]) -> jax.stages.Compiled:
    """Returns the compiled step. Raises UserError for an option that the compiler refuses."""
    memory_maps.warn_if_many()
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        text = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        named = [name for name in options if re.search(rf"\b{re.escape(name)}\b", text)]
        if not named or not re.match("No such compile option|Failed to parse|While setting", text):
            raise
        raise UserError(
            f"compiler_options: {named[0]}={options[named[0]]}: {text.rstrip(': ')}; remove it or "
            "change its value, or install a compiler that knows it."
        ) from error
