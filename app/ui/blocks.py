"""The block map: one cell a KV block of the pool, coloured by state, with the counts in words beside it.

Drawn as an SVG image of horizontal runs (a full pool of one state is a handful of rectangles), so that it stays
small at thousands of blocks. Above `MAX_CELLS` a cell stands for several blocks and shows the busiest of them.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Sequence

# Index = state in /debug/blocks: 0 free, 1 cached, 2 used, 3 shared.
STATES = ("free", "cached", "used", "shared")
MEANING = (
    "free: holds nothing",
    "cached: nobody uses it, kept for a prefix hit, dropped when a block is needed",
    "used: belongs to one running request",
    "shared: belongs to several requests through a common prefix",
)
COLORS = ("#9aa7b433", "#5b9bd5", "#e08a2e", "#8e5bd0")
MAX_CELLS = 2048
CELL = 10


def expand(states: Sequence[object]) -> list[int]:
    """State a block from a plain list `[2, 2, 0]` or from runs `[[2, 2], [0, 1]]` (state, length)."""
    out: list[int] = []
    for item in states:
        if isinstance(item, (list, tuple)):
            state, length = item
            out.extend([int(state)] * int(length))
        elif isinstance(item, (int, float)):
            out.append(int(item))
    return out


def counts(states: Sequence[int]) -> dict[str, int]:
    """Blocks by the word of their state."""
    found = Counter(states)
    return {word: found.get(index, 0) for index, word in enumerate(STATES)}


def thin(states: Sequence[int], max_cells: int = MAX_CELLS) -> tuple[list[int], int]:
    """At most `max_cells` cells and how many blocks each stands for; a cell shows its busiest block."""
    per_cell = max(1, math.ceil(len(states) / max_cells))
    return [max(states[i : i + per_cell]) for i in range(0, len(states), per_cell)], per_cell


def svg(cells: Sequence[int], columns: int = 64) -> str:
    """The map as an SVG document, `columns` cells a row, with a thin line between cells."""
    rows = max(1, math.ceil(len(cells) / columns))
    width, height = columns * CELL, rows * CELL
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    pattern = f'<pattern id="g" width="{CELL}" height="{CELL}" patternUnits="userSpaceOnUse">'
    border = f'<path d="M{CELL} 0V{CELL}" stroke="#fff" stroke-opacity=".35"/></pattern>'
    parts = [head, pattern, border]
    for row in range(rows):
        line = cells[row * columns : (row + 1) * columns]
        start = 0
        for i in range(1, len(line) + 1):
            if i == len(line) or line[i] != line[start]:
                parts.append(
                    f'<rect x="{start * CELL}" y="{row * CELL + 0.5}" width="{(i - start) * CELL}" '
                    f'height="{CELL - 1}" fill="{COLORS[min(line[start], 3)]}"/>'
                )
                start = i
    parts.append(f'<path d="M0 0H{width}V{height}H0Z" fill="url(#g)"/></svg>')
    return "".join(parts)


def image_html(states: Sequence[int]) -> str:
    """An `<img>` of the map with its counts as alternative text."""
    cells, per_cell = thin(states)
    data = base64.b64encode(svg(cells, 32 if len(cells) <= 256 else 64).encode()).decode()
    words = ", ".join(f"{n} {word}" for word, n in counts(states).items())
    note = f" One cell stands for {per_cell} blocks." if per_cell > 1 else ""
    return f'<img src="data:image/svg+xml;base64,{data}" alt="KV blocks: {words}.{note}" style="width:100%">'


def legend_html(states: Sequence[int]) -> str:
    """Swatches with word and count, in the order of the states."""
    items = [
        f'<span title="{MEANING[i]}" style="white-space:nowrap"><span style="display:inline-block;width:.8em;'
        f'height:.8em;border:1px solid #8893a0;background:{COLORS[i]}"></span>&nbsp;{word} <b>{n}</b></span>'
        for i, (word, n) in enumerate(counts(states).items())
    ]
    return f'<div style="display:flex;flex-wrap:wrap;gap:.3em 1.2em;font-size:.9rem">{"".join(items)}</div>'
