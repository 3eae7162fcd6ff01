"""What scripts/fuzz_readers.py has found, one test each, and whether it would find it again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.command import ROOT, Outcome, environment, mlxgen_here
from tests.fixtures.model_directories import Vocabulary, write_llama
from tests.fixtures.runs import ModelStore

sys.path.insert(0, str(ROOT / "scripts"))

from fuzzing.child import Case, Ended, complaint

Damage = Callable[[Any], None]


def generate(target: Path, *more: object) -> Outcome:
    return mlxgen_here("generate", "-m", target, "-p", "abc", "-n", 2, *more)


def damage_json(file: Path, damage: Damage) -> None:
    """Change the JSON value of a file in place."""
    value = json.loads(file.read_text(encoding="utf-8"))
    damage(value)
    file.write_text(json.dumps(value), encoding="utf-8")


# Model directories


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "rope_theta", "x"),
        ("config.json", "rms_norm_eps", None),
        ("config.json", "num_attention_heads", 3),
        ("tokenizer_config.json", "model_max_length", "x"),
    ],
)
def test_value_that_only_fails_in_use_is_the_models_fault(
    tmp_path: Path, file: str, key: str, value: object
) -> None:
    target = write_llama(tmp_path, 1)
    damage_json(target / file, lambda content: content.update({key: value}))
    run = generate(target)
    assert run.code == 2 and f"cannot load the target model from {target}: " in run.error


def test_adapter_with_a_scale_beyond_numbers_is_refused(tmp_path: Path) -> None:
    import mlx.core as mx

    target, adapter = write_llama(tmp_path / "target", 1), tmp_path / "adapter"
    adapter.mkdir()
    parameters = {"rank": 2, "scale": 10**30, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    content = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (adapter / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {})
    run = generate(target, "--adapter", adapter)
    assert run.code == 2 and "cannot load the target model" in run.error


@pytest.mark.parametrize("template", ["{{ '\\ud800' }}", "{{ messages[0].content }}\\udfff"])
def test_template_that_writes_half_a_character_is_refused(tmp_path: Path, template: str) -> None:
    vocabulary = Vocabulary(chat_template=json.loads(f'"{template}"'))
    run = generate(write_llama(tmp_path, 1, vocabulary=vocabulary))
    assert run.code == 2


def test_system_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    target = write_llama(tmp_path, 1, vocabulary=Vocabulary(chat_template=template))
    assert generate(target, "--system", "caf\udce9").code == 2


# Command lines


def test_name_of_a_file_cannot_break_a_note_into_lines(models: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\n", encoding="utf-8")
    pair = ("-m", models.llama_directory(1), "--draft-model", models.llama_directory(2))
    words = ("--prompts", tmp_path / "prompts.txt", "-n", 3, "--arms", "plain,block")
    run = mlxgen_here("compare", *pair, *words, "--csv", tmp_path / "a\nb\x1b")
    assert run.code == 0 and (tmp_path / "a\nb\x1b").is_file()
    assert f"wrote {tmp_path}/a b\\x1b" in run.stderr.splitlines()


def test_token_of_thousands_of_digits_is_refused(models: ModelStore) -> None:
    run = generate(models.llama_directory(1), "--extra-eos-token", "1" * 5000)
    assert run.code == 2 and "is neither a token of this model nor one of its ids" in run.error


@pytest.mark.parametrize("option", ["--csv", "--svg", "--html", "--resume"])
def test_home_of_nobody_is_a_directory_that_is_missing(models: ModelStore, option: str) -> None:
    pair = ("-m", models.llama_directory(1), "--draft-model", models.llama_directory(2))
    run = mlxgen_here("compare", *pair, "-n", 2, option, "~nobody-of-that-name/x")
    assert run.code == 2 and f"{option} ~nobody-of-that-name/x: " in run.error


def test_prompt_far_beyond_the_window_is_refused_by_every_command(
    models: ModelStore, tmp_path: Path
) -> None:
    target = models.llama_directory(1, config={"max_position_embeddings": 8})
    (tmp_path / "prompts.txt").write_text("a" * 17 + "\n", encoding="utf-8")
    pair = ("-m", target, "--draft-model", target, "-n", 2)
    for words in (
        ("generate", "-p", "a" * 17),
        ("verify", "-p", "a" * 17),
        ("compare", "--prompts", tmp_path / "prompts.txt"),
    ):
        run = mlxgen_here(*words, *pair)
        assert run.code == 2 and "has 17 tokens, more than twice the model's" in run.stderr


# Journals


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory, models: ModelStore) -> tuple[Any, Path]:
    """The command of a finished comparison, and its journal."""
    root = tmp_path_factory.mktemp("journal")
    (root / "prompts.txt").write_text("abc\n", encoding="utf-8")
    pair = ("-m", models.llama_directory(1), "--draft-model", models.llama_directory(2))
    words = ("compare", *pair, "--prompts", root / "prompts.txt", "-n", 3, "--arms", "plain,block")
    assert mlxgen_here(*words, "--resume", root / "journal.jsonl").code == 0
    return words, root / "journal.jsonl"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", "x"),
        ("rounds", None),
        ("tokens", 10**400),
        ("accepted", -1),
        ("positions_tested", 1.5),
        ("expected", float("nan")),
        ("variance", -1.0),
        ("sum_min", []),
        ("tested_by_offset", 3),
        ("rule", 3),
        ("rule", "\x1b[31m"),
        ("text_sha256", "\ud800"),
        ("text_sha256", None),
        ("timing", {"prefill_ms": float("inf"), "decode_ms": 1.0}),
        ("arm", 7),
        ("arm", float("inf")),
        ("prompt", -1),
        ("seed", 12345),
        ("phase", "x"),
    ],
)
def test_run_that_never_was_is_refused_with_its_line(
    journal: tuple[Any, Path], tmp_path: Path, name: str, value: object
) -> None:
    words, whole = journal
    first, line, *rest = whole.read_text(encoding="utf-8").splitlines()
    damaged = tmp_path / "journal.jsonl"
    changed = json.dumps({**json.loads(line), name: value})
    damaged.write_text("\n".join([first, changed, *rest, ""]), encoding="utf-8")
    run = mlxgen_here(*words, "--resume", damaged)
    assert run.code == 2 and f"{damaged}, line 2: not a run of a comparison" in run.error


# Prompt caches


@pytest.fixture(scope="module")
def prompt_cache(tmp_path_factory: pytest.TempPathFactory, models: ModelStore) -> Path:
    """A file that a run of the model of seed 1 has written."""
    file = tmp_path_factory.mktemp("cache") / "prompt.cache"
    assert generate(models.llama_directory(1), "--prompt-cache", file).code == 0
    return file


def with_header(data: bytes, damage: Damage) -> bytes:
    """A safetensors file with its header changed."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    damage(header)
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + data[8 + length :]


def described_as(text: str) -> Damage:
    """The description replaced, its checksum right, as another version may write it."""

    def damage(header: Any) -> None:
        crc32 = str(zlib.crc32(text.encode("utf-8", "surrogatepass")))
        header["__metadata__"] |= {"mlxgen_prompt_cache": text, "crc32": crc32}

    return damage


def end_that_is_no_number(header: Any) -> None:
    """The first array ends at an object."""
    header[next(name for name in header if name[:2] != "__")]["data_offsets"][1] = {}


@pytest.mark.parametrize(
    "damage",
    [
        end_that_is_no_number,
        described_as("[" * 100_000),
        described_as("[]"),
        described_as("{}"),
        described_as("\ud800"),
        described_as('{"format": 2}'),
    ],
)
def test_header_of_another_kind_is_refused_and_left_alone(
    models: ModelStore, prompt_cache: Path, tmp_path: Path, damage: Damage
) -> None:
    file = tmp_path / "prompt.cache"
    data = with_header(prompt_cache.read_bytes(), damage)
    file.write_bytes(data)
    run = generate(models.llama_directory(1), "--prompt-cache", file)
    assert run.code == 2 and f"--prompt-cache {file}: " in run.error
    assert file.read_bytes() == data


# The fuzzer itself


GENERATE = Case(("generate", "-m", "x"))


@pytest.mark.parametrize(
    ("ended", "wrong"),
    [
        (Ended(-signal.SIGSEGV, b"", b""), "ended by signal 11 (SIGSEGV)"),
        (Ended(-signal.SIGALRM, b"", b""), "took more than 10 s"),
        (Ended(70, b"", b""), "exit code 70"),
        (Ended(130, b"", b"mlxgen: interrupted\n"), "exit code 130"),
        (Ended(1, b"", b"Traceback (most recent call last):\n"), "a traceback"),
        (Ended(2, b"", b""), "0 error lines with exit code 2"),
        (Ended(2, b"", b"mlxgen: error: a\nmlxgen: error: b\n"), "2 error lines"),
        (Ended(0, b"", b"mlxgen: error: a\n"), "1 error lines with exit code 0"),
        (Ended(0, b"", b"something else\n"), "a line on stderr that is no note"),
        (Ended(1, b"", b"mlxgen: error: unexpected KeyError: 'a'\n"), "nobody expected"),
    ],
)
def test_fuzzer_complains_of_a_wrong_end(ended: Ended, wrong: str) -> None:
    assert wrong in str(complaint(GENERATE, ended))


def test_fuzzer_complains_of_a_document_that_is_none() -> None:
    case = Case((*GENERATE.words, "--json"))
    assert complaint(case, Ended(0, b"{", b"")) == "standard output is not JSON"
    assert complaint(case, Ended(0, b"{}\n", b"")) is None


@pytest.mark.parametrize(
    "ended",
    [
        Ended(0, b"text\n", b'Loading model from "x"...\nSeed: 3\n'),
        Ended(2, b"", b'Loading model from "x"...\nmlxgen: error: no\n'),
        Ended(1, b"", b"warning: so so\nmlxgen: error: a failure\n"),
    ],
)
def test_fuzzer_accepts_a_right_end(ended: Ended) -> None:
    assert complaint(GENERATE, ended) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arguments", "models", "files"])
def test_first_cases_of_the_fuzzer_find_nothing(kind: str, tmp_path: Path) -> None:
    """And a case can be repeated by its number."""
    words = [sys.executable, str(ROOT / "scripts" / "fuzz_readers.py"), kind, "--seed", "3"]
    how: dict[str, Any] = {"env": environment(), "capture_output": True, "text": True}
    run = subprocess.run([*words, "--cases", "15", "--keep", str(tmp_path)], timeout=300, **how)
    assert run.returncode == 0, run.stdout
    assert f"{kind}, seed 3: 15 cases" in run.stdout
    one = subprocess.run([*words, "--case", "7"], timeout=300, **how)
    assert "1 cases" in one.stdout


def test_showing_the_completion_is_no_failure() -> None:
    # The program asks which shell it runs in, so it gets one.
    shown = subprocess.run(
        ["bash", "-c", '"$0" -m mlxgen --show-completion generate; exit $?', sys.executable],
        env=environment({}),
        capture_output=True,
    )
    assert shown.returncode == 0 and b"Traceback" not in shown.stderr
