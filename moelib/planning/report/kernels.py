"""Kernels of a compiled step: Pallas kernels, and those of a GPU's libraries, by name and kind."""

import collections
import re
from typing import Any

from moelib.planning.hlo import values as hlo_values
from moelib.planning.hlo.program import Computation, Instruction, Program
from moelib.planning.report.step_report import Kernel

# What begins the target of a custom call, and whose kernel it then is.
_LIBRARIES = {
    "tpu_custom_call": "pallas tpu",
    "mosaic_gpu": "mosaic gpu",
    "__gpu$xla.gpu.triton": "triton",
    "triton_kernel_call": "triton",
    "__cublas$": "cublas",
    "__cudnn$": "cudnn",
}
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# A TPU's kernels have their estimate as XLA writes it; those of Mosaic for GPUs as JSON in a text.
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)".*?"bytes_accessed":"(\d+)"', re.DOTALL)
_ESTIMATE_GPU = re.compile(
    r"cost_estimate_json = .*?flops\W+?(?:22)?: (\d+).*?bytes_accessed\W+?(?:22)?: (\d+)"
)
_CALLS_OF_PALLAS = ("pallas_call", "mpmd_map")


def library(instruction: Instruction) -> str:
    """Returns whose kernel a custom call is, a value of `Kernel.library`; "" if it is none."""
    found = _TARGET.search(instruction.attributes)
    if instruction.opcode != "custom-call" or not found:
        return ""
    return next((name for k, name in _LIBRARIES.items() if found.group(1).startswith(k)), "")


def kernels(program: Program) -> tuple[Kernel, ...]:
    """Returns the kernels that a step runs, by name, with what they estimate of themselves.

    The FLOPs of cuBLAS are those of the matmul, which `hlo_values.matmul_flops` counts already:
    they are left out here.
    """
    rows: dict[tuple[Any, ...], collections.Counter[str]] = {}
    for computation, each in program.instructions():
        if computation.executions and (made_by := library(each)):
            sizes = (_said(each, key) for key in ("rows", "groups", "rows_at_once"))
            name = _name(each)
            key = name, *sizes, _kind(name, each, made_by), made_by
            _add(rows.setdefault(key, collections.Counter()), computation, each)
    return tuple(
        Kernel(
            key[0],
            **rows[key],
            rows=key[1],
            groups=key[2],
            rows_at_once=key[3],
            kind=key[4],
            library=key[5],
        )
        for key in sorted(rows)
    )


def _add(row: collections.Counter[str], computation: Computation, instruction: Instruction) -> None:
    text = instruction.attributes
    estimate = _ESTIMATE.search(text) or _ESTIMATE_GPU.search(text)
    flops, read = map(int, estimate.groups()) if estimate else (0, 0)
    row["count"] += 1
    row["without_estimate"] += estimate is None and not hlo_values.is_matmul(instruction)
    row["executions"] += computation.executions
    row["flops"] += flops * computation.executions
    row["bytes"] += read * computation.executions


def _name(instruction: Instruction) -> str:
    """Returns what the kernel was called when it was made, else the custom call's target."""
    if found := re.search(r'kernel_name[\\"]*[:=]\s*[\\"]*([\w.\-]+)', instruction.attributes):
        return found.group(1)
    path = instruction.op_name.split("/")
    if len(path) > 1 and path[-1] in _CALLS_OF_PALLAS and "(" not in path[-2]:
        return path[-2]
    found = _TARGET.search(instruction.attributes)
    if found and found.group(1).startswith("__cu"):
        return found.group(1)
    return re.sub(r"[.\d]*$", "", instruction.name)


def _kind(name: str, instruction: Instruction, made_by: str) -> str:
    """Returns what a kernel is for, a value of `Kernel.kind`."""
    backward = " gradient" if "gradient" in name or "Backward" in name else ""
    if name.startswith(("gmm", "tgmm")):
        # The gradient in the rows is a product like that of the forward pass.
        backward = backward or (" gradient" if "transpose(" in instruction.op_name else "")
        again = "rematted_computation" in instruction.op_name
        return "grouped matmul" + ("" if again else backward)
    if made_by == "cublas":
        return "matmul"
    if made_by == "cudnn" or "attention" in name or "attention" in instruction.op_name:
        return "attention" + backward
    return "other"


def _said(instruction: Instruction, key: str) -> int:
    """Returns a number in a kernel's metadata; 0 without."""
    found = re.search(rf'"{key}":"(\d+)"', instruction.attribute("frontend_attributes"))
    return int(found.group(1)) if found else 0
