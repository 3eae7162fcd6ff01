"""The Typer application: every option with its help text. docs/cli.md is generated from here.

A command imports what carries it out when it is called: help and completion need none of it.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mlxgen import __version__
from mlxgen.cli.dependent_options import check_dependent_options
from mlxgen.cli.options import (
    COMPARE_TEMPERATURE,
    COMPARE_TOKENS,
    VERIFY_TOKENS,
    GenerateOptions,
)
from mlxgen.cli.outcome import PROGRAM, run
from mlxgen.experiment.arms import DEFAULT_ARMS

app = typer.Typer(
    name=PROGRAM,
    help="Generate text with MLX models, with speculative decoding that is lossless and shows it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL, _PROMPT, _LENGTH = "Model", "Prompt", "Length and stopping"
_SAMPLING, _SPECULATION, _OUTPUT, _MEMORY = "Sampling", "Speculation", "Output", "Memory"
_EXPERIMENT = "Experiment"


def main() -> int:
    """The console script: parse, run, and map what happened to an exit code."""
    arguments = sys.argv[1:]
    return run(
        lambda: app(arguments, prog_name=PROGRAM, standalone_mode=False),
        verbose="--verbose" in arguments,
    )


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """Generate text with MLX models, with speculative decoding that is lossless and shows it."""


def _given(context: typer.Context) -> set[str]:
    """The parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


@app.command()
def generate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="DIR|HUB_ID",
            help="Target model: a directory, or a hub id (owner/name). Default: the default pair.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(metavar="REV", help="Revision of the hub id.", rich_help_panel=_MODEL),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="LoRA adapter, for the target only.", rich_help_panel=_MODEL
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run code that a model directory brings along.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            help="The prompt; - reads standard input, as does a pipe without -p. One that starts "
            "with a dash: --prompt=-5.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--file",
            metavar="PATH",
            help="Read the prompt from a UTF-8 file.",
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="System message, for the chat template.", rich_help_panel=_PROMPT
        ),
    ] = None,
    no_chat_template: Annotated[
        bool,
        typer.Option(
            "--no-chat-template",
            help="Pass the prompt as it is. Text that spells a special token becomes that token, "
            "here and in templates.",
            rich_help_panel=_PROMPT,
        ),
    ] = False,
    chat_template_args: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='Arguments of the chat template, such as {"enable_thinking": false}.',
            rich_help_panel=_PROMPT,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "-n",
            "--max-tokens",
            help="Most tokens to generate; negative: until the end of sequence or of the context "
            "window.",
            rich_help_panel=_LENGTH,
        ),
    ] = -1,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="End before this text. Repeatable.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after an end-of-sequence token.",
            rich_help_panel=_LENGTH,
        ),
    ] = False,
    extra_eos_token: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKEN|ID",
            help="One more token that ends the text. Repeatable.",
            rich_help_panel=_LENGTH,
        ),
    ] = None,
    temp: Annotated[
        float | None,
        typer.Option(
            "-t",
            "--temp",
            "--temperature",
            help="Temperature; 0 always takes the most likely token. Default: the model's "
            "generation_config.json, else 0.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Keep the K most likely tokens and those tied with the K-th; 0 is off, 1 is "
            "greedy. Default: the model's generation_config.json, else 0.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Keep the smallest set of tokens whose mass reaches P, ties included; 1 is off, 0 "
            "keeps the top token. Default: the model's generation_config.json, else 1.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    min_p: Annotated[
        float,
        typer.Option(
            help="Keep tokens with at least this share of the top token's probability; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    typical_p: Annotated[
        float,
        typer.Option(
            help="Keep the tokens of most typical surprise up to this mass; 1 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0,
    top_n_sigma: Annotated[
        float,
        typer.Option(
            help="Keep logits within N standard deviations of the top one; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    xtc_probability: Annotated[
        float,
        typer.Option(
            help="Chance at each position of excluding the top choices; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    xtc_threshold: Annotated[
        float,
        typer.Option(
            help="Tokens above this probability are top choices; all but the least likely of them "
            "are excluded, newlines and end-of-sequence tokens never.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.1,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Divide positive logits of tokens seen (prompt included) by this, multiply "
            "negative ones; 1 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0,
    repeat_last_n: Annotated[
        int,
        typer.Option(
            help="Window in tokens of the repetition, frequency and presence penalties: -1 all, "
            "0 none.",
            rich_help_panel=_SAMPLING,
        ),
    ] = -1,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            help="Take this off a logit for each time the token stands in the window, prompt "
            "included.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            help="Take this off the logit of every token in the window, prompt included.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    dry_multiplier: Annotated[
        float,
        typer.Option(
            help="DRY: strength of the penalty on continuing a repetition; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    dry_base: Annotated[
        float,
        typer.Option(help="DRY: growth of the penalty by token.", rich_help_panel=_SAMPLING),
    ] = 1.75,
    dry_allowed_length: Annotated[
        int,
        typer.Option(
            help="DRY: repetitions shorter than this are free.", rich_help_panel=_SAMPLING
        ),
    ] = 2,
    dry_penalty_last_n: Annotated[
        int,
        typer.Option(
            help="DRY: window in tokens, -1 all, 0 none.",
            rich_help_panel=_SAMPLING,
        ),
    ] = -1,
    dry_sequence_breaker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="DRY: tokens with this text end a repetition. Repeatable; none by default.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID:VALUE",
            help="Add VALUE to a token's logit, in target and draft; -inf bans it. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="0 to 2^64-1. Default: fresh entropy, and the seed is reported.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    samplers: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Order of the filters, after bias and penalties. Default "
            "'top_n_sigma;typical_p;xtc;temperature;top_k;top_p;min_p'; 'mlx-lm' is a preset.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    no_generation_config: Annotated[
        bool,
        typer.Option(
            "--no-generation-config",
            help="Ignore the sampling values of the model's generation_config.json.",
            rich_help_panel=_SAMPLING,
        ),
    ] = False,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB_ID",
            help="A small model of the target's vocabulary that proposes tokens.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Tokens proposed in a round; 0 decodes without the draft, auto lets measured "
            "costs choose, 0 included. Default 3.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    prompt_lookup: Annotated[
        bool,
        typer.Option(
            "--prompt-lookup",
            help="Propose what followed the newest tokens earlier in the text; alone, or ahead of "
            "the draft model.",
            rich_help_panel=_SPECULATION,
        ),
    ] = False,
    prompt_lookup_ngram_max: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Longest run of tokens looked up. Default 3, at most 16.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    prompt_lookup_ngram_min: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Shortest run of tokens looked up. Default 2.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    prompt_lookup_max_draft: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens that lookup proposes in a round. Default 7, at most 64.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    draft_kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="dflash or mtp, whose loops do not exist yet; leave it out for the classic loop.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    draft_block_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Block size that the drafter-kind line names; the classic loop has "
            "--num-draft-tokens.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    accept_rule: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="sampler-match, stochastic, block or gumbel-match; all are lossless. Default: "
            "MLXCEL_SPECULATIVE_STOCHASTIC_ACCEPT, else sampler-match. Greedy sampling has its own "
            "rule.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    accept_diag: Annotated[
        bool | None,
        typer.Option(
            "--accept-diag/--no-accept-diag",
            help="Print the closed forms of acceptance. Default: MLXCEL_SPECULATIVE_ACCEPT_DIAG.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    draft_temp: Annotated[
        float | None,
        typer.Option(
            help="The draft's own temperature; 0 proposes its most likely token. Default: the "
            "target's.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document on stdout.", rich_help_panel=_OUTPUT),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            help="Only text on stdout; statistics, warnings and errors on stderr.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Print prefill, decode and memory in place of the one line.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    show_draft: Annotated[
        bool,
        typer.Option(
            "--show-draft",
            help="Colour text that the draft proposed, on a terminal.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    logprobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Report each token's log-probability under the model's own softmax, and the N "
            "most likely tokens'; 0 is off.",
            rich_help_panel=_OUTPUT,
        ),
    ] = 0,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Versions, the filter order, and a traceback with an error.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    kv_bits: Annotated[
        int | None,
        typer.Option(
            help="Quantise the key/value cache to 2, 3, 4, 6 or 8 bits.", rich_help_panel=_MEMORY
        ),
    ] = None,
    kv_group_size: Annotated[
        int,
        typer.Option(help="Group size of the quantised cache.", rich_help_panel=_MEMORY),
    ] = 64,
    quantized_kv_start: Annotated[
        int,
        typer.Option(
            help="Number of cached tokens from which on it is quantised.", rich_help_panel=_MEMORY
        ),
    ] = 0,
    max_kv_size: Annotated[
        int | None,
        typer.Option(
            help="Keep only the newest tokens in a ring of this size; not with a draft.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
    prefill_step_size: Annotated[
        int,
        typer.Option(help="Prompt tokens taken in at once.", rich_help_panel=_MEMORY),
    ] = 2048,
    prompt_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep the caches in this file after a run, and take up what the prompt shares "
            "with it in the next. The text is that of a run without it.",
            rich_help_panel=_MEMORY,
        ),
    ] = None,
) -> int:
    """Generate text from a prompt, with a draft model where one is given.

    Without -m the default pair is used, and without a prompt on a terminal it is a chat. Statistics
    follow the text; the line [Speculative acceptance] says which acceptance rule ran and how it
    did.
    """
    from mlxgen.cli.generate import run_generate

    check_dependent_options(_given(context))
    return run_generate(
        GenerateOptions(
            model=model,
            revision=revision,
            adapter=adapter,
            trust_remote_code=trust_remote_code,
            prompt=prompt,
            file=file,
            system=system,
            no_chat_template=no_chat_template,
            chat_template_args=chat_template_args,
            max_tokens=max_tokens,
            stop=stop or [],
            ignore_eos=ignore_eos,
            extra_eos_token=extra_eos_token or [],
            temp=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            top_n_sigma=top_n_sigma,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            repetition_penalty=repetition_penalty,
            repeat_last_n=repeat_last_n,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            dry_multiplier=dry_multiplier,
            dry_base=dry_base,
            dry_allowed_length=dry_allowed_length,
            dry_penalty_last_n=dry_penalty_last_n,
            dry_sequence_breaker=dry_sequence_breaker or [],
            logit_bias=logit_bias or [],
            seed=seed,
            samplers=samplers,
            no_generation_config=no_generation_config,
            draft_model=draft_model,
            num_draft_tokens=num_draft_tokens,
            prompt_lookup=prompt_lookup,
            prompt_lookup_ngram_max=prompt_lookup_ngram_max,
            prompt_lookup_ngram_min=prompt_lookup_ngram_min,
            prompt_lookup_max_draft=prompt_lookup_max_draft,
            draft_kind=draft_kind,
            draft_block_size=draft_block_size,
            accept_rule=accept_rule,
            accept_diag=accept_diag,
            draft_temp=draft_temp,
            json=json,
            quiet=quiet,
            profile=profile,
            show_draft=show_draft,
            logprobs=logprobs,
            verbose=verbose,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
            max_kv_size=max_kv_size,
            prefill_step_size=prefill_step_size,
            prompt_cache=prompt_cache,
        )
    )


@app.command()
def verify(
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="DIR|HUB_ID",
            help="Target model: a directory, or a hub id (owner/name). Default: the default pair.",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="DIR|HUB_ID", help="The draft model to verify with it."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Revision of the target's hub id.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that a model directory brings along."),
    ] = False,
    prompt: Annotated[
        list[str] | None,
        typer.Option("-p", "--prompt", metavar="TEXT", help="A prompt to run on. Repeatable."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("-n", "--max-tokens", help="Tokens of each run.")
    ] = VERIFY_TOKENS,
    temp: Annotated[
        float, typer.Option("-t", "--temp", help="Temperature of the sampled checks.")
    ] = 0.8,
    num_draft_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens proposed in a round.")
    ] = 3,
    seed: Annotated[
        str, typer.Option(metavar="N", help="0 to 2^64-1; fixed, so that a failure repeats.")
    ] = "0",
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Versions, and a traceback with an error.")
    ] = False,
) -> int:
    """Verify that speculation changes nothing on a pair of models.

    Runs both models with every rule: greedy and same-seed parity with plain decoding, acceptance
    against theory, caches in lock-step, vocabularies. Exit 0 when every check passes, 1 otherwise.
    """
    from mlxgen.cli.verify import VerifyOptions, run_verify

    return run_verify(
        VerifyOptions(
            model=model,
            revision=revision,
            draft_model=draft_model,
            trust_remote_code=trust_remote_code,
            prompt=prompt or [],
            max_tokens=max_tokens,
            temp=temp,
            num_draft_tokens=num_draft_tokens,
            seed=seed,
            json=json,
            verbose=verbose,
        )
    )


@app.command()
def compare(
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="DIR|HUB_ID",
            help="Target model: a directory, or a hub id (owner/name). Default: the default pair.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV", help="Revision of the target's hub id.", rich_help_panel=_MODEL
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|HUB_ID",
            help="A small model of the target's vocabulary that proposes tokens.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run code that a model directory brings along.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Rules and plain, separated by commas; the first arm is what the others are "
            f"compared with. Default: {','.join(DEFAULT_ARMS)}.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="One more arm with settings of its own: a rule or plain, then k=N|auto, temp=, "
            "top-k=, top-p=, min-p=, draft-temp=, lookup, name=, such as "
            "'stochastic,k=8,temp=1.0'. Repeatable.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Prompts, one a line, or JSONL (*.jsonl) of strings or objects with "prompt". '
            "Default: a bundled set of 40.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Take the first N prompts only; any head of the bundled set is mixed.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(metavar="S", help="Runs of each prompt.", rich_help_panel=_EXPERIMENT),
    ] = 1,
    seed: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="The first seed, 0 to 2^64-1. Each run of an arm has one of its own, counted on "
            "from there; arms share them.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = "0",
    theory_seeds: Annotated[
        int,
        typer.Option(
            metavar="S",
            help="How many runs of each prompt are made again with closed forms, untimed, for the "
            "check against theory; 0 leaves it out.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = 1,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep every finished run in this journal, and go on from what it holds.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "-n", "--max-tokens", help="Most tokens of each run.", rich_help_panel=_EXPERIMENT
        ),
    ] = COMPARE_TOKENS,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Go on after an end-of-sequence token, so that all runs are of one length.",
            rich_help_panel=_EXPERIMENT,
        ),
    ] = False,
    no_chat_template: Annotated[
        bool,
        typer.Option(
            "--no-chat-template", help="Pass prompts as they are.", rich_help_panel=_EXPERIMENT
        ),
    ] = False,
    temp: Annotated[
        float,
        typer.Option(
            "-t",
            "--temp",
            "--temperature",
            help="Temperature. The model's generation_config.json is not looked at here.",
            rich_help_panel=_SAMPLING,
        ),
    ] = COMPARE_TEMPERATURE,
    top_k: Annotated[
        int,
        typer.Option(
            help="Keep the K most likely tokens and those tied with the K-th; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the smallest set of tokens whose mass reaches P; 1 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Keep tokens with at least this share of the top token's probability; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0,
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Tokens proposed in a round, where an arm does not say. Default 3.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON document on stdout, and the tables on stderr.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    csv: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write one row for each arm.", rich_help_panel=_OUTPUT),
    ] = None,
    svg: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a picture: acceptance against closed forms, speeds with intervals, "
            "acceptance by position.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a self-contained page with the picture and the tables.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Versions, and a traceback with an error.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
) -> int:
    """Compare acceptance rules and settings on a pair of models.

    Runs every arm on every prompt and seed, arms taking turns, and reports acceptance against
    theory, speeds, and their ratios with 95 % bootstrap intervals over prompts.
    """
    from mlxgen.cli.compare import CompareOptions, run_compare

    return run_compare(
        CompareOptions(
            model=model,
            revision=revision,
            draft_model=draft_model,
            trust_remote_code=trust_remote_code,
            arms=arms,
            arm=arm or [],
            prompts=prompts,
            num_prompts=num_prompts,
            seeds=seeds,
            seed=seed,
            theory_seeds=theory_seeds,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            no_chat_template=no_chat_template,
            temp=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            num_draft_tokens=num_draft_tokens,
            json=json,
            csv=csv,
            svg=svg,
            html=html,
            resume=resume,
            verbose=verbose,
        )
    )
