"""Damaged prompts, prompt sets, journals and prompt caches."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from random import Random

from fuzzing.child import Case
from fuzzing.mutations import damaged_bytes, damaged_json, damaged_lines, damaged_safetensors
from fuzzing.valid import COMPARE, JOURNAL, KEEPING, PROMPT, PROMPTS


def read_file(draw: Random, base: Path) -> Case:
    """A prompt, a prompt set, a journal or a prompt cache, damaged."""
    return draw.choice((_prompt, _prompt_set, _journal, _prompt_cache))(draw, base)


def _prompt(draw: Random, base: Path) -> Case:
    text = draw.choice((PROMPT, "é" * 20, "<eos>", "", "\x00", "\u2028", "\ufeff", " ", "\r\n"))
    data = text.encode()
    if draw.random() < 0.7:
        data = damaged_bytes(draw, data)
    if len(data) > 1000:
        # Behind its window a model is only slow.
        data = data[:100] + data[-100:]
    words = ["generate", "-m", "target", "-n", "3"]
    words += draw.choice(
        ([], ["--no-chat-template"], ["--prompt-lookup"], ["--draft-model", "draft"])
    )
    if draw.random() < 0.5:
        return Case((*words, *draw.choice(((), ("-p", "-")))), stdin=data)
    return Case((*words, "-f", "prompt.txt"), files=(("prompt.txt", data),))


def _prompt_set(draw: Random, base: Path) -> Case:
    name = draw.choice(("prompts.jsonl", "prompts.jsonl", "prompts.txt", "prompts.ndjson"))
    data = damaged_lines(draw, PROMPTS)
    if draw.random() < 0.3:
        data = damaged_lines(draw, data)
    words = [name if word == "prompts.jsonl" else word for word in COMPARE]
    return Case(tuple(words), files=((name, data),))


def _journal(draw: Random, base: Path) -> Case:
    data = damaged_lines(draw, (base / "journal.jsonl").read_bytes())
    more = draw.choice(
        ((), (), ("--json",), ("--html", "a.html", "--svg", "a.svg", "--csv", "a.csv"))
    )
    return Case((*JOURNAL, *more), files=(("journal.jsonl", data),))


def _prompt_cache(draw: Random, base: Path) -> Case:
    data = (base / "prompt.cache").read_bytes()
    if draw.random() < 0.8:
        data = damaged_safetensors(draw, data)
    else:
        data = _with_other_description(draw, data)
    words = [word for word in KEEPING if word not in ("--draft-model", "draft")]
    return Case(draw.choice((KEEPING, tuple(words))), files=(("prompt.cache", data),))


def _with_other_description(draw: Random, data: bytes) -> bytes:
    """Another description in the header, as another version may write it: its checksum is right.

    One of the same format is never wrong then, so the format goes with everything else.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    own = header["__metadata__"]
    other = {
        **json.loads(own["mlxgen_prompt_cache"]),
        "format": draw.choice((0, 2, "1", None, [1])),
    }
    changed = draw.choice((damaged_bytes, _damaged_object))(draw, json.dumps(other).encode())
    text = changed.decode("utf-8", "replace")
    own["mlxgen_prompt_cache"], own["crc32"] = text, str(zlib.crc32(text.encode()))
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + data[8 + length :]


def _damaged_object(draw: Random, data: bytes) -> bytes:
    return damaged_json(draw, data, {})
