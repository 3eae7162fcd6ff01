"""What a target and a draft remember from one run to the next: their caches."""

from __future__ import annotations

from mlxgen.cache.cached_model import CachedModel
from mlxgen.cache.kept import KeptCache
from mlxgen.cache.wide_blocks import lengths_to_fill_up
from mlxgen.config import CacheConfig
from mlxgen.models.loading import LoadedModel
from mlxgen.sampling.history import IntArray


class Memory:
    """The kept caches of a model or a pair, for runs one after another.

    Each run takes up the longest prefix of its prompt that is held, and prefills the rest. Its ids
    are those of a cold run on the same prompt. draft: None where no run has a draft model.
    """

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel | None = None,
        config: CacheConfig | None = None,
    ) -> None:
        self.config = config or CacheConfig()
        self.target = KeptCache(lambda: fresh_target(target, self.config), self.config)
        self.draft = None
        if draft is not None:
            self.draft = KeptCache(lambda: fresh_draft(target, draft, self.config), self.config)

    @property
    def caches(self) -> list[KeptCache]:
        """Those there are, the target's first."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    def take_back(self, text: IntArray) -> None:
        """After a run: its prompt and the tokens taken from it, `[n]`."""
        for kept in self.caches:
            kept.take_back(text)

    def forget(self) -> None:
        """The next run starts cold."""
        for kept in self.caches:
            kept.forget()


def fresh_target(target: LoadedModel, config: CacheConfig) -> CachedModel:
    """A target with empty caches."""
    # A table of positions ends somewhere, and what fills a block up would look behind it.
    may_fill_up = target.position_rows is None
    return CachedModel(
        target.model,
        role="target",
        width=target.drawable_ids,
        filled_up=lengths_to_fill_up(target.model) if may_fill_up else range(0),
        attends_in_pieces=target.attends_in_pieces,
        config=config,
    )


def fresh_draft(target: LoadedModel, draft: LoadedModel, config: CacheConfig) -> CachedModel:
    """A draft with empty caches, as wide as its target."""
    width, rows = target.drawable_ids, draft.embedding_rows
    return CachedModel(
        draft.model,
        role="draft",
        width=width,
        embedding_rows=rows if rows is not None and rows < width else None,
        config=config,
    )
