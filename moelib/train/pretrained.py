"""Models of Hugging Face, read from a folder into a mesh's arrays, and written to one.

Nothing here needs torch or transformers, and no more than a tensor is held beside the model.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moelib.checkpoint.contents import CheckpointMismatchError
from moelib.checkpoint.safetensors import TensorFolder, write_tensors
from moelib.core import tree
from moelib.core.context import Nested
from moelib.core.param import is_spec
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import (
    NotTheModelError,
    check_computes,
    may_drop,
    places_of,
    read_model,
    settings_of,
)
from moelib.models.huggingface.family import Family
from moelib.models.huggingface.quantized import Dequantized
from moelib.models.huggingface.tensors import (
    TensorMismatchError,
    load_parameters,
    their_tensors,
)
from moelib.parallel.sharding import named_shardings
from moelib.train.state import TrainerState

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Pretrained(NamedTuple):
    """A model that was read.

    Attributes:
        cfg: Its config.
        params: Its parameters.
        settings: Its config.json.
    """

    cfg: CausalLM.Config
    params: Nested
    settings: dict[str, Any]


def read_config(folder: str) -> tuple[CausalLM.Config, dict[str, Any]]:
    """Returns our config of the model in a folder, and its config.json.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If it is of no known architecture, or has settings that are not known.
    """
    values = _read_settings(folder)
    return read_model(values, os.path.join(folder, CONFIG_FILE))[1], values


def load_pretrained(
    folder: str, *, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None
) -> Pretrained:
    """Returns the model in a folder, its parameters laid over a mesh by their axes.

    Args:
        folder: With config.json and safetensors.
        dtype: Of the parameters, but for those that never leave float32.
        mesh: Where they go; the first device if None.

    Raises:
        DamagedTensorsError: If a file is damaged.
        FileNotFoundError: If a file is missing.
        TensorMismatchError: If the tensors are not those of the config.
        ValueError: If the config is not known, or a tensor's dtype.
    """
    values = _read_settings(folder)
    family, cfg = read_model(values, os.path.join(folder, CONFIG_FILE))
    if jnp.dtype(dtype) != jnp.float32:
        cfg = cfg.clone(dtype=str(jnp.dtype(dtype)))
    model = cfg.instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    targets = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs, is_leaf=is_spec
    )
    if mesh is not None:
        targets = jax.tree.map(
            lambda target, sharding: target.update(sharding=sharding),
            targets,
            named_shardings(specs, mesh),
        )
    return Pretrained(cfg, _read_tensors(folder, family, model, targets), values)


def state_from_hugging_face(folder: str, model: CausalLM) -> Callable[[TrainerState], TrainerState]:
    """Returns what gives a run's first state the weights in a folder: an `init_state_builder`.

        cfg.init_state_builder = config_for_function(state_from_hugging_face).set(folder="...")

    An average of the parameters begins with them, too. What only the run's model has, such as
    counters of losses of balance, begins at 0.

    Args:
        folder: With config.json and safetensors.
        model: The run's, which computes what the folder's does; the trainer gives it.

    Raises:
        CheckpointMismatchError: When it is called, if the run's model is not the folder's.
        Exception: Then, as `load_pretrained`.
    """

    def build(state: TrainerState) -> TrainerState:
        values = _read_settings(folder)
        try:
            family = check_computes(values, os.path.join(folder, CONFIG_FILE), model.config)
        except NotTheModelError as error:
            raise CheckpointMismatchError(str(error)) from error
        targets = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.model
        )
        params = _read_tensors(folder, family, model, targets)
        learner = state.learner
        if learner.ema is not None:
            by_path = dict(tree.flatten_items(params))
            begun = jax.tree_util.tree_map_with_path(
                lambda path, old: by_path[tree.path_string(path)].astype(old.dtype),
                learner.ema.params,
            )
            learner = learner._replace(ema=learner.ema._replace(params=begun))
        return state._replace(model=params, learner=learner)

    return build


def _read_tensors(folder: str, family: Family, model: CausalLM, targets: Nested) -> Nested:
    with TensorFolder(folder) as folder_tensors:
        tensors = Dequantized(folder_tensors)
        places, ignored = places_of(family, model), family.ignored(model.config)
        if model.config.lm_head is None and _HEAD in tensors.keys():  # noqa: SIM118, no dict.
            if not np.array_equal(tensors.read(_HEAD), tensors.read(_EMBEDDING)):
                raise TensorMismatchError(
                    f"{folder}: tie_word_embeddings is set, and {_HEAD} is not {_EMBEDDING}; unset "
                    "it, or remove the tensor."
                )
            ignored = (*ignored, re.escape(_HEAD))
        return load_parameters(tensors, places, targets, ignored=ignored)


def save_pretrained(
    folder: str,
    cfg: CausalLM.Config,
    params: Nested,
    *,
    dtype: Any = None,
    tokenizer_json: str | None = None,
    eos_token: str | None = None,
    more_settings: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    max_file_bytes: int = 2 << 30,
) -> str:
    """Writes a model for transformers; returns the name of its architecture.

    Args:
        folder: Where; it is made.
        cfg: The model.
        params: Its parameters.
        dtype: What they are rounded to, but for those that no gradient trains; as they are if None.
        tokenizer_json: The text of its tokenizer.json.
        eos_token: The tokenizer's end of text.
        more_settings: Further settings of config.json: token ids, max_position_embeddings.
        generation: What generation_config.json holds; no such file if None.
        max_file_bytes: When a new file of tensors is begun.

    Raises:
        FileExistsError: If there are tensors in the folder.
        NoFamilyError: If transformers has no such model.
    """
    family, settings = settings_of(cfg)
    if dropping := may_drop(cfg):
        logger.warning(
            "%s may drop choices of experts, which transformers never does: where it has dropped "
            "some, the logits differ.",
            ", ".join(dropping),
        )
    model = cfg.instantiate(parent=None)
    specs = dict(tree.flatten_items(model.create_parameter_specs_recursively(), is_spec))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        places = places_of(family, model)
        kept = {place.key for place in places if not specs[place.path].trainable}
        for key, values in their_tensors(params, places):
            as_it_is = dtype is None or key in kept  # A bias that balances: it chooses experts.
            yield key, values if as_it_is else _rounded(key, values, jnp.dtype(dtype))
        for key, shape in family.zeros(cfg).items():
            yield key, np.zeros(shape, written)

    written = jnp.dtype(dtype or params["embedding"]["weight"].dtype)
    settings = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": str(written),
        **settings,
        **(more_settings or {}),
    }
    write_tensors(folder, tensors(), max_file_bytes=max_file_bytes)
    _write_json(folder, CONFIG_FILE, settings)
    if generation is not None:
        _write_json(folder, "generation_config.json", generation)
    if tokenizer_json is not None:
        with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
            file.write(tokenizer_json)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
        _write_json(folder, "tokenizer_config.json", {k: x for k, x in about.items() if x})
    return family.architecture


def _rounded(key: str, values: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if np.isfinite(values).all() and not np.isfinite(rounded).all():
        raise ValueError(f"{key} has values too large for {dtype}; choose bfloat16 or float32.")
    return rounded


def _read_settings(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, CONFIG_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no {path}; give the folder of a Hugging Face model."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no settings.")
    return values


def _write_json(folder: str, name: str, content: Any) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
