"""Sizes of benchmarks, which are flags of the command: their checks and their description."""

import dataclasses
from typing import Literal

from moelib.core.errors import UsageError
from moelib.runtime.command_line import flag

_WITH_EXPERTS = ("step", "gmm", "dispatch")
_WITH_HEADS = ("step", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a benchmark."""

    batch_size: int = flag(8, "Sequences per step.")
    seq_len: int = flag(256, "Tokens per sequence.")
    num_experts: int = flag(16, "Experts per layer.")
    num_experts_per_token: int = flag(2, "Experts per token.")
    num_heads: int = flag(8, "Attention heads.")
    num_kv_heads: int = flag(4, "Key and value heads.")
    vocab_size: int = flag(8192, "Size of the vocabulary.")
    num_layers: int = flag(4, "Layers of the model.")
    dim: int = flag(256, "Width of the model.")
    hidden_dim: int = flag(256, "Hidden width of an expert.")
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "Dtype of the passes of a step, and elsewhere of inputs and weights."
    )

    @property
    def num_tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.seq_len


def check_sizes(name: str, sizes: Sizes, num_devices: int) -> None:
    """Raises UsageError, with the flag to change, for sizes that a benchmark cannot have."""
    for field in dataclasses.fields(Sizes):
        if isinstance(value := getattr(sizes, field.name), int) and value < 1:
            raise UsageError(f"--{field.name}={value}: set it to 1 or more.")
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
