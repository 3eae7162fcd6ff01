"""`mlxgen compare`: an experiment over arms, prompts and seeds, and what it shows."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxgen import __version__
from mlxgen.cli import interrupts
from mlxgen.cli.logs import configure_logging
from mlxgen.cli.options import (
    COMPARE_TEMPERATURE,
    COMPARE_TOKENS,
    parse_draft_tokens,
    parse_seed,
)
from mlxgen.cli.outcome import PROGRAM
from mlxgen.cli.pair import PairChoice, choose_pair, load_pair
from mlxgen.cli.prompt_length import check_prompt_length
from mlxgen.cli.streams import Mode, Streams
from mlxgen.config import MAX_SEED, GenerationConfig, SamplingConfig, SpeculationConfig
from mlxgen.errors import ExitCode, GenerationError, OptionError
from mlxgen.experiment.arms import Arm, parse_arms
from mlxgen.experiment.journal import Journal, open_journal
from mlxgen.experiment.plan import Experiment, RunKey
from mlxgen.experiment.prompts import Prompt, bundled_prompts, read_prompts
from mlxgen.experiment.records import RunRecord
from mlxgen.experiment.setting import this_machine
from mlxgen.models import default_pair
from mlxgen.models.identity import fingerprint
from mlxgen.models.source import expand_home

if TYPE_CHECKING:
    from mlxgen.models.loading import LoadedModel
    from mlxgen.report.experiment import Report
    from mlxgen.report.experiment_tables import TextTable

_WIDE_COLUMNS = 110
"""From this width of a terminal on, headings stand on one line."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options as they were typed."""

    model: str | None
    revision: str | None
    draft_model: str | None
    trust_remote_code: bool
    arms: str | None
    arm: list[str]
    prompts: str | None
    num_prompts: int | None
    seeds: int
    seed: str
    theory_seeds: int
    max_tokens: int
    ignore_eos: bool
    no_chat_template: bool
    temp: float
    top_k: int
    top_p: float
    min_p: float
    num_draft_tokens: str | None
    json: bool
    csv: str | None
    svg: str | None
    html: str | None
    resume: str | None
    verbose: bool

    def command(self) -> str:
        """What a person types to get the same experiment; where results go is left out."""
        given: list[tuple[str, object, object]] = [
            ("-m", self.model, None),
            ("--revision", self.revision, None),
            ("--draft-model", self.draft_model, None),
            ("--trust-remote-code", self.trust_remote_code, False),
            ("--arms", self.arms, None),
            *(("--arm", spec, None) for spec in self.arm),
            ("--prompts", self.prompts, None),
            ("--num-prompts", self.num_prompts, None),
            ("--seeds", self.seeds, 1),
            ("--seed", self.seed, "0"),
            ("--theory-seeds", self.theory_seeds, 1),
            ("-n", self.max_tokens, COMPARE_TOKENS),
            ("--ignore-eos", self.ignore_eos, False),
            ("--no-chat-template", self.no_chat_template, False),
            ("-t", f"{self.temp:g}", f"{COMPARE_TEMPERATURE:g}"),
            ("--top-k", self.top_k, 0),
            ("--top-p", f"{self.top_p:g}", "1"),
            ("--min-p", f"{self.min_p:g}", "0"),
            ("--num-draft-tokens", self.num_draft_tokens, None),
        ]
        words = [PROGRAM, "compare"]
        for flag, value, default in given:
            if value is True:
                words.append(flag)
            elif value != default:
                words += [flag, str(value)]
        return shlex.join(words)


def run_compare(options: CompareOptions) -> ExitCode:
    """Run or go on with a comparison and report it. Raises `MlxgenError`.

    Everything that can be refused without loading a model is refused first.
    """
    streams = Streams(Mode.JSON if options.json else Mode.DEFAULT)
    configure_logging(os.environ)
    for option, file in (("--csv", options.csv), ("--svg", options.svg), ("--html", options.html)):
        _check_writable(option, file)
    arms = parse_arms(
        options.arms, options.arm, _base_config(options), has_draft=_has_draft(options)
    )
    prompts = _prompts(options)
    choice = choose_pair(options.model, options.revision, options.draft_model)
    if not any(arm.needs_draft for arm in arms):
        choice = replace(choice, draft=None, kind=None)
    experiment = _experiment(options, arms, prompts, choice)
    with ExitStack() as stack:
        journal = None
        if options.resume is not None:
            journal = stack.enter_context(open_journal(options.resume, experiment))
        return _run(experiment, choice, options, streams, journal)


def _base_config(options: CompareOptions) -> GenerationConfig:
    if options.seeds < 1:
        raise OptionError(f"--seeds must be at least 1, not {options.seeds}")
    if not 0 <= options.theory_seeds <= options.seeds:
        raise OptionError(
            f"--theory-seeds must be between 0 and the number of seeds, {options.seeds}, not "
            f"{options.theory_seeds}"
        )
    if options.max_tokens < 2:
        raise OptionError("--max-tokens must be at least 2: the first token needs no draft")
    first_seed = parse_seed(options.seed)
    adapts = options.num_draft_tokens == "auto"
    return GenerationConfig(
        sampling=SamplingConfig(
            temperature=options.temp,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        ),
        speculation=SpeculationConfig(
            num_draft_tokens=parse_draft_tokens(None if adapts else options.num_draft_tokens),
            adapts_depth=adapts,
        ),
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=first_seed,
    )


def _has_draft(options: CompareOptions) -> bool:
    """Whether there is a draft model: one that is named, or that of the default pair."""
    return options.draft_model is not None or options.model is None


def _prompts(options: CompareOptions) -> tuple[Prompt, ...]:
    prompts = bundled_prompts() if options.prompts is None else read_prompts(options.prompts)
    count = options.num_prompts
    if count is None:
        return prompts
    if not 1 <= count <= len(prompts):
        raise OptionError(
            f"--num-prompts must be between 1 and {len(prompts)}, as many as there are, not {count}"
        )
    return prompts[:count]


def _experiment(
    options: CompareOptions, arms: tuple[Arm, ...], prompts: tuple[Prompt, ...], choice: PairChoice
) -> Experiment:
    names = {"target": options.model or default_pair.TARGET_NAME}
    fingerprints = {"target": fingerprint(choice.target)}
    if choice.draft is not None:
        names["draft"] = options.draft_model or default_pair.DRAFT_NAME
        fingerprints["draft"] = fingerprint(choice.draft)
    first_seed = parse_seed(options.seed)
    if first_seed + options.seeds * len(prompts) - 1 > MAX_SEED:
        raise OptionError(f"--seed {first_seed} leaves no room for a seed a run up to {MAX_SEED}")
    return Experiment(
        arms=arms,
        prompts=prompts,
        first_seed=first_seed,
        seeds=options.seeds,
        theory_seeds=options.theory_seeds,
        use_template=not options.no_chat_template,
        machine=this_machine(__version__),
        model_names=names,
        model_fingerprints=fingerprints,
        command=options.command(),
    )


def _check_writable(option: str, file: str | None) -> None:
    if file is None:
        return
    path = expand_home(file)
    if path.is_dir():
        raise OptionError(f"{option} {file}: is a directory")
    if not path.parent.is_dir():
        raise OptionError(f"{option} {file}: no such directory: {path.parent}")


def _run(
    experiment: Experiment,
    choice: PairChoice,
    options: CompareOptions,
    streams: Streams,
    journal: Journal | None,
) -> ExitCode:
    records = [] if journal is None else list(journal.records)
    done = {record.key for record in records}
    schedule = experiment.schedule()
    pending = [key for key in schedule if key not in done]
    if done:
        streams.note(f"{options.resume} holds {len(done)} of {len(schedule)} runs")
    if not pending:
        _report(experiment, records, options, streams)
        return ExitCode.DONE
    try:
        target, draft = load_pair(
            choice, streams, trust_remote_code=options.trust_remote_code, verbose=options.verbose
        )
        _make_runs(experiment, target, draft, pending, streams, records, journal)
    except KeyboardInterrupt:
        _tell_how_to_go_on(options, len(records), len(schedule), streams)
        _report(experiment, records, options, streams)
        return ExitCode.INTERRUPTED
    _report(experiment, records, options, streams)
    return ExitCode.DONE


def _make_runs(
    experiment: Experiment,
    target: LoadedModel,
    draft: LoadedModel | None,
    pending: list[RunKey],
    streams: Streams,
    records: list[RunRecord],
    journal: Journal | None,
) -> None:
    from mlxgen.experiment.running import encode_prompts, make_runs

    prompt_ids = encode_prompts(target, experiment.prompts, use_template=experiment.use_template)
    for prompt, ids in zip(experiment.prompts, prompt_ids, strict=True):
        check_prompt_length(len(ids), target.checkpoint, f"prompt {prompt.id!r}")
    longest = max(map(len, prompt_ids)) + experiment.arms[0].config.max_tokens
    for role, model in (("target", target), ("draft", draft)):
        window = None if model is None else model.checkpoint.declared_context_tokens
        if window is not None and window < longest:
            streams.warn(f"the longest run has {longest} tokens, the {role}'s window {window}")
    streams.note(f"{len(pending)} runs to make")
    with _progress(len(pending)) as advance:

        def keep(record: RunRecord) -> None:
            if journal is not None:
                journal.append(record)
            records.append(record)
            advance()
            interrupts.raise_lost()

        make_runs(experiment, target, draft, prompt_ids, pending, keep)


@contextmanager
def _progress(runs: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left, on a terminal; drawn between runs, never during one."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        auto_refresh=False,
        transient=True,
        speed_estimate_period=600,
    )
    with bar:
        task = bar.add_task("", total=runs)
        bar.refresh()

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def _tell_how_to_go_on(options: CompareOptions, runs: int, planned: int, streams: Streams) -> None:
    if options.resume is None:
        streams.warn(
            f"interrupted after {runs} of {planned} runs; --resume FILE would have kept them"
        )
    else:
        streams.warn(
            f"interrupted after {runs} of {planned} runs, which {options.resume} holds; the same "
            f"command goes on from there"
        )


def _report(
    experiment: Experiment, records: list[RunRecord], options: CompareOptions, streams: Streams
) -> None:
    from mlxgen.experiment.running import device_name
    from mlxgen.experiment.summary import summarise
    from mlxgen.report import experiment_tables as tables
    from mlxgen.report.experiment import report_of
    from mlxgen.report.experiment_page import page
    from mlxgen.report.experiment_picture import picture

    report = report_of(experiment, summarise(experiment, records), device_name())
    if report.comparison.prompts > 0:
        _print(report, streams, as_tables=not options.json and sys.stdout.isatty())
    for doubt in tables.warnings_of(report):
        streams.warn(doubt)
    outputs: tuple[tuple[str | None, Callable[[Report], str]], ...] = (
        (options.csv, tables.csv_text),
        (options.svg, picture),
        (options.html, page),
    )
    # First what cannot be had again without hours of runs.
    streams.document(report.document())
    unwritten = []
    for file, write in outputs:
        if file is not None and report.comparison.complete:
            try:
                expand_home(file).write_text(write(report), encoding="utf-8")
            except OSError as error:
                unwritten.append(f"{file}: {error.strerror or error}")
            else:
                streams.note(f"wrote {file}")
    if unwritten:
        raise GenerationError(f"cannot write {', '.join(unwritten)}")


def _print(report: Report, streams: Streams, *, as_tables: bool) -> None:
    """What bounds the speeds first, then both tables, then what can be told apart."""
    from mlxgen.report import experiment_tables as tables

    streams.statistics(tables.bound_lines(report))
    for table in (tables.acceptance_table(report), tables.speed_table(report)):
        if table.rows:
            streams.statistics([""])
            if as_tables:
                _print_table(table)
            else:
                streams.statistics(table.lines())
    streams.statistics(["", *tables.verdict_lines(report)])


def _print_table(table: TextTable) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout)
    is_wide = console.width >= _WIDE_COLUMNS
    shown = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1) if is_wide else 0,
        pad_edge=False,
        title=table.title,
        title_justify="left",
        title_style="bold",
    )
    for column in table.columns:
        # Numbers keep their width; what does not fit is taken from the names.
        shown.add_column(
            Text(column.title if is_wide else column.title.replace(" ", "\n")),
            justify="right" if column.is_number else "left",
            overflow="fold",
            no_wrap=column.is_number,
            min_width=None if column.is_number else 10,
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    for note in table.notes:
        console.print(Text(note))
