"""A comparison as one picture: SVG by hand, 800 pixels wide, readable on light and dark.

Three panels: what each arm accepted against its closed form, tokens a second with intervals, and
acceptance by position in the block. An arm keeps its colour and its mark throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from mlxgen.experiment.summary import ArmSummary, Theory, Verdict
from mlxgen.report import svg
from mlxgen.report.experiment import Report
from mlxgen.report.svg import Scale

WIDTH_PX = 800
_MARGIN, _LABEL_PX, _PLOT_END, _VALUES_AT = 24, 200, 540, 556
_FONT_PX, _ROW_PX, _TALL_ROW_PX, _HEAD_PX, _AXIS_PX, _GAP_PX = 12, 30, 36, 46, 40, 26
_CURVES_PX = 190
_FEWEST_TESTED = 20
_SIGMAS = 1.96

_LIGHT = {
    "surface": "#ffffff",
    "ink": "#1b1f24",
    "faint": "#59636e",
    "grid": "#dfe3e8",
    "band": "#d3d9e0",
}
_DARK = {
    "surface": "#0d1117",
    "ink": "#e8edf2",
    "faint": "#9aa5b1",
    "grid": "#2a313a",
    "band": "#3a434e",
}
# Distinct to colour-blind eyes as well (after Okabe and Ito), darkened or lightened for contrast.
_LIGHT_ARMS = (
    "#5b6470",
    "#0068a8",
    "#c24a00",
    "#00805c",
    "#a03b7d",
    "#8a6a00",
    "#2a86b8",
    "#7a4b2a",
)
_DARK_ARMS = (
    "#a9b4c0",
    "#5ab0f0",
    "#ff9248",
    "#2fc79b",
    "#e58ac4",
    "#e6c14a",
    "#8fd3f5",
    "#c99a78",
)


@dataclass
class _Canvas:
    """Shapes so far, and where the next panel begins."""

    y: float
    shapes: list[str] = field(default_factory=list)

    def add(self, *shapes: str) -> None:
        self.shapes += shapes


def picture(report: Report) -> str:
    """The whole SVG document."""
    canvas = _Canvas(_MARGIN)
    _headline(canvas, report)
    _acceptance_panel(canvas, report)
    _speed_panel(canvas, report)
    _position_panel(canvas, report)
    height = canvas.y - _GAP_PX + _MARGIN
    summary = "; ".join(
        f"{arm.name}: {arm.timing.decode_tokens_per_s:.2f} tokens a second"
        for arm in report.comparison.arms
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="cmp" role="img" '
            f'width="{WIDTH_PX}" height="{height:.0f}" viewBox="0 0 {WIDTH_PX} {height:.0f}">',
            "<title>Acceptance and speed by arm</title>",
            f"<desc>{escape(summary)}</desc>",
            f"<style>{_style()}</style>",
            svg.box(0, 0, WIDTH_PX, height, "surface"),
            *canvas.shapes,
            "</svg>",
            "",
        ]
    )


def _style() -> str:
    # No custom properties: programs other than browsers do not know them.
    rules = [
        f".cmp text{{font:{_FONT_PX}px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',"
        "sans-serif}",
        ".cmp .title{font-size:14px;font-weight:600}",
        ".cmp .small{font-size:11px}",
        ".cmp .tiny{font-size:10px}",
        ".cmp .curve{fill:none;stroke-width:2;stroke-linejoin:round}",
        ".cmp .whisker{stroke-width:2}",
        ".cmp .bar{opacity:.3}",
        ".cmp .form{fill:none;stroke-width:2}",
        *_colours(_LIGHT, _LIGHT_ARMS),
        "@media (prefers-color-scheme:dark){",
        *_colours(_DARK, _DARK_ARMS),
        "}",
    ]
    return "\n".join(rules)


def _colours(surface: dict[str, str], arms: Sequence[str]) -> list[str]:
    ink, faint = surface["ink"], surface["faint"]
    rules = [
        f".cmp .surface{{fill:{surface['surface']}}}",
        f".cmp text{{fill:{ink}}}",
        f".cmp .faint{{fill:{faint}}}",
        f".cmp .grid{{stroke:{surface['grid']}}}",
        f".cmp .axis{{stroke:{faint}}}",
        f".cmp .band{{fill:{surface['band']}}}",
        f".cmp .form{{stroke:{ink}}}",
    ]
    for index, colour in enumerate(arms):
        rules.append(f".cmp .f{index}{{fill:{colour}}}")
        rules.append(f".cmp .s{index}{{stroke:{colour}}}")
    return rules


def _headline(canvas: _Canvas, report: Report) -> None:
    models, settings = report.models, report.settings
    pair = models["target"] + (f" with {models['draft']}" if "draft" in models else "")
    seeds = settings["seeds"]
    runs = f"{settings['prompts']} prompts, {seeds} seed{'s' * (seeds != 1)}"
    facts = f"{runs}, {settings['max_tokens']} tokens · {report.device}"
    width = WIDTH_PX - 2 * _MARGIN
    for content in (pair, facts):
        canvas.add(svg.text(_MARGIN, canvas.y + 8, svg.shortened(content, width, 11), "faint"))
        canvas.y += 18
    canvas.y += 8


def _panel_head(canvas: _Canvas, title: str, note: str) -> float:
    """Title and note; returns where the rows begin."""
    canvas.add(
        svg.text(_MARGIN, canvas.y + 14, title, "title"),
        svg.text(_MARGIN, canvas.y + 31, note, "faint small"),
    )
    return canvas.y + _HEAD_PX


def _x_axis(canvas: _Canvas, scale: Scale, top: float, bottom: float, title: str) -> None:
    for tick in scale.ticks():
        x = scale(tick)
        canvas.add(
            svg.line(x, top, x, bottom, "grid"),
            svg.text(x, bottom + 16, svg.number(tick), "faint small", "middle"),
        )
    middle = (scale.start_px + scale.end_px) / 2
    canvas.add(svg.text(middle, bottom + 32, title, "faint small", "middle"))


def _row_px(report: Report) -> int:
    """Height of a row: settings of an arm take a second line."""
    return _TALL_ROW_PX if any("," in arm.name for _, arm in _arms(report)) else _ROW_PX


def _row_label(canvas: _Canvas, name: str, y: float) -> None:
    head, _, settings = name.partition(",")
    width, x = _LABEL_PX - _MARGIN - 12, _LABEL_PX - 12
    y += 4 if not settings else -2
    canvas.add(svg.text(x, y, svg.shortened(head, width, _FONT_PX), anchor="end"))
    if settings:
        settings = svg.shortened(settings.replace(",", ", "), width, 10)
        canvas.add(svg.text(x, y + 13, settings, "faint tiny", "end"))


def _arms(report: Report) -> list[tuple[int, ArmSummary]]:
    return list(enumerate(report.comparison.arms))


def _acceptance_panel(canvas: _Canvas, report: Report) -> None:
    rows = [(i, arm, arm.theory) for i, arm in _arms(report) if arm.theory is not None]
    if not rows:
        return
    top = _panel_head(
        canvas,
        "Acceptance against its closed form",
        "mark: measured · ring: closed form · band: where theory puts 95 % of measurements",
    )
    row_px = _row_px(report)
    bottom = top + len(rows) * row_px
    values = [value for _, _, theory in rows for value in (theory.acceptance, *_band(theory))]
    scale = Scale(
        *svg.rounded_range(values, least_span=0.1, floor=0.0, ceiling=1.0), _LABEL_PX, _PLOT_END
    )
    _x_axis(canvas, scale, top, bottom, "accepted per position tested")
    for row, (index, arm, theory) in enumerate(rows):
        y = top + (row + 0.5) * row_px
        low, high = (scale(end) for end in _band(theory))
        _row_label(canvas, arm.name, y)
        canvas.add(
            svg.box(low, y - 7, high - low, 14, "band", 3),
            svg.marker(index, scale(theory.acceptance), y, 4.5, f"f{index % 8}"),
            f'<circle class="form" cx="{scale(theory.closed_form):.1f}" cy="{y:.1f}" r="7"/>',
            svg.text(
                _VALUES_AT,
                y + 4,
                f"{theory.acceptance:.4f}, closed form {theory.closed_form:.4f}",
                "small",
            ),
        )
    canvas.y = bottom + _AXIS_PX + _GAP_PX


def _band(theory: Theory) -> tuple[float, float]:
    width = _SIGMAS * theory.standard_error
    return max(theory.closed_form - width, 0.0), min(theory.closed_form + width, 1.0)


def _speed_panel(canvas: _Canvas, report: Report) -> None:
    arms = _arms(report)
    top = _panel_head(
        canvas,
        "Tokens a second, decoding",
        f"line: 95 % interval over prompts · right: ratio to {report.first}, with its own interval",
    )
    row_px = _row_px(report)
    bottom = top + len(arms) * row_px
    ends = [arm.timing.decode_tokens_per_s for _, arm in arms]
    ends += [arm.timing.decode_interval.high for _, arm in arms if arm.timing.decode_interval]
    most = max(ends) or 1.0
    step = svg.round_step(most, 6)
    scale = Scale(0.0, step * -(-most // step), _LABEL_PX, _PLOT_END)
    _x_axis(canvas, scale, top, bottom, "tokens a second")
    for row, (index, arm) in enumerate(arms):
        y, timing = top + (row + 0.5) * row_px, arm.timing
        x, colour = scale(timing.decode_tokens_per_s), index % 8
        _row_label(canvas, arm.name, y)
        canvas.add(svg.box(_LABEL_PX, y - 8, x - _LABEL_PX, 16, f"bar f{colour}"))
        if timing.decode_interval is not None:
            low, high = scale(timing.decode_interval.low), scale(timing.decode_interval.high)
            canvas.add(svg.line(low, y, high, y, f"whisker s{colour}"))
        canvas.add(
            svg.marker(index, x, y, 4.5, f"f{colour}"),
        )
        shows_none = timing.verdict is Verdict.NO_DIFFERENCE
        canvas.add(svg.text(_VALUES_AT, y - 2 if shows_none else y + 4, _speed_text(arm), "small"))
        if shows_none:
            canvas.add(svg.text(_VALUES_AT, y + 11, Verdict.NO_DIFFERENCE.value, "faint tiny"))
    canvas.y = bottom + _AXIS_PX + _GAP_PX


def _speed_text(arm: ArmSummary) -> str:
    timing = arm.timing
    text = f"{timing.decode_tokens_per_s:.1f}"
    if timing.verdict is None or timing.ratio_to_first is None:
        return text
    text += f" · {timing.ratio_to_first:.2f} times"
    if timing.ratio_interval is not None:
        text += f" ({timing.ratio_interval.low:.2f} to {timing.ratio_interval.high:.2f})"
    return text


def _position_panel(canvas: _Canvas, report: Report) -> None:
    curves = [(index, arm, _rates(arm)) for index, arm in _arms(report)]
    curves = [(index, arm, rates) for index, arm, rates in curves if rates]
    if not curves:
        return
    top = _panel_head(
        canvas,
        "Acceptance by position in the block",
        f"of the proposals tested there, in the timed runs; from {_FEWEST_TESTED} tested on",
    )
    bottom = top + max(_CURVES_PX, 20 * len(curves))
    deepest = max(position for _, _, rates in curves for position, _ in rates)
    values = [rate for _, _, rates in curves for _, rate in rates]
    low, high = svg.rounded_range(values, least_span=0.2, floor=0.0, ceiling=1.0)
    across = Scale(0.5, deepest + 0.5, _LABEL_PX, _PLOT_END)
    up = Scale(low, high, bottom - 6, top + 6)
    for tick in up.ticks(6):
        canvas.add(
            svg.line(_LABEL_PX, up(tick), _PLOT_END, up(tick), "grid"),
            svg.text(_LABEL_PX - 10, up(tick) + 4, svg.number(tick), "faint small", "end"),
        )
    canvas.add(svg.line(_LABEL_PX, bottom, _PLOT_END, bottom, "axis"))
    step = max(int(svg.round_step(max(deepest, 2), 12)), 1)
    for position in [1, *range(step if step > 1 else 2, deepest + 1, step)]:
        canvas.add(svg.text(across(position), bottom + 16, str(position), "faint small", "middle"))
    middle = (_LABEL_PX + _PLOT_END) / 2
    canvas.add(svg.text(middle, bottom + 32, "position in the block", "faint small", "middle"))
    for row, (index, arm, rates) in enumerate(curves):
        colour = index % 8
        points = [(across(position), up(rate)) for position, rate in rates]
        canvas.add(svg.polyline(points, f"curve s{colour}"))
        canvas.add(*(svg.marker(index, x, y, 3.5, f"f{colour}") for x, y in points))
        y = top + 12 + 20 * row
        name = svg.shortened(arm.name, WIDTH_PX - _MARGIN - _VALUES_AT - 18, 11)
        canvas.add(
            svg.marker(index, _VALUES_AT + 6, y, 4.5, f"f{colour}"),
            svg.text(_VALUES_AT + 18, y + 4, name, "small"),
        )
    canvas.y = bottom + _AXIS_PX + _GAP_PX


def _rates(arm: ArmSummary) -> list[tuple[int, float]]:
    """Position from 1 and acceptance there, where enough was tested to draw it."""
    if arm.acceptance is None:
        return []
    counts = zip(arm.acceptance.tested_by_offset, arm.acceptance.accepted_by_offset, strict=True)
    return [
        (position, accepted / tested)
        for position, (tested, accepted) in enumerate(counts, start=1)
        if tested >= _FEWEST_TESTED
    ]
