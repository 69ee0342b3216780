"""Plots as SVG text: bars, and lines in panels. No dependencies."""

import math
from xml.sax.saxutils import escape

COLORS = ["#2f6db3", "#d9822b", "#4a9c5d", "#a64d8f", "#7a7a7a", "#c43c3c", "#3aa6a6", "#8c6d31"]
STYLE = ("<style>text{font:12px sans-serif;fill:#333}.title{font-size:14px;font-weight:bold}.grid{stroke:#ddd}"
         ".axis{stroke:#666}.end{text-anchor:end}.mid{text-anchor:middle}</style>")


def text(x, y, words, kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def line(x1, y1, x2, y2, kind):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def number(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def document(width, height, parts):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}">', STYLE, f'<rect width="{width}" height="{height}" fill="#fff"/>',
                      *parts, "</svg>", ""])


def bars(title, unit, groups):
    """`groups`: [(name, [(name of bar, value)])]. Each group has a scale of its own; longer is more."""
    left, width, row, gap = 150, 640, 22, 34
    names = list(dict.fromkeys(name for _, items in groups for name, _ in items))
    parts, y = [text(10, 22, title, "title")], 40
    for group, items in groups:
        parts.append(text(10, y + 12, f"{group}, {unit}", "title"))
        y += row
        largest = max((value for _, value in items), default=0) or 1
        for name, value in items:
            length = (width - left - 90) * value / largest
            color = COLORS[names.index(name) % len(COLORS)]
            parts += [text(left - 8, y + 13, name, "end"),
                      f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{row - 6}" fill="{color}"/>',
                      text(left + length + 6, y + 13, number(value))]
            y += row
        y += gap - row
    return document(width, y + 6, parts)


class LogAxis:
    """From the decade, or power of two, below the smallest value to that above the largest."""

    def __init__(self, values, start, end, base):
        low, high = math.log(min(values), base), math.log(max(values), base)
        self.low, self.high, self.base = math.floor(low + 1e-9), max(math.ceil(high - 1e-9), math.floor(low + 1e-9) + 1), base
        self.start, self.end = start, end

    def at(self, value):
        return self.start + (self.end - self.start) * (math.log(value, self.base) - self.low) / (self.high - self.low)

    def ticks(self):
        return [self.base**power for power in range(self.low, self.high + 1)]


def lines(title, x_name, y_name, panels):
    """`panels`: [(name, {name of line: [(x, y)]})], side by side on one scale, both axes logarithmic. A dashed line
    shows growth in proportion to x."""
    width, height, left, top, space = 300, 260, 66, 60, 20
    points = [point for _, series in panels for line_ in series.values() for point in line_ if point[1] > 0]
    if not points:
        points = [(1, 1)]
    names = list(dict.fromkeys(name for _, series in panels for name in series))
    parts = [text(10, 22, title, "title"), text(10, 42, y_name)]
    y_axis = LogAxis([y for _, y in points], top + height, top, 10)
    for index, (panel, series) in enumerate(panels):
        x0 = left + index * (width + space)
        x_axis = LogAxis([x for x, _ in points], x0, x0 + width, 2)
        parts.append(text(x0 + width / 2, top - 6, panel, "mid"))
        for tick in y_axis.ticks():
            parts.append(line(x0, y_axis.at(tick), x0 + width, y_axis.at(tick), "grid"))
            if index == 0:
                parts.append(text(x0 - 6, y_axis.at(tick) + 4, number(tick), "end"))
        for tick in x_axis.ticks():
            parts += [line(x_axis.at(tick), top, x_axis.at(tick), top + height, "grid"),
                      text(x_axis.at(tick), top + height + 16, number(tick), "mid")]
        parts += [line(x0, top + height, x0 + width, top + height, "axis"), line(x0, top, x0, top + height, "axis"),
                  text(x0 + width / 2, top + height + 34, x_name, "mid")]
        for name, values in series.items():
            color = COLORS[names.index(name) % len(COLORS)]
            seen = [(x_axis.at(x), y_axis.at(y)) for x, y in values if y > 0]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in seen)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in seen]
        firsts = [values[0] for values in series.values() if values and values[0][1] > 0]
        if firsts:
            x, y = max(firsts, key=lambda point: point[1])
            end = min(2**x_axis.high, x * 10**y_axis.high / y)
            parts.append(f'<line x1="{x_axis.at(x):.1f}" y1="{y_axis.at(y):.1f}" x2="{x_axis.at(end):.1f}" '
                         f'y2="{y_axis.at(y * end / x):.1f}" stroke="#999" stroke-dasharray="4 4"/>')
    y = top + height + 58
    x = left
    for name in names:
        parts += [f'<rect x="{x}" y="{y - 10}" width="14" height="10" fill="{COLORS[names.index(name) % len(COLORS)]}"/>',
                  text(x + 20, y, name)]
        x += 40 + 8 * len(name)
    parts.append(text(x, y, "dashed: in proportion"))
    return document(left + len(panels) * (width + space), y + 16, parts)
