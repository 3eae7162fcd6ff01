"""Random command lines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import typer

from fuzzing.child import Case
from fuzzing.valid import COMPARE, PROMPT
from mlxgen.cli.app import app

_NUMBERS = (
    *("0", "1", "2", "3", "-1", "0.5", "1.5", "nan", "inf", "-inf"),
    *("-0", "-0.0", "1e400", "1e-400", "1e308", "1e-45"),
    # Digits of other scripts, and what only some parsers take for a number.
    *("٣", "\uff13", "²", "½", "1_000", "0x10", "1e3", " 5 ", "+5", "", "1,5", "True"),
    *("9" * 400, "1" * 5000, "18446744073709551615", "18446744073709551616", "2147483648"),
    *("4294967296", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "64"),
)
_TEXTS = (
    *("", "-", "--", "abc", "\udc80", "\udce9", "é", "👍", "\x1b[31m", "a\nb", "<eos>", "0", "{}"),
    *("[", '{"a": 1}', '{"a": NaN}', "[" * 100_000, "x" * 100_000),
    *("-x", "=", "%s", "{0}", "\u2028"),
    *(";", "temperature;top_k", "mlx-lm", "stochastic", "block", "gumbel-match", "sampler-match"),
    *("auto", "plain", "plain,block", "block,k=2,temp=1", "block,k=auto,lookup", "plain,name="),
    *("dflash", "mtp", "0:1", "0:-inf", "0:nan", "1e400:1", "٣:1", "-1:2", "3:1e400", "999:1"),
    *("9" * 30 + ":1", "target", "draft", "adapter"),
    *("prompts.jsonl", "journal.jsonl", "prompt.txt"),
    *("prompt.cache", "nowhere/x", "~nobody/x", "~", ".", "..", "a/b", "n" * 300, "new.txt"),
    *('{"messages": []}', '{"tokenize": true}', '{"conversation": 1}', '{"chat_template": "x"}'),
)
_WORK = ("--max-tokens", "--seeds", "--theory-seeds")
"""Options that ask for more work: a large number takes long by right."""
_LITTLE = ("0", "1", "2", "3", "-1", "nan", "", "x", "٣", "0.5", "-0", "+3", " 2 ", "1" * 5000)
_BASES: dict[str, tuple[str, ...]] = {
    "generate": ("-m", "target", "-p", PROMPT, "-n", "3"),
    "verify": ("-m", "target", "--draft-model", "draft", "-n", "3"),
    "compare": COMPARE[1:],
}


@cache
def _options(command: str) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """(longest name, all names, kind) of a command's options; kind: flag, number or text."""
    root: Any = typer.main.get_command(app)
    found = []
    for parameter in root.commands[command].params:
        names = (*parameter.opts, *parameter.secondary_opts)
        kind = "number" if parameter.metavar in (None, "N", "S", "N|auto") else "text"
        found.append((max(names, key=len), names, "flag" if parameter.is_flag else kind))
    return tuple(found)


def command_line(draw: Random, base: Path) -> Case:
    """A valid command line with options added and words damaged."""
    command = draw.choice(("generate", "generate", "generate", "verify", "compare"))
    words = [command, *_BASES[command]]
    if command == "generate" and draw.random() < 0.5:
        words += ["--draft-model", "draft"]
    for _ in range(draw.choice((1, 1, 2, 2, 3, 5))):
        words += _option(draw, command)
    if draw.random() < 0.3:
        _damage_words(draw, words)
    if draw.random() < 0.02:
        words = [draw.choice(_TEXTS) for _ in range(draw.randrange(4))]
    is_bounded = "compare" not in words or {"-n", "--prompts", "prompts.jsonl"} <= set(words)
    stdin = draw.choice((b"", b"abc", b"\xff"))
    # A process's arguments hold no NUL, and of surrogates those that stand for a byte.
    return Case(tuple(word.replace("\0", "") for word in words), stdin, is_bounded=is_bounded)


def _option(draw: Random, command: str) -> list[str]:
    longest, names, kind = draw.choice(_options(command))
    name = draw.choice(names)
    if kind == "flag":
        return [name]
    if longest in _WORK:
        value = draw.choice(_LITTLE)
    elif draw.random() < 0.9:
        value = draw.choice(_NUMBERS if kind == "number" else (*_TEXTS, *_TEXTS, *_NUMBERS))
    else:
        value = draw.choice(_TEXTS)
    return [f"{name}={value}"] if draw.random() < 0.3 else [name, value]


def _damage_words(draw: Random, words: list[str]) -> None:
    place = draw.randrange(len(words))
    kind = draw.randrange(5)
    if kind == 0:
        words.pop(place)
    elif kind == 1:
        words.insert(place, draw.choice(words))
    elif kind == 2:
        words.insert(
            place, draw.choice((*_TEXTS, "--help", "--version", "-h", "--show-completion"))
        )
    elif kind == 3:
        other = draw.randrange(len(words))
        words[place], words[other] = words[other], words[place]
    else:
        word = words[place]
        start = draw.randrange(len(word) + 1)
        sign = draw.choice(("-", "=", ".", " ", "\udc80", "é", "'", "9", "\t", "~"))
        words[place] = word[:start] + sign + word[start + draw.randrange(2) :]
