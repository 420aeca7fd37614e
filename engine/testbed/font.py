"""The letters that pictures for the testbed model are written in, and how to draw a picture of text.

A picture is a grid of cells of 6 x 8 pixels, each with one glyph of 5 x 7 in its upper left corner, black on white.
`engine.images` reads such pictures back. There is no `<`, so that no picture can spell a special token.
Drawing needs the package pillow.
"""

from __future__ import annotations

import io
from functools import cache

import numpy as np
from numpy.typing import NDArray

CELL_WIDTH, CELL_HEIGHT = 6, 8

# Seven rows of five pixels, a hex number a row; its lowest bit is the pixel on the right.
_ROWS = {
    " ": "00 00 00 00 00 00 00",
    "0": "0e 11 13 15 19 11 0e", "1": "04 0c 04 04 04 04 0e", "2": "0e 11 01 02 04 08 1f",
    "3": "1f 02 04 02 01 11 0e", "4": "02 06 0a 12 1f 02 02", "5": "1f 10 1e 01 01 11 0e",
    "6": "06 08 10 1e 11 11 0e", "7": "1f 01 02 04 08 08 08", "8": "0e 11 11 0e 11 11 0e",
    "9": "0e 11 11 0f 01 02 0c",
    "a": "00 00 0e 01 0f 11 0f", "b": "10 10 16 19 11 11 1e", "c": "00 00 0e 10 10 11 0e",
    "d": "01 01 0d 13 11 11 0f", "e": "00 00 0e 11 1f 10 0e", "f": "06 09 08 1c 08 08 08",
    "g": "00 0f 11 11 0f 01 0e", "h": "10 10 16 19 11 11 11", "i": "04 00 0c 04 04 04 0e",
    "j": "02 00 06 02 02 12 0c", "k": "10 10 12 14 18 14 12", "l": "0c 04 04 04 04 04 0e",
    "m": "00 00 1a 15 15 11 11", "n": "00 00 16 19 11 11 11", "o": "00 00 0e 11 11 11 0e",
    "p": "00 00 1e 11 1e 10 10", "q": "00 00 0d 13 0f 01 01", "r": "00 00 16 19 10 10 10",
    "s": "00 00 0e 10 0e 01 1e", "t": "08 08 1c 08 08 09 06", "u": "00 00 11 11 11 13 0d",
    "v": "00 00 11 11 11 0a 04", "w": "00 00 11 11 15 15 0a", "x": "00 00 11 0a 04 0a 11",
    "y": "00 00 11 11 0f 01 0e", "z": "00 00 1f 02 04 08 1f",
    "=": "00 00 1f 00 1f 00 00", ";": "00 0c 0c 00 0c 04 08", "?": "0e 11 01 02 04 00 04",
    ">": "10 08 04 02 04 08 10", "+": "00 04 04 1f 04 04 00", "-": "00 00 00 1f 00 00 00",
    "(": "02 04 08 08 08 04 02", ")": "08 04 02 02 02 04 08", "[": "0e 08 08 08 08 08 0e",
    "]": "0e 02 02 02 02 02 0e", "{": "06 08 08 10 08 08 06", "}": "0c 02 02 01 02 02 0c",
    ".": "00 00 00 00 00 0c 0c", ",": "00 00 00 00 0c 04 08", ":": "00 0c 0c 00 0c 0c 00",
}  # fmt: skip

CHARACTERS = "".join(_ROWS)


@cache
def glyphs() -> NDArray[np.bool_]:
    """bool [characters, 8, 6], True where there is ink, in the order of `CHARACTERS`."""
    cells = np.zeros((len(_ROWS), CELL_HEIGHT, CELL_WIDTH), dtype=np.bool_)
    for cell, rows in zip(cells, _ROWS.values(), strict=True):
        for y, bits in enumerate(bytes.fromhex(rows)):
            cell[y, :5] = [bits >> (4 - x) & 1 for x in range(5)]
    return cells


def draw(text: str, columns: int | None = None) -> bytes:
    """A PNG of `text`, wrapped at `columns` cells (default: one line). `ValueError` for what the font does not have."""
    from PIL import Image

    missing = sorted(set(text) - set(CHARACTERS))
    if missing or not text:
        raise ValueError(f"the font has no {missing[0]!r}" if missing else "there is no text to draw")
    width = columns or len(text)
    lines = [text[start : start + width].ljust(width) for start in range(0, len(text), width)]
    indices = np.array([[CHARACTERS.index(char) for char in line] for line in lines])
    ink = glyphs()[indices].transpose(0, 2, 1, 3).reshape(len(lines) * CELL_HEIGHT, width * CELL_WIDTH)
    file = io.BytesIO()
    Image.fromarray(np.where(ink, 0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
