"""Printing a run: its text as it comes, then its lines. One-shot runs and chats share it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxgen.cli import interrupts
from mlxgen.cli.streams import Streams
from mlxgen.config import GenerationConfig

if TYPE_CHECKING:
    from mlxgen.generation import Generation, GenerationStream


@dataclass(frozen=True)
class Printed:
    """What was printed. interruption: what kind ended the run early, None when none did."""

    result: Generation
    lines: list[str]
    interruption: type[KeyboardInterrupt] | None


def print_run(
    stream: GenerationStream,
    streams: Streams,
    config: GenerationConfig,
    *,
    shows_profile: bool,
    decode: Callable[[list[int]], str],
) -> Printed:
    """Run to the end, or to an interruption, and print text and statistics.

    shows_profile: the block of `--profile` in place of the one line.
    """
    import mlx.core as mx

    from mlxgen.report import lines as report_lines

    interruption: type[KeyboardInterrupt] | None = None
    try:
        # Closing the run rewinds the caches now, not when it is collected.
        with closing(stream.pieces(interrupts.Delay())) as pieces:
            for piece in pieces:
                streams.text(piece.text, piece.from_draft)
    except KeyboardInterrupt as raised:
        interrupts.forget()
        interruption = type(raised)
        for piece in stream.held_back():
            streams.text(piece.text, piece.from_draft)
    streams.end_text()
    result = stream.result

    lines: list[str] = []
    if interruption is not None:
        lines.append("[Interrupted]")
    if config.logprobs:
        lines.extend(report_lines.logprob_lines(result, decode))
    if shows_profile:
        lines.extend(report_lines.profile_lines(result, mx.get_peak_memory()))
    else:
        lines.append(report_lines.generated_line(result))
    if result.statistics is not None:
        lines.extend(report_lines.speculation_lines(result.statistics))
        if config.speculation.prompt_lookup is not None:
            lines.append(report_lines.drafters_line(result.statistics))
    if result.depth is not None and shows_profile:
        for line in report_lines.depth_lines(result):
            streams.note(line)
    streams.statistics(lines)
    if result.statistics is not None and not result.statistics.check.is_consistent:
        streams.warn(
            "the run disagrees with theory (|z| > 4.9, a chance of one in a million): please "
            "report the command and the seed"
        )
    return Printed(result, lines, interruption)
