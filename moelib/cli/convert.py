"""`moelib convert`: models of Hugging Face to checkpoints, and runs to models of Hugging Face."""

import os
import shutil
from collections.abc import Sequence
from typing import Any

from absl import flags

from moelib.cli.generate import DTYPES
from moelib.core.errors import UsageError
from moelib.core.files import read_json

FLAGS = flags.FLAGS


# What a folder of Hugging Face has beside its config and tensors.
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "pad_token_id")


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_string("from_hf", None, "Folder of a Hugging Face model, to read.")
    flags.DEFINE_string("to", None, "Folder for the checkpoint that is made of it.")
    flags.DEFINE_string("trainer_dir", None, "Folder of a training run, to read.")
    flags.DEFINE_integer("step", None, "Checkpoint to take; the newest if unset.")
    flags.DEFINE_string("to_hf", None, "Folder for the Hugging Face model that is made of it.")
    flags.DEFINE_string("mesh", None, "Devices by axis: fsdp=4,expert=2; one device if unset.")
    flags.DEFINE_enum(
        "dtype",
        None,
        DTYPES,
        "Of what is written; if unset, float32 for --to, and as it is for --to_hf.",
    )


def run(args: Sequence[str]) -> None:
    """Converts in the direction that the flags name.

    Raises:
        UsageError: If flags are missing or do not belong together, or what they name cannot be
            converted.
    """
    if args:
        raise UsageError(f"{args[0]!r} is no flag; `moelib convert --help` lists them.")
    ways = {("from_hf", "to"), ("trainer_dir", "to_hf")}
    given = tuple(n for n in ("from_hf", "to", "trainer_dir", "to_hf") if FLAGS[n].value)
    if given not in ways:
        raise UsageError(
            "set --from_hf and --to, or --trainer_dir and --to_hf; "
            f"given: {', '.join('--' + name for name in given) or 'none of them'}."
        )
    from moelib.checkpoint.contents import CheckpointMismatchError, DamagedCheckpointError
    from moelib.checkpoint.safetensors import DamagedTensorsError
    from moelib.train.loading import as_mesh

    try:
        how = {"dtype": FLAGS.dtype, "mesh": as_mesh(FLAGS.mesh)}
        if "from_hf" in given:
            print(from_hugging_face(FLAGS.from_hf, FLAGS.to, **how))
        else:
            print(to_hugging_face(FLAGS.trainer_dir, FLAGS.to_hf, step=FLAGS.step, **how))
    except (
        CheckpointMismatchError,
        DamagedCheckpointError,
        DamagedTensorsError,
        OSError,
        ValueError,
    ) as error:
        raise UsageError(str(error)) from error


def from_hugging_face(
    folder: str, to: str, *, dtype: str | None = None, mesh: Any | None = None
) -> str:
    """Writes a model of Hugging Face as step 0 of a run that has no data; says what it wrote.

    Args:
        folder: The model's.
        to: Folder of the run, which is made.
        dtype: Of the parameters; float32 if None.
        mesh: Over which they are laid meanwhile; one device if None.

    Raises:
        FileExistsError: If there is a run in `to`.
        UsageError: If there is a tokenizer that does not belong to the model.
        Exception: As `load_pretrained`.
    """
    from moelib.checkpoint.checkpointer import Checkpointer
    from moelib.checkpoint.contents import CheckpointRecord
    from moelib.train.identity import CONFIG_FILE
    from moelib.train.loading import tokenizer_of_model
    from moelib.train.pretrained import load_pretrained, read_config
    from moelib.train.trainer import SpmdTrainer

    path = os.path.join(to, CONFIG_FILE)
    if os.path.exists(path):
        raise FileExistsError(f"{path} is there already; choose another folder.")
    if read_json(os.path.join(folder, "tokenizer_config.json")).get("eos_token"):
        tokenizer_of_model(folder, read_config(folder)[0].vocab_size)
    loaded = load_pretrained(folder, dtype=dtype or "float32", mesh=mesh)
    os.makedirs(to, exist_ok=True)
    checkpoints = os.path.join(to, "checkpoints")
    writer = Checkpointer.default_config().set(dir=checkpoints).instantiate(parent=None)
    writer.save({"model": loaded.params}, CheckpointRecord(step=0, arrays={}))
    writer.close()
    if writer.last_error is not None:
        raise writer.last_error
    with open(path, "w", encoding="utf-8") as file:
        file.write(SpmdTrainer.default_config().set(model=loaded.cfg).debug_string())
    _copy(("config.json", *_BESIDE), folder, to)
    return f"The {loaded.settings['model_type']} model is in {to}."


def to_hugging_face(
    trainer_dir: str,
    to: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    mesh: Any | None = None,
) -> str:
    """Writes a run's model for transformers; says what it wrote.

    Args:
        trainer_dir: Folder of the run.
        to: Folder of the model, which is made.
        step: Checkpoint to take; the newest if None.
        dtype: What parameters are rounded to; as they are if None.
        mesh: Over which they are laid meanwhile; one device if None.

    Raises:
        Exception: As `load_model` and `save_pretrained`.
    """
    from moelib.train.loading import load_model
    from moelib.train.pretrained import save_pretrained

    loaded = load_model(trainer_dir, step=step, dtype="stored", mesh=mesh)
    tokenizer = loaded.tokenizer
    settings = {"eos_token_id": tokenizer.eos_id, "max_position_embeddings": loaded.max_length}
    if published := read_json(os.path.join(trainer_dir, "config.json")):  # It was converted.
        settings = {name: published.get(name) for name in (*settings, *_TOKEN_IDS)}
    settings = {name: value for name, value in settings.items() if value is not None}
    architecture = save_pretrained(
        to,
        loaded.model.config,
        loaded.parameters,
        dtype=dtype,
        tokenizer_json=tokenizer.to_json(),
        eos_token=tokenizer.config.eos_token,
        more_settings=settings,
        generation={"eos_token_id": tokenizer.eos_id},
    )
    _copy(_BESIDE, trainer_dir, to)
    return f"{architecture} is in {to}: {', '.join(sorted(os.listdir(to)))}."


def _copy(names: Sequence[str], source: str, to: str) -> None:
    for name in names:
        if os.path.exists(path := os.path.join(source, name)):
            shutil.copy(path, to)
