"""`mlxgen verify`: prove on the user's own two models that speculation changes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from mlxgen.cli import interrupts
from mlxgen.cli.logs import configure_logging
from mlxgen.cli.options import parse_seed
from mlxgen.cli.pair import choose_pair, load_pair
from mlxgen.cli.prompt_length import check_prompt_length
from mlxgen.cli.streams import Mode, Streams
from mlxgen.config import GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.errors import ExitCode, OptionError

DEFAULT_PROMPTS = ("Explain in a few words why the sky is blue, then count from one to five.",)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options as they were typed."""

    model: str | None
    revision: str | None
    draft_model: str | None
    trust_remote_code: bool
    prompt: list[str]
    max_tokens: int
    temp: float
    num_draft_tokens: int
    seed: str
    json: bool
    verbose: bool


def run_verify(options: VerifyOptions) -> ExitCode:
    """Run every check; `FAILED` when one of them fails."""
    streams = Streams(Mode.JSON if options.json else Mode.DEFAULT)
    configure_logging(os.environ)
    if options.temp <= 0:
        raise OptionError("--temp must be above 0: the sampled checks need a distribution")
    if options.num_draft_tokens < 1:
        raise OptionError("--num-draft-tokens must be at least 1 to verify speculation")
    if options.max_tokens < 2:
        raise OptionError("--max-tokens must be at least 2: the first token needs no draft")
    config = GenerationConfig(
        sampling=SamplingConfig(temperature=options.temp),
        speculation=SpeculationConfig(num_draft_tokens=options.num_draft_tokens),
        max_tokens=options.max_tokens,
        ignore_eos=True,
        seed=parse_seed(options.seed),
    )
    choice = choose_pair(options.model, options.revision, options.draft_model)
    if choice.draft is None:
        raise OptionError("verify needs --draft-model beside -m")
    started_s = time.perf_counter()
    target, draft = load_pair(
        choice, streams, trust_remote_code=options.trust_remote_code, verbose=options.verbose
    )
    assert draft is not None
    from mlxgen.audit.checks import device_name, run_checks
    from mlxgen.report.audit import audit_document, verdict_line
    from mlxgen.text.prompt import encode_prompt

    def progress(step: str) -> None:
        streams.note(f"Checking {step}...")
        interrupts.raise_lost()

    prompts = options.prompt or list(DEFAULT_PROMPTS)
    for prompt in prompts:
        check_prompt_length(len(encode_prompt(target.tokenizer, prompt)), choice.target)
    results = list(run_checks(target, draft, prompts, config, progress))
    streams.checks([(result.name, result.passed, result.detail) for result in results])
    seconds = time.perf_counter() - started_s
    streams.statistics([verdict_line(results)])
    streams.document(
        audit_document(
            results,
            {
                "models": {"target": str(choice.target.path), "draft": str(choice.draft.path)},
                "temperature": options.temp,
                "num_draft_tokens": options.num_draft_tokens,
                "max_tokens": options.max_tokens,
                "seed": config.seed,
                "device": device_name(),
                "seconds": seconds,
            },
        )
    )
    return ExitCode.DONE if all(result.passed for result in results) else ExitCode.FAILED
