"""Every option of every command does what it says, with a draft and without, or is refused.

A row tells an option, the command line that it is added to, and what it changes. The options are
read from the program, so one without a row fails. Each effect is also shown two equal runs, as an
option wired to nothing would give, and has to object.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
import typer
from huggingface_hub import constants
from mlx_lm.models import llama

from mlxgen.cli.app import app
from mlxgen.cli.generate import run_generate
from mlxgen.cli.options import GenerateOptions
from tests.cli.test_sampling_options import LOOPING, PROMPT, VOCABULARY
from tests.cli.test_sampling_options import OPTIONS as SAMPLING_OPTIONS
from tests.fixtures.command import DIAGNOSTIC, Outcome, mlxgen_here
from tests.fixtures.model_directories import LlamaShape, write_llama

TEMPLATE = (
    "{{ messages[0].content }}{% if messages[1] %}{{ messages[1].content }}{% endif %}{{ x }}."
)
RECOMMENDED = {"temperature": 0.9, "top_p": 0.8, "top_k": 5}
NOT_MEASURED = ("timing", "settings")
DIAGNOSTICS_ON = {"MLXCEL_SPECULATIVE_ACCEPT_DIAG": "1"}


@dataclass(frozen=True)
class Run:
    """A finished command. forwards: how many tokens each call of a model took, while loading too.

    files: the names and sizes of what lies in the directory for output.
    """

    outcome: Outcome
    forwards: tuple[int, ...]
    files: tuple[tuple[str, int], ...]

    def fact(self, *path: str) -> Any:
        """A value of the document, None where it is missing.

        Without times, and without what an arm was only told.
        """
        found: Any = Outcome(0, self.outcome.out, self.outcome.err).document
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return _measured(found)


def _measured(value: Any) -> Any:
    if isinstance(value, list):
        return [_measured(item) for item in value]
    if isinstance(value, dict):
        return {key: _measured(item) for key, item in value.items() if key not in NOT_MEASURED}
    return value


# An effect compares the run without an option and the run with it, and raises when they are not
# as the option has it.
Effect = Callable[[Run, Run], None]


def changes(*path: str, to: Any = None) -> Effect:
    """A value of the document changes, to a given one if there is one."""

    def check(before: Run, after: Run) -> None:
        assert before.fact(*path) != after.fact(*path)
        assert to is None or after.fact(*path) == to

    return check


def keeps(*path: str) -> Effect:
    """A value of the document stays."""

    def check(before: Run, after: Run) -> None:
        assert before.fact(*path) == after.fact(*path) is not None

    return check


def both(*effects: Effect) -> Effect:
    """All of several effects."""

    def check(before: Run, after: Run) -> None:
        for effect in effects:
            effect(before, after)

    return check


def adds(text: str) -> Effect:
    """A text that was on neither stream is on one."""

    def check(before: Run, after: Run) -> None:
        for run, is_there in ((before, False), (after, True)):
            assert run.outcome.code in (0, 1), run.outcome.stderr
            assert (text in run.outcome.stdout + run.outcome.stderr) == is_there, text

    return check


def removes(text: str) -> Effect:
    """A text that was on one of the streams is on neither."""
    return lambda before, after: adds(text)(after, before)


def refused(message: str, *, after_loading: bool = False) -> Effect:
    """One line with this message and exit code 2, before anything is loaded.

    after_loading: only the loaded tokenizer tells.
    """

    def check(before: Run, after: Run) -> None:
        assert before.outcome.code == 0, before.outcome.stderr
        assert after.outcome.code == 2 and message in after.outcome.error
        assert after_loading == ("Loading" in after.outcome.stderr)

    return check


def names_the_revision(before: Run, after: Run) -> None:
    """Off line a hub id is refused either way."""
    assert "some-owner/some-name: no such" in before.outcome.error
    assert "some-owner/some-name at revision main: no such" in after.outcome.error


def begins_to_run(before: Run, after: Run) -> None:
    """It was refused for want of this option."""
    assert before.outcome.code == 2 and after.outcome.code == 0


def writes(name: str) -> Effect:
    """A file appears."""

    def check(before: Run, after: Run) -> None:
        assert name not in dict(before.files) and dict(after.files).get(name, 0) > 0

    return check


def takes_smaller_steps(before: Run, after: Run) -> None:
    """The prompt goes through the models in pieces of at most 5; the text stays."""
    keeps("token_ids")(before, after)
    assert max(before.forwards) > 5 >= max(after.forwards)


def is_one_document(before: Run, after: Run) -> None:
    """Text becomes JSON."""
    assert before.outcome.out[:1] != b"{"
    assert isinstance(after.outcome.document, dict)


def changes_nothing(before: Run, after: Run) -> None:
    """Asks for what is so anyway."""
    assert before.fact("token_ids") == after.fact("token_ids")
    assert before.fact("lines")[1:] == after.fact("lines")[1:]


IDS = changes("token_ids")
SAME_IDS = keeps("token_ids")


@dataclass(frozen=True, kw_only=True)
class Row:
    """An option with its argument, the words it is added to, and its effects.

    plain, drafted: without and with a draft model; alone: of `verify` and `compare`, which always
    have one. how: further arguments of `mlxgen_here`.
    """

    option: str
    more: tuple[str, ...]
    base: tuple[str, ...] = ("-p", PROMPT)
    mode: tuple[str, ...] = ("--json",)
    plain: Effect | None = None
    drafted: Effect | None = None
    alone: Effect | None = None
    how: tuple[tuple[str, Any], ...] = ()

    @property
    def effects(self) -> dict[str, Effect]:
        """What is checked, by column."""
        columns = {"plain": self.plain, "drafted": self.drafted, "alone": self.alone}
        return {name: effect for name, effect in columns.items() if effect is not None}


def row(option: str, *arguments: str, **rest: Any) -> Row:
    """A row whose effect is the same in both columns unless it says otherwise."""
    effect = rest.pop("effect", None)
    more = () if "more" in rest else (option, *arguments)
    return Row(option=option, **{"more": more, "plain": effect, "drafted": effect, **rest})


def needs_a_draft(option: str, *arguments: str, drafted: Effect, **rest: Any) -> Row:
    """A row of an option that is refused without a draft."""
    return row(
        option, *arguments, plain=refused(f"{option} needs --draft-model"), drafted=drafted, **rest
    )


LOOKUP = ("-p", PROMPT, "--prompt-lookup", *LOOPING, "--temp", "1.1", "--seed", "5")
# The text goes on with c: right after "xbc", as at first, and wrong after "bc", as later.
NGRAMS = ("-p", "xbccd ybce xb", "--prompt-lookup", "--logit-bias", "2:60")
PIECES = ("-p", PROMPT, "--kv-bits", "2")
WARM = ("-p", PROMPT, "--temp", "1.1", "--seed", "5")
LIVE: dict[str, Any] = {"mode": ()}
HUB_ID = ("-p", "a", "-m", "some-owner/some-name")
NO_LOOP = refused("the dflash round loop does not exist yet")

GENERATE = [
    row("--model", "{draft}", effect=IDS),
    row("--revision", "main", effect=refused("--revision is for hub ids")),
    row("--revision", "main", base=HUB_ID, effect=names_the_revision),
    row("--adapter", "{adapter}", effect=IDS),
    row(
        "--trust-remote-code",
        base=("-p", PROMPT, "-m", "{custom}"),
        effect=begins_to_run,
    ),
    row("--prompt", "abcd", effect=changes("prompt_ids")),
    row("--file", "{file}", base=(), effect=changes("prompt_ids"), how=(("stdin", b"abc"),)),
    row("--system", "be", base=("-p", PROMPT, "-m", "{chatty}"), effect=changes("prompt_ids")),
    row("--system", "be", effect=refused("--system needs a chat template", after_loading=True)),
    row("--no-chat-template", base=("-p", "a", "-m", "{chatty}"), effect=changes("prompt_ids")),
    row(
        *("--chat-template-args", '{"x": "yes"}'),
        base=("-p", PROMPT, "-m", "{chatty}"),
        effect=changes("prompt_ids"),
    ),
    row("--max-tokens", "7", effect=changes("generated_tokens", to=7)),
    row("--stop", "{stop}", effect=changes("finish_reason", to="stop")),
    row(
        "--ignore-eos",
        base=("-p", PROMPT, "-m", "{ending}"),
        effect=changes("generated_tokens", to=20),
    ),
    row("--extra-eos-token", "{last}", effect=changes("finish_reason", to="stop")),
    *(
        row(option, more=more, base=("-p", PROMPT, "--seed", "5", *base), effect=IDS)
        for option, cases in SAMPLING_OPTIONS.items()
        for base, more in cases[:1]
    ),
    row(
        "--no-generation-config",
        base=("-p", PROMPT, "-m", "{recommending}", "--seed", "5"),
        effect=IDS,
    ),
    row(
        *("--draft-model", "{other}"),
        plain=both(SAME_IDS, changes("speculative", "active", to=True)),
        drafted=both(SAME_IDS, changes("speculative", "accepted")),
    ),
    needs_a_draft(
        "--num-draft-tokens", "6", drafted=both(SAME_IDS, changes("speculative", "proposed"))
    ),
    needs_a_draft(
        *("--num-draft-tokens", "auto"),
        drafted=both(SAME_IDS, changes("speculative", "num_draft_tokens", to="auto")),
    ),
    row(
        *("--num-draft-tokens", "0"),
        plain=changes_nothing,
        drafted=both(
            SAME_IDS, changes("speculative", "why_inactive", to="--num-draft-tokens is 0")
        ),
    ),
    row(
        "--prompt-lookup",
        effect=both(SAME_IDS, changes("speculative", "by_drafter")),
    ),
    *(
        row(option, value, base=base, effect=both(SAME_IDS, changes("speculative", "by_drafter")))
        for option, value, base in (
            ("--prompt-lookup-ngram-max", "2", NGRAMS),
            ("--prompt-lookup-ngram-min", "1", LOOKUP),
            ("--prompt-lookup-max-draft", "2", LOOKUP),
        )
    ),
    *(
        row(option, "2", effect=refused(f"{option} needs --prompt-lookup"))
        for option in (
            "--prompt-lookup-ngram-max",
            "--prompt-lookup-ngram-min",
            "--prompt-lookup-max-draft",
        )
    ),
    row("--draft-kind", "dflash", effect=NO_LOOP),
    needs_a_draft("--draft-block-size", "5", drafted=adds("(block_size = 5, explicit)")),
    needs_a_draft(
        *("--accept-rule", "gumbel-match"),
        base=WARM,
        drafted=both(SAME_IDS, changes("speculative", "rule", to="gumbel-match")),
    ),
    needs_a_draft(
        *("--accept-rule", "block"),
        base=WARM,
        drafted=both(IDS, changes("speculative", "rule", to="block")),
    ),
    needs_a_draft("--accept-diag", base=WARM, drafted=both(SAME_IDS, adds(DIAGNOSTIC))),
    row(
        "--no-accept-diag",
        base=WARM,
        plain=changes_nothing,
        drafted=both(SAME_IDS, removes(DIAGNOSTIC)),
        how=(("variables", DIAGNOSTICS_ON),),
    ),
    needs_a_draft(
        "--draft-temp", "0", base=WARM, drafted=both(SAME_IDS, changes("speculative", "accepted"))
    ),
    # Lookup is a draft without a model, so these mean something with it alone.
    row("--accept-rule", "block", base=LOOKUP, plain=changes("speculative", "rule", to="block")),
    row("--accept-diag", base=LOOKUP, plain=both(SAME_IDS, adds(DIAGNOSTIC))),
    row(
        "--show-draft",
        **LIVE,
        base=LOOKUP,
        plain=adds("\x1b[36m"),
        how=(("is_terminal", True),),
    ),
    row("--json", **LIVE, effect=is_one_document),
    row("--quiet", **LIVE, effect=removes('Loading model from "')),
    row("--profile", **LIVE, effect=both(adds("[Profile Results]"), removes("[Generated "))),
    needs_a_draft("--show-draft", **LIVE, drafted=adds("\x1b[36m"), how=(("is_terminal", True),)),
    row("--logprobs", "2", effect=both(SAME_IDS, changes("logprobs"))),
    row("--verbose", effect=both(SAME_IDS, adds("Filter order: "))),
    row("--kv-bits", "2", effect=IDS),
    row("--kv-group-size", "32", base=PIECES, effect=IDS),
    row("--quantized-kv-start", "1000", base=PIECES, effect=IDS),
    row("--max-kv-size", "16", plain=IDS, drafted=refused("--max-kv-size keeps a rotating cache")),
    row("--prefill-step-size", "5", effect=takes_smaller_steps),
    row("--prompt-cache", "{out}/cache", effect=both(SAME_IDS, writes("cache"))),
]
VERIFY = [
    row("--model", "{other}", alone=changes("checks")),
    row("--draft-model", "{other}", alone=changes("checks")),
    row("--revision", "main", alone=refused("--revision is for hub ids")),
    row("--revision", "main", base=HUB_ID, alone=names_the_revision),
    row("--trust-remote-code", base=("-p", "abc", "-m", "{custom}"), alone=begins_to_run),
    row("--prompt", "abcd", alone=changes("checks")),
    row("--max-tokens", "9", alone=changes("checks")),
    row("--temp", "1.4", alone=changes("checks")),
    row("--num-draft-tokens", "2", alone=changes("checks")),
    row("--seed", "3", alone=changes("checks")),
    row("--json", **LIVE, alone=is_one_document),
    row("--verbose", alone=adds("mlx-lm ")),
]
MEASURED = changes("arms")
COMPARE = [
    row("--model", "{other}", alone=MEASURED),
    row("--revision", "main", alone=refused("--revision is for hub ids")),
    row("--revision", "main", base=HUB_ID[2:], alone=names_the_revision),
    row("--draft-model", "{other}", alone=MEASURED),
    row("--trust-remote-code", base=("-m", "{custom}"), alone=begins_to_run),
    row("--arms", "plain,block", alone=MEASURED),
    row("--arm", "block,k=2", alone=MEASURED),
    row("--prompts", "{more_prompts}", alone=both(MEASURED, changes("settings", "prompts", to=3))),
    row("--num-prompts", "1", alone=both(MEASURED, changes("settings", "prompts", to=1))),
    row("--seeds", "2", alone=both(MEASURED, changes("runs", to=10))),
    row("--seed", "3", alone=MEASURED),
    row("--theory-seeds", "0", alone=both(MEASURED, changes("runs", to=4))),
    row("--resume", "{out}/journal", alone=both(keeps("arms"), writes("journal"))),
    row("--max-tokens", "6", alone=MEASURED),
    row("--ignore-eos", base=("-m", "{ending}", "-n", "12", "-t", "0"), alone=MEASURED),
    row("--no-chat-template", base=("-m", "{chatty}"), alone=MEASURED),
    row("--temp", "1.5", alone=MEASURED),
    row("--top-k", "2", alone=MEASURED),
    row("--top-p", "0.2", alone=MEASURED),
    row("--min-p", "0.5", alone=MEASURED),
    row("--num-draft-tokens", "1", alone=MEASURED),
    row("--json", **LIVE, alone=is_one_document),
    *(
        row(option, "{out}/file", alone=both(keeps("arms"), writes("file")))
        for option in ("--csv", "--svg", "--html")
    ),
    row("--verbose", alone=adds("mlx-lm ")),
]
ROWS = {"generate": GENERATE, "verify": VERIFY, "compare": COMPARE}
FIRST_WORDS = {
    "generate": ("-m", "{target}", "-n", "20"),
    "verify": ("-m", "{target}", "--draft-model", "{draft}", "-n", "6"),
    "compare": (
        *("-m", "{target}", "--draft-model", "{draft}", "-n", "4", "-t", "1"),
        *("--arms", "plain,sampler-match", "--prompts", "{prompts}"),
    ),
}
CASES = [
    pytest.param(command, row, column, id=" ".join([command, *row.more, column, str(number)]))
    for command, rows in ROWS.items()
    for number, row in enumerate(rows)
    for column in row.effects
]


# The options that there are


def parameters(command: str) -> list[Any]:
    """The options of a command, from the program; `--help` is no option of ours."""
    group: Any = typer.main.get_command(app)
    return [found for found in group.commands[command].params if found.name != "help"]


def options(command: str) -> set[str]:
    """Their first long names, and those that turn one off."""
    return {
        next(name for name in names if name.startswith("--"))
        for found in parameters(command)
        for names in (found.opts, found.secondary_opts)
        if names
    }


@pytest.mark.parametrize("command", ROWS)
def test_every_option_has_a_row_and_every_row_an_option(command: str) -> None:
    assert {row.option for row in ROWS[command]} == options(command)
    assert all(row.effects for row in ROWS[command])


def test_names_of_an_option_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-t`, `--temp` and `--temperature`, `-m` and `--model`, ..."""
    given: list[Any] = []
    # Some are refused alone, whatever they are called.
    monkeypatch.setattr("mlxgen.cli.app.check_dependent_options", lambda given: None)
    for command in ROWS:
        monkeypatch.setattr(f"mlxgen.cli.{command}.run_{command}", given.append)
        for found in parameters(command):
            value = [] if found.is_flag else ["7"]
            for words in ([], *([name, *value] for name in found.opts)):
                assert mlxgen_here(command, *words).code == 0, words
            default, *named = given
            assert all(options == named[0] != default for options in named), found.opts
            given.clear()


# Running the rows


class Bench:
    """Models and files that rows speak of, and every command run once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._runs: dict[tuple[object, ...], Run] = {}
        self._numbers = itertools.count()
        self._places = {name: str(path) for name, path in self._models().items()}
        self._places |= self._files()
        plain = self.run("generate", ("-m", "{target}", "-p", PROMPT, "-n", "20", "--json"))
        ids, text = plain.fact("token_ids"), plain.fact("text")
        late = next(
            i for i, token in enumerate(ids) if i > 5 and token >= 10 and token not in ids[:i]
        )
        self._places |= {"stop": text[7:9], "last": str(ids[late])}
        self._places["ending"] = str(self._llama("ending", eos_token_id=[ids[late], *range(9, 40)]))

    def run(self, command: str, words: Sequence[str], **how: Any) -> Run:
        """A command, with places filled in. The same command is run once."""
        out = self._root / f"out-{next(self._numbers)}"
        key = (command, *words, *map(repr, how.items()))
        if key in self._runs:
            return self._runs[key]
        out.mkdir()
        forwards: list[int] = []
        forward: Any = llama.Model.__call__

        def counted(model: Any, ids: mx.array, *rest: Any, **options: Any) -> mx.array:
            forwards.append(ids.shape[1])
            result: mx.array = forward(model, ids, *rest, **options)
            return result

        with (
            mock.patch.object(llama.Model, "__call__", counted),
            mock.patch.object(constants, "HF_HUB_OFFLINE", True),
            mock.patch.object(constants, "HF_HUB_CACHE", str(self._root / "hub")),
        ):
            outcome = mlxgen_here(command, *self._filled(words, out), **how)
        files = tuple((path.name, path.stat().st_size) for path in sorted(out.iterdir()))
        self._runs[key] = Run(outcome, tuple(forwards), files)
        return self._runs[key]

    def _filled(self, words: Sequence[str], out: Path) -> list[str]:
        filled = []
        for word in words:
            for name, value in {**self._places, "out": str(out)}.items():
                word = word.replace(f"{{{name}}}", value)
            filled.append(word)
        return filled

    def _llama(self, name: str, **changes: Any) -> Path:
        sizes = LlamaShape(heads=1, head_dim=64)
        options = {"head_scale": 2.0, "vocabulary": VOCABULARY, "shape": sizes, **changes}
        return write_llama(self._root / name, 4, **options)

    def _models(self) -> dict[str, Path]:
        models = {
            "target": self._llama("target"),
            "draft": self._llama("draft", disturbance=0.15),
            "other": self._llama("other", disturbance=0.3, disturbance_seed=1),
            "recommending": self._llama("recommending"),
            "chatty": self._llama("chatty", vocabulary=replace(VOCABULARY, chat_template=TEMPLATE)),
            "custom": self._llama("custom", config={"model_file": "custom.py"}),
            "adapter": self._root / "adapter",
        }
        (models["recommending"] / "generation_config.json").write_text(json.dumps(RECOMMENDED))
        (models["custom"] / "custom.py").write_text(
            "from mlx_lm.models.llama import Model, ModelArgs\n"
        )
        write_adapter(models["adapter"], inner=64)
        return models

    def _files(self) -> dict[str, str]:
        contents = {"file": "abcd", "prompts": "abc\nthe", "more_prompts": "abc\nthe\nxyz"}
        for name, text in contents.items():
            (self._root / f"{name}.txt").write_text(text, encoding="utf-8")
        return {name: str(self._root / f"{name}.txt") for name in contents}


def write_adapter(directory: Path, *, inner: int) -> None:
    """A LoRA adapter of both layers."""
    directory.mkdir()
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    content = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    weights = {
        f"model.layers.{layer}.self_attn.v_proj.lora_{side}": mx.random.normal(
            size, key=mx.random.key(2 * layer + (side == "b"))
        )
        for layer in range(2)
        for side, size in (("a", (64, 4)), ("b", (4, inner)))
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def runs(bench: Bench, command: str, row: Row, column: str) -> tuple[Run, Run]:
    """The run that a row starts from, and the one with its option."""
    words = [*FIRST_WORDS[command], *(row.base if command != "compare" else _own(row)), *row.mode]
    if column == "drafted":
        words += ["--draft-model", "{draft}"]
    how = dict(row.how)
    return bench.run(command, words, **how), bench.run(command, [*words, *row.more], **how)


def _own(row: Row) -> tuple[str, ...]:
    """The base of a row of `compare`, which has no prompt of its own."""
    return () if row.base == ("-p", PROMPT) else row.base


@pytest.mark.parametrize(("command", "row", "column"), CASES)
def test_option_does_what_its_row_says(bench: Bench, command: str, row: Row, column: str) -> None:
    before, after = runs(bench, command, row, column)
    effect = row.effects[column]
    effect(before, after)
    if effect is not changes_nothing:
        with pytest.raises(AssertionError):
            effect(before, before)
    if effect is IDS and column == "drafted":
        plain = runs(bench, command, row, "plain")[1]
        assert after.fact("token_ids") == plain.fact("token_ids")


WIRES: dict[str, tuple[str, Any]] = {
    "--top-k": ("top_k", None),
    "--logit-bias": ("logit_bias", []),
    "--stop": ("stop", []),
    "--accept-rule": ("accept_rule", None),
    "--draft-temp": ("draft_temp", None),
    "--kv-bits": ("kv_bits", None),
    "--prefill-step-size": ("prefill_step_size", 2048),
    "--prompt-cache": ("prompt_cache", None),
    "--logprobs": ("logprobs", 0),
    "--max-kv-size": ("max_kv_size", None),
}


@pytest.mark.parametrize("option", WIRES)
def test_option_that_reaches_nothing_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Between the parser and the run its value is lost."""
    name, default = WIRES[option]

    def deaf(options: GenerateOptions) -> Any:
        changes: dict[str, Any] = {name: default}
        return run_generate(replace(options, **changes))

    for row in (found for found in GENERATE if found.option == option):
        for column, effect in row.effects.items():
            before, _ = runs(bench, "generate", row, column)
            words = [*FIRST_WORDS["generate"], *row.base, *row.mode, *row.more]
            words += ["--draft-model", "{draft}"] if column == "drafted" else []
            monkeypatch.setattr("mlxgen.cli.generate.run_generate", deaf)
            # A variable that nobody reads tells this run from the right one.
            after = bench.run("generate", words, **dict(row.how), variables={"LOST": option})
            monkeypatch.undo()
            with pytest.raises(AssertionError):
                effect(before, after)
