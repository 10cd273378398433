"""Models of Hugging Face, read from a folder into a mesh's arrays, and written to one.

Nothing here needs torch or transformers, and no more than a tensor is held beside the model.
"""

import json
import os
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
from moelib.models.huggingface.families import places_of, read_model, settings_of
from moelib.models.huggingface.family import Family
from moelib.models.huggingface.quantized import Dequantized
from moelib.models.huggingface.tensors import load_parameters, their_tensors
from moelib.parallel.sharding import named_shardings
from moelib.train.state import TrainerState

CONFIG_FILE = "config.json"


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
    model = cfg.clone(dtype=str(jnp.dtype(dtype))).instantiate(parent=None)
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


def state_from_hugging_face(folder: str) -> Callable[[TrainerState], TrainerState]:
    """Returns what gives a run's first state the weights in a folder: an `init_state_builder`.

        cfg.init_state_builder = config_for_function(state_from_hugging_face).set(folder="...")

    An average of the parameters begins with them, too.

    Raises:
        CheckpointMismatchError: When it is called, if the run's model is not the folder's.
        Exception: Then, as `load_pretrained`.
    """

    def build(state: TrainerState) -> TrainerState:
        values = _read_settings(folder)
        family, cfg = read_model(values, os.path.join(folder, CONFIG_FILE))
        model = cfg.instantiate(parent=None)
        targets = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state.model
        )
        wanted = model.create_parameter_specs_recursively()
        shapes = [
            {path: x.shape for path, x in tree.flatten_items(t, is_spec)} for t in (wanted, targets)
        ]
        for path in sorted(shapes[0].keys() | shapes[1].keys()):
            if (theirs := shapes[0].get(path)) != (ours := shapes[1].get(path)):
                raise CheckpointMismatchError(
                    f"{folder} is not the run's model: {path} is {theirs or 'missing'} there, and "
                    f"{ours or 'missing'} in the run; set `model` to what its config.json says."
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
    with TensorFolder(folder) as tensors:
        places, ignored = places_of(family, model), family.ignored(model.config)
        return load_parameters(Dequantized(tensors), places, targets, ignored=ignored)


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
    model = cfg.instantiate(parent=None)
    specs = dict(tree.flatten_items(model.create_parameter_specs_recursively(), is_spec))

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        places = places_of(family, model)
        kept = {place.key for place in places if not specs[place.path].trainable}
        for key, values in their_tensors(params, places):
            as_it_is = dtype is None or key in kept  # A bias that balances: it chooses experts.
            yield key, values if as_it_is else values.astype(jnp.dtype(dtype))
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
