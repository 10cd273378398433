"""Trained models, loaded from the folder of a run or of a Hugging Face model."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from moelib.checkpoint.contents import CheckpointRecord
from moelib.checkpoint.restore import restore_params_only
from moelib.checkpoint.safetensors import check_sum
from moelib.core import config_text, trusted_code
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, is_spec
from moelib.core.precision import is_cast
from moelib.core.tree import Nested
from moelib.data.batches.input import load_tokenizer
from moelib.data.tokens.tokenizer import FILE_NAME, SETTINGS_FILE, Tokenizer
from moelib.huggingface import pretrained
from moelib.huggingface.published_tokenizer import read_tokenizer
from moelib.huggingface.settings import check_setting
from moelib.kernels.backend import kernel_backends
from moelib.models.causal_lm import CausalLM
from moelib.parallel import sharding
from moelib.parallel.mesh import MESH_AXIS_NAMES, create_device_mesh, parse_mesh
from moelib.parallel.sharding import abstract_arrays
from moelib.runs import identity
from moelib.runs.folder import CONFIG_FILE, RunFolder
from moelib.runtime import storage
from moelib.runtime.storage import read_json

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A trained model with its tokenizer, to generate with or to evaluate."""

    folder: str  # Folder of the run or of the Hugging Face model.
    model: CausalLM = dataclasses.field(repr=False)
    parameters: Nested = dataclasses.field(repr=False)  # Sharded over `mesh`.
    # Has the ids of BOS (`bos_id`, may be None) and of end of text (`eos_id`). None only with
    # `require_tokenizer=False`.
    tokenizer: Tokenizer
    stop_ids: Sequence[int]  # Ids of all tokens that end a text.
    # Config of the run's trainer; None for a Hugging Face folder.
    config: Any = dataclasses.field(repr=False)
    step: int | None  # Training step of the parameters; None for a Hugging Face folder.
    max_length: int | None  # Longest sequence in training, in tokens; None if unknown.
    dtype: str | None  # Dtype that parameters were cast to; None if they were not.
    mesh: Mesh | None  # Devices that hold the parameters; None for the first device.
    # Record of the checkpoint that `config` is from.
    record: CheckpointRecord | None = dataclasses.field(default=None, repr=False)
    # Other arguments of `load_model`, for steps with another config.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @contextlib.contextmanager
    def on_mesh(self) -> Iterator[None]:
        """Sets the mesh, if there is one, and the run's sharding rules in the block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(kernel_backends())
            if self.mesh is not None:
                rules = getattr(self.config, "sharding_rules", None) or {}
                stack.enter_context(jax.set_mesh(self.mesh))
                stack.enter_context(sharding.sharding_rules(rules))
            yield

    def at_step(self, step: int | None) -> "LoadedModel":
        """Returns the model at another step, as `load_model` does; None for the newest.

        It is built again only if the run's config or files changed between the two steps.
        """
        skip_checksums = self.arguments.get("skip_checksums", False)
        specs = self.model.create_parameter_specs_recursively()
        with self.on_mesh():
            restored = restore_params_only(
                RunFolder(self.folder).checkpoints,
                abstract_arrays(specs, self.mesh),
                step=step,
                skip_checksums=skip_checksums,
            )
        record = restored.record
        of_run = lambda record: (record.config, record.files)
        if self.record and not skip_checksums and of_run(record) != of_run(self.record):
            del restored  # Frees its parameters.
            return load_model(self.folder, step=record.step, **self.arguments)
        parameters = restored.state
        if self.dtype is not None:
            parameters = _cast_one_by_one(parameters, specs, self.dtype)
        return dataclasses.replace(self, parameters=parameters, step=record.step)


def load_model(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    mesh: Mesh | str | None = None,
    module_dir: str | None = None,
    require_tokenizer: bool = True,
    skip_checksums: bool = False,
) -> LoadedModel:
    """Returns the model in the folder of a run or of a Hugging Face model.

    Args:
        folder: A run's folder (config.txt and checkpoints/) or a folder with config.json,
            safetensors, tokenizer.json and tokenizer_config.json.
        step: Step of the run's checkpoint; None for the newest.
        dtype: Dtype of the parameters, one of `DTYPES` or "stored" for that of the checkpoint; None
            for the dtype that the run computes in or that config.json names. Parameters that are
            never cast in training, such as routers, keep their dtype.
        mesh: Mesh to shard the parameters over, also as text, such as "fsdp=4,expert=2"; None for
            the first device.
        module_dir: Folder of the modules of the run's own layers, which its config may then name;
            modules that you have imported need none.
        require_tokenizer: Whether a missing tokenizer is an error; else `tokenizer` is None.
        skip_checksums: Whether the arrays and files of a run are not compared with their checksums,
            and its config is config.txt instead of that in the checkpoint.

    Raises:
        UserError: If an argument is invalid, the folder holds no model or no tokenizer, or a module
            of the run's config is missing.
        DamagedCheckpointError: If a checkpoint cannot be read.
    """
    if not isinstance(folder, str | os.PathLike):
        raise UserError(
            f"folder is {folder!r}; pass the folder of a run or of a Hugging Face model."
        )
    folder = str(folder)
    if module_dir is not None:
        trusted_code.allow_folder(module_dir)
    cfg, record = _read_config(folder, step, skip_checksums=skip_checksums)
    run = cfg is not None
    if not run and not storage.is_remote(folder) and not os.path.isdir(folder):
        hint = pretrained.hint_of_hub(folder) or " Name another."
        raise UserError(f"There is no folder {folder!r} (in {os.getcwd()}).{hint}")
    if not run and not storage.exists(os.path.join(folder, pretrained.CONFIG_FILE)):
        raise UserError(
            f"{folder} holds no model: it has neither the {CONFIG_FILE} of a run nor the "
            f"{pretrained.CONFIG_FILE} of a Hugging Face model."
        )
    if not run and step is not None:
        raise UserError(f"step {step}: {folder} is a Hugging Face folder, without steps; unset it.")
    model_cfg = cfg.model if run else pretrained.read_config(folder)[0]
    model = model_cfg.instantiate(parent=None)
    published = read_json(os.path.join(folder, pretrained.CONFIG_FILE))  # Converted models too.
    seq_len = getattr(cfg and cfg.input, "seq_len", None)
    try:
        tokenizer = tokenizer_of_model(folder, model_cfg.vocab_size, cfg and cfg.input)
    except UserError as error:
        if require_tokenizer:
            raise
        logger.warning("%s", error)
        tokenizer = cast(Any, None)
    loaded = LoadedModel(
        folder=folder,
        model=model,
        parameters={},
        tokenizer=tokenizer,
        stop_ids=stop_ids_of_model(folder, tokenizer, model_cfg.vocab_size),
        config=cfg,
        step=None,
        max_length=_published(folder, "max_position_embeddings", seq_len),
        dtype=_dtype(folder, dtype, cfg, published),
        mesh=as_mesh(mesh, cfg.mesh_axis_names if run else MESH_AXIS_NAMES),
        record=record,
        arguments={
            "dtype": dtype,
            "mesh": mesh,
            "require_tokenizer": require_tokenizer,
            "skip_checksums": skip_checksums,
        },
    )
    if run:
        return loaded.at_step(step)
    read = pretrained.load_pretrained(folder, dtype=loaded.dtype, mesh=loaded.mesh)
    model = read.cfg.instantiate(parent=None)
    return dataclasses.replace(loaded, model=model, parameters=read.params)


def _dtype(folder: str, dtype: str | None, cfg: Any, published: Mapping[str, Any]) -> str | None:
    """Returns the dtype to cast to; None if a run's parameters keep theirs."""
    if cfg is not None and dtype in (None, "stored"):
        cast = dtype is None and cfg.train_dtype is not None
        return str(jnp.dtype(cfg.train_dtype)) if cast else None
    if dtype in (None, "stored"):
        dtype = published.get("dtype") or published.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise UserError(f"{folder}: dtype {dtype!r}; set dtype to one of {', '.join(DTYPES)}.")
    return dtype


# -- Parameters ----------------------------------------------------------------------------------


def as_mesh(mesh: Mesh | str | None, axis_names: Sequence[str] = MESH_AXIS_NAMES) -> Mesh | None:
    """Returns the mesh, over all devices if it is given as text. Raises UserError."""
    if not isinstance(mesh, str):
        return mesh
    shape = parse_mesh(mesh, axis_names=axis_names, num_devices=jax.device_count())
    return create_device_mesh(shape, axis_names)


def _cast_one_by_one(parameters: Nested, specs: Nested, dtype: str) -> Nested:
    """Returns the parameters cast as in training; each original is freed before the next cast."""

    def cast(spec: ParameterSpec, x: jax.Array) -> jax.Array:
        if not is_cast(spec, dtype) or x.dtype == dtype:
            return x
        small = x.astype(dtype)
        x.delete()
        return small

    return jax.tree.map(cast, specs, parameters, is_leaf=is_spec)


def tokenizer_of_model(folder: str, vocab_size: int, cfg: Any = None) -> Tokenizer:
    """Returns the tokenizer in a folder, or else that of the run's input.

    Raises:
        UserError: If there is none, or it has more tokens than the model.
    """
    if cfg is not None and not storage.exists(os.path.join(folder, FILE_NAME)):
        try:
            tokenizer = load_tokenizer(cfg)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder} has no {FILE_NAME}, and the run's input no tokenizer that can be read: "
                f"{error} Copy {FILE_NAME} and {SETTINGS_FILE} of the data to {folder}."
            ) from error
    else:
        published = storage.exists(os.path.join(folder, pretrained.CONFIG_FILE))
        tokenizer = read_tokenizer(folder, published=published)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has "
            f"vocab_size={vocab_size}; use the tokenizer that the model was trained with."
        )
    return tokenizer


def stop_ids_of_model(folder: str, tokenizer: Tokenizer | None, vocab_size: int) -> Sequence[int]:
    """Returns the ids that end a text: that of the tokenizer, and those of a published model.

    Raises:
        UserError: If an id is not in the vocabulary.
    """
    ids: set[int] = set()
    for file in (pretrained.CONFIG_FILE, pretrained.GENERATION_FILE):
        ends = _published(folder, "eos_token_id", [], file=file)
        ids |= set(ends if isinstance(ends, list) else [ends])
    if beyond := [i for i in ids if i >= vocab_size]:
        raise UserError(
            f"{folder}: eos_token_id is {beyond[0]}, but the model has vocab_size={vocab_size}; "
            f"correct it in {pretrained.CONFIG_FILE} or {pretrained.GENERATION_FILE}."
        )
    if tokenizer and ids and tokenizer.eos_id not in ids:
        logger.warning(
            "%s: eos_token %r has id %d, but eos_token_id is %s: is this the right tokenizer?",
            *(folder, tokenizer.eos_token, tokenizer.eos_id, sorted(ids)),
        )
    return tuple(sorted(ids | ({tokenizer.eos_id} if tokenizer else set())))


def _published(folder: str, name: str, default: Any, *, file: str = pretrained.CONFIG_FILE) -> Any:
    """Returns a setting of a published model's file. Raises UserError if it cannot be one."""
    path = os.path.join(folder, file)
    settings = read_json(path)
    value = settings.get(name, (settings.get("text_config") or {}).get(name))
    check_setting(name, default if value is None else value, path)
    return default if value is None else value


def _parse(text: str, source: str) -> Any:
    """Returns a trainer's config, without watchers that it may not name: no model needs them."""
    try:
        return config_text.parse(text, source=source)
    except trusted_code.UntrustedNameError:
        return config_text.parse(identity.without_watchers(text), source=source)


def _read_config(
    folder: str, step: int | None, *, skip_checksums: bool
) -> tuple[Any, CheckpointRecord | None]:
    """Returns the config that trained a step of a run, and its record; None for each without one.

    Raises:
        DamagedTensorsError: If a file of the folder, such as that of the tokenizer, has changed.
    """
    run = RunFolder(folder)
    record = run.record(step)
    try:
        text, source = run.config_text(record, use_file=skip_checksums)
        cfg = _parse(text, source) if text else None
    except trusted_code.UntrustedNameError as error:
        # The run's folders are data, too: a hint, from which nothing is imported.
        hint = ", ".join(run.module_dirs())
        raise type(error)(
            f"{error} In training, modules came from {hint or 'elsewhere'}."
        ) from None
    if record is not None and not skip_checksums:
        if cfg is not None:
            identity.warn_other_file(run, record, cfg)
        source, cure = f"the record of step {record.step}", "restore it, or pass --skip_checksums"
        for name, digest in record.files.items():
            check_sum(os.path.join(folder, name), digest, source, cure=cure)
    return cfg, record
