"""The corpus: rows of tokens that the target writes, with its hidden state at each position."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .config import CorpusSettings
from .llama import fast_attention
from .phrases import HELD_OUT_TOPICS, TOPICS
from .prompts import Prompt, Role, draw_prompt
from .target import Target

TURN_START, TURN_END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class Round:
    """Rows decoded in step; the last held_out ones are never trained on.

    tokens: (rows, length) int32. hidden: the target's last hidden state after each token,
    (rows, length, hidden) in its compute dtype. roles: who wrote each token, (rows, length) uint8
    of Role. temperatures: of the target's own words, (rows,) float32.
    """

    tokens: Tensor
    hidden: Tensor
    roles: Tensor
    temperatures: Tensor
    held_out: int

    @property
    def training_rows(self) -> int:
        return len(self.tokens) - self.held_out


class RoundWriter:
    """Lets the target write rounds of conversations and plain texts."""

    def __init__(self, target: Target, tokenizer: Tokenizer) -> None:
        self._target, self._tokenizer = target, tokenizer
        self._turn_end = self._special(TURN_END)
        self._specials = [self._special(name) for name in (TEXT_END, TURN_START, TURN_END)]
        # After USER comes the header of an answer and the other way round.
        self._headers = {
            Role.USER: self._encode(f"\n{TURN_START}assistant\n"),
            Role.ANSWER: self._encode(f"\n{TURN_START}user\n"),
        }

    def write(self, prompts: Sequence[Prompt], length: int, held_out: int) -> Round:
        """One round: a row of this many tokens for each prompt."""
        target, rows = self._target, len(prompts)
        device = target.device
        # Line r of the script is row r's prompt, and the two lines after all prompts are the
        # headers of turns. A row follows its line until it ends (-1) and then writes freely.
        script = self._script([self._encode(prompt.text)[:length] for prompt in prompts])
        line = torch.arange(rows, device=device)
        cursor = torch.ones_like(line)
        writer = torch.tensor([prompt.writer for prompt in prompts], device=device)
        temperatures = torch.tensor([prompt.temperature for prompt in prompts], device=device)
        specials = torch.tensor(self._specials, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)  # plain texts only

        tokens = torch.empty(rows, length, dtype=torch.int32, device=device)
        roles = torch.zeros(rows, length, dtype=torch.uint8, device=device)
        hidden = target.embedding.new_empty(rows, length, target.config.hidden_size)
        current = script[:rows, 0]
        tokens[:, 0] = current
        target.start(rows, length)
        for position in range(length):
            hidden[:, position] = state = target.step(current, position)
            if position + 1 == length:
                break
            # Users' turns are sampled plainly: cold ones would all be alike.
            heat = torch.where(writer == Role.USER, 1.0, temperatures)
            drawn = target.sample(state, heat)
            scripted = script[line, cursor]
            free = scripted < 0
            current = torch.where(free, drawn, scripted)
            cursor = torch.where(free, cursor, cursor + 1)
            tokens[:, position + 1] = current
            roles[:, position + 1] = torch.where(free & ~ended, writer, Role.FORCED)

            turn_ended = free & (current == self._turn_end) & (writer != Role.TEXT)
            line = torch.where(turn_ended, rows + writer - Role.USER, line)
            cursor = torch.where(turn_ended, 0, cursor)
            writer = torch.where(turn_ended, Role.USER + Role.ANSWER - writer, writer)
            ended |= free & (writer == Role.TEXT) & torch.isin(current, specials)
        target.finish()
        return Round(tokens, hidden, roles, temperatures, held_out)

    def _script(self, prompts: list[list[int]]) -> Tensor:
        """Prompts and headers padded with -1, (prompts + 2, longest + 1) int64."""
        lines = [*prompts, self._headers[Role.USER], self._headers[Role.ANSWER]]
        width = max(map(len, lines)) + 1
        padded = [ids + [-1] * (width - len(ids)) for ids in lines]
        return torch.tensor(padded, device=self._target.device)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _special(self, name: str) -> int:
        token = self._tokenizer.token_to_id(name)
        if token is None:
            raise ValueError(f"the target's tokenizer has no {name}; it must know ChatML turns")
        return int(token)


def write_corpus(
    target: Target,
    tokenizer: Tokenizer,
    settings: CorpusSettings,
    rng: Random,
    log: Callable[[str], None],
) -> list[Round]:
    """All rounds of a corpus. Sampling draws on PyTorch's global generator, prompts on rng."""
    writer, lengths = RoundWriter(target, tokenizer), settings.round_lengths()
    planned = settings.rows_per_round * sum(lengths)
    state_bytes = target.config.hidden_size * target.embedding.element_size()
    log(
        f"corpus: {len(lengths)} rounds, {planned:,} tokens, "
        f"{planned * state_bytes / 1e9:.2f} GB of hidden states"
    )
    rounds: list[Round] = []
    training_rows = settings.rows_per_round - settings.held_out_rows
    with torch.no_grad(), fast_attention(target.device):
        for length in lengths:
            begin = time.monotonic()
            prompts = [
                draw_prompt(
                    rng, TOPICS if row < training_rows else HELD_OUT_TOPICS, settings.request_share
                )
                for row in range(settings.rows_per_round)
            ]
            rounds.append(writer.write(prompts, length, settings.held_out_rows))
            # Reading the shares back also waits for a GPU, so that the time is the whole.
            counts = torch.bincount(rounds[-1].roles.flatten().long(), minlength=len(Role))
            shares = (counts / counts.sum()).tolist()
            seconds = time.monotonic() - begin
            log(
                f"round {len(rounds)} of rows of {length}: {seconds:.1f} s, "
                + ", ".join(f"{role.name.lower()} {shares[role]:.1%}" for role in Role)
            )
            if len(rounds) == 1:
                for row in rounds[0].tokens[:4].tolist():
                    log(repr(tokenizer.decode(row, skip_special_tokens=False)[:400]))
    return rounds


class Batches:
    """Batches of about the same number of tokens, each of one round's training rows.

    Batch number n depends on the seed, the corpus and n alone, so that a run that goes on from a
    checkpoint sees the batches that an uninterrupted one would have seen.
    """

    def __init__(self, rounds: Sequence[Round], batch_tokens: int, seed: int) -> None:
        self._rounds, self._seed = rounds, seed
        self._rows = [max(1, batch_tokens // part.tokens.shape[1]) for part in rounds]
        self.per_epoch = sum(
            part.training_rows // rows for part, rows in zip(rounds, self._rows, strict=True)
        )
        if not self.per_epoch:
            raise ValueError(
                "no round has enough rows for a batch: write more rows a round, or make the "
                "batches smaller"
            )
        self._epoch, self._order = -1, list[tuple[int, list[int]]]()

    def __getitem__(self, step: int) -> tuple[Round, Tensor]:
        """A round and the numbers of its rows in this step's batch, (rows,) int64."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        number, rows = self._order[index]
        part = self._rounds[number]
        return part, torch.tensor(rows, device=part.tokens.device)

    def _shuffled(self, epoch: int) -> list[tuple[int, list[int]]]:
        rng = Random(f"{self._seed}, epoch {epoch}")
        order = []
        for number, part in enumerate(self._rounds):
            rows = rng.sample(range(part.training_rows), part.training_rows)
            size = self._rows[number]
            whole = math.floor(len(rows) / size) * size
            order += [(number, rows[i : i + size]) for i in range(0, whole, size)]
        rng.shuffle(order)
        return order
