"""A few shapes of SVG as text, and axes with round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CHARACTER_SHARE = 0.58
"""Width of a character over the font's size; a generous mean for sans-serif fonts."""


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linearly; a value outside is moved to the edge."""

    low: float
    high: float
    start_px: float
    end_px: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start_px + share * (self.end_px - self.start_px)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values from end to end, ends included where they are round."""
        step = round_step(self.high - self.low, most)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts a span into at most `most` - 1."""
    least = span / (most - 1)
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))


def rounded_range(
    values: Sequence[float], *, least_span: float, floor: float, ceiling: float
) -> tuple[float, float]:
    """Ends at round numbers around the values, not beyond floor and ceiling."""
    low, high = min(values), max(values)
    missing = max(least_span - (high - low), 0.0) / 2
    low, high = low - missing, high + missing
    step = round_step(high - low, 6)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    return max(low, floor), min(high, ceiling)


def number(value: float) -> str:
    """A number for a tick: as short as it is exact."""
    return f"{value:.10g}" if abs(value) > 1e-9 else "0"


def shortened(text: str, width_px: float, font_px: float) -> str:
    """The text, cut with an ellipsis where it would not fit."""
    most = int(width_px / (font_px * _CHARACTER_SHARE))
    return text if len(text) <= most else text[: most - 1] + "…"


def text(x: float, y: float, content: str, style: str = "", anchor: str = "start") -> str:
    """A line of text with its baseline at y."""
    names = f' class="{style}"' if style else ""
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text{names} {at}>{escape(content, quote=False)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def box(x: float, y: float, width: float, height: float, style: str, radius: float = 0) -> str:
    """A rectangle."""
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" '
        f'height="{height:.1f}" rx="{radius:g}"/>'
    )


def polyline(points: Sequence[tuple[float, float]], style: str) -> str:
    """Straight lines from point to point."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{style}" points="{places}"/>'


def marker(shape: int, x: float, y: float, radius: float, style: str) -> str:
    """A filled mark; shapes repeat after four: disc, square, triangle, diamond."""
    r = radius
    if shape % 4 == 0:
        return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
    corners = {
        1: [(-r, -r), (r, -r), (r, r), (-r, r)],
        2: [(0, -1.2 * r), (1.15 * r, 0.9 * r), (-1.15 * r, 0.9 * r)],
        3: [(0, -1.3 * r), (1.3 * r, 0), (0, 1.3 * r), (-1.3 * r, 0)],
    }[shape % 4]
    places = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="{style}" points="{places}"/>'
