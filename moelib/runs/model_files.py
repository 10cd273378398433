"""Files that belong to the weights of a run: tokenizer, chat template, settings of generation.

They travel with the weights into the folder of a run that starts from them. Weights, training data
and evaluation data must have the same tokenizer.
"""

import logging
import os
from typing import Any

from moelib.core.errors import UserError
from moelib.data.batches.input import load_tokenizer
from moelib.data.tokens.tokenizer import (
    CHAT_TEMPLATE_FILE,
    FILE_NAME,
    SETTINGS_FILE,
    NoTokenizerError,
    Tokenizer,
)
from moelib.huggingface.pretrained import CONFIG_FILE, GENERATION_FILE
from moelib.huggingface.published_tokenizer import read_tokenizer
from moelib.runs.loading import stop_ids_of_model
from moelib.runtime import storage
from moelib.runtime.storage import atomic_file, read_json, write_json

logger = logging.getLogger(__name__)


def check_tokenizers(cfg: Any, weights: str | None, *, before: Any = None) -> bool:
    """Returns whether the input of a trainer has the tokenizer of the weights in a folder.

    Args:
        cfg: Config of the trainer. Inputs without text are not compared.
        weights: Folder of a run or of a Hugging Face model; None for initial weights.
        before: Config of the input of the run's first phase, if this is a later one.

    Raises:
        UserError: If the tokenizer of the weights, or of the input of an evaler, is another one,
            and `accept_changes` does not have "tokenizer".
    """
    data = _of_input(cfg.input)
    found = {f"evalers.{name}.input": _of_input(each.input) for name, each in cfg.evalers.items()}
    if before is not None:
        found["the input of the first phase"] = _of_input(before)
    if weights is not None and storage.exists(os.path.join(weights, FILE_NAME)):
        found[weights] = read_tokenizer(weights)
    elif weights not in (None, cfg.dir) and data:
        logger.warning("%s has no %s to compare with that of the input.", weights, FILE_NAME)
    different = {
        n: x for n, each in found.items() if data and each and (x := data.difference(each))
    }
    for name, detail in different.items():
        message = f"input and {name} have different tokenizers: {detail}"
        if "tokenizer" not in (cfg.accept_changes or ()):
            raise UserError(
                f"{message}; prepare the data with the same tokenizer, or pass "
                '--accept_changes=tokenizer (in Python, accept_changes=["tokenizer"]).'
            )
        logger.warning("%s.", message)
    return weights not in different


def _of_input(cfg: Any) -> Tokenizer | None:
    """Returns the tokenizer of an input; None if its token ids stand for no text."""
    try:
        return load_tokenizer(cfg)
    except NoTokenizerError:
        return None


def save_tokenizer(cfg: Any) -> bool:
    """Writes the tokenizer of a trainer's input into the folder of the run, which needs it.

    If the run started from a published model, the files of its tokenizer are kept. The file with
    the tokens is that of the input where it has more, and a text may also end as in the input.

    Returns:
        False if the input has none.
    """
    if (tokenizer := _of_input(cfg.input)) is None:
        return False
    kept = None
    if storage.exists(os.path.join(cfg.dir, CONFIG_FILE)):
        kept = read_tokenizer(cfg.dir, published=True)
    if kept is None or kept.difference(tokenizer):
        tokenizer.save(cfg.dir)
        return True
    if tokenizer.chat_template is not None:  # The conversations of the run have this one.
        with atomic_file(os.path.join(cfg.dir, CHAT_TEMPLATE_FILE)) as file:
            file.write(tokenizer.chat_template)
        names = {"bos_token": tokenizer.template_bos, "eos_token": tokenizer.eos_token}
        names = {name: x for name, x in names.items() if x and name in tokenizer.chat_template}
        path = os.path.join(cfg.dir, SETTINGS_FILE)
        write_json(path, read_json(path) | names)
    if tokenizer.vocab_size > kept.vocab_size:
        with atomic_file(os.path.join(cfg.dir, FILE_NAME)) as file:
            file.write(tokenizer.to_json())
    stop_ids = stop_ids_of_model(cfg.dir, kept, cfg.model.vocab_size)
    if tokenizer.eos_id not in stop_ids:
        path = os.path.join(cfg.dir, GENERATION_FILE)
        write_json(path, read_json(path) | {"eos_token_id": [*stop_ids, tokenizer.eos_id]})
    return True
