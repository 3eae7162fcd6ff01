"""The prompts of a comparison: a file of the user's, or the set that comes with the package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxgen.errors import InputError

BUNDLED = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Prompt:
    """id: unique in its set. category: "" where the file names none."""

    id: str
    text: str
    category: str = ""


def bundled_prompts() -> tuple[Prompt, ...]:
    """The set written for this project. Categories take turns, so that any head of it is mixed."""
    return read_prompts(str(BUNDLED))


def read_prompts(file: str) -> tuple[Prompt, ...]:
    """The prompts of a UTF-8 file: one a line, or JSONL where its name says so (`.jsonl`).

    A JSONL line is a string, or an object with "prompt" and maybe "id" and "category"; other keys
    are left alone. Empty lines are skipped. Raises `InputError` naming file and line.
    """
    is_json = file.endswith(_JSON_ENDINGS)
    prompts: list[Prompt] = []
    lines_by_id: dict[str, int] = {}
    for number, line in enumerate(_read_lines(file), start=1):
        if not line.strip():
            continue
        place = f"--prompts {file}, line {number}"
        prompt = _from_json(line, number, place) if is_json else Prompt(str(number), line)
        if prompt.id in lines_by_id:
            raise InputError(f"{place}: id {prompt.id!r} stands in line {lines_by_id[prompt.id]}")
        lines_by_id[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"--prompts {file} holds no prompt")
    return tuple(prompts)


def _read_lines(file: str) -> Sequence[str]:
    # Not splitlines(): a prompt may hold U+2028 and its like.
    try:
        data = Path(file).expanduser().read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"--prompts {file}: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # a home that is not known, a NUL in the name
        raise InputError(f"--prompts {file}: {error}") from error
    try:
        return data.decode("utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"--prompts {file}, line {line}: not UTF-8 text") from error


def _from_json(line: str, number: int, place: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise InputError(f"{place}: not JSON that can be read: nested too deeply") from error
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise InputError(f'{place}: a string or an object with "prompt" is needed')
    text, name, category = value.get("prompt"), value.get("id", number), value.get("category", "")
    if not isinstance(text, str):
        raise InputError(f'{place}: "prompt" must be there and be a string')
    if not text.strip():
        raise InputError(f"{place}: the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: the prompt is not UTF-8 text") from error
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f'{place}: "id" must be a string or a whole number')
    if not isinstance(category, str):
        raise InputError(f'{place}: "category" must be a string')
    return Prompt(str(name), text, category)
