"""Prompts reach the tokenizer byte for byte, and through a chat template where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fixtures.command import Outcome, mlxgen_here, mlxgen_process
from tests.fixtures.model_directories import Vocabulary
from tests.fixtures.runs import ModelStore
from tests.fixtures.tokenizers import byte_vocabulary

LONG_TOKEN = "<" + "x" * 998 + ">"
TEXTS = [
    r"日本語 \n é C:\new",
    "  leading and trailing \t ",
    "\n\nlines\r\nof\rall kinds\n",
    " ",
    "\n",
    "-5",
    "--prompt",
    "\ufeffbyte order mark",
    "nul \0 inside",
    "e\u0301 👩\u200d👧 \U0001f1e9\U0001f1ea",
    "%s {0} $HOME `x` [bold]markup[/bold] \x1b[31m",
]


@pytest.fixture
def bytewise(models: ModelStore) -> Path:
    """A model whose id b is the byte b; id 256 is a token of a thousand characters."""
    return models.llama_directory(1, vocabulary=byte_vocabulary(LONG_TOKEN))


def prompt_bytes(run: Outcome) -> bytes:
    """The prompt as the model saw it."""
    ids = run.document["prompt_ids"]
    assert len(ids) == run.document["prompt_tokens"]
    return b"".join(LONG_TOKEN.encode() if i == 256 else bytes([i]) for i in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_every_way_in_keeps_the_bytes_of_a_prompt(
    bytewise: Path, tmp_path: Path, text: str
) -> None:
    words = ["generate", "-m", bytewise, "-n", 1, "--json"]
    data = text.encode()
    file = tmp_path / "prompt.txt"
    file.write_bytes(data)
    assert prompt_bytes(mlxgen_here(*words, f"--prompt={text}")) == data
    assert prompt_bytes(mlxgen_here(*words, "-p", text)) == data
    assert prompt_bytes(mlxgen_here(*words, "-p", "-", stdin=data)) == data
    assert prompt_bytes(mlxgen_here(*words, stdin=data)) == data
    assert prompt_bytes(mlxgen_here(*words, "-f", file)) == data


def test_bytes_survive_a_process_under_another_locale(bytewise: Path, tmp_path: Path) -> None:
    data = TEXTS[0].encode()
    words = ["generate", "-m", bytewise, "-n", 1, "--json"]
    latin = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}
    assert prompt_bytes(mlxgen_process(*words, stdin=data, variables=latin)) == data


def test_a_pipe_of_200_kilobytes_is_read_to_its_end(bytewise: Path) -> None:
    data = LONG_TOKEN.encode() * 200 + "é\n".encode()
    run = mlxgen_process("generate", "-m", bytewise, "-n", 1, "--json", stdin=data)
    assert prompt_bytes(run) == data
    assert run.document["prompt_tokens"] == 203


def test_piped_input_is_left_alone_when_a_prompt_is_given(bytewise: Path) -> None:
    run = mlxgen_here(
        "generate", "-m", bytewise, "-n", 1, "--json", "-p", "words", stdin=b"\xff piped"
    )
    assert prompt_bytes(run) == b"words"


def test_prompt_file_may_stand_in_the_home_directory(bytewise: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"at home")
    words = ["generate", "-m", bytewise, "-n", 1, "--json", "-f", "~/prompt.txt"]
    assert prompt_bytes(mlxgen_here(*words, variables={"HOME": str(tmp_path)})) == b"at home"


@pytest.mark.parametrize("name", ["with space", "déjà", "-dash", "~tilde", "trailing/"])
def test_model_directory_may_have_any_name(
    bytewise: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name.rstrip("/")).symlink_to(bytewise)
    monkeypatch.chdir(tmp_path)
    reference = f"./{name}" if name.startswith("~") else name
    run = mlxgen_here("generate", f"--model={reference}", "-p", "a", "-n", 1, "--json")
    assert run.document["generated_tokens"] == 1


def test_home_in_a_model_path_is_expanded(bytewise: Path) -> None:
    home, name = os.path.split(bytewise)
    run = mlxgen_here(
        "generate", "-m", f"~/{name}", "-p", "a", "-n", 1, "--json", variables={"HOME": home}
    )
    assert run.document["models"]["target"] == str(bytewise)


# The vocabulary of the template tests has no letters but these, so ids and text are one to one.
SYMBOLS = "abcdefghijklmnopqrstuvwxyz :/\n{}'ABC"
TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}:{{ m.content }}/{% endfor %}"
    "{% if mood is defined %}{{ mood }}/{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
STRICT += "{% endif %}{{ m.content }}{% endfor %}"


def chat_vocabulary(template: str | None, *, bos: str | None = "<s>") -> Vocabulary:
    return Vocabulary(SYMBOLS, ("<s>", "</s>"), bos=bos, eos="</s>", chat_template=template)


def prompt_text(target: Path, *options: object) -> str:
    """The prompt that the model saw, special tokens spelled out."""
    run = mlxgen_here("generate", "-m", target, "-n", 1, "--json", *options)
    tokens = chat_vocabulary(None).tokens
    return "".join(tokens[i] for i in run.document["prompt_ids"])


@pytest.fixture
def chatty(models: ModelStore) -> Path:
    return models.llama_directory(1, vocabulary=chat_vocabulary(TEMPLATE))


def test_template_renders_prompt_and_system_text(chatty: Path) -> None:
    assert prompt_text(chatty, "-p", "hi") == "<s>user:hi/assistant:"
    with_system = prompt_text(chatty, "-p", "hi", "--system", "be kind")
    assert with_system == "<s>system:be kind/user:hi/assistant:"


def test_template_arguments_reach_the_template(chatty: Path) -> None:
    options = ["-p", "hi", "--chat-template-args", '{"mood": "glad"}']
    assert prompt_text(chatty, *options) == "<s>user:hi/glad/assistant:"


def test_prompt_has_one_bos_in_template_and_raw_mode(chatty: Path, models: ModelStore) -> None:
    for options in ([], ["--system", "a"], ["--no-chat-template"]):
        text = prompt_text(chatty, "-p", "hi", *options)
        assert text.startswith("<s>") and text.count("<s>") == 1
    assert prompt_text(chatty, "-p", "hi", "--no-chat-template") == "<s>hi"
    assert prompt_text(chatty, "-p", "<s>hi", "--no-chat-template") == "<s>hi"
    no_template = models.llama_directory(1, vocabulary=chat_vocabulary(None))
    assert prompt_text(no_template, "-p", "hi") == "<s>hi"
    no_bos = models.llama_directory(1, vocabulary=chat_vocabulary(None, bos=None))
    assert prompt_text(no_bos, "-p", "hi") == "hi"


def test_text_that_spells_a_special_token_becomes_it(chatty: Path) -> None:
    assert prompt_text(chatty, "-p", "a</s>b", "--no-chat-template") == "<s>a</s>b"
    run = mlxgen_here(
        "generate", "-m", chatty, "-n", 1, "--json", "-p", "</s>", "--no-chat-template"
    )
    assert run.document["prompt_ids"] == [len(SYMBOLS), len(SYMBOLS) + 1]


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (STRICT, ["--system", "a"], "chat template rejected the request: no system here"),
        ("{{ messages[5].content }}", [], "chat template rejected the request"),
        ("{% for %}", [], "chat template rejected the request"),
        (None, ["--system", "a"], "--system needs a chat template, and this model has none"),
        (TEMPLATE, ["--no-chat-template", "--system", "a"], "--no-chat-template is set"),
        (
            TEMPLATE,
            ["--no-chat-template", "--chat-template-args", "{}"],
            "--chat-template-args needs a chat template, and --no-chat-template is set",
        ),
    ],
)
def test_template_that_cannot_serve_is_an_error_not_a_silent_drop(
    models: ModelStore, template: str | None, options: list[str], message: str
) -> None:
    target = models.llama_directory(1, vocabulary=chat_vocabulary(template))
    run = mlxgen_here("generate", "-m", target, "-p", "hi", "-n", 1, *options)
    assert run.code == 2 and message in run.error


def test_rejected_system_text_leaves_the_raw_prompt_usable(models: ModelStore) -> None:
    target = models.llama_directory(1, vocabulary=chat_vocabulary(STRICT))
    assert prompt_text(target, "-p", "hi") == "hi"
    assert prompt_text(target, "-p", "hi", "--no-chat-template") == "<s>hi"


@pytest.mark.parametrize("k", [0, 4])
def test_template_text_is_the_same_with_and_without_a_draft(
    models: ModelStore, chatty: Path, k: int
) -> None:
    draft = models.llama_directory(2, vocabulary=chat_vocabulary(None))
    words = ["generate", "-m", chatty, "-p", "hi", "-n", 12, "--json", "--system", "a"]
    plain = mlxgen_here(*words).document
    found = mlxgen_here(*words, "--draft-model", draft, "--num-draft-tokens", k).document
    for field in ("prompt_ids", "token_ids", "text"):
        assert found[field] == plain[field]
