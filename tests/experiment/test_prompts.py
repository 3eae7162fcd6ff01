"""Prompt files, and the set that comes with the package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mlxgen.errors import InputError
from mlxgen.experiment.prompts import Prompt, bundled_prompts, read_prompts


def written(directory: Path, name: str, content: str | bytes) -> str:
    path = directory / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_the_bundled_set_is_varied_and_so_is_any_head_of_it() -> None:
    prompts = bundled_prompts()
    assert len(prompts) == 40
    assert len({prompt.text for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 40
    kinds = {"chat", "code", "story", "list", "maths", "translation", "edit", "long"}
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(kinds, 5)
    assert {prompt.category for prompt in prompts[:8]} == kinds
    assert all(len(prompt.text) > 1200 for prompt in prompts if prompt.category == "long")


def test_one_prompt_a_line(tmp_path: Path) -> None:
    text = '\ufeffone\r\n\n  two \n{"prompt": "three"}\nfour\u2028five'
    assert read_prompts(written(tmp_path, "p.txt", text)) == (
        Prompt("1", "one"),
        Prompt("3", "  two "),
        Prompt("4", '{"prompt": "three"}'),
        Prompt("5", "four\u2028five"),
    )


def test_jsonl_of_strings_and_objects(tmp_path: Path) -> None:
    text = '"a\\nb"\n\n{"prompt": "c", "id": "x", "category": "chat", "more": [1]}\n'
    assert read_prompts(written(tmp_path, "p.jsonl", text)) == (
        Prompt("1", "a\nb"),
        Prompt("x", "c", "chat"),
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", " holds no prompt"),
        ("p.txt", "\n  \n", " holds no prompt"),
        ("p.jsonl", "\n", " holds no prompt"),
        ("p.txt", b"ok\nna\xefve\n", ", line 2: not UTF-8 text"),
        ("p.jsonl", '"a"\n{"prompt": \n', ", line 2: not JSON: Expecting value (column 12)"),
        ("p.jsonl", '"a"\n\n3\n', ', line 3: a string or an object with "prompt" is needed'),
        ("p.jsonl", '{"text": "a"}', ', line 1: "prompt" must be there and be a string'),
        ("p.jsonl", '{"prompt": ["a"]}', ', line 1: "prompt" must be there and be a string'),
        ("p.jsonl", '"a"\n""', ", line 2: the prompt is empty"),
        ("p.jsonl", '{"prompt": "\\ud800"}', ", line 1: the prompt is not UTF-8 text"),
        ("p.jsonl", '{"prompt": "a", "id": 1.5}', ', line 1: "id" must be a string'),
        ("p.jsonl", '{"prompt": "a", "category": 1}', ', line 1: "category" must be a string'),
        ("p.jsonl", '{"prompt": "a", "id": 2}\n"b"', ", line 2: id '2' stands in line 1"),
        ("p.jsonl", "[" * 100_000, ", line 1: not JSON"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    file = written(tmp_path, name, content)
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    assert str(caught.value).startswith(f"--prompts {file}{message}")
    assert "\n" not in str(caught.value)


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.txt: No such file or directory"):
        read_prompts(str(tmp_path / "nowhere.txt"))
    with pytest.raises(InputError, match="Is a directory"):
        read_prompts(str(tmp_path))
