"""A language made up: learnable, the same everywhere, and of known entropy.

Words stand on a ring of V. A document begins at any of them; each next word lies one of a few steps
further on, with known probabilities. So all words are equally frequent, a model that knows only
frequencies stays at log V, and the best that any model can reach is the entropy of a step.

Letters: V vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.data.hashing import random_bits, random_uniform
from moelib.data.lm_input import LMInput
from moelib.data.mixture import Mixture
from moelib.data.source import BadRecords, Part, Source
from moelib.data.token_source import InMemoryTokens, TokenSource

# How likely each step is; the steps themselves are odd multiples, far from one another.
_PROBABILITIES = (0.5, 0.25, 0.125, 0.125)


def step_entropy() -> float:
    """Returns the entropy of a step in nats: the least loss of a word, given the one before."""
    return -sum(p * math.log(p) for p in _PROBABILITIES)


def random_walk(length: int, ring: int, seed: int, document: int) -> npt.NDArray[np.int64]:
    """Returns the words of a document [length], each in [0, ring)."""
    bounds = np.cumsum(_PROBABILITIES)[:-1]
    uniform = random_uniform(length, seed, document)
    sizes = 1 + np.searchsorted(bounds, uniform, side="right") * max(ring // 5, 1)
    sizes[0] = int(random_bits(1, seed, document, 1)[0] % np.uint64(ring))
    return np.cumsum(sizes) % ring


def _check_ring(ring: int, field: str) -> None:
    if ring < 5:
        raise ValueError(f"{field} is {ring}; set it to leave 5 words or more.")


class SyntheticTokens(InMemoryTokens):
    """Documents of the made-up language as tokens: id 0 ends a document, the others are words."""

    @config_class
    class Config(InMemoryTokens.Config):
        documents: Sequence[Sequence[int]] = ()  # Made here.
        num_documents: int = 256
        max_document_tokens: int = 512  # Lengths are uniform from 2 up to this, the end included.
        seed: int = 0

    def __init__(self, cfg: Config) -> None:
        """Makes the documents."""
        super(InMemoryTokens, self).__init__(cfg)
        cfg = self.config
        _check_ring(cfg.vocab_size - 1, "vocab_size")
        uniform = random_uniform(cfg.num_documents, cfg.seed)
        lengths = 2 + (uniform * (cfg.max_document_tokens - 1)).astype(np.int64)
        documents = [
            np.append(1 + random_walk(length - 1, cfg.vocab_size - 1, cfg.seed, index), 0)
            for index, length in enumerate(lengths.tolist())
        ]
        self._hold(documents, cfg.vocab_size, eos_id=0)


class SyntheticInput(LMInput):
    """An `LMInput` of the made-up language: no disk, no tokenizer. Set its vocab_size."""

    @config_class
    class Config(LMInput.Config):
        source: TokenSource.Config | Mixture.Config = SyntheticTokens.default_config()

    def __init__(self, cfg: Config) -> None:
        """Makes the tokens, of the input's vocabulary and seed unless the source has its own.

        Raises:
            ValueError: If vocab_size is unset.
        """
        cfg = cfg.clone()
        source = cfg.source
        if isinstance(source, SyntheticTokens.Config) and source.vocab_size is REQUIRED:
            if cfg.vocab_size is None:
                raise ValueError("vocab_size is None; set it to the model's.")
            source.set(vocab_size=cfg.vocab_size, seed=cfg.seed)
        super().__init__(cfg)


@dataclasses.dataclass(frozen=True)
class SyntheticPart:
    """Some documents of the made-up language."""

    first: int
    count: int
    num_words: int
    ring: int
    seed: int

    @property
    def name(self) -> str:
        """Which documents."""
        return f"synthetic documents from {self.first}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the texts, exact."""
        return self.count * self.num_words * (_word_length(self.ring) + 1)

    def documents(self, bad_records: BadRecords | None = None) -> Iterator[str]:
        """Yields the texts."""
        del bad_records
        words = _words(self.ring)
        for index in range(self.first, self.first + self.count):
            walk = random_walk(self.num_words, self.ring, self.seed, index)
            yield "".join(words[word] for word in walk.tolist())


def _word_length(ring: int) -> int:
    return max(math.ceil(math.log(ring, 26) - 1e-9), 1)


def _words(ring: int) -> list[str]:
    """Returns a word for each place on the ring: letters of one number, and a space."""
    length = _word_length(ring)
    places = [[chr(97 + i // 26**k % 26) for k in reversed(range(length))] for i in range(ring)]
    return ["".join(letters) + " " for letters in places]


class SyntheticText(Source):
    """Documents of the made-up language as text."""

    @config_class
    class Config(Source.Config):
        num_documents: int = 256
        num_words: int = 200  # In each document.
        ring: int = 500  # Different words.
        seed: int = 0

    def parts(self) -> Sequence[Part]:
        """Returns documents in groups of 64."""
        cfg = self.config
        _check_ring(cfg.ring, "ring")
        return [
            SyntheticPart(i, min(64, cfg.num_documents - i), cfg.num_words, cfg.ring, cfg.seed)
            for i in range(0, cfg.num_documents, 64)
        ]

    @property
    def bits_per_byte(self) -> float:
        """The entropy of the texts: no model can do better on average."""
        cfg = self.config
        nats = math.log(cfg.ring) + (cfg.num_words - 1) * step_entropy()
        return nats / math.log(2) / (cfg.num_words * (_word_length(cfg.ring) + 1))
