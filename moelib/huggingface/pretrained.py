"""Hugging Face models: read from a folder into arrays on a mesh, and written to a folder.

Needs neither torch nor transformers, and holds at most one tensor next to the model.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.checkpoint.contents import CheckpointMismatchError
from moelib.checkpoint.safetensors import TensorFolder, add_sums, write_tensors
from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.param import specs_by_path
from moelib.core.tree import Nested
from moelib.data.tokens.tokenizer import CHAT_TEMPLATE_FILE, FILE_NAME, SETTINGS_FILE, Tokenizer
from moelib.huggingface.families import (
    NoFamilyError,
    NotTheModelError,
    check_computes,
    may_drop,
    published_settings,
    quantizes,
    read_model,
    settings_of,
    tensor_mappings,
)
from moelib.huggingface.family import Family
from moelib.huggingface.quantized import Dequantized
from moelib.huggingface.tensors import (
    TensorMismatchError,
    checkpoint_tensors,
    load_parameters,
)
from moelib.layers.adapter import has_adapters, is_adapter
from moelib.models.causal_lm import CausalLM
from moelib.parallel.sharding import abstract_arrays
from moelib.runtime import storage
from moelib.runtime.processes import agreed
from moelib.runtime.storage import copy_file, read_json, write_json

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
FILES = (  # Files of a Hugging Face folder next to the tensors.
    CONFIG_FILE,
    FILE_NAME,
    SETTINGS_FILE,
    "special_tokens_map.json",
    CHAT_TEMPLATE_FILE,
    GENERATION_FILE,
)
_TRAVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Pretrained(NamedTuple):
    """A Hugging Face model in memory."""

    cfg: CausalLM.Config
    params: Nested
    settings: dict[str, Any]  # Content of config.json.


def read_config(
    folder: str, *, ignore_settings: Iterable[str] = (), multi_token_prediction: bool = False
) -> tuple[CausalLM.Config, dict[str, Any]]:
    """Returns the model config of a folder, and its config.json.

    Args:
        folder: Folder with config.json.
        ignore_settings: Settings of config.json that are known to change nothing.
        multi_token_prediction: Whether the model has the modules that predict further tokens.

    Raises:
        UserError: If config.json is missing or cannot be read, the architecture is unknown, or a
            setting that is not in `ignore_settings` is unsupported.
    """
    values = read_settings(folder)
    source = os.path.join(folder, CONFIG_FILE)
    return read_model(
        values, source, ignored=ignore_settings, multi_token_prediction=multi_token_prediction
    )[1], values


def load_pretrained(
    folder: str,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    ignore_settings: Iterable[str] = (),
    multi_token_prediction: bool = False,
) -> Pretrained:
    """Returns the model of a folder, its parameters sharded over a mesh.

    Args:
        folder: Folder with config.json and safetensors.
        dtype: Dtype of the parameters, except those that are always float32.
        mesh: Mesh of the parameters; None for the first device.
        ignore_settings: Settings of config.json that are known to change nothing.
        multi_token_prediction: Whether to read the modules that predict further tokens.

    Raises:
        DamagedTensorsError: If a file is damaged.
        FileNotFoundError: If a file is missing.
        TensorMismatchError: If the tensors are not those of the config.
        UserError: If the config or the dtype of a tensor is not supported.
    """
    values = read_settings(folder)
    source = os.path.join(folder, CONFIG_FILE)
    family, cfg = read_model(
        values, source, ignored=ignore_settings, multi_token_prediction=multi_token_prediction
    )
    if jnp.dtype(dtype) != jnp.float32:
        cfg = cfg.clone(dtype=str(jnp.dtype(dtype)))
    model = cfg.instantiate(parent=None)
    targets = abstract_arrays(model.create_parameter_specs_recursively(), mesh)
    params = agreed(lambda: _read_tensors(folder, family, model, targets))
    return Pretrained(cfg, params, values)


def replaced_parameters(
    params: Nested, folder: str, model: CausalLM, ignore_settings: Sequence[str] = ()
) -> Nested:
    """Returns the weights of a folder in place of initial parameters, on their devices.

    State that only the run's model has, such as load counters, starts at 0, and adapters keep their
    initial values. The other initial parameters are freed before any weight is read.

    Args:
        params: Initial parameters of the run.
        folder: Folder with config.json and safetensors.
        model: The run's model.
        ignore_settings: Settings of config.json that are known to change nothing.

    Raises:
        CheckpointMismatchError: If the folder holds another model.
        Exception: The errors of `load_pretrained`.
    """

    def read_family() -> Family:
        settings, path = read_settings(folder), os.path.join(folder, CONFIG_FILE)
        try:
            return check_computes(settings, path, model.config, ignored=ignore_settings)
        except NotTheModelError as error:
            raise CheckpointMismatchError(str(error)) from error

    family = agreed(read_family)
    adapters, weights = tree.split(params, is_adapter)
    targets = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights
    )
    jax.tree.map(lambda x: x.delete(), weights)
    return tree.merge(agreed(lambda: _read_tensors(folder, family, model, targets)), adapters)


def _read_tensors(folder: str, family: Family, model: CausalLM, targets: Nested) -> Nested:
    with TensorFolder(folder) as folder_tensors:
        tensors = Dequantized(folder_tensors)
        mappings, ignored = tensor_mappings(family, model), family.ignored(model.config)
        present = tensors.keys()
        unread = [name for name in present if any(re.fullmatch(p, name) for p in ignored)]
        if unread:
            logger.warning(
                "%d tensors in %s, such as %s, are not read: logits of text do not depend on them. "
                "moelib convert --multi_token_prediction reads modules of multi-token prediction.",
                len(unread),
                folder,
                unread[0],
            )
        copies = family.copies(model.config)
        if model.config.lm_head is None:
            copies = {family.tensor_name(_HEAD): family.tensor_name(_EMBEDDING), **copies}
        for copy, name in copies.items():
            if copy not in present or name not in present:  # `load_parameters` names the latter.
                continue
            if not np.array_equal(tensors.read(copy), tensors.read(name)):
                advice = (
                    "tie_word_embeddings=true; set it to false or remove the tensor"
                    if copy == family.tensor_name(_HEAD)
                    else "the model has one parameter for both; convert it without "
                    "multi_token_prediction or remove the tensor"
                )
                raise TensorMismatchError(f"{folder}: {copy} differs from {name}, but {advice}.")
            ignored = (*ignored, re.escape(copy))
        try:
            return load_parameters(tensors, mappings, targets, ignored=ignored)
        except TensorMismatchError as error:
            raise TensorMismatchError(f"{folder}: {error}") from error


def save_pretrained(
    folder: str,
    cfg: CausalLM.Config,
    params: Nested,
    *,
    dtype: Any = None,
    tokenizer: Tokenizer | None = None,
    files_of: str | None = None,
    more_settings: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    max_file_bytes: int = 2 << 30,
) -> str:
    """Writes a model for transformers; returns the name of its architecture.

    Args:
        folder: Folder to create.
        cfg: Config of the model.
        params: Parameters.
        dtype: Dtype to round to, except non-trainable parameters; None keeps each dtype.
        tokenizer: Tokenizer, which is written too.
        files_of: Folder of the model that this one was trained from. Its files are written again,
            `config.json` with the new dtype. Of a config.json that does not describe the model,
            only token ids and max_position_embeddings are.
        more_settings: Further settings of config.json: token ids, max_position_embeddings.
        generation: Content of generation_config.json; None writes no such file.
        max_file_bytes: Size in bytes at which a new file of tensors starts.

    Raises:
        FileExistsError: If the folder holds tensors.
        UserError: If the model has adapters.
        NoFamilyError: If transformers has no such model.
    """
    published = read_json(os.path.join(files_of, CONFIG_FILE)) if files_of else {}
    try:
        family, settings = _family_and_settings(cfg, published)
    except NoFamilyError:
        if cfg.multi_token_prediction is None:
            raise
        cfg = cfg.clone(multi_token_prediction=None)
        family, settings = _family_and_settings(cfg, published)
        logger.warning(
            "multi_token_prediction is not written: %s has no such modules.", family.architecture
        )
    _warn_of_differences(cfg)
    model = cfg.instantiate(parent=None)
    specs = specs_by_path(model.create_parameter_specs_recursively())
    written = jnp.dtype(dtype or params["embedding"]["weight"].dtype)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        mappings = tensor_mappings(family, model)
        by_tensor = {mapping.tensor: mapping for mapping in mappings}
        for copy, name in family.copies(cfg).items():
            mappings.append(by_tensor[name]._replace(tensor=copy))
        kept = {mapping.tensor for mapping in mappings if not specs[mapping.path].trainable}
        for name, values in checkpoint_tensors(params, mappings):
            exact = dtype is None or name in kept  # A rounded balancing bias chooses other experts.
            yield name, values if exact else _rounded(name, values, jnp.dtype(dtype))
        for name, shape in family.zeros(cfg).items():
            yield name, np.zeros(shape, written)

    write_tensors(folder, tensors(), max_file_bytes=max_file_bytes)
    published = {**(published.get("text_config") or {}), **published}
    kept = {name: published[name] for name in _TRAVEL if name in published}
    settings = {**settings, **(more_settings or {}), **kept, "dtype": str(written)}
    write_json(os.path.join(folder, CONFIG_FILE), settings)
    if generation is not None:
        write_json(os.path.join(folder, GENERATION_FILE), generation)
    if tokenizer is not None:
        tokenizer.save(folder)
    if files_of is not None:
        copy_files(files_of, folder, without=CONFIG_FILE)
    add_sums(folder, FILES)
    return family.architecture


def copy_files(source: str, to: str, *, without: str = "") -> None:
    """Copies those of `FILES` that a folder has, except `without`."""
    storage.make_folder(to)
    for name in FILES:
        if name != without and storage.exists(path := os.path.join(source, name)):
            copy_file(path, os.path.join(to, name))


def _warn_of_differences(cfg: CausalLM.Config) -> None:
    if dropping := may_drop(cfg):
        logger.warning(
            "%s may drop assignments, which transformers never does: logits differ where it does.",
            ", ".join(dropping),
        )
    if quantized := quantizes(cfg):
        logger.warning(
            "%s is not written: transformers computes with the weights as they are stored.",
            ", ".join(quantized),
        )


def _family_and_settings(
    cfg: CausalLM.Config, published: Mapping[str, Any]
) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a model and its config.json, the published one if it is the model's."""
    if has_adapters(cfg):
        raise UserError(
            "the model has adapters, which its tensors cannot hold: merge them (--merge), or write "
            "them for PEFT (--to_peft)."
        )
    if published:
        try:
            return published_settings(published, cfg)
        except UserError as error:
            logger.warning("The published config.json is not kept: %s", error)
    family, settings = settings_of(cfg)
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    # Without nulls the class's own ids apply, such as OLMoE's pad_token_id=1, which never trains.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return family, {**names, **ids, **settings}


def _rounded(key: str, values: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if np.isfinite(values).all() and not np.isfinite(rounded).all():
        raise UserError(
            f"{key} has values too large for {dtype}; set dtype to bfloat16 or float32."
        )
    return rounded


def hint_of_hub(folder: str) -> str:
    """Returns how to fetch a model, if an absent folder has a name such as those of the Hub."""
    if os.path.exists(os.path.dirname(folder)) or not re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        return ""
    return (
        " Nothing is downloaded: fetch a model of the Hub first, such as by "
        f"`hf download {folder} --local-dir=model`."
    )


def read_settings(folder: str) -> dict[str, Any]:
    """Returns the content of a folder's config.json. Raises UserError if it cannot be read."""
    path = os.path.join(folder, CONFIG_FILE)
    if not os.path.exists(path):
        raise UserError(
            f"{path} does not exist; pass the folder of a Hugging Face model.{hint_of_hub(folder)}"
        )
    return read_json(path)
