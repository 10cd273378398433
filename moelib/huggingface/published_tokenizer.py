"""Tokenizers in folders that transformers or a run of moelib wrote."""

import copy
import functools
import os
from collections.abc import Sequence
from typing import Any

from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import END_OF_TEXT, SETTINGS_FILE, Tokenizer, read_text
from moelib.runtime.storage import read_json


class PublishedTokenizer(Tokenizer):
    """The tokenizer of a published model, which encodes prompts as transformers does.

    Special tokens in a prompt are recognized, and the prompt begins with BOS where the model asks
    for it.
    """

    @config_class
    class Config(Tokenizer.Config):
        bos_token: str | None = None  # Text of BOS; None: the tokenizer has none.
        add_bos_token: bool | None = None  # None: tokenizer.json decides.

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        cfg = self.config
        if cfg.bos_token is not None:
            self.bos_id = self._tokenizer.token_to_id(cfg.bos_token)
        if cfg.add_bos_token and self.bos_id is None:
            raise UserError(
                f"{cfg.path}: add_bos_token=True, but bos_token={cfg.bos_token!r} is not a token; "
                f"correct one of them in {SETTINGS_FILE}."
            )

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of prompts."""
        add_bos = self.config.add_bos_token
        prefix = [self.bos_id] if add_bos and self.bos_id is not None else []
        encode = self._for_prompts.encode_batch_fast
        encodings = encode(list(texts), add_special_tokens=add_bos is None)
        return [prefix + encoding.ids for encoding in encodings]

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
    tokens = map(settings.get, ("eos_token", "bos_token"))
    eos, bos = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    if eos is None and (published or END_OF_TEXT not in read_text(folder)):
        raise UserError(f"{path} has no eos_token; set it to the token that ends a text.")
    kind = PublishedTokenizer if published else Tokenizer
    cfg: Any = kind.default_config().set(path=folder, eos_token=eos or END_OF_TEXT)
    if published:
        cfg.set(bos_token=bos, add_bos_token=settings.get("add_bos_token"))
    return cfg.instantiate()
