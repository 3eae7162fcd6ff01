"""Whether a target and a draft speak of the same tokens."""

from __future__ import annotations

from collections.abc import Mapping

from mlxgen.errors import PairError


def compare_vocabularies(target: Mapping[str, int], draft: Mapping[str, int]) -> list[str]:
    """Check that every id which both know stands for the same token; return notes for people.

    target, draft: token string to id. Ids past the shorter vocabulary are allowed, since the draft
    then never proposes them or they are cut off. Raises `PairError` naming the first differing id.
    """
    target_tokens = {token_id: token for token, token_id in target.items()}
    draft_tokens = {token_id: token for token, token_id in draft.items()}
    shared_end = min(max(target_tokens, default=-1), max(draft_tokens, default=-1))
    # Ids may lie far apart, so they are not counted through.
    for token_id in sorted(target_tokens.keys() | draft_tokens.keys()):
        if token_id > shared_end:
            break
        ours, theirs = target_tokens.get(token_id), draft_tokens.get(token_id)
        if ours != theirs:
            raise PairError(
                f"the draft has another vocabulary: token {token_id} is {_shown(ours)} in the "
                f"target and {_shown(theirs)} in the draft; use a draft made for this target"
            )
    longer, shorter = len(target_tokens), len(draft_tokens)
    if longer == shorter:
        return []
    which = "target" if longer > shorter else "draft"
    extra = abs(longer - shorter)
    return [
        f"the {which}'s tokenizer has {extra} more token{'' if extra == 1 else 's'} than the "
        f"other, never proposed"
    ]


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
