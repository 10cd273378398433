"""The kernels of a compiled step: Pallas kernels, and those of a GPU's libraries."""

import collections
import re
from typing import Any

from moelib.layers.moe.rows import SUM_ROWS
from moelib.planning.hlo.program import Instruction, Program
from moelib.planning.hlo.source import phase
from moelib.planning.hlo.values import is_matmul
from moelib.planning.report.step_report import Kernel

# Libraries of kernels by the start of a custom call's target.
_LIBRARIES = {
    "tpu_custom_call": "pallas tpu",
    "mosaic_gpu": "mosaic gpu",
    "__gpu$xla.gpu.triton": "triton",
    "triton_kernel_call": "triton",
    "__cublas$": "cublas",
    "__cudnn$": "cudnn",
}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# The cost estimate of a TPU kernel is XLA's; that of Mosaic for GPUs is JSON in a string.
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"', re.DOTALL)
_ESTIMATE_GPU = re.compile(
    r"cost_estimate_json = .*?flops\W+?(?:22)?: (\d+).*?bytes_accessed\W+?(?:22)?: (\d+)"
)
_KERNEL_NAME = re.compile(r'kernel_name[\\"]*[:=]\s*[\\"]*([\w.\-]+)')
_PALLAS_CALLS = ("pallas_call", "mpmd_map")


def library(instruction: Instruction) -> str:
    """Returns the library of a kernel, as `Kernel.library`; "" for other instructions."""
    found = _TARGET.search(instruction.attributes)
    if instruction.opcode != "custom-call" or not found:
        return ""
    return next((name for k, name in _LIBRARIES.items() if found.group(1).startswith(k)), "")


def kernels(program: Program) -> tuple[Kernel, ...]:
    """Returns the executed kernels by name, with their own cost estimates.

    Matmuls of cuBLAS have no FLOPs here, because `hlo.values.matmul_flops` counts them.
    """
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for computation, each in program.instructions():
        if not computation.executions or not (library_name := library(each)):
            continue
        name = _name(each)
        sizes = tuple(_metadata(each, key) for key in ("rows", "groups", "rows_at_once"))
        key = name, *sizes, _kind(name, each, library_name), library_name
        row = rows.setdefault(key, collections.defaultdict(float))
        estimate = estimate_of(each)
        flops, accessed = estimate or (0, 0)
        row["count"] += 1
        row["without_estimate"] += estimate is None and not is_matmul(each)
        row["executions"] += computation.executions
        row["flops"] += flops * computation.executions
        row["bytes"] += accessed * computation.executions
    fields = ("name", "rows", "groups", "rows_at_once", "kind", "library")
    found = []
    for key in sorted(rows):
        sums: dict[str, Any] = {name: round(x) for name, x in rows[key].items()}
        found.append(Kernel(**dict(zip(fields, key, strict=True)), **sums))
    return tuple(found)


def estimate_of(kernel: Instruction) -> tuple[int, int] | None:
    """Returns a kernel's own estimate of its FLOPs and bytes; None without one."""
    text = kernel.attributes
    found = _ESTIMATE.search(text) or _ESTIMATE_GPU.search(text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def _name(instruction: Instruction) -> str:
    """Returns the kernel's own name, or the custom call's target."""
    if found := _KERNEL_NAME.search(instruction.attributes):
        return found.group(1)
    path = instruction.op_name.split("/")
    if len(path) > 1 and path[-1] in _PALLAS_CALLS and "(" not in path[-2]:
        return path[-2]
    found = _TARGET.search(instruction.attributes)
    if found and found.group(1).startswith("__cu"):
        return found.group(1)
    return re.sub(r"[.\d]*$", "", instruction.name)


def _kind(name: str, instruction: Instruction, library_name: str) -> str:
    """Returns the purpose of a kernel, as `Kernel.kind`."""
    if f"/{SUM_ROWS}/" in instruction.op_name:
        return "row sum"
    backward = " gradient" if "gradient" in name or "Backward" in name else ""
    if name.startswith(("gmm", "tgmm")):
        # The input gradient is the same kernel as the forward pass.
        gradient = " gradient" if phase(instruction.op_name) == "backward" else backward
        return "grouped matmul" + ("" if phase(instruction.op_name) == "recomputed" else gradient)
    if library_name == "cublas":
        return "matmul"
    if "fmha" in name or "attention" in name or "attention" in instruction.op_name:
        return "attention" + backward
    return "other"


def _metadata(instruction: Instruction, key: str) -> int:
    """Returns a number in a kernel's metadata, or 0."""
    found = re.search(rf'"{key}":"(\d+)"', instruction.attribute("frontend_attributes"))
    return int(found.group(1)) if found else 0
