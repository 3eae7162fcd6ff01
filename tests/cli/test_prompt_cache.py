"""`--prompt-cache FILE`: a warm run is a cold run, and the file is whole, right, or refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxgen.cache.cached_model import as_ids
from mlxgen.cache.kept import KeptCache, common_prefix_length
from tests.fixtures.command import (
    ROOT,
    Outcome,
    command_line,
    environment,
    first_bytes,
    mlxgen_here,
    started,
)
from tests.fixtures.light_commands import Request, run_all
from tests.fixtures.model_directories import Vocabulary
from tests.fixtures.runs import ModelStore

PROMPT = "the quick brown fox"
VOCABULARY = Vocabulary("abcdefghijklmnopqrstuvwxyz ")


@pytest.fixture(scope="module")
def target(models: ModelStore) -> Path:
    return models.llama_directory(1, vocabulary=VOCABULARY, head_scale=6.0)


@pytest.fixture(scope="module")
def draft(models: ModelStore) -> Path:
    return models.llama_directory(1, vocabulary=VOCABULARY, head_scale=6.0, disturbance=0.1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kept here.cache"


def generate(target: Path, *options: object, prompt: str = PROMPT) -> Outcome:
    words: list[object] = ["generate", "-m", target, "-p", prompt, "-n", 8, "--json"]
    return mlxgen_here(*words, *options)


def reused(run: Outcome) -> int:
    """Prompt tokens that were taken up from the file."""
    count: int = run.document["reused_prompt_tokens"]
    return count


def names(directory: Path) -> list[str]:
    """What a directory holds, hidden files too."""
    return [path.name for path in directory.iterdir()]


def test_all_of_a_file_is_written_and_nothing_else(target: Path, file: Path) -> None:
    run = generate(target, "--prompt-cache", file)
    assert run.code == 0 and reused(run) == 0
    assert names(file.parent) == [file.name]
    assert f"Prompt cache: 0 of {len(PROMPT)} prompt tokens taken up" in run.stderr


@pytest.mark.parametrize("sampling", [[], ["--temp", 1, "--seed", 5]])
@pytest.mark.parametrize("drafts", [(0, 0, 0), (1, 1, 1), (0, 1, 0), (1, 0, 1)])
def test_a_conversation_over_a_file_is_the_one_without_it(
    target: Path,
    draft: Path,
    file: Path,
    sampling: list[object],
    drafts: tuple[int, int, int],
) -> None:
    """The draft may come and go; what the file does not hold of it, it takes in itself."""
    prompt = PROMPT
    for turn, has_draft in enumerate(drafts):
        options = [*sampling, *(["--draft-model", draft] if has_draft else [])]
        warm = generate(target, *options, "--prompt-cache", file, prompt=prompt)
        cold = generate(target, *sampling, prompt=prompt)
        assert warm.ids == cold.ids
        assert reused(warm) == (len(prompt) - len(" and") - 1 if turn else 0)
        prompt += warm.document["text"] + " and"


def test_the_same_prompt_again(target: Path, draft: Path, file: Path) -> None:
    pair = ["--draft-model", draft, "--prompt-cache", file]
    first, again = generate(target, *pair), generate(target, *pair)
    assert again.ids == first.ids
    assert reused(again) == len(PROMPT) - 1


def test_a_run_of_no_tokens_takes_the_prompt_in(target: Path, draft: Path, file: Path) -> None:
    pair = ["--draft-model", draft, "--prompt-cache", file]
    assert generate(target, *pair, "-n", 0).ids == []
    longer = PROMPT + " jumps"
    warm = generate(target, *pair, prompt=longer)
    assert warm.ids == generate(target, prompt=longer).ids
    assert reused(warm) == len(PROMPT) - 1


@pytest.mark.parametrize("prompt", ["the quick red fox", "the", "another text"])
def test_what_another_prompt_shares_is_taken_up(target: Path, file: Path, prompt: str) -> None:
    generate(target, "--prompt-cache", file)
    warm = generate(target, "--prompt-cache", file, prompt=prompt)
    assert warm.ids == generate(target, prompt=prompt).ids
    shared = common_prefix_length(
        as_ids(VOCABULARY.ids(prompt[:-1])), as_ids(VOCABULARY.ids(PROMPT))
    )
    assert reused(warm) == shared


@pytest.mark.parametrize("bits", [2, 8])
def test_quantised_caches(target: Path, draft: Path, file: Path, bits: int) -> None:
    options = ["--kv-bits", bits, "--kv-group-size", 32]
    generate(target, *options, "--draft-model", draft, "--prompt-cache", file)
    longer = PROMPT + " and so on"
    warm = generate(target, *options, "--draft-model", draft, "--prompt-cache", file, prompt=longer)
    assert warm.ids == generate(target, *options, prompt=longer).ids
    assert reused(warm) == len(PROMPT)


def test_sliding_windows(models: ModelStore, file: Path) -> None:
    sliding = models.llama_directory(3, vocabulary=VOCABULARY, head_scale=6.0, sliding_window=8)
    prompt = PROMPT
    for turn in range(3):
        warm = generate(sliding, "--prompt-cache", file, prompt=prompt)
        assert warm.ids == generate(sliding, prompt=prompt).ids
        assert (reused(warm) > 0) == (turn > 0)
        prompt += warm.document["text"] + " and"


def test_a_chat_goes_on_where_the_one_before_ended(target: Path, file: Path) -> None:
    words: list[object] = ["generate", "-m", target, "-n", 8, "--prompt-cache", file]
    mlxgen_here(*words, stdin=b"hello\nagain\n", is_typed=True)
    run = mlxgen_here(*words, "--profile", stdin=b"hello\n", is_typed=True)
    assert run.code == 0
    # "hello\n" but for its last token is known.
    assert "  Prompt tokens:    5\n" in run.stdout, run.stdout
    assert "(0.00 tok/s)" in run.stdout


def test_a_link_stays_a_link_and_a_mode_stays(target: Path, file: Path) -> None:
    link = file.parent / "link"
    link.symlink_to(file)
    generate(target, "--prompt-cache", link)
    assert link.is_symlink() and file.is_file()
    file.chmod(0o600)
    generate(target, "--prompt-cache", link)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


# Refusals


def refusal(run: Outcome) -> str:
    """The message of a run that was refused before it printed anything."""
    assert run.code == 2, run.stderr
    assert run.out == b"" and "Traceback" not in run.stderr
    (line,) = run.lines("mlxgen: error: ", stream="stderr")
    return line


@pytest.fixture
def written(target: Path, file: Path) -> Path:
    """A file by the target of these tests."""
    assert generate(target, "--prompt-cache", file).code == 0
    return file


def test_another_model_is_refused_without_loading_it(
    target: Path, draft: Path, written: Path
) -> None:
    before = written.read_bytes()
    words = ("generate", "-m", str(draft), "-p", "a", "--prompt-cache", str(written))
    ((run, heavy),) = run_all([Request(words)])
    assert "was written for another model" in refusal(run) and heavy == []
    assert written.read_bytes() == before


def test_a_model_whose_weights_were_written_anew_is_another(
    target: Path, tmp_path: Path, file: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    generate(copy, "--prompt-cache", file)
    assert reused(generate(copy, "--prompt-cache", file)) > 0
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert "files have changed since" in refusal(generate(copy, "--prompt-cache", file))


def test_an_adapter_makes_another_model(target: Path, tmp_path: Path, written: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}", encoding="utf-8")
    run = generate(target, "--adapter", adapter, "--prompt-cache", written)
    assert "was written for another model" in refusal(run)


def test_another_draft_prefills_itself(
    models: ModelStore, target: Path, draft: Path, file: Path
) -> None:
    other = models.llama_directory(2, vocabulary=VOCABULARY, head_scale=6.0)
    generate(target, "--draft-model", other, "--prompt-cache", file)
    warm = generate(target, "--draft-model", draft, "--prompt-cache", file)
    cold = generate(target, "--draft-model", draft)
    assert warm.ids == cold.ids and reused(warm) == len(PROMPT) - 1
    assert warm.document["speculative"]["accepted"] == cold.document["speculative"]["accepted"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-bits", "8", "--kv-group-size", "32"], "other values of --kv-bits"),
        (["--max-kv-size", "64"], "--prompt-cache and --max-kv-size exclude each other"),
        (["--kv-bits", "8", "--quantized-kv-start", "5"], "needs --quantized-kv-start 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    target: Path, written: Path, options: list[str], message: str
) -> None:
    assert message in refusal(generate(target, "--prompt-cache", written, *options))


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_in_its_header(data: bytes) -> bytes:
    return data[:300]


def flipped_at_the_end(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def flipped_offset(data: bytes) -> bytes:
    old = b'\\"offset\\": {\\"value\\": 2'
    assert old in data
    return data.replace(old, old[:-1] + b"1")


def flipped_shape(data: bytes) -> bytes:
    """Two dimensions of an array exchanged in the header."""
    length = len(PROMPT) + 8 - 1
    old, new = f"[1,2,{length},32]".encode(), f"[1,2,32,{length}]".encode()
    assert old in data
    return data.replace(old, new, 1)


DAMAGES: list[Callable[[bytes], bytes]] = [
    cut,
    cut_in_its_header,
    flipped_at_the_end,
    flipped_offset,
    flipped_shape,
    lambda data: b"",
    lambda data: b"\x00",
    lambda data: b"{}" * 50,
    lambda data: (10**15).to_bytes(8, "little") + data[8:],
    lambda data: (2).to_bytes(8, "little") + b"[]" + data[8:],
    lambda data: (2).to_bytes(8, "little") + b"{}",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line_and_stays_as_it_is(
    target: Path, written: Path, damage: Callable[[bytes], bytes]
) -> None:
    damaged = damage(written.read_bytes())
    written.write_bytes(damaged)
    message = refusal(generate(target, "--prompt-cache", written))
    assert f"--prompt-cache {written}: " in message
    assert "damaged" in message
    assert written.read_bytes() == damaged


@pytest.mark.parametrize("position", range(9, 4000, 397))
def test_any_byte_of_the_description_may_be_wrong(
    target: Path, written: Path, position: int
) -> None:
    data = bytearray(written.read_bytes())
    header = int.from_bytes(data[:8], "little")
    data[min(position, header)] ^= 0x10
    written.write_bytes(data)
    run = generate(target, "--prompt-cache", written)
    assert run.code in (0, 2) and "Traceback" not in run.stderr
    if run.code == 0:
        assert run.ids == generate(target).ids
    else:
        refusal(run)


def test_other_files_are_never_written_over(target: Path, tmp_path: Path) -> None:
    weights = target / "model.safetensors"
    text = tmp_path / "notes.txt"
    text.write_text("a letter", encoding="utf-8")
    for other in (weights, text):
        before = other.read_bytes()
        message = refusal(generate(target, "--prompt-cache", other))
        assert "is not a prompt cache of mlxgen" in message
        assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--prompt-cache needs a file"),
        ("no/such/place", "no such directory"),
        (".", "is not a file"),
        ("/dev/null", "is not a file"),
    ],
)
def test_places_that_cannot_hold_a_file_are_refused(
    target: Path, tmp_path: Path, name: str, message: str
) -> None:
    given = str(tmp_path / name) if name else name
    assert message in refusal(generate(target, "--prompt-cache", given))


def test_a_file_of_another_version_is_refused(target: Path, written: Path) -> None:
    loaded: Any = mx.load(str(written), format="safetensors", return_metadata=True)
    arrays, metadata = loaded
    for key, value, message in (
        ("format", 99, "another version of mlxgen"),
        ("mlx_lm", "0.1", "was written with mlx-lm 0.1"),
    ):
        contents = json.dumps({**json.loads(metadata["mlxgen_prompt_cache"]), key: value})
        header = {
            "mlxgen_prompt_cache": contents,
            "crc32": str(zlib.crc32(contents.encode())),
        }
        other = written.with_suffix(".safetensors")
        mx.save_safetensors(str(other), arrays, header)
        assert message in refusal(generate(target, "--prompt-cache", other))


# Ends in which writing goes wrong, or comes early


def test_a_place_that_cannot_be_written_is_told_after_the_text(target: Path) -> None:
    words = ["generate", "-m", target, "-p", PROMPT, "-n", 8]
    expected = mlxgen_here(*words)
    run = mlxgen_here(*words, "--prompt-cache", "/proc/kept.cache")
    assert run.code == 1
    assert run.text == expected.text
    assert run.lines("[Generated 8 tokens in ")
    (line,) = run.lines("mlxgen: error: ", stream="stderr")
    assert line.startswith("mlxgen: error: --prompt-cache /proc/kept.cache: cannot write it: ")


def test_a_full_disk_keeps_the_old_file(target: Path, written: Path) -> None:
    before = written.read_bytes()

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, resource.RLIM_INFINITY))

    words = ["generate", "-m", target, "-p", PROMPT + " once more", "-n", 8]
    run = subprocess.run(
        command_line(*words, "--prompt-cache", written),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        preexec_fn=limit,
        timeout=120,
    )
    assert run.returncode == 1, run.stderr
    assert b"cannot write it" in run.stderr and b"Traceback" not in run.stderr
    assert written.read_bytes() == before
    assert names(written.parent) == [written.name]


def test_an_interrupted_run_is_kept_up_to_its_last_token(target: Path, file: Path) -> None:
    words: list[object] = ["generate", "-m", target, "-p", PROMPT, "--prompt-cache", file]
    words += ["--temp", 1, "--seed", 3]
    with started(command_line(*words, "-n", 100_000)) as process:
        begun = first_bytes(process, 20)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    text = (begun + rest).decode().split("\n[Interrupted]")[0]
    assert names(file.parent) == [file.name]
    warm = generate(target, "--temp", 1, "--seed", 3, "--prompt-cache", file, prompt=PROMPT + text)
    assert reused(warm) == len(PROMPT) + len(text) - 1
    cold = generate(target, "--temp", 1, "--seed", 3, prompt=PROMPT + text)
    assert warm.ids == cold.ids


def test_interrupted_while_writing_leaves_the_old_file(
    target: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()

    def interrupted(path: str, *_: Any, **__: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", interrupted)
        run = generate(target, "--prompt-cache", written)
    assert run.code == 130
    assert written.read_bytes() == before
    assert names(written.parent) == [written.name]


def test_the_comparison_rejects_a_state_one_token_off(
    target: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = KeptCache.put

    def shifted(self: KeptCache, cached: Any, ids: Any) -> None:
        right(self, cached, ids[1:])

    monkeypatch.setattr(KeptCache, "put", shifted)
    warm = generate(target, "--prompt-cache", written, prompt=PROMPT[1:] + " and")
    assert warm.code == 2 or warm.ids != generate(target, prompt=PROMPT[1:] + " and").ids
