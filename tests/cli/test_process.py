"""A process among others: signals at any moment, full disks, folders that cannot be written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fixtures.command import (
    ERROR,
    ROOT,
    Outcome,
    command_line,
    environment,
    mlxgen_here,
    mlxgen_process,
    started,
)
from tests.fixtures.runs import ModelStore
from tests.fixtures.tokenizers import byte_vocabulary

TIMEOUT_S = 120
NOWHERE = "/proc/no-such-folder"
"""A place where nobody, not even root, can make a folder."""
UNREACHABLE = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture(scope="module")
def target(models: ModelStore) -> Path:
    return models.llama_directory(
        1,
        vocabulary=byte_vocabulary(),
        head_scale=6.0,
        config={"max_position_embeddings": 4096},
    )


UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""One read is one line."""


def endless(target: Path, *options: object, flags: Sequence[str] = ()) -> list[str]:
    words: list[object] = ["generate", "-m", target, "--draft-model", target, "-p", "a"]
    return command_line(*words, "-n", 10_000_000, "--temp", 1, *options, flags=flags)


def interrupt(
    words: list[str], moment: str, sent: signal.Signals, *, delay_s: float = 0.0
) -> Outcome:
    """Send a signal a moment after a line with a certain text has come on stderr."""
    with started(words, variables=UNBUFFERED) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if moment.encode() in line:
                break
        time.sleep(delay_s)
        process.send_signal(sent)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    timings = [line for line in errors.splitlines(True) if line.startswith(b"import time")]
    for line in timings:
        errors = errors.replace(line, b"")
    return Outcome(process.returncode, output, errors)


@pytest.mark.parametrize(
    ("module", "sent"),
    [
        ("typer", signal.SIGINT),
        ("mlx.core", signal.SIGTERM),
        ("transformers", signal.SIGINT),
        ("mlxgen.speculative.loop", signal.SIGTERM),
    ],
)
def test_an_interrupt_while_the_program_loads_is_one_line(
    target: Path, module: str, sent: signal.Signals
) -> None:
    run = interrupt(endless(target, flags=["-X", "importtime"]), f" {module}", sent)
    assert run.code == 130, run.stderr
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr
    if not run.out:
        assert run.stderr.endswith("mlxgen: interrupted\n")


def test_an_interrupt_during_the_prefill_keeps_the_statistics(target: Path) -> None:
    prompt = "x" * 8000
    words = endless(target, "--prefill-step-size", 1, f"--prompt={prompt}")
    run = interrupt(words, "Seed: ", signal.SIGINT, delay_s=0.4)
    assert run.code == 130
    assert run.stdout.startswith("\n[Interrupted]\n[Generated 0 tokens ")
    assert "rule=" in run.stdout and "Traceback" not in run.stderr


def test_impatience_is_no_traceback(target: Path) -> None:
    """Ctrl-C again and again, also while the first one is being handled."""
    with started(endless(target), variables=UNBUFFERED) as process:
        assert process.stdout is not None
        process.stdout.read(10)
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            time.sleep(0.002)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors and b"Exception ignored" not in errors


full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that only Linux has")


@full
def test_a_full_disk_under_the_document_is_one_line_and_exit_1(target: Path) -> None:
    words = ["generate", "-m", target, "-p", "a", "-n", 5, "--json"]
    run = mlxgen_process(*words, prefix=["sh", "-c", 'exec "$@" >/dev/full', "sh"])
    assert run.code == 1
    (line,) = run.lines(ERROR, stream="stderr")
    assert "No space left on device" in line
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr


@pytest.mark.parametrize(
    "redirection",
    [
        pytest.param("2>/dev/full", marks=full),
        "2>&-",
        "</dev/null 2</dev/null",
        # A reader that has gone before anything was written.
        "2> >(exec 0<&-)",
    ],
)
def test_the_text_comes_whatever_stderr_is(target: Path, redirection: str) -> None:
    words = ["generate", "-m", target, "-p", "a", "-n", 5, "--seed", 3]
    right = mlxgen_process(*words)
    shell = f'exec 3<&0; sleep 0.1; exec "$@" {redirection}'
    run = mlxgen_process(*words, prefix=["bash", "-c", shell, "bash"])
    text = right.out.split(b"[Generated")[0]
    assert run.code == 0 and text and run.out.startswith(text)


def test_a_prompt_on_the_command_line_needs_no_stdin(target: Path) -> None:
    """The first file to be opened gets descriptor 0, which MLX takes for a failure."""
    words = ["generate", "-m", target, "-p", "a", "-n", 5, "--seed", 3]
    right = mlxgen_process(*words)
    run = mlxgen_process(*words, prefix=["sh", "-c", 'exec "$@" <&-', "sh"])
    assert run.code == 0 and run.out.split(b"[Generated")[0] == right.out.split(b"[Generated")[0]


@pytest.mark.parametrize("options", [[], ["-n", "5"]])
def test_a_megabyte_of_prompt_is_refused_when_the_window_is_small(
    target: Path, tmp_path: Path, options: list[str]
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("a line of some length, and more\n" * 32_768, encoding="utf-8")
    assert file.stat().st_size == 1 << 20
    began_s = time.monotonic()
    run = mlxgen_here("generate", "-m", target, "-f", file, *options)
    assert time.monotonic() - began_s < 60
    assert run.code == 2 and run.out == b"" and "Traceback" not in run.stderr
    (line,) = run.lines(ERROR, stream="stderr")
    assert "1048576 tokens, more than twice the model's context window of 4096" in line


def test_the_longest_prompt_that_is_not_refused(models: ModelStore) -> None:
    small = models.llama_directory(
        1, vocabulary=byte_vocabulary(), config={"max_position_embeddings": 20}
    )
    words = ["generate", "-m", small, "-n", 2, "--json"]
    assert mlxgen_here(*words, "-p", "x" * 40).document["prompt_tokens"] == 40
    assert mlxgen_here(*words, "-p", "x" * 41).code == 2


def test_a_local_model_needs_no_folder_to_write_to(target: Path) -> None:
    places = ("HF_HOME", "HF_HUB_CACHE", "MLXGEN_CACHE", "XDG_CACHE_HOME", "HOME")
    nowhere = dict.fromkeys(places, NOWHERE)
    run = mlxgen_process("generate", "-m", target, "-p", "a", "-n", 3, variables=nowhere)
    assert run.code == 0, run.stderr
    assert "Traceback" not in run.stderr and "warning" not in run.stderr


@pytest.mark.parametrize("hub", [{"HF_HUB_OFFLINE": "1"}, UNREACHABLE])
@pytest.mark.parametrize("home", [None, NOWHERE])
def test_a_hub_that_cannot_help_is_one_line(
    tmp_path: Path, hub: dict[str, str], home: str | None
) -> None:
    variables = {**hub, "HF_HOME": home or str(tmp_path)}
    began_s = time.monotonic()
    run = mlxgen_process("generate", "-m", "owner/name", "-p", "a", variables=variables)
    assert time.monotonic() - began_s < 60
    assert run.code == 2 and run.error.startswith("-m owner/name: ")
    assert ("HF_HUB_OFFLINE is set" in run.error) == ("HF_ENDPOINT" not in hub)


def test_the_default_pair_without_a_folder_is_one_line(target: Path) -> None:
    variables = {"MLXGEN_CACHE": NOWHERE}
    run = mlxgen_process("generate", "-p", "a", variables=variables)
    assert run.code == 2 and "make pair" in run.error
    fetched = subprocess.run(
        [sys.executable, "scripts/fetch_default_pair.py"],
        env=environment(variables),
        cwd=ROOT,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    assert fetched.returncode == 1 and fetched.stderr.count(b"\n") == 1
    assert NOWHERE.encode() in fetched.stderr and not os.path.exists(NOWHERE)  # noqa: PTH110
