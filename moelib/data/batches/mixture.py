"""Mixtures: sequences of several sources in fixed proportions.

The source of a sequence follows a fixed pattern that repeats, and a sequence's number within its
source is a closed form of its number in the mixture: nothing needs to be counted or saved.

Letters: K sources, n sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.core.errors import UserError
from moelib.data.tokens.token_source import TokenSource
from moelib.data.tokens.tokenizer import Tokenizer

PERIOD = 10_000  # Sequences in a pattern; weights are rounded to multiples of 1 / PERIOD.


class Mixture(Configurable):
    """Token sources with weights: any first n sequences have each source's share, within one.

    A source whose sequences are used up begins its next epoch, independently of the others. The
    order in which the config lists the sources has no effect.
    """

    @config_class
    class Config(Configurable.Config):
        sources: dict[str, TokenSource.Config] = REQUIRED  # By a name of the user's choice.
        weights: dict[str, float] = REQUIRED  # Shares of sequences, by the same names; any sum.

    def __init__(self, cfg: Config) -> None:
        """Opens the sources.

        Raises UserError if names or weights are wrong, or the sources' vocabularies differ.
        """
        super().__init__(cfg)
        cfg = self.config
        _check_weights(list(cfg.sources), cfg.weights)
        self.names = sorted(cfg.sources)
        self.sources: list[TokenSource] = [cfg.sources[name].instantiate() for name in self.names]
        self._check_vocabularies()
        weights = np.array([cfg.weights[name] for name in self.names], np.float64)
        self.counts = round_shares(weights, PERIOD)
        for name, count in zip(self.names, self.counts.tolist(), strict=True):
            if not count:
                raise UserError(
                    f"weights[{name!r}]={cfg.weights[name]} of {weights.sum():g} in all is less "
                    f"than one sequence in {PERIOD}; set it larger or the others smaller, or "
                    "remove the source."
                )
        self.pattern = spread_pattern(self.counts)
        self._rank = np.empty(PERIOD, np.int64)  # Number of each sequence within its source.
        for k, count in enumerate(self.counts.tolist()):
            self._rank[self.pattern == k] = np.arange(count)

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer that all sources share, with BOS of text and a chat template."""
        found = [source.klass.load_tokenizer(source) for source in cfg.sources.values()]
        tokenizer = max(found, key=lambda each: each.chat_template is not None)
        of_text = max(found, key=lambda each: each.bos_id is not None)
        tokenizer.bos_token, tokenizer.bos_id = of_text.bos_token, of_text.bos_id
        return tokenizer

    def _check_vocabularies(self) -> None:
        first, *others = sorted(self.sources, key=lambda each: each.label_bounds is not None)
        for source in others:
            if not np.array_equal(first.token_num_bytes, source.token_num_bytes):
                raise UserError(
                    f"{source.name} and {first.name} have different tokenizers (vocabularies of "
                    f"{source.vocab_size} and {first.vocab_size}); prepare both with the same one."
                )
            # Conversations begin as their template says.
            if source.label_bounds is None and first.bos_token != source.bos_token:
                raise UserError(
                    f"{source.name} has bos_token={source.bos_token!r}, and {first.name} "
                    f"{first.bos_token!r}; prepare both with --prepend_bos, or none."
                )

    def locate(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the source [n] of sequences of the mixture, and their number in it [n]."""
        period, index = np.divmod(numbers, PERIOD)
        source = self.pattern[index]
        return source, period * self.counts[source] + self._rank[index]


def counts_before(number: int, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the sequences [K] of each source among the first of a mixture; see `round_shares`."""
    periods, rest = divmod(number, int(counts.sum()))
    first = spread_pattern(counts)[:rest]
    return periods * counts + np.bincount(first, minlength=len(counts))


def _check_weights(names: Sequence[str], weights: Mapping[str, float]) -> None:
    """Raises UserError if names differ, or a weight is not a positive number."""
    if not names or set(names) != set(weights):
        raise UserError(
            f"A mixture has sources {sorted(names)} and weights for {sorted(weights)}; set a "
            "weight for each source, and at least one."
        )
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise UserError(f"weights[{name!r}]={weight}: set it above 0, or remove the source.")


def round_shares(weights: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Returns integers [K] in proportion to weights that sum to total: largest remainders."""
    exact = weights / weights.sum() * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def spread_pattern(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns a sequence with `counts[k]` copies of each k, spread as evenly as possible.

    In any prefix of length i, the count of each k differs by less than 1 from i times its share.

    Source: Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980).
    """
    total = int(counts.sum())
    share = counts / total
    slack = 1 - 1 / max(2 * len(counts) - 2, 1)
    used = np.zeros(len(counts), np.int64)
    pattern = np.empty(total, np.int64)
    for i in range(total):
        due = share * (i + 1) - used
        deadline = np.where(due >= 1 - slack - 1e-9, (slack - due) / share, np.inf)
        k = int(np.argmin(deadline))
        pattern[i] = k
        used[k] += 1
    return pattern
