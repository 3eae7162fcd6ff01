"""Making the runs of a comparison: one load, fresh caches for each run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import mlx.core as mx

from mlxgen.errors import InputError
from mlxgen.experiment.plan import Experiment, Phase, RunKey
from mlxgen.experiment.prompts import Prompt
from mlxgen.experiment.records import RoundCounter, RunRecord, record_of
from mlxgen.generation import generate
from mlxgen.models.loading import LoadedModel
from mlxgen.text.prompt import encode_prompt

WARM_UP_TOKENS = 32


def encode_prompts(
    target: LoadedModel, prompts: Sequence[Prompt], *, use_template: bool
) -> list[list[int]]:
    """Token ids of every prompt. Raises `InputError` naming the one that cannot be encoded."""
    encoded = []
    for prompt in prompts:
        try:
            encoded.append(encode_prompt(target.tokenizer, prompt.text, use_template=use_template))
        except InputError as error:
            raise InputError(f"prompt {prompt.id!r}: {error}") from error
    return encoded


def make_runs(
    experiment: Experiment,
    target: LoadedModel,
    draft: LoadedModel | None,
    prompt_ids: Sequence[Sequence[int]],
    pending: Collection[RunKey],
    on_record: Callable[[RunRecord], None],
) -> None:
    """Make the pending runs in their order, each reported as soon as it is finished.

    Every arm that has a timed run ahead of it generates a little first, which compiles kernels
    and touches the weights.
    """

    def run(key: RunKey, max_tokens: int | None = None) -> RunRecord:
        config = experiment.config_of(key)
        if max_tokens is not None:
            config = replace(config, max_tokens=min(max_tokens, config.max_tokens))
        rounds = RoundCounter()
        arm = experiment.arms[key.arm]
        result = generate(
            target,
            prompt_ids[key.prompt],
            config,
            draft=draft if arm.needs_draft else None,
            on_round=rounds.see,
        )
        return record_of(key, result, rounds)

    for arm in sorted({key.arm for key in pending if key.phase is Phase.SPEED}):
        run(RunKey(Phase.SPEED, arm, 0, experiment.first_seed), WARM_UP_TOKENS)
    for key in pending:
        on_record(run(key))


def device_name() -> str:
    """The device that the runs are made on."""
    name = mx.device_info().get("device_name", "")
    kind = "GPU" if mx.default_device().type == mx.DeviceType.gpu else "CPU"
    return f"{kind}, {name}" if name else kind
