"""Tokenizers: text to token ids and back, with the tokenizer.json format of `tokenizers`.

The same file serves the export to Hugging Face. A tokenizer for training neither truncates nor
pads, drops no merges at random (BPE dropout), adds no tokens around a document, and treats special
tokens that a text spells out as ordinary text, whatever the file requests.

Letters: V vocabulary.
"""

import collections
import functools
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, Configurable, config_class, did_you_mean
from moelib.core.errors import MissingFileError, UserError
from moelib.runtime import storage
from moelib.runtime.progress import format_seconds
from moelib.runtime.storage import atomic_file, write_json

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"  # As Hugging Face names it.
CHAT_TEMPLATE_FILE = "chat_template.jinja"


# A text whose ids depend on the normalizer, the words and the merges of a tokenizer.
_PROBE = "The naïve café costs 1,234.50 €;\n\n\tif x_1 != 'ÜNÏCODE': DON'T!  # 東京 🙂"


class NoTokenizerError(UserError):
    """The data consist of token ids that no tokenizer made."""


class Tokenizer(Configurable):
    """A tokenizer.json: encodes documents and knows the bytes of text that each token covers."""

    @config_class
    class Config(Configurable.Config):
        path: str = REQUIRED  # A tokenizer.json, or a folder or token store with one.
        eos_token: str = END_OF_TEXT  # Token at the end of a document; part of the vocabulary.
        bos_token: str | None = None  # Token at the beginning of a prompt; None for none.

    def __init__(self, cfg: Config) -> None:
        """Loads the file. Raises UserError if it is not a tokenizer with these tokens."""
        super().__init__(cfg)
        cfg = self.config
        self._load(read_text(cfg.path), cfg.eos_token)
        self.bos_token = cfg.bos_token
        folder = os.path.dirname(cfg.path) if cfg.path.endswith(".json") else cfg.path
        self.chat_template = _read_chat_template(folder)
        settings = storage.read_json(os.path.join(folder, SETTINGS_FILE))
        self.template_bos = cfg.bos_token or named_token(settings, "bos_token")
        if cfg.bos_token is not None:
            self.bos_id = self._tokenizer.token_to_id(cfg.bos_token)
        if self._adds_bos and self.bos_id is None:
            raise UserError(
                f"{cfg.path}: prompts begin with bos_token={cfg.bos_token!r}, which is not a "
                f"token; correct it (bos_token and add_bos_token in {SETTINGS_FILE})."
            )

    def _load(self, text: str, eos_token: str) -> None:
        import tokenizers

        name = self.config.path or "the tokenizer"
        try:
            self._content: dict[str, Any] = json.loads(text)
            if dropout := self._content["model"].get("dropout"):
                logger.warning("%s: model.dropout=%s would make ids random; unset.", name, dropout)
                self._content["model"]["dropout"] = None
                text = json.dumps(self._content, ensure_ascii=False)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            eos_id = self._tokenizer.token_to_id(eos_token)
        except Exception as error:  # The library raises bare Exception.
            raise UserError(
                f"{name} is not a tokenizer.json of the tokenizers library: {error}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._text = text
        if eos_id is None:
            special = [token["content"] for token in self._content.get("added_tokens", ())]
            raise UserError(
                f"{name} has no token {eos_token!r}; set eos_token (--eos_token) to its "
                "end-of-text token: " + did_you_mean(eos_token, special)
            )
        self.eos_id: int = eos_id
        self.eos_token = eos_token
        self.bos_token: str | None = None
        self.template_bos: str | None = None  # BOS of chat templates; prompts may go without it.
        self.chat_template: str | None = None  # In Jinja, if its folder has one.
        self.bos_id: int | None = None  # The token that begins a text, if there is one.
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    # Text and ids.

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, with nothing added before or after."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of many texts; faster than one by one."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of texts as a model reads prompts, with BOS if the tokenizer adds it."""
        begin = [] if self.bos_id is None else [self.bos_id]
        return [begin + ids for ids in self.encode_batch(texts)]

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the ids of the text of a chat template, in which special tokens are meant."""
        return self._for_chat.encode(text, add_special_tokens=False).ids

    def encode_rendered_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of `encode_rendered`, and the characters [begin, end) of each."""
        encoding = self._for_chat.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @functools.cached_property
    def _for_chat(self) -> Any:
        """The tokenizer of the library that knows special tokens in a text."""
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(self._text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @functools.cached_property
    def special_tokens(self) -> Sequence[str]:
        """The texts of tokens that are no text."""
        added = self._content.get("added_tokens", ())
        return [token["content"] for token in added if token.get("special")]

    @property
    def _adds_bos(self) -> bool | None:
        """Whether prompts begin with BOS; None: tokenizer.json decides."""
        return self.config.bos_token is not None

    @property
    def prefix_id(self) -> int:
        """Id of the token that precedes the first token of a text: BOS, or else end of text."""
        return self.eos_id if self.bos_id is None else self.bos_id

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Returns the text of ids, special tokens included; invalid UTF-8 becomes U+FFFD.

        Raises ValueError if an id is not in the vocabulary.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and not (0 <= ids.min() and ids.max() < self.vocab_size):
            wrong = ids[(ids < 0) | (ids >= self.vocab_size)][0]
            raise ValueError(
                f"Token id {wrong} is beyond the vocabulary of {self.vocab_size}; decode with the "
                "tokenizer that the ids came from."
            )
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def lost_characters(
        self, texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> collections.Counter[str]:
        """Returns the characters of texts that their ids do not decode to, with their numbers.

        Those are unknown characters, and those that a normalizer drops or replaces.
        """
        if (unknown := self._unknown_id) is not None:
            ids = [[each for each in of_text if each != unknown] for of_text in ids]
        decoded = self._tokenizer.decode_batch(ids, skip_special_tokens=False)
        lost: collections.Counter[str] = collections.Counter()
        for text, back in zip(texts, decoded, strict=True):
            if text != back:
                lost += collections.Counter(text) - collections.Counter(back)
        return lost

    @functools.cached_property
    def _unknown_id(self) -> int | None:
        """Id of the token of unknown text, if there is one."""
        model = self._content["model"]  # Unigram has the id, others the token.
        unknown = model.get("unk_token")
        return model.get("unk_id") if unknown is None else self._tokenizer.token_to_id(unknown)

    # For token stores.

    @functools.cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of the content, independent of white space and the order of keys."""
        canonical = json.dumps(self._content, sort_keys=True) + f"\neos {self.eos_id}"
        return hashlib.sha256(canonical.encode()).hexdigest()

    def difference(self, other: "Tokenizer") -> str:
        """Returns a token or a text to which another tokenizer gives other ids; "" without one.

        Added tokens that only one of the two has make no difference: they extend a vocabulary.
        """
        pair = (self._tokenizer, other._tokenizer)
        first, second = (each.get_vocab(with_added_tokens=True) for each in pair)
        added = {x.content for each in pair for x in each.get_added_tokens_decoder().values()}
        ids: dict[str, tuple[Any, Any]] = {x: (first.get(x), second.get(x)) for x in first | second}
        ids[_PROBE] = self.encode(_PROBE), other.encode(_PROBE)
        for text, found in ids.items():
            if found[0] != found[1] and not (None in found and text in added):
                return f"{text!r} has the ids {found[0]} and {found[1]}"
        return ""

    def to_json(self) -> str:
        """Returns the text of the tokenizer.json."""
        return self._text

    def save(self, folder: str) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which names end of text and BOS."""
        with atomic_file(os.path.join(folder, FILE_NAME)) as file:
            file.write(self._text)
        settings: dict[str, str | bool] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
        }
        if bos_token := self.bos_token or self.template_bos:
            settings |= {"bos_token": bos_token, "add_bos_token": self.bos_token is not None}
        write_json(os.path.join(folder, SETTINGS_FILE), settings)
        if self.chat_template is not None:
            with atomic_file(os.path.join(folder, CHAT_TEMPLATE_FILE)) as file:
                file.write(self.chat_template)

    def token_num_bytes(self) -> npt.NDArray[np.int32]:
        """Returns the bytes of UTF-8 text that each token covers [V]: 0 for special tokens.

        Exact for byte-level tokenizers, whose tokens are byte strings. In others (SentencePiece
        style) the marker of a space counts as one byte, and so does a byte-fallback token.
        """
        sizes = np.zeros(self.vocab_size, np.int32)
        added = {t["id"]: t.get("special") for t in self._content.get("added_tokens", ())}
        byte_level = _is_byte_level(self._content)
        for token, index in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if index in added:  # Written as it is.
                sizes[index] = 0 if added[index] else len(token.encode())
            else:
                sizes[index] = len(token) if byte_level else _piece_num_bytes(token)
        return sizes


def saved_tokenizer(folder: str) -> Tokenizer:
    """Returns the tokenizer that `Tokenizer.save` wrote into a folder. Raises UserError."""
    eos_token = named_token(storage.read_json(os.path.join(folder, SETTINGS_FILE)), "eos_token")
    cfg = Tokenizer.default_config().set(path=folder, eos_token=eos_token or END_OF_TEXT)
    return cfg.instantiate()


def read_text(path: str) -> str:
    """Returns the text of a tokenizer.json, or of the one in a folder. Raises UserError."""
    if os.path.isdir(path) or (storage.is_remote(path) and not path.endswith(".json")):
        path = os.path.join(path, FILE_NAME)
    try:
        with storage.open_to_read(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        raise MissingFileError(
            f"There is no tokenizer at {path}; copy that of the model there, name another "
            "(--tokenizer), or train one (--train_bpe)."
        ) from None
    except UnicodeDecodeError:
        raise UserError(
            f"{path} is not text; set path to a tokenizer.json (convert a SentencePiece model "
            "first)."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _read_chat_template(folder: str) -> str | None:
    """Returns the chat template in the folder of a tokenizer, or None."""
    file_path = os.path.join(folder, CHAT_TEMPLATE_FILE)
    if not storage.exists(file_path):
        return None
    with storage.open_to_read(file_path, encoding="utf-8") as file:
        return file.read()


def named_token(settings: Mapping[str, Any], name: str) -> str | None:
    """Returns the text of a token such as "bos_token" in tokenizer_config.json."""
    token = settings.get(name)
    return token.get("content") if isinstance(token, dict) else token


def bos_token_of(path: str) -> str:
    """Returns the text of BOS of a tokenizer.json, by the settings in its folder.

    Raises UserError if they name none.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    settings = os.path.join(folder, SETTINGS_FILE)
    if (token := named_token(storage.read_json(settings), "bos_token")) is None:
        raise UserError(f"{settings} names no BOS; set bos_token there, or do not prepend it.")
    return token


class ByteTokenizer(Tokenizer):
    """A token for each of the 256 bytes, and end of text; needs neither training nor a file."""

    @config_class
    class Config(Tokenizer.Config):
        path: str = ""  # Unused.

    def __init__(self, cfg: Config) -> None:
        super(Tokenizer, self).__init__(cfg)
        self._load(_byte_level_json({}, [], 256), END_OF_TEXT)


def train_bpe(texts: Iterable[str], vocab_size: int, path: str) -> Tokenizer:
    """Returns a byte-level BPE trained on texts and written to `path`.

    The ids are the 256 bytes in order, then end of text, then merges by rank. The same texts give
    the same tokenizer. Messages on stderr report the start and the end.

    Args:
        texts: Documents; all are read, so pass a sample (20 MB suffice for 32k tokens).
        vocab_size: Number of tokens, the 256 bytes and end of text included.
        path: The tokenizer.json to write; in a folder, it gets that name.

    Raises:
        UserError: If vocab_size is too small, or there is no text.
    """
    import tokenizers
    from tokenizers import models, trainers

    if vocab_size < 257:
        raise UserError(
            f"vocab_size={vocab_size} (--train_bpe), but 256 bytes and end of text are 257 "
            "tokens; set more."
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=_byte_characters(),
        special_tokens=[],
        show_progress=sys.stderr.isatty(),
    )
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer, _ = _byte_level_parts()
    num_texts = num_characters = 0

    def counted() -> Iterator[str]:
        nonlocal num_texts, num_characters
        for text in texts:
            num_texts += 1
            num_characters += len(text)
            yield text

    begin = time.monotonic()
    _log(f"training a BPE of {vocab_size} tokens; this may take minutes")
    bpe.train_from_iterator(counted(), trainer=trainer)
    if not num_characters:
        raise UserError(
            f"There is no text to train a tokenizer on: {num_texts} documents, all empty."
        )
    model = json.loads(bpe.to_str())["model"]
    if os.path.isdir(path):
        path = os.path.join(path, FILE_NAME)
    with atomic_file(path) as file:
        file.write(_byte_level_json(model["vocab"], model["merges"], 256))
    tokenizer: Tokenizer = Tokenizer.default_config().set(path=path).instantiate()
    _log(
        f"{path}: {tokenizer.vocab_size} tokens, from {num_characters:,} characters in "
        f"{num_texts} documents, after {format_seconds(time.monotonic() - begin)}."
    )
    return tokenizer


def _log(text: str) -> None:
    print(f"tokenizer: {text}", file=sys.stderr, flush=True)


def _byte_characters() -> list[str]:
    """Returns the printable character that represents each byte in a byte-level vocabulary.

    Printable Latin-1 bytes represent themselves; the others are characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def _byte_level_parts() -> tuple[Any, Any]:
    """Returns the pre-tokenizer and decoder of byte-level BPE."""
    from tokenizers import decoders, pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()


def _byte_level_json(vocab: dict[str, int], merges: list[Any], eos_id: int) -> str:
    """Returns a tokenizer.json: bytes 0 to 255, end of text, then the merged tokens in order."""
    import tokenizers
    from tokenizers import models

    ids = {character: byte for byte, character in enumerate(_byte_characters())}
    merged = sorted((t for t in vocab if t not in ids), key=lambda token: vocab[token])
    ids[END_OF_TEXT] = eos_id
    ids |= {token: index for index, token in enumerate(merged, eos_id + 1)}
    bpe = tokenizers.Tokenizer(models.BPE(ids, [tuple(merge) for merge in merges]))
    bpe.pre_tokenizer, bpe.decoder = _byte_level_parts()
    bpe.add_special_tokens([END_OF_TEXT])
    return bpe.to_str(pretty=True)


def _is_byte_level(content: dict[str, Any]) -> bool:
    """Returns whether a tokenizer.json's tokens are byte strings in byte-level characters."""
    return '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])


def _piece_num_bytes(token: str) -> int:
    """Returns the bytes of a SentencePiece-style token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("\u2581", " ").encode())
