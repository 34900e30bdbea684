"""Plots as SVG, written by hand: lines and bars, enough for a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 40, 50
COLORS = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72", "#6940a5", "#64473a", "#dfab01", "#e03e3e")
Points = Sequence[tuple[float, float]]


def lines(
    path: Path, title: str, x_name: str, y_name: str, series: Mapping[str, Points], log: str = "", most: int = 400
) -> Path:
    """One line for each name; ``log`` may contain "x" and "y"; long series are thinned to means of ``most`` runs."""
    thin = {name: _thinned(points, most) for name, points in series.items()}
    xs = [x for points in thin.values() for x, _ in points]
    ys = [y for points in thin.values() for _, y in points]
    x_at, x_ticks = _axis(xs, LEFT, WIDTH - RIGHT, "x" in log)
    y_at, y_ticks = _axis(ys, HEIGHT - BOTTOM, TOP, "y" in log)
    out = _frame(title, x_name, y_name, [(x_at(v), _text(v)) for v in x_ticks], [(y_at(v), _text(v)) for v in y_ticks])
    for i, (name, points) in enumerate(thin.items()):
        color = COLORS[i % len(COLORS)]
        shape = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if i >= len(COLORS) // 2 and len(thin) > 4 else ""
        out.append(f'<polyline points="{shape}" fill="none" stroke="{color}" stroke-width="1.8"{dash}/>')
        out += _legend(i, name, color)
    return _write(path, out)


def bars(path: Path, title: str, y_name: str, groups: Mapping[str, Mapping[str, float]]) -> Path:
    """A group of bars for each name; all groups have the same keys."""
    keys = list(next(iter(groups.values())))
    y_at, ticks = _axis([0.0, *(v for g in groups.values() for v in g.values())], HEIGHT - BOTTOM, TOP, False)
    room = (WIDTH - RIGHT - LEFT) / len(groups)
    wide = 0.8 * room / len(keys)
    middles = [(LEFT + room * (i + 0.5), name) for i, name in enumerate(groups)]
    out = _frame(title, "", y_name, middles, [(y_at(v), _text(v)) for v in ticks])
    for i, group in enumerate(groups.values()):
        for j, key in enumerate(keys):
            x, y = LEFT + room * (i + 0.1) + wide * j, y_at(group[key])
            color = COLORS[j % len(COLORS)]
            out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" fill="{color}"/>'
                f'<text x="{x + wide / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">{_text(group[key])}</text>'
            )
    for j, key in enumerate(keys):
        out += _legend(j, key, COLORS[j % len(COLORS)])
    return _write(path, out)


def _thinned(points: Points, most: int) -> Points:
    if len(points) <= most:
        return points
    step = -(-len(points) // most)
    runs = [points[i : i + step] for i in range(0, len(points), step)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def _axis(values: Sequence[float], low: float, high: float, log: bool) -> tuple[Callable[[float], float], list[float]]:
    """Where a value lies between two pixels, and the values to mark."""
    if log:
        first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        last = max(last, first + 1)
        return (
            lambda v: low + (high - low) * (math.log10(v) - first) / (last - first),
            [10.0**e for e in range(first, last + 1)],
        )
    top = max(values) or 1.0
    step = 10 ** math.floor(math.log10(top))
    step = next(s for s in (step / 5, step / 2, step, step * 2) if top / s <= 8)
    end = step * math.ceil(top / step - 1e-9)
    return lambda v: low + (high - low) * v / end, [step * i for i in range(round(end / step) + 1)]


def _frame(
    title: str, x_name: str, y_name: str, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]
) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = (TOP + bottom) / 2
    out = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{escape(y_name)}</text>',
    ]
    for y, text in y_ticks:
        out.append(f'<line x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for x, text in x_ticks:
        out.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(text)}</text>')
    return out


def _legend(i: int, name: str, color: str) -> list[str]:
    x, y = WIDTH - RIGHT + 14, TOP + 12 + 20 * i
    return [
        f'<rect x="{x}" y="{y - 8}" width="14" height="8" fill="{color}"/>',
        f'<text x="{x + 20}" y="{y}">{escape(name)}</text>',
    ]


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _write(path: Path, parts: Sequence[str]) -> Path:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    head += ' font-size="11">'
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([head, *parts, "</svg>"]), encoding="utf-8")
    print(f"plot: {path}")
    return path
