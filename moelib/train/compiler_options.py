"""Options of XLA's compiler for training steps, for each kind of device."""

from collections.abc import Mapping

# All-gathers, reduce-scatters and all-reduces run on the SparseCores, concurrently with the
# TensorCore; without these options every all-gather is synchronous. The compilers for other
# generations accept them too, but their effect there has not been measured.
_V6E = {
    "xla_tpu_scoped_vmem_limit_kib": "81920",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_tpu_enable_data_parallel_all_reduce_opt": "true",
    "xla_tpu_data_parallel_opt_different_sized_ops": "true",
}

# NVIDIA GPUs need none: XLA's latency-hiding scheduler is on by default. Pipelined all-gathers and
# reduce-scatters (xla_gpu_pipeline_all_gather and _reduce_scatter) leave 11 of the 120 MiB that a
# layer of deepseek-v2-lite gathers on eight H100 asynchronous, as without them, for 0.8 GiB more
# memory and a third more compile time.

BY_DEVICE_KIND: Mapping[str, Mapping[str, str]] = {"TPU v6 lite": _V6E}
