"""Prompt lookup ahead of a draft model: the model drafts where the text does not repeat itself."""

from __future__ import annotations

from mlxgen.drafters.draft_model import DraftModel
from mlxgen.drafters.prompt_lookup import PromptLookup
from mlxgen.drafters.proposal import Proposal
from mlxgen.sampling.history import History, IntArray


class LookupFirst:
    """Asks lookup for a continuation in each round, and the draft model where it has none.

    Which of the two proposes depends on the text so far and on finished rounds, never on a token
    that is yet to be judged.
    """

    def __init__(self, lookup: PromptLookup, model: DraftModel) -> None:
        self._lookup = lookup
        self._model = model
        self._newest: PromptLookup | DraftModel = model
        self.reports_distribution = lookup.reports_distribution and model.reports_distribution
        self.length_policy = max(lookup.length_policy, model.length_policy)

    @property
    def name(self) -> str:
        """The drafter of the newest plan."""
        return self._newest.name

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in the draft model's cache."""
        return self._model.cached_tokens

    def prefill(self, prompt: IntArray) -> None:
        """Take in all prompt tokens but the last."""
        self._model.prefill(prompt)

    def plan(self, history: History, k: int, limit: int) -> int:
        """The length of lookup's continuation, else of the model's draft."""
        found = self._lookup.plan(history, k, limit)
        self._newest = self._lookup if found else self._model
        return found or self._model.plan(history, k, limit)

    def propose(
        self, history: History, k: int, *, want_distribution: bool, coupled: bool
    ) -> Proposal:
        """The proposals of whoever made the plan."""
        return self._newest.propose(
            history, k, want_distribution=want_distribution, coupled=coupled
        )

    def record(self, proposed: int, accepted: int) -> None:
        """Tell whoever proposed."""
        self._newest.record(proposed, accepted)

    def rewind(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens of the text."""
        self._model.rewind(length)
