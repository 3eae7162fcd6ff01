"""Prompts for the rows of the corpus: chat requests, empty user turns and plain-text openers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from random import Random

from . import phrases

TEXT_SHARE = 0.12  # rows without the chat template
DEFAULT_SYSTEM_SHARE = 0.85  # of the chat rows

# Temperatures of the target's own words and their shares. The first is so cold that sampling is
# nearly greedy; greedy decoding is what a draft is asked for most often.
GREEDY_TEMPERATURE = 0.01
TEMPERATURES = (GREEDY_TEMPERATURE, 0.3, 0.7, 1.0)
TEMPERATURE_SHARES = (0.25, 0.05, 0.30, 0.40)


class Role(IntEnum):
    """Who wrote a token. The order matters: a higher role is worth more to the draft."""

    FORCED = 0  # prompts and turn headers
    USER = 1  # a user's turn written by the target
    ANSWER = 2
    TEXT = 3


@dataclass(frozen=True)
class Prompt:
    """The forced beginning of a row, who writes on from it, and at which temperature."""

    text: str
    writer: Role
    temperature: float


def draw_prompt(rng: Random, topics: Sequence[str], request_share: float) -> Prompt:
    """One row's prompt; the rows that are neither text nor requests open an empty user turn."""
    temperature = rng.choices(TEMPERATURES, TEMPERATURE_SHARES)[0]
    kind = rng.random()
    if kind < TEXT_SHARE:
        return Prompt(draw_opener(rng, topics), Role.TEXT, temperature)
    user_turn = f"{_draw_system_turn(rng)}<|im_start|>user\n"
    if kind < TEXT_SHARE + request_share:
        text = f"{user_turn}{draw_request(rng, topics)}<|im_end|>\n<|im_start|>assistant\n"
        return Prompt(text, Role.ANSWER, temperature)
    return Prompt(user_turn, Role.USER, temperature)


def draw_request(rng: Random, topics: Sequence[str]) -> str:
    """One user's request."""
    kind = rng.choices(
        ("topic", "code", "sentence", "passage", "arithmetic", "other"),
        (50, 12, 10, 7, 11, 10),
    )[0]
    if kind == "topic":
        return _fill_topics(rng.choice(phrases.TOPIC_REQUESTS), rng, topics)
    if kind == "code":
        task = rng.choice(phrases.CODE_TASKS)
        return rng.choice(phrases.CODE_REQUESTS).replace("{task}", task)
    if kind == "sentence":
        sentence = rng.choice(phrases.SENTENCES)
        return rng.choice(phrases.SENTENCE_REQUESTS).replace("{sentence}", sentence)
    if kind == "passage":
        passage = rng.choice(phrases.PASSAGES)
        return rng.choice(phrases.PASSAGE_REQUESTS).replace("{passage}", passage)
    if kind == "arithmetic":
        return _draw_arithmetic(rng)
    return rng.choice(phrases.OTHER_REQUESTS)


def draw_opener(rng: Random, topics: Sequence[str]) -> str:
    """The first words of a plain text."""
    return _fill_topics(rng.choice(phrases.TEXT_OPENERS), rng, topics)


def _draw_system_turn(rng: Random) -> str:
    system: str | None = phrases.DEFAULT_SYSTEM
    if rng.random() >= DEFAULT_SYSTEM_SHARE:
        system = rng.choice(phrases.OTHER_SYSTEMS)
    return "" if system is None else f"<|im_start|>system\n{system}<|im_end|>\n"


def _fill_topics(template: str, rng: Random, topics: Sequence[str]) -> str:
    topic, other = rng.sample(list(topics), 2)
    # Plain replacement, since openers hold code with braces of its own.
    for name, value in (("topic", topic), ("other", other)):
        template = template.replace("{" + name + "}", value)
        template = template.replace("{" + name.capitalize() + "}", value[0].upper() + value[1:])
    return template


def _draw_arithmetic(rng: Random) -> str:
    large, other, small = rng.randint(10, 120), rng.randint(2, 99), rng.randint(2, 12)
    return rng.choice(
        (
            f"What is {large} plus {other}?",
            f"{other} x {small} = ?",
            f"Subtract {other} from {large + other}.",
            f"Find x if {small}x - {other} = {small * large - other}.",
            f"How much is {small * 5}% of {large * 10}?",
            f"A cyclist rides {other * 2} km in {small} hours. How fast does she go on average?",
            f"Lena had {large} stickers and lost {small}. How many does she have now?",
            f"{small} friends share {small * other} sweets equally. How many does each get? "
            "Show your work.",
            f"A jacket costs ${large}. What does it cost after a discount of {small * 5}%?",
            f"What is the perimeter of a rectangle that is {large} cm long and {other} cm wide?",
            f"Count from {other} to {other + small}.",
            f"Find the mean of {large}, {other} and {small}.",
        )
    )
