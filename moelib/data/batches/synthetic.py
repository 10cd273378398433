"""A made-up language: learnable, identical on every machine, and of known entropy.

V words lie on a ring. A document begins at any of them; each next word lies one of a few steps
further on, with known probabilities. So all words are equally frequent, a model that knows only
frequencies stays at log V, and the entropy of a step is the lowest loss of any model.

Letters: V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.batches.lm_input import LMInput
from moelib.data.batches.mixture import Mixture
from moelib.data.hashing import random_bits, random_uniform
from moelib.data.tokens.token_source import InMemoryTokens, TokenSource

# Probability of each step; the steps are odd multiples of one size, far from one another.
_PROBABILITIES = (0.5, 0.25, 0.125, 0.125)


def step_entropy() -> float:
    """Returns the entropy of a step in nats: the lowest loss of a word, given the one before."""
    return -sum(p * math.log(p) for p in _PROBABILITIES)


def random_walk(length: int, ring: int, seed: int, document: int) -> npt.NDArray[np.int64]:
    """Returns the words of a document [length], each in [0, ring)."""
    bounds = np.cumsum(_PROBABILITIES)[:-1]
    uniform = random_uniform(length, seed, document)
    sizes = 1 + np.searchsorted(bounds, uniform, side="right") * max(ring // 5, 1)
    sizes[0] = int(random_bits(1, seed, document, 1)[0] % np.uint64(ring))
    return np.cumsum(sizes) % ring


class SyntheticTokens(InMemoryTokens):
    """Documents of the made-up language as tokens: id 0 ends a document, the others are words."""

    @config_class
    class Config(InMemoryTokens.Config):
        documents: Sequence[Sequence[int]] = ()  # Unused.
        num_documents: int = 256  # Number of documents of an epoch.
        max_document_tokens: int = 512  # Lengths are uniform from 2 to this, the end included.
        seed: int = 0  # Of the documents.

    def __init__(self, cfg: Config) -> None:
        """Makes the documents. Raises UserError if the vocabulary leaves fewer than 5 words."""
        super(InMemoryTokens, self).__init__(cfg)
        cfg = self.config
        if cfg.vocab_size < 6:
            raise UserError(f"vocab_size={cfg.vocab_size}: set 6 or more, for 5 words and an end.")
        uniform = random_uniform(cfg.num_documents, cfg.seed)
        lengths = 2 + (uniform * (cfg.max_document_tokens - 1)).astype(np.int64)
        documents = [
            np.append(1 + random_walk(length - 1, cfg.vocab_size - 1, cfg.seed, index), 0)
            for index, length in enumerate(lengths.tolist())
        ]
        self._hold(documents, cfg.vocab_size, eos_id=0)


class SyntheticInput(LMInput):
    """An `LMInput` of the made-up language, without disk or tokenizer. Requires vocab_size."""

    @config_class
    class Config(LMInput.Config):
        # Tokens of the language; vocab_size and seed are by default the input's.
        source: TokenSource.Config | Mixture.Config = SyntheticTokens.default_config()

    def __init__(self, cfg: Config) -> None:
        """Makes the tokens, of the input's vocabulary and seed unless the source has its own."""
        cfg = cfg.clone()
        source = cfg.source
        if isinstance(source, SyntheticTokens.Config) and source.vocab_size is REQUIRED:
            if cfg.vocab_size is None:
                raise UserError("vocab_size=None: set it to the model's.")
            source.set(vocab_size=cfg.vocab_size, seed=cfg.seed)
        super().__init__(cfg)
