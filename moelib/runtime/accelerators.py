"""Accelerators: peak FLOP/s, memory, links and prices of one device of each kind."""

import dataclasses

# Peak of dense matmuls in TFLOP/s, by the start of JAX's `device_kind`: bfloat16, float32, float8
# (None without float8 units). From the makers' data sheets: Google Cloud's page on each TPU;
# NVIDIA's tables without sparsity, SXM modules unless named. float32 is at JAX's default matmul
# precision: one bfloat16 pass on TPU, TF32 on GPU.
_PEAK_TFLOPS: dict[str, tuple[float, float, float | None]] = {
    "TPU v2": (22.5, 22.5, None),  # Per core, which is a JAX device; half a chip.
    "TPU v3": (61.5, 61.5, None),  # Per core.
    "TPU v4": (275.0, 275.0, None),
    "TPU v5 lite": (197.0, 197.0, None),
    "TPU v5e": (197.0, 197.0, None),
    "TPU v5": (459.0, 459.0, None),
    "TPU v6": (918.0, 918.0, None),
    "TPU7x": (1153.5, 1153.5, 2307.0),  # Per core.
    "NVIDIA A10G": (70.0, 35.0, None),
    "NVIDIA A100": (312.0, 156.0, None),
    "NVIDIA L4": (121.0, 60.0, 242.5),
    "NVIDIA L40S": (362.0, 183.0, 733.0),
    "NVIDIA H100": (989.4, 494.7, 1978.9),
    "NVIDIA H100 NVL": (835.5, 417.5, 1670.5),
    "NVIDIA H100 PCIe": (756.0, 378.0, 1513.0),
    "NVIDIA H200": (989.4, 494.7, 1978.9),
    "NVIDIA H200 NVL": (835.5, 417.5, 1670.5),
    "NVIDIA GH200": (989.4, 494.7, 1978.9),
    "NVIDIA B200": (2250.0, 1125.0, 4500.0),
    "NVIDIA GB200": (2500.0, 1250.0, 5000.0),
}


def peak_flops_per_second(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Returns the peak rate of dense matmuls of one device, or None if it is unknown.

    Args:
        device_kind: Kind of the device, as JAX names it, such as "NVIDIA H100 80GB HBM3".
        dtype: Dtype of the operands; float16 counts as bfloat16, and any float8 as float8.
    """
    kinds = [  # An L40 is no L4.
        kind
        for kind in _PEAK_TFLOPS
        if device_kind.startswith(kind) and not device_kind[len(kind) :][:1].isdigit()
    ]
    column = {"bfloat16": 0, "float16": 0, "float32": 1}.get(
        dtype, 2 if "float8" in dtype else None
    )
    if not kinds or column is None or " MIG " in device_kind:  # A part of a GPU.
        return None
    peak = _PEAK_TFLOPS[max(kinds, key=len)][column]
    return None if peak is None else peak * 1e12


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device of an accelerator, as JAX counts devices."""

    name: str  # Name in a topology such as "h100:2x8".
    platform: str  # "tpu" or "gpu".
    device_kind: str  # Kind of the device, as JAX names it.
    hbm_bytes: int  # HBM available to programs.
    hbm_bytes_per_second: float
    cycles_per_second: float  # Clock of a TPU's TensorCore, or of a GPU's multiprocessors.
    link_bytes_per_second: float  # Bandwidth out of a device to its domain (ICI, NVLink).
    # Bandwidth out of a device to other slices or hosts (DCN, InfiniBand).
    network_bytes_per_second: float
    devices_per_domain: int | None  # Devices joined by NVLink; None for a TPU slice.
    dollars_per_hour: float  # On-demand price.
    devices_per_host: int  # Largest number of GPUs in one host.

    @property
    def flops_per_second(self) -> float:
        """Peak rate of dense matmuls in bfloat16."""
        peak = peak_flops_per_second(self.device_kind)
        assert peak is not None, self.device_kind
        return peak


# Accelerators for which programs can be compiled without the device. Columns: name, platform,
# device kind, HBM in GiB, HBM GB/s, clock in GHz, link GB/s, network GB/s, devices per domain,
# dollars per hour, devices per host.
#
# TPU: HBM bandwidth and ICI from Google Cloud's documentation, pages "TPU v5e", "TPU v5p", "TPU
# v6e" and "TPU7x (Ironwood)"; ICI there counts both directions, here one. A device of tpu7x is half
# a chip. HBM is what the compiler's out-of-memory message calls available (libtpu 0.0.51), of 16,
# 95, 32 and 96 GB per device. Clocks follow from the peak FLOP/s and the FLOPs per cycle of the
# matrix units; that of tpu7x is a guess. DCN: a host's network divided by its devices. v4 is
# missing: libtpu describes two devices per chip where a run has one.
#
# GPU: NVIDIA's data sheets (SXM). HBM is what a process takes, 92% of the memory in XLA's own
# description of the GPU; see runtime/platforms.py. Network: 400 Gb/s InfiniBand per GPU, 200 for
# A100.
#
# Prices are public on-demand list prices in US regions, of whole machines divided by their devices.
# They change and are negotiable: `moelib plan --prices` replaces them.
_TABLE = (
    ("v5e", "tpu", "TPU v5 lite", 15.75, 819, 1.5, 200, 6.25, None, 1.20, 8),
    ("v5p", "tpu", "TPU v5", 95.73, 2765, 1.75, 600, 6.25, None, 4.20, 8),
    ("v6e", "tpu", "TPU v6 lite", 31.24, 1640, 1.75, 400, 12.5, None, 2.70, 8),
    ("tpu7x", "tpu", "TPU7x", 94.74, 3690, 1.75, 300, 12.5, None, 6.00, 8),
    ("a100", "gpu", "NVIDIA A100-SXM4-80GB", 72.8, 2039, 1.41, 300, 25, 8, 3.43, 8),
    ("h100", "gpu", "NVIDIA H100 80GB HBM3", 72.7, 3350, 1.83, 450, 50, 8, 6.88, 8),
    ("h200", "gpu", "NVIDIA H200", 129.5, 4800, 1.83, 450, 50, 8, 7.91, 8),
    ("b200", "gpu", "NVIDIA B200", 164.0, 8000, 1.85, 900, 50, 8, 14.24, 8),
    ("gb200", "gpu", "NVIDIA GB200", 169.5, 8000, 1.93, 900, 50, 72, 10.50, 4),
)
ACCELERATORS = {
    name: Accelerator(
        name, platform, kind, int(hbm * 2**30), memory * 1e9, clock * 1e9, link * 1e9,
        network * 1e9, domain, dollars, per_host,
    )
    for name, platform, kind, hbm, memory, clock, link, network, domain, dollars, per_host in _TABLE
}  # fmt: skip
