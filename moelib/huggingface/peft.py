"""Adapters written for PEFT: adapter_config.json and adapter_model.safetensors.

PEFT adapts each tensor of transformers. One that holds several matrices with an adapter each (gate
and up of all experts, the two latents of keys) has the joined ranks: A is stacked, and B is block
diagonal. Experts, and dense layers whose names PEFT takes for those of experts, are written as
`target_parameters`.

Letters: E experts, n matrices of a tensor, r rank.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from moelib.checkpoint.safetensors import ExistingFileError
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, specs_by_path
from moelib.core.tree import Nested
from moelib.huggingface.families import settings_of, tensor_mappings
from moelib.huggingface.tensor_mapping import TensorMapping, join_rows, to_tensor
from moelib.layers.adapter import adapter_names, without_adapters
from moelib.models.causal_lm import CausalLM
from moelib.runtime.storage import write_json

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"

# The parameter of transformers that holds the tensors of all experts with these names.
_FUSED = {"gate_up_proj": "gate_up_proj", "down_proj": "down_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_FUSED |= {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_EXPERTS = re.compile(r"(.*\.experts)(?:\.\d+)?\.(\w+?)(?:\.weight)?")


class _Adapter(NamedTuple):
    """The adapter of a tensor."""

    module: str  # The module of transformers.
    parameter: str  # Its parameter.
    a: np.ndarray  # [r, in], or [E r, in] with the ranks of an expert next to each other.
    b: np.ndarray  # [out, r], or [out, r E] with the experts next to each other.
    rank: int
    scale: float


def save_adapter(folder: str, cfg: CausalLM.Config, params: Nested, *, base: str = "") -> int:
    """Writes the adapters of a model for PEFT; returns the number of adapted tensors.

    Args:
        folder: Folder to create.
        cfg: Config of the model.
        params: Parameters.
        base: Folder or name of the base model, for `base_model_name_or_path`.

    Raises:
        ExistingFileError: If `folder` has tensors.
        NoFamilyError: If transformers has no such model.
        UserError: If the model has no adapters, or PEFT cannot hold one of them.
    """
    adapters = list(_adapters(cfg, params))
    if not adapters:
        raise UserError("the model has no adapters; write its weights by --to_hf instead.")
    fused = any(each.parameter in _FUSED.values() for each in adapters)
    modules, parameters, tensors = [], [], {}
    for each in adapters:
        name = each.module.rpartition(".")[2]
        inner = each.parameter == "gate_up_proj"  # PEFT wraps gate_up_proj, then down_proj.
        prefix = f"base_model.model.{each.module}" + ".base_layer" * inner
        if each.parameter == "weight" and not (fused and name in _FUSED):
            modules.append(each.module)
        else:
            parameters.append(f"{each.module}.{each.parameter}")
        tensors |= {f"{prefix}.lora_A.weight": each.a, f"{prefix}.lora_B.weight": each.b}
    rank, alpha = adapters[0].rank, adapters[0].rank * adapters[0].scale
    ranks = {_pattern(each): each.rank for each in adapters}
    alphas = {_pattern(each): each.rank * each.scale for each in adapters}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": modules,
        "target_parameters": parameters,
        "rank_pattern": {name: x for name, x in ranks.items() if x != rank},
        "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
    }
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(path := os.path.join(folder, TENSORS_FILE)):
        raise ExistingFileError(f"{path} exists; choose another folder.")
    save_file(tensors, path, {"format": "pt"})
    write_json(os.path.join(folder, CONFIG_FILE), settings)
    return len(adapters)


def _pattern(adapter: _Adapter) -> str:
    """Returns the regular expression by which PEFT finds the rank of an adapter."""
    is_module = adapter.parameter == "weight"
    return re.escape(adapter.module + ("" if is_module else f".{adapter.parameter}"))


def _adapters(cfg: CausalLM.Config, params: Nested) -> Iterator[_Adapter]:
    model = cfg.instantiate(parent=None)
    family, _ = settings_of(without_adapters(cfg))
    specs = specs_by_path(model.create_parameter_specs_recursively())
    leaves = {path: np.asarray(x) for path, x in tree.by_path(params).items()}
    scales = {
        layer.path().replace(".", "/"): layer.config.adapter.instantiate().scale
        for layer, _ in model.walk()
        if layer.config.adapter is not None
    }
    groups: dict[tuple[str, str], list[TensorMapping]] = {}
    for mapping in tensor_mappings(family, model):
        if adapter_names(mapping.path)[0] in leaves:
            groups.setdefault(_target(mapping.tensor), []).append(mapping)
    for (module, parameter), mappings in groups.items():
        path = mappings[0].path
        pieces = _experts if parameter != "weight" else _dense
        a, b, rank = pieces(mappings, specs, leaves)
        scale = scales[path.rpartition("/")[0]]
        a, b = (np.ascontiguousarray(x, np.float32) for x in (a, b))
        yield _Adapter(module, parameter, a, b, rank, scale)


def _target(tensor: str) -> tuple[str, str]:
    """Returns the module of transformers that holds a tensor, and the module's parameter."""
    tensor = tensor.replace("block_sparse_moe.", "mlp.")  # As transformers 5 names Mixtral's.
    if not (found := _EXPERTS.fullmatch(tensor)):
        return tensor.removesuffix(".weight"), "weight"
    if found[2] not in _FUSED:
        raise _refused(tensor)
    return found[1], _FUSED[found[2]]


def _refused(tensor: str) -> UserError:
    return UserError(
        f"PEFT cannot hold the adapter of {tensor} exactly: choose `targets` without its layer, or "
        "merge the adapters (--merge with --to_hf)."
    )


_Factors = tuple[np.ndarray, np.ndarray, int]  # A, B and the rank.


def _experts(
    mappings: Sequence[TensorMapping], specs: dict[str, ParameterSpec], leaves: dict[str, Any]
) -> _Factors:
    """Returns the factors of all experts of a layer: A [E r, in], B [out, r E]."""
    (path,) = {mapping.path for mapping in mappings}
    first, is_up = mappings[0], len({m.path for m in mappings}) == 1 and path.endswith("/up")
    lead = first.index[:1] if specs[path].axes[0] == "layers" else ()
    a, b = (leaves[name][lead] for name in adapter_names(path))
    if not is_up:
        a, b = a[:, None], b[:, None]  # [E, n, in, r] and [E, n, r, out].
    num_experts, n, _, rank = a.shape
    if is_up and n == 1:
        raise _refused(first.tensor)
    a = np.einsum("endr->enrd", a).reshape(num_experts, n * rank, -1)
    diagonal = np.einsum("enrf,nm->enfmr", b, np.eye(n, dtype=b.dtype)) / first.part.factor
    if "(f n)" in first.part.view:  # Gate and up alternate.
        diagonal = diagonal.swapaxes(1, 2)
    b = diagonal.reshape(num_experts, -1, n * rank)
    b = np.einsum("eor->ore", b).reshape(b.shape[1], -1)
    return a.reshape(-1, a.shape[-1]), b, n * rank


def _dense(
    mappings: Sequence[TensorMapping], specs: dict[str, ParameterSpec], leaves: dict[str, Any]
) -> _Factors:
    """Returns the factors of a matrix, of which each mapping may hold a part of the rows."""
    parts, blocks = [], []
    for mapping in mappings:
        fan, names = specs[mapping.path].fan_axes, mapping.part.view.split(" -> ")
        assert fan is not None
        of_a, of_b = (leaves[name] for name in adapter_names(mapping.path))
        num_inputs, outputs = len(fan.in_axis), names[1].split()[len(fan.in_axis) :]
        inputs = names[1].split()[:num_inputs]
        groups = re.findall(r"\([^)]*\)|\S+", names[0])
        index = (*mapping.index, *[None] * (len(specs[mapping.path].shape) - len(mapping.index)))
        stacked = tuple(index[axis] for axis in fan.batch_axis)
        if [g.strip("()").split() for g in groups] != [outputs, inputs] or None in stacked:
            raise _refused(mapping.tensor)
        kept = tuple(slice(None) if i is None else i for i in index[: of_a.ndim - 1])
        a = of_a[kept].reshape(-1, of_a.shape[-1])  # [in, r]
        view = f"{groups[0]} rank -> rank {' '.join(outputs)}"
        whole = mapping._replace(part=mapping.part._replace(view=view))
        parts.append(a.T)
        blocks.append(to_tensor(of_b[stacked], whole))  # [out, r]
    rank = parts[0].shape[0]
    widths = [(i * rank, (len(blocks) - 1 - i) * rank) for i in range(len(blocks))]
    padded = [np.pad(b, ((0, 0), w)) for b, w in zip(blocks, widths, strict=True)]
    pairs = [(b, m.part) for b, m in zip(padded, mappings, strict=True)]
    return np.concatenate(parts), join_rows(pairs), rank * len(parts)
