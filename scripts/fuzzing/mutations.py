"""Damage to valid files: bytes, JSON values, and safetensors headers."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

_WORDS: tuple[Any, ...] = ("", "x", "0", "\x00", "\ud800", "é👍", "\x1b[31m", "a\nb", "../x", "nan")
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 1000, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, -(10**30)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
)
_SHAPES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], [0], {"": 0}, {"a": {}})
_DEEP = 100_000
_HEADER_BYTES = 8


def damaged_bytes(draw: Random, data: bytes) -> bytes:
    """A few bytes changed, a piece cut out, repeated or put in, or another encoding."""
    kind = draw.randrange(8)
    start = draw.randrange(len(data) + 1)
    end = min(len(data), start + draw.choice((1, 2, 8, 100, 10_000)))
    if kind <= 1:
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 20)) if data else 0):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(changed)
    if kind == 2:
        return data[:start]
    if kind == 3:
        return data[:start] + data[end:]
    if kind == 4:
        return data[:end] + data[start:]
    if kind == 5:
        return data[:start] + draw.randbytes(draw.choice((1, 4, 100))) + data[start:]
    if kind == 6:
        put_in = draw.choice(
            (b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b"[" * _DEEP)
        )
        return data[:start] + put_in + data[start:]
    return draw.choice((b"", b"\xef\xbb\xbf" + data, data.decode("latin-1").encode("utf-16")))


def damaged_json(draw: Random, data: bytes, extra: dict[str, Any]) -> bytes:
    """The JSON of a file with a few values, keys or structures changed.

    extra: keys that such a file may have, with valid values; one may be put in.
    """
    try:
        value = json.loads(data)
    except ValueError:  # it has been damaged before
        return damaged_bytes(draw, data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _changed(draw, value, extra)
    text = json.dumps(value, ensure_ascii=draw.random() < 0.9)
    if draw.random() < 0.1:
        text = _with_duplicate_key(draw, text)
    if draw.random() < 0.05:
        text = text.replace("null", "[" * _DEEP + "]" * _DEEP, 1)
    return text.encode("utf-8", "surrogatepass")


def damaged_lines(draw: Random, data: bytes) -> bytes:
    """JSONL with one of its lines damaged, lost, repeated or moved."""
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0 and lines[place].strip():
        lines[place] = damaged_json(draw, lines[place], {})
    elif kind == 1:
        lines[place] = damaged_bytes(draw, lines[place])
    elif kind == 2:
        lines.insert(place, draw.choice(lines))
    else:
        lines.pop(place)
    return b"\n".join(lines)


def damaged_safetensors(draw: Random, data: bytes) -> bytes:
    """A safetensors file with its header, the header's length or its data damaged."""
    length = int.from_bytes(data[:_HEADER_BYTES], "little")
    header, rest = data[_HEADER_BYTES : _HEADER_BYTES + length], data[_HEADER_BYTES + length :]
    kind = draw.randrange(4)
    if kind == 0:
        return damaged_bytes(draw, data)
    if kind == 1:
        wrong = draw.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
        return wrong.to_bytes(_HEADER_BYTES, "little") + header + rest
    if kind == 2:
        header = damaged_bytes(draw, header)
    else:
        header = damaged_json(
            draw, header, {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        )
    return len(header).to_bytes(_HEADER_BYTES, "little") + header + rest


def _changed(draw: Random, value: Any, extra: dict[str, Any]) -> Any:
    """A copy of a JSON value with one change somewhere in it."""
    value = copy.deepcopy(value)
    places = _places(value)
    if isinstance(value, dict) and extra and draw.random() < 0.3:
        name = draw.choice(list(extra))
        value[name] = copy.deepcopy(extra[name])
        places = [place for place in _places(value) if place[0] is value[name]] or [(value, name)]
    if not places:
        return _other(draw)
    holder, key = draw.choice(places)
    kind = draw.randrange(10)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice((*_WORDS, *holder))] = holder.pop(key)
    elif kind == 2:
        from_holder, from_key = draw.choice(places)
        holder[key] = copy.deepcopy(from_holder[from_key])
    elif kind == 3:
        holder[key] = draw.choice(([holder[key]], {"x": holder[key]}, [holder[key]] * 1000))
    elif kind <= 5 and isinstance(holder[key], int | float):
        holder[key] = draw.choice(
            (
                -holder[key],
                holder[key] + 1,
                holder[key] * 2,
                0,
                str(holder[key]),
                float(holder[key]),
            )
        )
    else:
        holder[key] = _other(draw)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value; of long containers the first and last few."""
    found: list[tuple[Any, Any]] = []
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys if len(keys) <= 60 else [*keys[:5], *keys[-5:]]:
        found.append((value, key))
        found += _places(value[key])
    return found


def _other(draw: Random) -> Any:
    return copy.deepcopy(draw.choice(draw.choice((_WORDS, _NUMBERS, _NUMBERS, _SHAPES))))


def _with_duplicate_key(draw: Random, text: str) -> str:
    starts = [place for place, sign in enumerate(text) if sign == "{"]
    if not starts:
        return text
    start = draw.choice(starts) + 1
    key, colon, _ = text[start:].partition(":")
    if not colon or not key.startswith('"'):
        return text
    return f"{text[:start]}{key}: {json.dumps(_other(draw))}, {text[start:]}"
