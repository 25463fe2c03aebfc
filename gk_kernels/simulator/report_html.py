"""A cost report as one HTML file: a timeline, bars, and the table, without scripts or outside files."""

from __future__ import annotations

from html import escape

from gk_kernels.simulator.report import LANES, CostReport, SectionCost

# Readable on white and on black, and told apart without red against green.
COLOURS = {
    "tensor": "#4269d0",
    "vector": "#efb118",
    "scalar": "#ff725c",
    "gpsimd": "#a463f2",
    "dma": "#3ca951",
    "collective": "#97bbf5",
}
WIDTH = 960
LABEL = 110
ROW = 26

_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: 2px 10px; text-align: right; border-bottom: 1px solid #8884 }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto; display: block; margin: 1em 0 }
svg text { font: 12px system-ui, sans-serif; fill: currentColor }
.key span { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 14px }
"""


def render(report: CostReport) -> str:
    """The whole document."""
    title = escape(f"{report.kernel} on {report.target.name}")
    key = "".join(f'<span style="background:{COLOURS[lane]}"></span>{lane}' for lane in report.total.busy_us)
    facts = "".join(f"<li>{escape(a)}: {escape(b)}</li>" for a, b in report.facts())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>A model of one core from counted work and published rates, not a measurement. A section"
        " lasts as long as its busiest engine; sections follow each other.</p>"
        f'<p class="key">{key}</p><h2>Timeline</h2>{_timeline(report)}'
        f"<h2>Busy time by section</h2>{_bars(report)}"
        f"<h2>Numbers</h2>{_table(report)}<ul>{facts}</ul></body></html>\n"
    )


def _rect(x: float, y: float, width: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{ROW - 8}" rx="2" '
        f'fill="{colour}"><title>{escape(tip)}</title></rect>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>'


def _svg(height: int, label: str, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">' + "".join(parts) + "</svg>"


def _timeline(report: CostReport) -> str:
    """One lane per engine; each section starts when the one before it ends."""
    lanes = [lane for lane in LANES if lane in report.total.busy_us]
    whole = sum(section.floor_us for section in report.sections) or 1.0
    scale = (WIDTH - LABEL - 10) / whole
    parts = [_text(0, row * ROW + 14, lane) for row, lane in enumerate(lanes)]
    start = 0.0
    for section in report.sections:
        x = LABEL + start * scale
        for row, lane in enumerate(lanes):
            busy = section.busy_us.get(lane, 0.0)
            if busy:
                tip = f"{section.name}, {lane}: {busy:.2f} us"
                parts.append(_rect(x, row * ROW, busy * scale, COLOURS[lane], tip))
        start += section.floor_us
    axis = len(lanes) * ROW + 14
    parts.append(_text(LABEL, axis, "0 us"))
    parts.append(_text(WIDTH - 90, axis, f"{whole:.1f} us"))
    return _svg(axis + 8, "timeline of engines", parts)


def _bars(report: CostReport) -> str:
    """One bar per section, lanes stacked."""
    longest = max((section.serial_us for section in report.sections), default=0.0) or 1.0
    scale = (WIDTH - 2 * LABEL - 80) / longest
    parts = []
    for row, section in enumerate(report.sections):
        parts.append(_text(0, row * ROW + 14, section.name[:30]))
        x = 2.0 * LABEL
        for lane, busy in section.busy_us.items():
            parts.append(_rect(x, row * ROW, busy * scale, COLOURS[lane], f"{lane}: {busy:.2f} us"))
            x += busy * scale
        parts.append(_text(x + 6, row * ROW + 14, f"{section.serial_us:.2f} us"))
    return _svg(len(report.sections) * ROW + 4, "busy time by section", parts)


def _row(cost: SectionCost, lanes: list[str]) -> str:
    busy = [f"{cost.busy_us.get(lane, 0.0):.2f}" for lane in lanes]
    cells = [escape(cost.name), f"{cost.instructions:,}", *busy]
    cells += [f"{cost.floor_us:.2f}", cost.slowest, f"{cost.dma_bytes:,}", f"{cost.macs:,}"]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _table(report: CostReport) -> str:
    lanes = list(report.total.busy_us)
    heads = ["section", "instructions", *(f"{lane} us" for lane in lanes)]
    heads += ["floor us", "slowest", "DMA bytes", "MACs"]
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in heads) + "</tr>"
    rows = "".join(_row(cost, lanes) for cost in (*report.sections, report.total))
    return f"<table>{head}{rows}</table>"
