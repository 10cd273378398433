"""Tokenizers in folders that transformers or a run of moelib wrote."""

import copy
import functools
import os
from collections.abc import Sequence
from typing import Any

from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import (
    END_OF_TEXT,
    SETTINGS_FILE,
    Tokenizer,
    named_token,
    read_text,
)
from moelib.runtime.storage import read_json


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published model, which encodes prompts as transformers does.

    Special tokens in a prompt are recognized, and the prompt begins with BOS where the model asks
    for it.
    """

    @config_class
    class Config(Tokenizer.Config):
        add_bos_token: bool | None = None  # None: tokenizer.json decides.

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of prompts."""
        add_bos = self.config.add_bos_token
        prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        encode = self._for_prompts.encode_batch_fast
        encodings = encode(list(texts), add_special_tokens=add_bos is None)
        return [prefix + encoding.ids for encoding in encodings]

    @property
    def _adds_bos(self) -> bool | None:
        return self.config.add_bos_token

    @functools.cached_property
    def _for_prompts(self) -> Any:
        """The tokenizer that recognizes special tokens; other threads may use both."""
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.encode_special_tokens = False
        return tokenizer


def read_tokenizer(folder: str, *, published: bool = False) -> Any:
    """Returns the tokenizer in a folder that `Tokenizer.save` or transformers wrote.

    The prompts of a `published` model may begin with BOS.

    Raises:
        MissingFileError: If there is no tokenizer.json.
        UserError: If it is not a tokenizer, or the end-of-text token is not named.
    """
    path = os.path.join(folder, SETTINGS_FILE)
    settings = read_json(path)
    eos, bos = named_token(settings, "eos_token"), named_token(settings, "bos_token")
    add_bos = settings.get("add_bos_token")
    if eos is None and (published or END_OF_TEXT not in read_text(folder)):
        raise UserError(f"{path} has no eos_token; set it to the token that ends a text.")
    kind = PublishedTokenizer if published else Tokenizer
    cfg: Any = kind.default_config().set(path=folder, eos_token=eos or END_OF_TEXT)
    if published:
        cfg.set(bos_token=bos, add_bos_token=add_bos)
    elif add_bos:
        cfg.set(bos_token=bos)
    return cfg.instantiate()
