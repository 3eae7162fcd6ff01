"""Mistakes: one line on stderr, the right exit code, and no MLX where no model is needed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.fixtures.command import Outcome, mlxgen_here, mlxgen_process
from tests.fixtures.light_commands import Request, run_all
from tests.fixtures.model_directories import (
    Vocabulary,
    iid_table,
    write_llama,
    write_table_model,
)
from tests.fixtures.runs import ModelStore

M = ("-m", "{model}")
P = ("-p", "a")
WITH_DRAFT = (*M, *P, "--draft-model", "{draft}")

# Found before any model is loaded: options -> what the message says.
LIGHT: dict[tuple[str, ...], str] = {
    # Ranges.
    (*M, *P, "--temp", "-1"): "--temp must be a finite number of at least 0, not -1",
    (*M, *P, "--temp", "nan"): "--temp must be a finite number",
    (*M, *P, "--temp", "inf"): "--temp must be a finite number",
    (*M, *P, "--temp", "hot"): "--temp",
    (*M, *P, "--top-p", "1.5"): "--top-p must be between 0 and 1, not 1.5",
    (*M, *P, "--top-p", "-0.1"): "--top-p must be between 0 and 1",
    (*M, *P, "--top-p", "nan"): "--top-p must be between 0 and 1, not nan",
    (*M, *P, "--top-k", "-1"): "--top-k must be 0 (off) or more, not -1",
    (*M, *P, "--top-k", "2.5"): "--top-k",
    (*M, *P, "--min-p", "1.1"): "--min-p must be between 0 and 1",
    (*M, *P, "--min-p", "nan"): "--min-p must be between 0 and 1",
    (*M, *P, "--typical-p", "0"): "--typical-p must be above 0",
    (*M, *P, "--top-n-sigma", "-1"): "--top-n-sigma must be between 0 (off) and",
    (*M, *P, "--top-n-sigma", "inf"): "--top-n-sigma must be",
    (*M, *P, "--xtc-probability", "2"): "--xtc-probability must be between 0 and 1",
    (*M, *P, "--top-n-sigma", "1e39"): "--top-n-sigma must be between 0 (off) and 1e+30",
    (*M, *P, "--frequency-penalty", "1e39"): "--frequency-penalty must be a finite number",
    (*M, *P, "--repetition-penalty", "1e39"): "--repetition-penalty must be above 0",
    (*M, *P, "--repetition-penalty", "1e-39"): "--repetition-penalty must be above 0",
    (*M, *P, "--logit-bias", "2:1e39"): "ID:VALUE with a finite VALUE or -inf",
    (*M, *P, "--logit-bias", "2:-1e39"): "ID:VALUE with a finite VALUE or -inf",
    (*M, *P, "--xtc-threshold", "0.2"): "--xtc-threshold means nothing without --xtc-probability",
    (*M, *P, "--dry-base", "2"): "--dry-base means nothing without --dry-multiplier",
    (*M, *P, "--dry-sequence-breaker", "x"): "means nothing without --dry-multiplier",
    (*M, *P, "--kv-group-size", "32"): "--kv-group-size means nothing without --kv-bits",
    (*M, *P, "--quantized-kv-start", "9"): "--quantized-kv-start means nothing without --kv-bits",
    (*M, *P, "--xtc-probability", "1", "--xtc-threshold", "0"): "--xtc-threshold must be above 0",
    (*M, *P, "--repetition-penalty", "0"): "--repetition-penalty must be above 0",
    (*M, *P, "--repetition-penalty", "nan"): "--repetition-penalty must be",
    (*M, *P, "--repeat-last-n", "-2"): "--repeat-last-n must be -1 (all) or more",
    (*M, *P, "--frequency-penalty", "inf"): "--frequency-penalty must be a finite number",
    (*M, *P, "--presence-penalty", "nan"): "--presence-penalty must be a finite number",
    (*M, *P, "--dry-multiplier", "-1"): "--dry-multiplier must be between 0 (off) and",
    (*M, *P, "--dry-multiplier", "1", "--dry-base", "0.5"): "--dry-base must be at least 1",
    (
        *M,
        *P,
        "--dry-multiplier",
        "1",
        "--dry-allowed-length",
        "0",
    ): "--dry-allowed-length must be at least 1",
    (
        *M,
        *P,
        "--dry-multiplier",
        "1",
        "--dry-penalty-last-n",
        "-2",
    ): "--dry-penalty-last-n must be -1 (all) or more",
    (*M, *P, "--seed", "-1"): "--seed must be between 0 and 18446744073709551615, not -1",
    (*M, *P, "--seed", "18446744073709551616"): "--seed must be between 0 and",
    (*M, *P, "--seed", "abc"): "--seed must be a whole number, not 'abc'",
    (*M, *P, "--seed", "1.5"): "--seed must be a whole number",
    (*M, *P, "--logprobs", "-1"): "--logprobs must be between 0 and 100",
    (*M, *P, "--logprobs", "101"): "--logprobs must be between 0 and 100",
    (*M, *P, "-n", "many"): "--max-tokens",
    (*M, *P, "--stop", ""): "--stop needs a text",
    # Biases.
    (*M, *P, "--logit-bias", "6:1"): "--logit-bias 6:1: the vocabulary has ids 0 to 5",
    (*M, *P, "--logit-bias", "1000000:5"): "--logit-bias 1000000:5: the vocabulary",
    (*M, *P, "--logit-bias=-1:5"): "--logit-bias must be ID:VALUE with an ID from 0",
    (*M, *P, "--logit-bias", "3:nan"): "--logit-bias must be ID:VALUE with a finite VALUE or -inf",
    (*M, *P, "--logit-bias", "3:inf"): "--logit-bias must be ID:VALUE with a finite VALUE or -inf",
    (*M, *P, "--logit-bias", "abc:1"): "--logit-bias must be ID:VALUE, such as 42:-1.5",
    (*M, *P, "--logit-bias", "3"): "--logit-bias must be ID:VALUE, such as",
    (*M, *P, "--logit-bias", "3:"): "--logit-bias must be ID:VALUE, such as",
    (*M, *P, "--logit-bias", "3:1", "--logit-bias", "3:2"): "--logit-bias names token 3 twice",
    # Speculation.
    (*WITH_DRAFT, "--num-draft-tokens", "-1"): "--num-draft-tokens must be between 0 and",
    (*WITH_DRAFT, "--num-draft-tokens", "10000"): "--num-draft-tokens must be between 0 and",
    (*WITH_DRAFT, "--num-draft-tokens", "abc"): "--num-draft-tokens must be",
    (*WITH_DRAFT, "--num-draft-tokens", "1.5"): "--num-draft-tokens must be",
    (*WITH_DRAFT, "--accept-rule", "typical"): "--accept-rule 'typical' is not known",
    (*WITH_DRAFT, "--accept-rule", ""): "--accept-rule '' is not known",
    (*WITH_DRAFT, "--draft-block-size", "0"): "--draft-block-size",
    (*WITH_DRAFT, "--temp", "1", "--samplers", "top_k", "--draft-temp", "0.3"): (
        "--draft-temp is set but --samplers leaves out temperature"
    ),
    (*WITH_DRAFT, "--draft-kind", "dflash"): "the dflash round loop does not exist yet",
    (*WITH_DRAFT, "--draft-kind", "mtp"): "the mtp round loop does not exist yet",
    (*WITH_DRAFT, "--draft-kind", "internal-mtp"): "internal-mtp is not user-selectable",
    (*WITH_DRAFT, "--draft-kind", "bogus"): "accepted values: dflash, mtp",
    (*WITH_DRAFT, "--max-kv-size", "64"): "--max-kv-size keeps a rotating cache",
    (*M, *P, "--num-draft-tokens", "4"): "--num-draft-tokens needs --draft-model",
    (*M, *P, "--accept-rule", "stochastic"): "--accept-rule needs --draft-model",
    (*M, *P, "--accept-diag"): "--accept-diag needs --draft-model",
    (*M, *P, "--draft-block-size", "4"): "--draft-block-size needs --draft-model",
    (*M, *P, "--show-draft"): "--show-draft needs --draft-model",
    (*M, *P, "--draft-model", "{dflash}"): "--draft-model {dflash} is a DFlash drafter, not a",
    (*M, *P, "--draft-model", "{mtp}"): "--draft-model {mtp} is an MTP drafter, not a",
    ("-m", "{dflash}", *P): "-m {dflash} is a DFlash drafter, not a standalone model",
    ("-m", "{mtp}", *P): "-m {mtp} is an MTP drafter, not a standalone model",
    # Memory.
    (*M, *P, "--kv-bits", "5"): "--kv-bits must be 2, 3, 4, 6 or 8, not 5",
    (*M, *P, "--kv-bits", "0"): "--kv-bits must be 2, 3, 4, 6 or 8",
    (*M, *P, "--kv-bits", "4", "--kv-group-size", "48"): "--kv-group-size must be 32, 64 or 128",
    (
        *M,
        *P,
        "--kv-bits",
        "4",
        "--quantized-kv-start",
        "-1",
    ): "--quantized-kv-start must be 0 or more",
    (*M, *P, "--max-kv-size", "1"): "--max-kv-size must be at least 8",
    (*M, *P, "--max-kv-size", "64", "--kv-bits", "4"): "--max-kv-size and --kv-bits exclude",
    (*M, *P, "--prefill-step-size", "0"): "--prefill-step-size must be at least 1",
    # Prompts.
    (*M, "-p", ""): "the prompt is empty",
    (*M,): "the prompt is empty",
    (*M, "-p", "-"): "the prompt is empty",
    (*M, "-f", "{empty_file}"): "the prompt is empty",
    (*M, "-f", "{tmp}/nowhere.txt"): "-f {tmp}/nowhere.txt: No such file or directory",
    (*M, "-f", "{tmp}"): "-f {tmp}: Is a directory",
    (*M, "-f", "{latin1_file}"): "-f {latin1_file} is not UTF-8 text (byte 3)",
    (*M, *P, "-f", "{empty_file}"): "-p and -f both give a prompt",
    (*M, *P, "--chat-template-args", "{{"): "--chat-template-args is not JSON",
    (*M, *P, "--chat-template-args", "[1]"): "--chat-template-args must be a JSON object",
    # Models.
    ("-m", "./x", *P): "-m ./x: no such directory",
    ("-m", "~/x", *P): "-m ~/x: no such directory",
    ("-m", "~nobody-of-that-name/x", *P): "-m ~nobody-of-that-name/x: no such directory",
    ("-m", "x/y/z", *P): "-m x/y/z: no such directory",
    ("-m", "some-owner/some-name/", *P): "-m some-owner/some-name/: no such directory",
    ("-m", "a folder/with spaces", *P): "-m a folder/with spaces: no such directory",
    ("-m", "some-owner/some-name", *P): "HF_HUB_OFFLINE is set",
    ("-m", "just-a-name", *P): "-m just-a-name: no such directory, and not a hub id",
    ("-m", "", *P): "-m needs a directory or a hub id",
    ("-m", "{file}", *P): "-m {file}: is a file; pass the model's directory",
    ("-m", "{model}", "--revision", "main", *P): "--revision is for hub ids",
    ("-m", "{empty}", *P): "the target model {empty} has no config.json",
    ("-m", "{not_json}", *P): "cannot read {not_json}/config.json: Expecting",
    ("-m", "{not_object}", *P): "cannot read {not_object}/config.json: a JSON object is needed",
    ("-m", "{broken_recommendations}", *P): "generation_config.json: Expecting",
    (*M, *P, "--draft-model", "./x"): "--draft-model ./x: no such directory",
    (
        *M,
        *P,
        "--draft-model",
        "some-owner/some-name",
    ): "--draft-model some-owner/some-name: no such",
    (*M, *P, "--draft-model", "{empty}"): "the draft model {empty} has no config.json",
    (*M, *P, "--draft-model", "{not_json}"): "cannot read {not_json}/config.json",
    (*M, *P, "--adapter", "{empty}"): "--adapter {empty}: no such directory with an adapter",
    # The rest.
    (*M, *P, "--json", "--quiet"): "--json and --quiet exclude each other",
    (*M, *P, "--bogus"): "No such option: --bogus",
    (*M, *P, "stray"): "unexpected extra argument",
    (*M, "-p"): "requires an argument",
    (*M, *P, "--samplers", "heat"): "--samplers does not know 'heat'",
    (*M, *P, "--temp", "0.5", "--samplers", "top_k"): "--samplers leaves out temperature",
}
NOT_UTF8 = Request(("generate", *M), "naïve".encode("latin-1"))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths that the cases above speak of, by name."""
    tmp = tmp_path_factory.mktemp("places")
    table = iid_table([1.0, 0.5, 0.2, 0.1, 0.0, -0.5])
    found = {
        "tmp": tmp,
        "model": write_table_model(tmp / "model", table),
        "draft": write_table_model(tmp / "draft", table),
    }
    for name, content in {
        "dflash": json.dumps({"model_type": "qwen3", "dflash_config": {}}),
        "mtp": json.dumps({"model_type": "gemma4_assistant"}),
        "not_json": "{",
        "not_object": "[]",
        "empty": None,
    }.items():
        found[name] = tmp / name
        found[name].mkdir()
        if content is not None:
            (found[name] / "config.json").write_text(content, encoding="utf-8")
    found["broken_recommendations"] = write_table_model(tmp / "broken_recommendations", table)
    (tmp / "broken_recommendations" / "generation_config.json").write_text("?", encoding="utf-8")
    for name, data in {
        "file": b"a",
        "empty_file": b"",
        "latin1_file": "abcé".encode("latin-1"),
    }.items():
        found[name] = tmp / f"{name}.txt"
        found[name].write_bytes(data)
    return {name: str(path) for name, path in found.items()}


@pytest.fixture(scope="module")
def outcomes(places: dict[str, str]) -> dict[tuple[str, ...], tuple[Outcome, list[str]]]:
    """All of them, run in one process, with the heavy modules that were loaded by then."""
    requests = [
        Request(("generate", *(word.format(**places) for word in words))) for words in LIGHT
    ]
    return dict(zip(LIGHT, run_all(requests), strict=True))


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_mistake_is_one_line_and_exit_2_without_loading_mlx(
    outcomes: dict[tuple[str, ...], tuple[Outcome, list[str]]],
    places: dict[str, str],
    words: tuple[str, ...],
) -> None:
    run, heavy = outcomes[words]
    assert run.code == 2, run.stderr
    assert run.stderr.count("\n") == 1, run.stderr
    assert LIGHT[words].format(**places) in run.error
    assert heavy == []


def test_the_check_for_heavy_modules_sees_them(places: dict[str, str]) -> None:
    words = ("generate", "-m", places["model"], "-p", "a", "-n", "1")
    ((run, heavy),) = run_all([Request(words)])
    assert run.code == 0 and {"mlx", "mlx_lm", "transformers"} <= set(heavy)


@pytest.mark.parametrize("data", [b"na\xefve", b"\xff", b"ok then \xc3"])
def test_standard_input_that_is_not_utf8_is_refused(places: dict[str, str], data: bytes) -> None:
    run = mlxgen_here("generate", "-m", places["model"], stdin=data)
    assert run.code == 2 and re.search(r"standard input is not UTF-8 text \(byte \d", run.error)


def test_closed_standard_input_is_refused_not_waited_for(places: dict[str, str]) -> None:
    closing = ["sh", "-c", 'exec "$@" <&-', "sh"]
    for prompt in ([], ["-p", "-"]):
        run = mlxgen_process("generate", "-m", places["model"], *prompt, prefix=closing)
        assert run.code == 2 and "standard input is closed" in run.error


def test_argument_that_is_not_utf8_is_refused(places: dict[str, str]) -> None:
    run = mlxgen_here("generate", "-m", places["model"], "-p", "caf\udce9")
    assert run.code == 2 and "the prompt of -p is not UTF-8" in run.error


def test_missing_default_pair_is_told_with_the_cure(tmp_path: Path) -> None:
    run = mlxgen_here("generate", "-p", "a", variables={"MLXGEN_CACHE": str(tmp_path)})
    assert run.code == 2 and "make pair" in run.error


@pytest.fixture
def damaged(tmp_path: Path) -> Any:
    """`damaged(name)`: a copy of a model with one file missing or broken."""

    def make(name: str) -> Path:
        directory = write_llama(tmp_path / "damaged", 1)
        weights, tokenizer = directory / "model.safetensors", directory / "tokenizer.json"
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if name == "truncated weights":
            weights.write_bytes(weights.read_bytes()[:1000])
        elif name == "weights cut in their data":
            weights.write_bytes(weights.read_bytes()[:-1000])
        elif name == "no weights":
            weights.unlink()
        elif name == "weights of another shape":
            config["vocab_size"] = 65
        elif name == "a weight missing":
            arrays: Any = mx.load(str(weights))
            arrays.pop("lm_head.weight")
            mx.save_safetensors(str(weights), arrays)
        elif name == "no tokenizer":
            tokenizer.unlink()
            (directory / "tokenizer_config.json").unlink()
        elif name == "tokenizer cut":
            tokenizer.write_bytes(tokenizer.read_bytes()[:500])
        elif name == "unknown model type":
            config["model_type"] = "no-such-type"
        elif name == "no model type":
            config.pop("model_type")
        elif name == "model type of another kind":
            config["model_type"] = ["llama"]
        elif name == "config without sizes":
            config.pop("hidden_size")
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return directory

    return make


@pytest.mark.parametrize(
    "name",
    [
        "truncated weights",
        "weights cut in their data",
        "no weights",
        "weights of another shape",
        "a weight missing",
        "no tokenizer",
        "tokenizer cut",
        "unknown model type",
        "no model type",
        "model type of another kind",
        "config without sizes",
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_damaged_model_directory_is_one_line_naming_it(
    models: ModelStore, damaged: Any, name: str, role: str
) -> None:
    whole, broken = models.llama_directory(1), damaged(name)
    target, draft = (broken, whole) if role == "target" else (whole, broken)
    run = mlxgen_here("generate", "-m", target, "-p", "a", "-n", 2, "--draft-model", draft)
    assert run.code == 2, run.stderr
    assert f"cannot load the {role} model from {broken}: " in run.error
    assert "Traceback" not in run.stderr and len(run.error) < 600


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("weight", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize(
    "options", [[], ["--temp", 1], ["--temp", 1, "--accept-rule", "stochastic"]]
)
def test_weights_that_are_not_numbers_end_the_run_naming_model_and_step(
    models: ModelStore, role: str, weight: str, options: list[object]
) -> None:
    healthy = models.llama_directory(1)
    ill = models.llama_directory(1, nan_weight=weight)
    target, draft = (ill, healthy) if role == "target" else (healthy, ill)
    words: list[object] = ["generate", "-m", target, "--draft-model", draft, "-p", "abc"]
    # In the JSON mode text is not streamed, so stdout stays empty.
    run = mlxgen_here(*words, "-n", 9, "--json", *options)
    assert run.code == 1
    step = re.match(rf"the {role} model's logits are not usable at step (\d+) ", run.error)
    assert step is not None and int(step[1]) == (3 if role == "target" else 4)


def test_ill_target_is_found_without_a_draft_too(models: ModelStore) -> None:
    ill = models.llama_directory(1, nan_weight="lm_head.weight")
    run = mlxgen_here("generate", "-m", ill, "-p", "abc", "-n", 9)
    assert run.code == 1 and "the target model's logits are not usable at step 3" in run.error


def test_banning_every_token_is_told_so(places: dict[str, str]) -> None:
    bans = [word for token in range(6) for word in ("--logit-bias", f"{token}:-inf")]
    run = mlxgen_here("generate", "-m", places["model"], "-p", "a", "-n", 2, *bans)
    assert run.code == 1 and "--logit-bias bans every token" in run.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--extra-eos-token", "<nope>"], "--extra-eos-token '<nope>' is neither a token"),
        (["--extra-eos-token", "6"], "--extra-eos-token '6' is neither a token"),
        (["--system", "be nice"], "--system needs a chat template, and this model has none"),
        (["--chat-template-args", "{}"], "--chat-template-args needs a chat template"),
        (["--kv-bits", "4"], "--kv-bits 4 with --kv-group-size 64 does not fit"),
    ],
)
@pytest.mark.parametrize("is_speculative", [False, True])
def test_option_that_does_not_fit_the_model_is_refused(
    places: dict[str, str], options: list[str], message: str, is_speculative: bool
) -> None:
    draft = ["--draft-model", places["draft"]] if is_speculative else []
    run = mlxgen_here("generate", "-m", places["model"], "-p", "abc", "-n", 3, *draft, *options)
    assert run.code == 2 and message in run.error


def test_prompt_that_the_tokenizer_cannot_represent_is_refused(places: dict[str, str]) -> None:
    run = mlxgen_here("generate", "-m", places["model"], "-p", "XYZ")
    assert run.code == 2 and "nothing that this model's tokenizer can represent" in run.error


def test_tokenizer_with_more_tokens_than_the_embedding_is_refused_before_a_wild_read(
    tmp_path: Path,
) -> None:
    target = write_llama(tmp_path, 1, head_rows=10, vocabulary=Vocabulary("abcdefghijklmnopqrst"))
    run = mlxgen_here("generate", "-m", target, "-p", "abt", "-n", 3)
    assert run.code == 2 and "the prompt holds token 19" in run.error
    assert mlxgen_here("generate", "-m", target, "-p", "abc", "-n", 3).code == 0


def test_verbose_adds_the_traceback_and_keeps_the_last_line(places: dict[str, str]) -> None:
    words = ["generate", "-m", places["model"], "-p", "a", "--temp", "-1"]
    run = mlxgen_here(*words, "--verbose")
    assert run.code == 2 and "Traceback" in run.stderr
    assert run.stderr.splitlines()[-1].startswith("mlxgen: error: --temp must be")
    assert "Traceback" not in mlxgen_here(*words).stderr


def test_escape_sequences_in_a_message_are_shown_not_sent(tmp_path: Path) -> None:
    template = "{{ raise_exception('no \\x1b[31mred\\x9b2J') }}"
    target = write_llama(tmp_path, 1, vocabulary=Vocabulary(chat_template=template))
    run = mlxgen_here("generate", "-m", target, "-p", "a")
    assert run.code == 2 and "no \\x1b[31mred\\x9b2J" in run.error
