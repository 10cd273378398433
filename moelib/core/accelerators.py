"""Accelerators: what one device of each kind has, how it is linked to others, what it costs."""

import dataclasses

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One device, as JAX counts devices, of an accelerator.

    Attributes:
        name: As it stands before the colon of a topology's name.
        platform: "tpu" or "gpu".
        device_kind: What JAX calls a device.
        hbm_bytes: Bytes that the compiler may hand out.
        flops_per_second: Peak of dense matmuls in bfloat16.
        hbm_bytes_per_second: To and from HBM.
        cycles_per_second: Clock of a TPU's TensorCore, which turns cycles into time; of a GPU's
            multiprocessors.
        link_bytes_per_second: Out of a device to those it is wired to (ICI, NVLink), all links
            together, one direction.
        network_bytes_per_second: Out of a device to other slices or hosts (DCN, InfiniBand), one
            direction.
        devices_per_domain: Devices that NVLink joins; None of a TPU, whose slice is one domain.
        dollars_per_hour: Of one device, on demand.
        devices_per_host: Of a GPU, the most that a host has.
    """

    name: str
    platform: str
    device_kind: str
    hbm_bytes: int
    flops_per_second: float
    hbm_bytes_per_second: float
    cycles_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_domain: int | None
    dollars_per_hour: float
    devices_per_host: int = 8


# TPU: peak FLOP/s, HBM bandwidth and ICI from Google Cloud's documentation, pages "TPU v5e", "TPU
# v5p", "TPU v6e" and "TPU7x (Ironwood)"; ICI there is of both directions, half of it here. A device
# of tpu7x is half a chip. Bytes of HBM are what the compiler's own out-of-memory message says is
# available (libtpu 0.0.51), of 16, 95, 32 and 96 GB a device. Clocks follow from peak FLOP/s over
# what the matrix units do in a cycle; that of tpu7x is a guess. DCN: a host's network over its
# devices.
#
# v4 is left out: libtpu describes it as two devices a chip, but runs join the two.
#
# GPU: NVIDIA's data sheets (dense, SXM). Bytes of HBM are 0.6 to 2 GiB less than XLA's own
# description of the GPU says, which is what the driver and CUDA take.
# Network: 400 Gb/s InfiniBand a GPU, 200 for A100.
#
# Prices are public list prices on demand in US regions, of whole machines over their devices; they
# change and are bargained over: `moelib plan --prices` replaces them.
ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator(
            "v5e", "tpu", "TPU v5 lite", int(15.75 * _GIB), 197e12, 819e9, 1.5e9,
            200e9, 6.25e9, None, 1.20,
        ),
        Accelerator(
            "v5p", "tpu", "TPU v5", int(95.73 * _GIB), 459e12, 2765e9, 1.75e9,
            600e9, 6.25e9, None, 4.20,
        ),
        Accelerator(
            "v6e", "tpu", "TPU v6 lite", int(31.24 * _GIB), 918e12, 1640e9, 1.75e9,
            400e9, 12.5e9, None, 2.70,
        ),
        Accelerator(
            "tpu7x", "tpu", "TPU7x", int(94.74 * _GIB), 1153.5e12, 3690e9, 1.75e9,
            300e9, 12.5e9, None, 6.00,
        ),
        Accelerator(
            "a100", "gpu", "NVIDIA A100-SXM4-80GB", int(78.5 * _GIB), 312e12, 2039e9, 1.41e9,
            300e9, 25e9, 8, 3.43,
        ),
        Accelerator(
            "h100", "gpu", "NVIDIA H100 80GB HBM3", int(78.5 * _GIB), 989.4e12, 3350e9, 1.83e9,
            450e9, 50e9, 8, 6.88,
        ),
        Accelerator(
            "h200", "gpu", "NVIDIA H200", int(139.0 * _GIB), 989.4e12, 4800e9, 1.83e9,
            450e9, 50e9, 8, 7.91,
        ),
        Accelerator(
            "b200", "gpu", "NVIDIA B200", int(177.0 * _GIB), 2250e12, 8000e9, 1.85e9,
            900e9, 50e9, 8, 14.24,
        ),
        Accelerator(
            "gb200", "gpu", "NVIDIA GB200", int(183.0 * _GIB), 2500e12, 8000e9, 1.93e9,
            900e9, 50e9, 72, 10.50, 4,
        ),
    )
}  # fmt: skip
