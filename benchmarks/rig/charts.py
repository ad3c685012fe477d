"""Pictures of reports as SVG; they have a background of their own, and so are legible on light and dark pages."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Band", "Bar", "Curve", "Panel", "Plot", "bars", "curves"]

STYLE = """
text { font-family: Inter, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px; fill: #24292f }
.title { font-size: 17px; font-weight: 600 }
.muted { fill: #57606a }
.panel { font-size: 13px; font-weight: 600 }
.ours { font-weight: 600 }
.end { text-anchor: end }
.middle { text-anchor: middle }
.grid { stroke: #d8dee4; stroke-width: 1 }
"""
WIDTH, MARGIN, ROW, LABELS = 900, 24, 22, 190
#: Colours of Okabe and Ito, which colour-blind readers can tell apart; the first one is for hixl_async.
INKS = ("#0072b2", "#d55e00", "#009e73", "#a3467f")
THEIRS = "#b1bac4"


class Bar(NamedTuple):
    """One value; `ours` stands out."""

    label: str
    value: float
    text: str
    ours: bool = False


class Panel(NamedTuple):
    """Bars on one axis."""

    title: str
    bars: Sequence[Bar]


class Curve(NamedTuple):
    """Points from left to right."""

    label: str
    values: Sequence[float]


class Plot(NamedTuple):
    """Curves over the same places; `texts` name the grid lines of the axis, by value."""

    title: str
    places: Sequence[str]
    curves: Sequence[Curve]


class Band(NamedTuple):
    """Plots side by side, on one axis."""

    title: str
    plots: Sequence[Plot]


class Picture:
    """An SVG that grows downwards."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", role="img")
        ET.SubElement(self._root, "title").text = title
        ET.SubElement(self._root, "style").text = STYLE
        self._background = self.shape("rect", width=WIDTH, fill="#ffffff")
        self.text(MARGIN, 34, title, "title")
        self.text(MARGIN, 54, subtitle, "muted")
        self.y = 64.0

    def shape(self, tag: str, **attributes: object) -> ET.Element:
        """Add an element."""
        words = {name.rstrip("_").replace("_", "-"): _number(value) for name, value in attributes.items()}
        return ET.SubElement(self._root, tag, words)

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Add text."""
        self.shape("text", x=x, y=y, **({"class_": kind} if kind else {})).text = text

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add a line of the grid."""
        self.shape("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="grid")

    def finish(self) -> str:
        """Return the picture as text."""
        height = round(self.y + 18)
        self._root.attrib.update(viewBox=f"0 0 {WIDTH} {height}", width=str(WIDTH), height=str(height))
        self._background.set("height", str(height))
        ET.indent(self._root)
        return ET.tostring(self._root, encoding="unicode") + "\n"


def bars(title: str, subtitle: str, panels: Sequence[Panel]) -> str:
    """Return horizontal bars on one logarithmic axis for each panel; the panels are one below the other."""
    picture = Picture(title, subtitle)
    left, right = MARGIN + LABELS, WIDTH - MARGIN - 70
    for panel in panels:
        low = 10 ** math.floor(math.log10(min(bar.value for bar in panel.bars)))
        decades = max(1, math.ceil(math.log10(max(bar.value for bar in panel.bars) / low)))
        scale = (right - left) / decades
        picture.y += 26
        picture.text(MARGIN, picture.y, panel.title, "panel")
        picture.y += 10
        bottom = picture.y + ROW * len(panel.bars)
        for decade in range(decades + 1):
            picture.line(left + decade * scale, picture.y, left + decade * scale, bottom)
        for bar in panel.bars:
            length = max(2.0, math.log10(bar.value / low) * scale)
            ink = INKS[0] if bar.ours else THEIRS
            picture.shape("rect", x=left, y=picture.y + 3, width=length, height=ROW - 6, rx=2, fill=ink)
            kind = "ours" if bar.ours else ""
            picture.text(left - 10, picture.y + 15, bar.label, f"end {kind}".strip())
            picture.text(left + length + 6, picture.y + 15, bar.text, kind)
            picture.y += ROW
    return picture.finish()


def curves(title: str, subtitle: str, bands: Sequence[Band], unit: str) -> str:
    """Return curves on one logarithmic axis for each band; the bands are one below the other."""
    picture = Picture(title, subtitle)
    _legend(picture, [curve.label for curve in bands[0].plots[0].curves])
    for band in bands:
        picture.y += 34
        picture.text(MARGIN, picture.y, band.title)
        _plots(picture, band.plots, unit)
    return picture.finish()


def _plots(picture: Picture, plots: Sequence[Plot], unit: str) -> None:
    values = [value for plot in plots for curve in plot.curves for value in curve.values if value > 0]
    low = math.floor(math.log10(min(values)))
    decades = max(1, math.ceil(math.log10(max(values))) - low)
    top, height, gap = picture.y + 40, 190, 22
    left, width = MARGIN + 46, (WIDTH - 2 * MARGIN - 46 - gap * (len(plots) - 1)) / len(plots)
    for number, plot in enumerate(plots):
        x = left + number * (width + gap)
        picture.text(x, top - 10, plot.title, "panel")
        for decade in range(decades + 1):
            y = top + height - decade * height / decades
            picture.line(x, y, x + width, y)
            if number == 0:
                picture.text(x - 8, y + 4, f"{_power(low + decade)} {unit}", "end muted")
        step = width / max(1, len(plot.places) - 1)
        for i, place in enumerate(plot.places):
            picture.text(x + i * step, top + height + 18, place, "middle muted")
        for curve, ink in zip(plot.curves, INKS, strict=False):
            points = [
                (x + i * step, top + height - (math.log10(max(value, 10.0**low)) - low) * height / decades)
                for i, value in enumerate(curve.values)
            ]
            path = " ".join(f"{_number(px)},{_number(py)}" for px, py in points)
            picture.shape("polyline", points=path, fill="none", stroke=ink, stroke_width=2)
            for px, py in points:
                picture.shape("circle", cx=px, cy=py, r=2.5, fill=ink)
    picture.y = top + height + 22


def _legend(picture: Picture, labels: Sequence[str]) -> None:
    x = float(MARGIN)
    picture.y += 12
    for label, ink in zip(labels, INKS, strict=False):
        picture.shape("rect", x=x, y=picture.y, width=12, height=12, rx=2, fill=ink)
        picture.text(x + 18, picture.y + 10, label, "muted")
        x += 40 + 7 * len(label)


def _power(exponent: int) -> str:
    return f"{10**exponent:g}" if exponent >= 0 else f"{10.0**exponent:g}"


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
