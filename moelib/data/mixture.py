"""Mixtures: rows of several sources in fixed proportions.

Which source a row comes from is a fixed pattern that repeats, and the row's number within its
source is a closed form of its number in the mixture: nothing needs to be counted or saved.

Letters: K sources, n rows asked for.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.data.token_source import TokenSource
from moelib.data.tokenizer import Tokenizer

PERIOD = 10_000  # Rows in a pattern: weights are rounded to so many parts.


class Mixture(Configurable):
    """Token sources with weights: of the first n rows each has its share, give or take one.

    A source whose rows are used up begins its next epoch, whatever the others do.
    """

    @config_class
    class Config(Configurable.Config):
        sources: dict[str, TokenSource.Config] = REQUIRED  # By a name of your choice.
        weights: dict[str, float] = REQUIRED  # Of rows, by the same names; any sum.

    def __init__(self, cfg: Config) -> None:
        """Opens the sources.

        Raises:
            ValueError: If names or weights are wrong, or the sources' vocabularies differ.
        """
        super().__init__(cfg)
        cfg = self.config
        _check_weights(list(cfg.sources), cfg.weights)
        self.names = list(cfg.sources)
        opened: list[Any] = [source.instantiate() for source in cfg.sources.values()]
        self.sources: list[TokenSource] = opened
        self._check_vocabularies()
        weights = np.array([cfg.weights[name] for name in self.names], np.float64)
        self.counts = round_shares(weights, PERIOD)
        for name, count in zip(self.names, self.counts.tolist(), strict=True):
            if not count:
                raise ValueError(
                    f"weights[{name!r}] is {cfg.weights[name]}, less than one row in {PERIOD}; set "
                    "it larger, or leave the source out."
                )
        self.pattern = spread_pattern(self.counts)
        self._rank = np.empty(PERIOD, np.int64)  # Which row of its source each place has.
        for k, count in enumerate(self.counts.tolist()):
            self._rank[self.pattern == k] = np.arange(count)

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer of the sources, which all have the same."""
        source = next(iter(cfg.sources.values()))
        return source.klass.load_tokenizer(source)

    def _check_vocabularies(self) -> None:
        first, *others = self.sources
        for source in others:
            if not np.array_equal(first.token_num_bytes, source.token_num_bytes):
                raise ValueError(
                    f"{source.name} and {first.name} are of different tokenizers (vocabularies of "
                    f"{source.vocab_size} and {first.vocab_size}); prepare both with the same one."
                )

    def rows(
        self, rows: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the source [n] of rows of the mixture, and their number in that source [n]."""
        period, place = np.divmod(rows, PERIOD)
        source = self.pattern[place]
        return source, period * self.counts[source] + self._rank[place]


def _check_weights(names: Sequence[str], weights: Mapping[str, float]) -> None:
    """Raises ValueError if names differ, or a weight is not a positive number."""
    if not names or set(names) != set(weights):
        raise ValueError(
            f"A mixture has sources {sorted(names)} and weights for {sorted(weights)}; set a "
            "weight for each source, and at least one."
        )
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise ValueError(
                f"weights[{name!r}] is {weight}; set it above 0, or leave the source out."
            )


def round_shares(weights: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Returns whole numbers [K] in proportion to weights that sum to total: largest remainders."""
    exact = weights / weights.sum() * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def spread_pattern(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns a sequence that holds each k `counts[k]` times, spread as evenly as can be.

    After any i places, the count of each k differs by less than 1 from i times its share.

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
