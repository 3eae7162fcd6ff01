"""Model directories that somebody else made: whatever their files hold, a run ends soon, with one
line that says what is wrong and what helps, and nothing of theirs runs that nobody asked for."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxgen
from mlxgen.errors import InputError
from mlxgen.text import prompt
from tests.fixtures.command import Outcome, mlxgen_here, mlxgen_process
from tests.fixtures.model_directories import SYMBOLS_64, Vocabulary, write_llama
from tests.fixtures.runs import ModelStore

Edit = Callable[[Path], object]
HEAD = "lm_head.weight"
AGAIN = "fetch the model again"
_SOON_S = 20
"""Far above the second that a case takes, far below what an endless one would."""


def config(**entries: object) -> Edit:
    """Change entries of config.json."""
    return _json_edit("config.json", entries)


def tokenizer_config(**entries: object) -> Edit:
    """Change entries of tokenizer_config.json."""
    return _json_edit("tokenizer_config.json", entries)


def _json_edit(name: str, entries: Mapping[str, object]) -> Edit:
    def edit(directory: Path) -> None:
        file = directory / name
        content = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**content, **entries}), encoding="utf-8")

    return edit


def text(name: str, content: str) -> Edit:
    """Replace a file."""
    return lambda directory: (directory / name).write_text(content, encoding="utf-8")


def removed(*names: str) -> Edit:
    """Remove files."""

    def edit(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return edit


def weights(change: Callable[[bytes], bytes]) -> Edit:
    """Change the bytes of the weights."""

    def edit(directory: Path) -> None:
        file = directory / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return edit


def header(**entries: object) -> Edit:
    """Change what the weights' header says of the head."""

    def change(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        described = json.loads(data[8 : 8 + length])
        described[HEAD] |= entries
        written = json.dumps(described).encode()
        return struct.pack("<Q", len(written)) + written + data[8 + length :]

    return weights(change)


def header_length(length: int) -> Edit:
    """Change the length that the weights give for their header."""
    return weights(lambda data: struct.pack("<Q", length) + data[8:])


def arrays(change: Callable[[dict[str, mx.array]], object]) -> Edit:
    """Change the weights' arrays."""

    def edit(directory: Path) -> None:
        file = str(directory / "model.safetensors")
        loaded: Any = mx.load(file)
        mx.eval(loaded)
        change(loaded)
        mx.save_safetensors(file, loaded)

    return edit


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change tokenizer.json."""

    def edit(directory: Path) -> None:
        file = directory / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        change(content)
        file.write_text(json.dumps(content), encoding="utf-8")

    return edit


def both(*edits: Edit) -> Edit:
    """One edit after the other."""
    return lambda directory: [edit(directory) for edit in edits]


def pipe(name: str) -> Edit:
    """Put a pipe that nobody writes to in a file's place."""

    def edit(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return edit


SHARDS = json.dumps({"weight_map": {HEAD: "model-00002-of-00002.safetensors"}})
OUTSIDE = json.dumps({"weight_map": {HEAD: "../../outside.safetensors", "x": "/etc/passwd"}})
SIZES = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
)

# Edit -> two pieces of the message: what is wrong, and what helps.
DAMAGE: dict[str, tuple[Edit, str, str]] = {
    "config cut": (text("config.json", '{"model_type": "lla'), "config.json: ", "Unterminated"),
    "config nested": (text("config.json", "[" * 10**5), "config.json: ", "recursion"),
    "config a number": (text("config.json", "NaN"), "config.json: ", "a JSON object is needed"),
    "sizes agree on nothing": (config(hidden_size=128), "Expected shape", AGAIN),
    "more layers than weights": (config(num_hidden_layers=50), "Missing", AGAIN),
    "fewer layers than weights": (config(num_hidden_layers=1), "parameters not in model", AGAIN),
    "rope of no kind": (config(rope_scaling={"type": "x"}), "Unsupported RoPE type x", AGAIN),
    "rope divided by 0": (config(rope_scaling={"type": "linear", "factor": 0}), "zero", AGAIN),
    "rope a list": (config(rope_scaling=[3]), "'list'", AGAIN),
    "base of rope a text": (config(rope_theta="x"), "rope()", AGAIN),
    "eps of 0": (config(rms_norm_eps=0), "'eps' must be positive", AGAIN),
    "window of -5": (
        config(layer_types=["full_attention", "sliding_attention"], sliding_window=-5),
        "Negative dimensions",
        AGAIN,
    ),
    "layers of no kind": (config(layer_types=["bogus"]), "'full_attention'", AGAIN),
    "quantised by nothing": (config(quantization=3), "'int'", AGAIN),
    "ids of ends no ids": (config(eos_token_id=["x", {}]), "eos_token_id", AGAIN),
    "module of no model": (config(model_type="base"), "'Model'", "choose another"),
    "module outside": (config(model_type="../../os"), "not supported", "choose another"),
    "type of 5000 letters": (config(model_type="a" * 5000), "aaa...", "choose another"),
    "code of its own": (config(model_file="own.py"), "own.py", "--trust-remote-code"),
    "code from elsewhere": (config(model_file="../own.py"), "own.py", "--trust-remote-code"),
    "code for the tokenizer": (
        tokenizer_config(auto_map={"AutoTokenizer": ["own.T", "own.T"]}, tokenizer_class="T"),
        "code of its own",
        "--trust-remote-code",
    ),
    "weights empty": (weights(lambda data: b""), "Unable to read 8 bytes", AGAIN),
    "header cut": (weights(lambda data: data[:500]), "incomplete download", AGAIN),
    "data cut": (weights(lambda data: data[:-1000]), "exceeding the size of the file", AGAIN),
    "header of 9e18 bytes": (header_length(1 << 63), "Invalid json header length", AGAIN),
    "header of 99 MB": (header_length(99_000_000), "99000000 bytes long", AGAIN),
    "header no JSON": (weights(lambda data: struct.pack("<Q", 4) + b"oops"), "parse", AGAIN),
    "header a list": (weights(lambda data: struct.pack("<Q", 2) + b"[]"), "metadata", AGAIN),
    "data behind the end": (header(data_offsets=[10**9, 10**9 + 16384]), "exceeding", AGAIN),
    "data before the start": (header(data_offsets=[-100, 16284]), "invalid data offsets", AGAIN),
    "data backwards": (header(data_offsets=[16384, 0]), "invalid data offsets", AGAIN),
    "data too short": (header(data_offsets=[0, 4]), "Expecting 16384 bytes", AGAIN),
    "data of 2^80 numbers": (header(shape=[2**40, 2**40]), "invalid data offsets", AGAIN),
    "shape below 0": (header(shape=[-64, -64]), "Expected shape (64, 64)", AGAIN),
    "numbers of no type": (header(dtype="X9"), "unsupported dtype X9", AGAIN),
    "weight of another shape": (
        arrays(lambda loaded: loaded.update({HEAD: mx.zeros((64, 32))})),
        "Expected shape (64, 64) but received shape (64, 32)",
        AGAIN,
    ),
    "weights a pipe": (pipe("model.safetensors"), "no regular file", "remove or replace it"),
    "tokenizer a pipe": (pipe("tokenizer.json"), "no regular file", "remove or replace it"),
    "template a pipe": (pipe("chat_template.jinja"), "no regular file", "remove or replace it"),
    "shard missing": (
        both(text("model.safetensors.index.json", SHARDS), arrays(lambda loaded: loaded.pop(HEAD))),
        "model-00002-of-00002.safetensors is missing",
        AGAIN,
    ),
    "tokenizer missing": (removed("tokenizer.json", "tokenizer_config.json"), "tokenizer", AGAIN),
    "tokenizer a list": (text("tokenizer.json", "[]"), "tokenizer's files", AGAIN),
    "tokenizer nested": (text("tokenizer.json", "[" * 10**5), "recursion", AGAIN),
    "tokenizer empty": (text("tokenizer.json", "{}"), "added_tokens", AGAIN),
    "id of 2^40": (tokenizer(lambda t: t["model"]["vocab"].update(z=2**40)), "u32", AGAIN),
    "id of -1": (tokenizer(lambda t: t["model"]["vocab"].update(z=-1)), "u32", AGAIN),
    "tokenizer config a list": (text("tokenizer_config.json", "[]"), "'list'", AGAIN),
    "tokenizer config no JSON": (text("tokenizer_config.json", "{"), "Expecting", AGAIN),
    "end token a number": (tokenizer_config(eos_token=3), "eos_token", AGAIN),
    "tokenizer class a number": (tokenizer_config(tokenizer_class=3), "'int'", AGAIN),
    "longest text a word": (tokenizer_config(model_max_length="x"), "'str'", AGAIN),
    "module of no template": (tokenizer_config(chat_template_type="../x"), "module", AGAIN),
} | {
    f"{key} = {value}": (config(**{key: value}), f"says {key} = ", AGAIN)
    for key in SIZES
    for value in (-1, 10**30, 1.5, float("nan"), float("inf"), "x", True)
}


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """No test of this file may take long."""
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < _SOON_S


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Edit], Path]:
    """`edited(edit)`: a copy of a model with something done to its files."""

    def make(edit: Edit) -> Path:
        directory = write_llama(tmp_path / "edited", 1)
        edit(directory)
        return directory

    return make


def pair_words(
    models: ModelStore, directory: Path, role: str, command: str = "generate"
) -> list[object]:
    """A command on a directory, as target or as draft of a healthy model."""
    healthy = models.llama_directory(1)
    target, draft = (directory, healthy) if role == "target" else (healthy, directory)
    return [command, "-m", target, "--draft-model", draft]


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_with_cause_and_cure(
    models: ModelStore, edited: Callable[[Edit], Path], name: str, role: str
) -> None:
    edit, cause, cure = DAMAGE[name]
    directory = edited(edit)
    run = mlxgen_here(*pair_words(models, directory, role), "-p", "ab", "-n", 2)
    assert run.code == 2, run.stderr
    assert cause in run.error and cure in run.error and str(directory) in run.error
    assert len(run.error) < 700


@pytest.mark.parametrize("command", ["verify", "compare"])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", ["data cut", "code of its own", "hidden_size = nan"])
def test_other_commands_tell_damage_alike(
    models: ModelStore, edited: Callable[[Edit], Path], name: str, role: str, command: str
) -> None:
    edit, cause, cure = DAMAGE[name]
    run = mlxgen_here(*pair_words(models, edited(edit), role, command), "-n", 2)
    assert run.code == 2 and cause in run.stderr and cure in run.stderr
    assert run.stderr.count("mlxgen: error: ") == 1 and "Traceback" not in run.stderr


HARMLESS: dict[str, Edit] = {
    "index of missing shards beside whole weights": text("model.safetensors.index.json", SHARDS),
    "index that leads outside": text("model.safetensors.index.json", OUTSIDE),
    "index no JSON": text("model.safetensors.index.json", "{"),
    "code named but not needed": config(auto_map={"AutoModelForCausalLM": "own.Model"}),
    "end ids of 2^31 and more": config(eos_token_id=[2**31, 2**40]),
    "end ids no ids": text("generation_config.json", '{"eos_token_id": ["x", -1, {}, 1e99]}'),
    "recommendations no numbers": text(
        "generation_config.json", '{"temperature": 1e999, "top_k": 1e400, "top_p": NaN}'
    ),
    "top-k of 1e300": text("generation_config.json", '{"top_k": 1e300}'),
    "window longer than the world": config(max_position_embeddings=2**31),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", HARMLESS)
def test_nonsense_that_says_nothing_changes_nothing(
    models: ModelStore, edited: Callable[[Edit], Path], name: str, role: str
) -> None:
    words = pair_words(models, edited(HARMLESS[name]), role)
    # XTC looks at end-of-sequence tokens, DRY at the history.
    options = ["--xtc-probability", 0.5, "--dry-multiplier", 1, "--temp", 1, "--seed", 3, "--json"]
    run = mlxgen_here(*words, "-p", "ab", "-n", 12, *options)
    wanted = mlxgen_here(
        "generate", "-m", models.llama_directory(1), "-p", "ab", "-n", 12, *options
    )
    assert run.ids == wanted.ids


def renamed(**ids: int) -> Callable[[dict[str, Any]], object]:
    """Give tokens other ids."""
    return lambda content: content["model"]["vocab"].update(ids)


def added(token_id: int) -> Callable[[dict[str, Any]], object]:
    """Add a special token."""
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    entry = {"id": token_id, "content": "<x>", "special": True, **token}
    return lambda content: content["added_tokens"].append(entry)


@pytest.mark.parametrize(
    "change",
    [renamed(b=0), renamed(z=10**6), renamed(z=2**32 - 1), added(64), added(10**6), added(3)],
    ids=["twice", "10^6", "2^32-1", "added 64", "added 10^6", "added 3"],
)
@pytest.mark.parametrize("options", [[], ["--temp", 1, "--accept-rule", "block"]])
def test_ids_that_the_model_does_not_have_are_never_looked_up(
    models: ModelStore, edited: Callable[[Edit], Path], change: Any, options: list[object]
) -> None:
    """Target and draft alike, or the target alone, whose vocabulary is then another."""
    directory = edited(tokenizer(change))
    words: list[object] = ["generate", "-m", directory, "-p", "ac", "-n", 12, "--json", *options]
    run = mlxgen_here(*words, "--draft-model", directory)
    assert run.code == 0 and max(run.ids) < 64
    against = mlxgen_here(*words, "--draft-model", models.llama_directory(1))
    assert against.code == 0 or "the draft has another vocabulary" in against.error


def test_a_prompt_of_ids_that_the_model_does_not_have_is_refused(
    edited: Callable[[Edit], Path],
) -> None:
    directory = edited(tokenizer(renamed(z=10**6)))
    run = mlxgen_here("generate", "-m", directory, "-p", "az", "-n", 2)
    assert run.code == 2 and "the prompt holds token 1000000" in run.error


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weight", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_weights_that_are_no_numbers_end_the_run(
    models: ModelStore, edited: Callable[[Edit], Path], weight: str, value: float, role: str
) -> None:
    def change(loaded: dict[str, mx.array]) -> None:
        numbers = np.array(loaded[weight])
        numbers.flat[:] = value
        loaded[weight] = mx.array(numbers)

    run = mlxgen_here(*pair_words(models, edited(arrays(change)), role), "-p", "ab", "--json")
    assert run.code == 1 and f"the {role} model's logits are not usable at step" in run.error


# --- Code.


OWN_CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from mlx_lm.models.llama import Model, ModelArgs
"""


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("command", ["generate", "verify", "compare"])
def test_code_of_a_model_runs_when_it_is_asked_for_and_never_else(
    models: ModelStore, edited: Callable[[Edit], Path], command: str, role: str
) -> None:
    directory = edited(both(config(model_file="own.py"), text("own.py", OWN_CODE)))
    prompts: list[object] = ["--num-prompts", 1] if command == "compare" else ["-p", "ab"]
    words = [*pair_words(models, directory, role, command), "-n", 2, *prompts]
    assert mlxgen_here(*words).code == 2 and not (directory / "ran").exists()
    mlxgen_here(*words, "--trust-remote-code")
    assert (directory / "ran").exists()


@pytest.mark.parametrize("is_typed", [False, True])
def test_nobody_is_asked_whether_code_may_run(
    edited: Callable[[Edit], Path], is_typed: bool
) -> None:
    """transformers would ask on stdout, and take what is piped in for the answer."""
    code = OWN_CODE.replace("mlx_lm.models.llama import Model, ModelArgs", "typing import Any as T")
    auto_map = {"AutoTokenizer": ["own.T", "own.T"]}
    directory = edited(
        both(tokenizer_config(auto_map=auto_map, tokenizer_class="T"), text("own.py", code))
    )
    run = mlxgen_here("generate", "-m", directory, "-n", 2, stdin=b"y\n", is_typed=is_typed)
    assert run.code == 2 and "--trust-remote-code" in run.error
    assert not list(directory.parent.rglob("ran"))


def test_code_from_outside_the_directory_is_refused_even_when_code_is_trusted(
    models: ModelStore, edited: Callable[[Edit], Path]
) -> None:
    directory = edited(config(model_file="../own.py"))
    (directory.parent / "own.py").write_text(OWN_CODE, encoding="utf-8")
    words = ["generate", "-m", directory, "-p", "ab", "-n", 2, "--trust-remote-code"]
    run = mlxgen_here(*words)
    assert run.code == 2 and "is not inside its directory" in run.error
    assert not (directory.parent / "ran").exists()


# --- Adapters.


def adapter(
    directory: Path, *, rank: int = 2, content: str | None = None, **entries: object
) -> Path:
    """An adapter that changes the queries of the last layer; entries: of its config."""
    directory.mkdir()
    lora: dict[str, object] = {"rank": 2, "scale": 9.0, "dropout": 0.0}
    lora["keys"] = ["self_attn.q_proj"]
    lora |= {name: entries.pop(name) for name in list(entries) if name in lora}
    written = json.dumps({"num_layers": 1, "lora_parameters": lora, **entries})
    (directory / "adapter_config.json").write_text(content or written, encoding="utf-8")
    path = "model.layers.1.self_attn.q_proj.lora_"
    made = {f"{path}a": mx.ones((64, rank)), f"{path}b": mx.ones((rank, 64))}
    mx.save_safetensors(str(directory / "adapters.safetensors"), made)
    return directory


BAD_ADAPTERS: dict[str, dict[str, Any]] = {
    "no JSON": {"content": "{"},
    "a list": {"content": "[]"},
    "nested": {"content": "[" * 10**5},
    "nothing": {"content": "{}"},
    "rank of the weights": {"rank": 3},
    "rank below 0": {"lora_parameters": {"rank": -1, "scale": 1, "dropout": 0}},
    "rank of 10^30": {"lora_parameters": {"rank": 10**30, "scale": 1, "dropout": 0}},
    "layers a word": {"num_layers": "x"},
    "dropout of 2": {"lora_parameters": {"rank": 2, "scale": 1, "dropout": 2}},
}


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_a_bad_adapter_is_one_line_naming_it(models: ModelStore, tmp_path: Path, name: str) -> None:
    bad = adapter(tmp_path / "adapter", **BAD_ADAPTERS[name])
    words = ["generate", "-m", models.llama_directory(1), "-p", "ab", "-n", 2, "--adapter", bad]
    run = mlxgen_here(*words)
    assert run.code == 2 and f"with --adapter {bad}: " in run.error
    assert "one that was made for this model" in run.error


@pytest.mark.parametrize("cut", [None, 0, 5, 100])
def test_an_adapter_without_all_its_weights_is_one_line(
    models: ModelStore, tmp_path: Path, cut: int | None
) -> None:
    bad = adapter(tmp_path / "adapter")
    file = bad / "adapters.safetensors"
    if cut is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:cut])
    words = ["generate", "-m", models.llama_directory(1), "-p", "ab", "-n", 2, "--adapter", bad]
    run = mlxgen_here(*words)
    assert run.code == 2 and "one that was made for this model" in run.error


def test_an_adapter_that_is_a_pipe_is_not_waited_for(models: ModelStore, tmp_path: Path) -> None:
    bad = adapter(tmp_path / "adapter")
    pipe("adapters.safetensors")(bad)
    words = ["generate", "-m", models.llama_directory(1), "-p", "ab", "-n", 2, "--adapter", bad]
    run = mlxgen_here(*words)
    assert run.code == 2 and "adapters.safetensors is no regular file" in run.error


# --- Chat templates.


SYMBOLS = SYMBOLS_64[:-2] + " \n"
MORE = "asks for too much: it takes more than"
TEMPLATES: dict[str, tuple[str, str]] = {
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        f"{MORE} 0.5 seconds",
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        f"{MORE} 0.5 seconds",
    ),
    "a macro that calls itself for ever": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "recursion",
    ),
    "a text of 10 GB": ("{{ 'a' * 10**10 }}", MORE),
    "a line of 10 GB": ("{{ 'a'.center(10**10) }}", MORE),
    "a number of 10 GB": ("{{ '%10000000000d' % 1 }}", MORE),
    "a list of 10^10": ("{{ ([1] * 10**10)|length }}", MORE),
    "a text that doubles": (
        "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}"
        "{% endfor %}{{ n.a }}",
        MORE,
    ),
    "ten thousand paragraphs and more": ("{{ lipsum(n=10**7) }}", f"{MORE} 0.5 seconds"),
    "an indent of 10^10": ("{{ messages|tojson(indent=10**10) }}", MORE),
    "a range of 10^12": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    "a text of 1.5 MB": ("{{ 'a' * 1500000 }}", "asks for too much: it writes more than"),
    "the classes of Python": ("{{ ''.__class__.__mro__ }}", "is unsafe"),
    "a shell": ("{{ cycler.__init__.__globals__.os.system('id') }}", "is unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "a change to the messages": ("{{ messages[0].update({}) }}", "is unsafe"),
    "its own error": ("{{ raise_exception('no\nway') }}", "rejected the request: no"),
    "a division by 0": ("{{ 1 / 0 }}", "division by zero"),
    "a name of nothing": ("{{ nothing.at.all }}", "undefined"),
    "no template": ("{% for %}", "Expected an expression"),
    "brackets in brackets": ("{{" + "(" * 2000 + "1" + ")" * 2000 + "}}", "recursion"),
    "half a character": ("{{ '\\ud800' }}", "writes no valid text"),
    "nothing": ("", "nothing that this model's tokenizer can represent"),
}


def with_template(directory: Path, template: str) -> Path:
    """A model whose chat template is this."""
    return write_llama(directory, 1, vocabulary=Vocabulary(SYMBOLS, chat_template=template))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give templates half a second, so that the tests are quick."""
    monkeypatch.setattr(prompt, "TEMPLATE_SECONDS", 0.5)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_bad_template_is_one_line_and_soon(tmp_path: Path, impatient: None, name: str) -> None:
    template, cause = TEMPLATES[name]
    directory = with_template(tmp_path, template)
    run = mlxgen_here("generate", "-m", directory, "-p", "ab", "-n", 2)
    assert run.code == 2 and cause in run.error and len(run.error) < 400
    assert "--no-chat-template" in run.error or name == "nothing"
    raw = mlxgen_here("generate", "-m", directory, "-p", "ab", "-n", 2, "--no-chat-template")
    assert raw.code == 0


def test_a_template_of_the_draft_is_not_rendered(models: ModelStore, tmp_path: Path) -> None:
    vocabulary = Vocabulary(SYMBOLS)
    target = models.llama_directory(1, vocabulary=vocabulary)
    draft = with_template(tmp_path, TEMPLATES["loops in loops"][0])
    words = ["generate", "-m", target, "--draft-model", draft, "-p", "ab", "-n", 2]
    assert mlxgen_here(*words).code == 0


@pytest.mark.parametrize("command", ["verify", "compare"])
def test_other_commands_bound_templates_alike(
    tmp_path: Path, impatient: None, command: str
) -> None:
    directory = with_template(tmp_path, TEMPLATES["loops in loops"][0])
    run = mlxgen_here(command, "-m", directory, "--draft-model", directory, "-n", 2)
    assert run.code == 2 and MORE in run.stderr and "Traceback" not in run.stderr


def test_a_chat_goes_on_after_a_template_that_does_not_end(tmp_path: Path, impatient: None) -> None:
    loops = TEMPLATES["loops in loops"][0]
    template = (
        "{% if messages[-1].content == 'no' %}" + loops + "{% endif %}{{ messages[-1].content }}"
    )
    directory = with_template(tmp_path, template)
    # Whoever types is on a terminal.
    run = mlxgen_here(
        "generate", "-m", directory, "-n", 2, "--quiet", stdin=b"no\nyes\n", is_typed=True
    )
    assert run.code == 0 and MORE in run.stderr and run.out.count(b"\n") == 1


def test_the_check_rejects_templates_without_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = mlxgen.load(str(with_template(tmp_path, TEMPLATES["a text of 1.5 MB"][0])))
    with pytest.raises(InputError, match="writes more than"):
        prompt.encode_prompt(loaded.tokenizer, "ab")
    monkeypatch.setattr(prompt, "call_bounded", lambda render, **_: render())
    assert len(prompt.encode_prompt(loaded.tokenizer, "ab")) == 1_500_000


def test_what_templates_may_write_grows_with_what_they_are_given(tmp_path: Path) -> None:
    loaded = mlxgen.load(str(with_template(tmp_path, "{{ messages[0].content * 9 }}")))
    assert len(prompt.encode_prompt(loaded.tokenizer, "a" * 150_000)) == 1_350_000


@pytest.mark.slow
def test_the_limit_of_a_process_of_its_own_is_a_few_seconds(tmp_path: Path) -> None:
    """With the time that people get, and no pytest around it."""
    directory = with_template(tmp_path, TEMPLATES["loops in loops"][0])
    run: Outcome = mlxgen_process("generate", "-m", directory, "-p", "ab", "-n", 2)
    assert run.code == 2 and f"{MORE} 5 seconds" in run.error


def test_a_tokenizer_whose_pattern_gives_up_is_told(edited: Callable[[Edit], Path]) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "^(a+)+$"}, "behavior": "Isolated"}
    directory = edited(
        tokenizer(lambda content: content.update(pre_tokenizer={**pattern, "invert": False}))
    )
    run = mlxgen_here("generate", "-m", directory, "-p", "a" * 40 + "b", "-n", 2)
    assert run.code == 2 and "tokenizer fails on this prompt" in run.error and AGAIN in run.error
