"""The data of fine-tuning: records become a folder next to the run, which its input reads.

A folder holds `request.json`, the settings that made it, written last; others are refused.
"""

import dataclasses
import glob
import hashlib
import logging
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moelib.core import module_names, trusted_code
from moelib.core.errors import ExistingFileError, UserError
from moelib.data.batches.input import Input
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.packing import LongDocuments, Packing
from moelib.data.batches.pair_input import PairInput, arrays_of, rows_of, write_pairs
from moelib.data.sources.source import BadRecordError, BadRecords, Source, fingerprint
from moelib.data.sources.source_for_path import source_for_path
from moelib.data.tokens.chat import pairs as pairs_lib
from moelib.data.tokens.chat.labels import ChatOptions, chat_options
from moelib.data.tokens.chat.template import ChatTemplate, find_template, warn_of_long_end
from moelib.data.tokens.prepare import prepare
from moelib.data.tokens.token_store import META, TokenStore
from moelib.data.tokens.tokenizer import Tokenizer
from moelib.huggingface.pretrained import FILES
from moelib.huggingface.published_tokenizer import read_tokenizer
from moelib.inference.conversation import ChatFormat
from moelib.models.objective import pair_log_probs
from moelib.runs.loading import load_model, stop_ids_of_model
from moelib.runtime import storage
from moelib.tasks.fine_tuning import FineTuning
from moelib.tasks.rollout_input import RolloutInput, log_probs, write_prompts, write_stop_ids

logger = logging.getLogger(__name__)

_REQUEST = "request.json"
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # Of each file of a model.


def input_of(settings: FineTuning, model: Any) -> Input.Config:
    """Returns the config of the input, whose data are prepared now if they are records.

    Args:
        settings: The settings.
        model: Config of the model.

    Raises:
        UserError: If there are no such records, no chat template, or no reward.
    """
    sizes: dict[str, Any] = {"seq_len": settings.seq_len, "global_batch_size": settings.batch_size}
    if settings.objective == "sft":
        return LMInput.default_config().set(
            source=TokenStore.default_config().set(path=_store(settings)),
            packing=Packing.BEST_FIT,
            long_documents=LongDocuments.SPLIT,
            vocab_size=model.vocab_size,
            **sizes,
        )
    folder = settings.trainer_dir.rstrip("/") + ".data"
    if settings.objective == "dpo":
        _made(settings, folder, _write_pairs)
        return PairInput.default_config().set(path=folder, **sizes)
    if settings.reward is None:
        raise UserError(
            f"objective={settings.objective} needs a reward; set reward (--reward) to a Python "
            "function, as module:function."
        )
    if settings.max_new_tokens >= settings.seq_len:
        raise UserError(
            f"max_new_tokens={settings.max_new_tokens} leaves no room for a prompt in seq_len="
            f"{settings.seq_len}; set max_new_tokens below it."
        )
    _check_reward(settings.reward)
    _made(settings, folder, _write_prompts)
    names = ("reward", "reward_seconds", "group_size", "max_new_tokens", "steps_per_rollout")
    fields = {name: getattr(settings, name) for name in (*names, "replay_routing")}
    return RolloutInput.default_config().set(path=folder, **fields, **sizes)


def _check_reward(reward: str) -> None:
    """Raises UserError if there is no such reward, or its file cannot be imported."""
    module, _, name = reward.partition(":")
    if not module or not name:
        raise UserError(f"reward={reward!r} is no function; set it to module:function.")
    if module_names.find_module(module) is None:
        raise UserError(
            f"reward={reward!r}: there is no module {module} here; set reward to a function of a "
            "Python file in this folder, as file:function without .py."
        )
    try:
        trusted_code.resolve(reward)
    except UserError as error:
        raise UserError(f"reward: {error}") from error
    except Exception as error:
        raise UserError(
            f"reward={reward!r}: {module} cannot be imported ({type(error).__name__}: {error}); "
            "correct it."
        ) from error


def _store(settings: FineTuning) -> str:
    """Returns the token store of the data; conversations are prepared now, next to the run."""
    if os.path.exists(os.path.join(settings.data, META)):
        return settings.data
    records, tokenizer, template = _opened(settings)
    chat = chat_options(template, records, max_length=settings.seq_len)
    store = settings.trainer_dir.rstrip("/") + ".data"
    skip = settings.skip_bad_lines
    try:
        prepare(records, tokenizer, store, chat=chat, append_eos=False, skip_bad_records=skip)
    except ExistingFileError as error:
        raise ExistingFileError(
            f"{str(error).rpartition('; set output_dir')[0]} (source: --data; chat: "
            "--chat_template, --seq_len); "
            "restore them, set another trainer_dir (--trainer_dir), or delete the folder."
        ) from error
    return store


def _opened(settings: FineTuning) -> tuple[Source, Tokenizer, ChatTemplate]:
    """Returns the records, and the tokenizer and the template of the model. Raises UserError."""
    records = source_for_path(settings.data, text_field=None).instantiate()
    records.parts()  # Absent files are the first error.
    tokenizer = read_tokenizer(settings.model, published=True)
    template = find_template(settings.model, settings.chat_template, tokenizer)
    if template is None:
        raise UserError(
            f"model={settings.model} has no chat template; set chat_template (--chat_template) to "
            "chatml, llama3, plain or a file of Jinja."
        )
    is_rollout = settings.objective in ("grpo", "gspo")
    longer = " Rollouts end at a single token, so answers go on up to max_new_tokens." * is_rollout
    warn_of_long_end(template, tokenizer, longer)
    return records, tokenizer, template


# Arguments: settings, folder, records, their options, tokenizer, counter of those left out.
_Write = Callable[[FineTuning, str, Source, ChatOptions, Tokenizer, BadRecords], int]


def _made(settings: FineTuning, folder: str, write: _Write) -> None:
    """Makes the folder of the data, unless the same request made it.

    Raises:
        UserError: If another request made it, or no record is of use.
    """
    records, tokenizer, template = _opened(settings)
    options = chat_options(template, records, max_length=settings.seq_len)
    names = ["objective", "seq_len", "dtype"]
    names += ["max_new_tokens"] * (settings.objective != "dpo")  # Longer prompts are left out.
    request = {name: getattr(settings, name) for name in names} | {
        "model": _digest(settings),
        "records": fingerprint(records.parts()),
        "template": options.template,
    }
    path = os.path.join(folder, _REQUEST)
    if found := storage.read_json(path):
        if different := [name for name in request if request[name] != found.get(name)]:
            raise UserError(
                f"{folder} was made with another {', '.join(different)}; restore it, set another "
                "trainer_dir, or delete the folder."
            )
        return
    storage.make_folder(folder)
    left_out = BadRecords()
    try:
        count = write(settings, folder, records, options, tokenizer, left_out)
    except BadRecordError as error:
        raise UserError(
            f"{error}; correct it, or set skip_bad_lines (--skip_bad_lines), which skips and "
            "counts such records."
        ) from error
    if not count:
        raise UserError(
            f"{settings.data} holds no record of use: {left_out.first or 'it is empty'}; set data "
            "(--data) to other records, or seq_len (--seq_len) higher if they are too long."
        )
    if left_out.count:
        reasons = ", ".join(f"{name}: {number:,}" for name, number in left_out.reasons.items())
        print(f"{left_out.count:,} records left out ({reasons}); the first: {left_out.first:.200}.")
    tokenizer.chat_template = options.template
    tokenizer.save(folder)
    storage.write_json(path, request)


def _digest(settings: FineTuning) -> str:
    """Returns a hash of the model's files that the data depend on: of sizes and samples."""
    digest, names = hashlib.sha256(), [*FILES]
    if settings.objective == "dpo":  # Of the weights, too.
        names += glob.glob("*.safetensors", root_dir=settings.model)
    for name in sorted(names):
        path = os.path.join(settings.model, name)
        if os.path.exists(path):
            num_bytes = os.path.getsize(path)
            digest.update(f"{name} {num_bytes} ".encode())
            with open(path, "rb") as file:
                for begin in range(0, num_bytes, max(num_bytes // _NUM_SAMPLES, _SAMPLE_BYTES)):
                    file.seek(begin)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _write_pairs(
    settings: FineTuning,
    folder: str,
    records: Source,
    options: ChatOptions,
    tokenizer: Tokenizer,
    left_out: BadRecords,
) -> int:
    """Writes the pairs, with their log probabilities under the model; returns their number."""
    skip = settings.skip_bad_lines
    pairs = pairs_lib.read_pairs(records, options, tokenizer, left_out, skip_bad_records=skip)
    arrays = arrays_of(pairs)
    num, size = len(arrays["lengths"]), settings.batch_size
    if num:
        mesh = settings.mesh or f"fsdp={jax.device_count()}"
        loaded = load_model(settings.model, dtype=settings.dtype, mesh=mesh)
        with loaded.on_mesh():
            for first in range(0, num, size):
                indices = [min(i, num - 1) for i in range(first, first + size)]
                batch = rows_of(arrays, indices, settings.seq_len, tokenizer.eos_id)
                of_tokens = log_probs(loaded.model, loaded.parameters, batch)
                sums = np.asarray(pair_log_probs(of_tokens, batch))
                arrays["reference_log_probs"][first : first + size] = sums[: num - first]
    write_pairs(folder, arrays)
    return num


def _write_prompts(
    settings: FineTuning,
    folder: str,
    records: Source,
    options: ChatOptions,
    tokenizer: Tokenizer,
    left_out: BadRecords,
) -> int:
    """Writes the prompts, and the tokens that end an answer; returns their number."""
    room = settings.seq_len - settings.max_new_tokens + 1
    chat = ChatFormat(options.chat_template(), tokenizer)
    options = dataclasses.replace(options, max_length=max(room, 1))
    skip = settings.skip_bad_lines
    read = pairs_lib.read_prompts(records, options, tokenizer, left_out, skip_bad_records=skip)
    prompts = list(read)
    write_prompts(folder, prompts)
    ends = stop_ids_of_model(settings.model, tokenizer, tokenizer.vocab_size)
    write_stop_ids(folder, [*ends, *chat.stop_ids])
    return len(prompts)
