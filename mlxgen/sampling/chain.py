"""The sampler chain: the one place where logits become the distribution that is drawn from.

Plain decoding, the target's verification and the draft all go through `SamplerChain`. One row of
scores or weights is the source of both the draw (a race with exponential noise, which is an exact
draw in proportion to the weights) and of the reported distribution (`probabilities`), so the two
cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxgen.config import SamplingConfig
from mlxgen.errors import OptionError
from mlxgen.sampling import filters, penalties
from mlxgen.sampling.elementary import exp, largest_at, one_hot, race
from mlxgen.sampling.history import History
from mlxgen.sampling.sums import total

_TOP_K_AND_P = "top_k and top_p"
_NO_PROPOSALS = np.zeros(0, dtype=np.int32)


class Weights(NamedTuple):
    """rows: `[rows, V] float32`, in proportion to the distribution, 0 outside the support; tops:
    `[rows, 1]`, the largest logit of each row before the filters, for `rows_are_usable`."""

    rows: mx.array
    tops: mx.array


class Draws(NamedTuple):
    """ids: `[rows] int32`; rows: `[rows, V]`, the weights that the ids were drawn from, under
    greedy sampling the logits that they were chosen from; tops: as in `Weights`."""

    ids: mx.array
    rows: mx.array
    tops: mx.array


class SamplerChain:
    """Bias, penalties and filters of one configuration, for rows of `width` logits.

    protected: ids that XTC never removes (newlines and end-of-sequence tokens).
    breakers: ids that end a DRY match. Raises `OptionError` for a bias id of at least `width`.
    """

    def __init__(
        self,
        config: SamplingConfig,
        width: int,
        *,
        protected: Iterable[int] = (),
        breakers: Iterable[int] = (),
    ) -> None:
        self.config = config
        self.width = width
        self._protected_ids = frozenset(i for i in protected if i < width)
        self._protected = mx.array(sorted(self._protected_ids), dtype=mx.int32)
        self._breaker_ids = frozenset(breakers)
        self._breakers = mx.array(sorted(self._breaker_ids), dtype=mx.int32)
        self._bias = self._dense_bias()
        self._filters = _steps([name for name in config.order if name in config.active_filters])
        # A last top_p looks at weights, so the chain ends in those, and not in scores.
        self._ends_with_top_p = self._filters[-1:] == ["top_p"]
        if self._ends_with_top_p:
            self._filters.pop()
        self._nucleus_tokens: int | None = None

    def with_config(self, config: SamplingConfig) -> SamplerChain:
        """The same chain under another configuration, for a draft with its own temperature."""
        return SamplerChain(
            config, self.width, protected=self._protected_ids, breakers=self._breaker_ids
        )

    def narrowed(self, nucleus_tokens: int) -> SamplerChain:
        """The same chain, whose top_p need not keep more than so many tokens: for a draft, which
        may propose from any distribution that it reports. Behind a top_k it keeps what it does."""
        chain = copy(self)
        chain._nucleus_tokens = nucleus_tokens
        return chain

    def _dense_bias(self) -> mx.array | None:
        if not self.config.logit_bias:
            return None
        bias = np.zeros(self.width, dtype=np.float32)
        for token, value in self.config.logit_bias:
            if token >= self.width:
                raise OptionError(
                    f"--logit-bias {token}:{value:g}: the vocabulary has ids 0 to {self.width - 1}"
                )
            bias[token] = value
        return mx.array(bias)

    def new_history(self, tokens: Iterable[int]) -> History:
        """A history of these tokens that keeps what this chain's penalties need."""
        return History(tokens, track_matches=self.config.uses_dry, breakers=self._breaker_ids)

    @property
    def tosses_coins(self) -> bool:
        """Whether a row's distribution needs a coin."""
        return "xtc" in self._filters

    @property
    def reads_history(self) -> bool:
        """Whether a row depends on the tokens before it beyond what the model made of them."""
        return self.config.counts_tokens or self.config.uses_dry

    def adjusted_logits(
        self, logits: mx.array, history: History, proposals: mx.array | None = None
    ) -> mx.array:
        """Logits after bias and penalties: `[rows, width] -> [rows, width] float32`.

        The last row is conditioned on the history and all proposals, the row before it on one
        proposal less, and so on. The argmax of this is the greedy choice.
        """
        config = self.config
        adjusted = logits.astype(mx.float32)
        rows, width = adjusted.shape
        block = mx.array(_NO_PROPOSALS) if proposals is None else proposals.astype(mx.int32)
        if self._bias is not None:
            adjusted = adjusted + self._bias
        counts = None
        if config.counts_tokens:
            counts = penalties.token_counts(history, block, rows, width, config.repeat_last_n)
            if config.repetition_penalty != 1:
                adjusted = penalties.repetition(adjusted, counts, config.repetition_penalty)
        if config.uses_dry:
            adjusted = penalties.dry(
                adjusted,
                history,
                block,
                multiplier=config.dry_multiplier,
                base=config.dry_base,
                allowed_length=config.dry_allowed_length,
                last_n=config.dry_penalty_last_n,
                breakers=self._breakers,
            )
        if counts is not None and (config.frequency_penalty or config.presence_penalty):
            adjusted = penalties.frequency_and_presence(
                adjusted, counts, config.frequency_penalty, config.presence_penalty
            )
        return adjusted

    def weights(
        self,
        logits: mx.array,
        history: History,
        proposals: mx.array | None = None,
        coins: mx.array | None = None,
    ) -> Weights:
        """Weights of the effective distribution, for rows as in `adjusted_logits`.

        coins: `[rows] float32` uniforms, needed when `tosses_coins`; a row's XTC is on when its
        uniform is below the probability. Not for greedy sampling, which has no distribution.
        """
        scores, tops = self._scores(logits, history, proposals, coins)
        return Weights(self._weights_of(scores), tops)

    def _weights_of(self, scores: mx.array) -> mx.array:
        if self._ends_with_top_p:
            return filters.top_p_weights(scores, self.config.top_p, self._nucleus_tokens)
        return exp(scores)

    def _scores(
        self,
        logits: mx.array,
        history: History,
        proposals: mx.array | None,
        coins: mx.array | None,
    ) -> tuple[mx.array, mx.array]:
        """Rows behind all filters but a last top_p, and the largest logits before the filters."""
        config = self.config
        row, tops = filters.shifted(self._prepared(logits, history, proposals))
        for name in self._filters:
            if name == "temperature":
                row = filters.temperature(row, config.temperature)
            elif name == _TOP_K_AND_P:
                row = filters.top_k_and_p(row, config.top_k, config.top_p)
            elif name == "top_k":
                row = filters.top_k(row, config.top_k)
            elif name == "top_p":
                row = filters.top_p(row, config.top_p, self._nucleus_tokens)
            elif name == "min_p":
                row = filters.min_p(row, config.min_p)
            elif name == "typical_p":
                row = filters.typical_p(row, config.typical_p)
            elif name == "top_n_sigma":
                row = filters.top_n_sigma(row, config.top_n_sigma)
            elif coins is not None:
                tossed = coins < config.xtc_probability
                row = filters.xtc(row, tossed, config.xtc_threshold, self._protected)
            else:
                raise ValueError("XTC is on: every row needs a coin")
        return row, tops

    def draw(
        self,
        logits: mx.array,
        noise: mx.array,
        history: History,
        proposals: mx.array | None = None,
        coins: mx.array | None = None,
    ) -> Draws:
        """A token for each row and the weights it was drawn from. noise: `[rows, V] float32`,
        standard exponential; the rest as in `weights`."""
        scores, tops = self._scores(logits, history, proposals, coins)
        rows = self._weights_of(scores)
        if self._ends_with_top_p:
            return Draws(race(rows, noise), rows, tops)
        # The same race in logs; rows that nobody asks for are never computed.
        return Draws(largest_at(scores - mx.log(noise)), rows, tops)

    def choose(
        self, logits: mx.array, history: History, proposals: mx.array | None = None
    ) -> Draws:
        """The greedy token of each row."""
        rows = self._prepared(logits, history, proposals)
        tops = mx.max(rows, axis=-1, keepdims=True)
        return Draws(largest_at(rows), rows, tops)

    def _prepared(self, logits: mx.array, history: History, proposals: mx.array | None) -> mx.array:
        """As `adjusted_logits`, or the logits as they came where nothing adjusts them."""
        if self._bias is None and not self.reads_history:
            return logits
        return self.adjusted_logits(logits, history, proposals)


def _steps(names: list[str]) -> list[str]:
    """Filters in their order, a top_p right behind a top_k taken together with it."""
    steps: list[str] = []
    for name in names:
        if name == "top_p" and steps[-1:] == ["top_k"]:
            steps[-1] = _TOP_K_AND_P
        else:
            steps.append(name)
    return steps


def rows_are_usable(tops: mx.array) -> bool:
    """Whether a token can be drawn from every row with these tops, `[rows, 1]`, once evaluated.

    A maximum is NaN if any logit is, and infinite if one is +inf or none is finite; the filters
    always leave something of a row with a finite top. Asked of the logits, since a filter can mask
    a NaN that it met. The host looks at them: it reads the round anyway.
    """
    rows: Any = tops.tolist()
    return all(math.isfinite(top) for (top,) in rows)


def probabilities(weights: mx.array) -> mx.array:
    """`[rows, V] float32 -> [rows, V] float32`: the distribution that is drawn from."""
    return weights / total(weights)


def effective_token_distribution(
    logits: mx.array,
    chain: SamplerChain,
    history: History,
    proposals: mx.array | None = None,
    coins: mx.array | None = None,
) -> mx.array:
    """The distribution that a token after `history` is drawn from. Consumes no randomness.

    logits: `[rows, V]`; the result is `[rows, V] float32`, rows sum to 1, one-hot when the
    configuration is greedy. Rows and coins as in `SamplerChain.weights`.
    """
    if chain.config.is_greedy:
        return one_hot(chain.choose(logits, history, proposals).ids, chain.width)
    return probabilities(chain.weights(logits, history, proposals, coins).rows)


def sample_token_with_distribution(
    logits: mx.array,
    chain: SamplerChain,
    history: History,
    noise: mx.array,
    proposals: mx.array | None = None,
    coins: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """A token for each row and the distribution it was drawn from, from one pre-step.

    logits, noise: `[rows, V] float32`, noise standard exponential (`mlxgen.sampling.randomness`).
    Returns ids `[rows] int32` and rows `[rows, V] float32` that sum to 1.
    """
    if chain.config.is_greedy:
        row = effective_token_distribution(logits, chain, history, proposals)
        return largest_at(row), row
    ids, rows, _ = chain.draw(logits, noise, history, proposals, coins)
    return ids, probabilities(rows)
