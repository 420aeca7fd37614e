"""Pictures in chat messages, for the testbed model: a stand-in for a vision tower, and nothing more.

The testbed model has no eyes. A picture of text in the font of `engine.testbed.font` is read cell by cell, and the
tokens of that text are what the model computes on; the prompt itself has a placeholder token in each of these places,
as prompts of real vision models do. So, as there, equal prompts with different pictures have different KV, and the
prefix cache must tell them apart by the picture's digest.
"""

from __future__ import annotations

import base64
import binascii
import io
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.testbed.font import CELL_HEIGHT, CELL_WIDTH, CHARACTERS, glyphs

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

PNG_URL = "data:image/png;base64,"
MAX_BYTES = 1024**2  # of a PNG file
MAX_CELLS = 4096
MODES = ("L", "RGB")
_PLACEHOLDER = "<unk>"
_SAMPLE = ["ax", "=37", ";"]


class ImageError(ValueError):
    """A picture that cannot be read; the message is for the client."""


@dataclass(frozen=True)
class Picture:
    """What a picture says, and the SHA-256 of its mode, size and pixels (hex): equal pixels of another shape differ."""

    text: str
    digest: str


@dataclass(frozen=True)
class PictureTokens:
    """The tokens a picture stands for, and its digest."""

    token_ids: list[int]
    digest: str


class ImageReader:
    """Turns pictures into tokens of the testbed's vocabulary. placeholder_id stands for each of them in the prompt."""

    def __init__(self, tokenizer: Tokenizer, placeholder_id: int) -> None:
        self._tokenizer = tokenizer
        self.placeholder_id = placeholder_id

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ImageReader | None:
        """A reader for a model with the testbed's vocabulary, `None` for any other."""
        ids = tokenizer.encode(_PLACEHOLDER + "".join(_SAMPLE), add_special_tokens=False)
        if [tokenizer.token_text(token) for token in ids] != [_PLACEHOLDER, *_SAMPLE]:
            return None
        return cls(tokenizer, ids[0])

    def read(self, url: str) -> PictureTokens:
        """The tokens of a picture in a `data:` URL; raises `ImageError`."""
        picture = read_picture(png_of(url))
        return PictureTokens(self._tokenizer.encode(picture.text, add_special_tokens=False), picture.digest)


def png_of(url: str) -> bytes:
    """The file in a `data:image/png;base64,` URL; raises `ImageError`. Nothing is ever fetched."""
    if not url.startswith(PNG_URL):
        raise ImageError(f"must be a PNG file in a URL that starts with {PNG_URL}; nothing is fetched from elsewhere")
    if len(url) - len(PNG_URL) > MAX_BYTES * 4 // 3 + 4:
        raise ImageError(f"is larger than {MAX_BYTES} bytes")
    try:
        return base64.b64decode(url[len(PNG_URL) :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"is not base64: {error}") from None


def read_picture(png: bytes) -> Picture:
    """Reads each cell as the glyph that differs in the fewest pixels; rows follow each other without a break.

    Blanks at the end of a row are dropped. Raises `ImageError`.
    """
    pixels, digest = _pixels(png)
    rows, columns = pixels.shape[0] // CELL_HEIGHT, pixels.shape[1] // CELL_WIDTH
    cells = (pixels < 128).reshape(rows, CELL_HEIGHT, columns, CELL_WIDTH).swapaxes(1, 2).reshape(rows * columns, -1)
    shapes = glyphs().reshape(len(CHARACTERS), -1)
    # Pixels that differ: ink of the cell, plus ink of the glyph, less what they share twice.
    shared = cells.astype(np.float32) @ shapes.T.astype(np.float32)
    nearest = (shapes.sum(axis=1) - 2 * shared).argmin(axis=1).reshape(rows, columns)
    text = "".join("".join(CHARACTERS[index] for index in row).rstrip() for row in nearest)
    if not text:
        raise ImageError("shows no text")
    return Picture(text, digest)


def _pixels(png: bytes) -> tuple[NDArray[np.uint8], str]:
    """Grey values [height, width] and the digest of a PNG file."""
    try:
        from PIL import Image
    except ImportError:
        raise ImageError("images need the package pillow: pip install 'kvoncall[images]'") from None
    if len(png) > MAX_BYTES:
        raise ImageError(f"is larger than {MAX_BYTES} bytes")
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            width, height = image.size
            if image.mode not in MODES:
                raise ImageError(f"must be greyscale or RGB of 8 bits without transparency, not of mode {image.mode}")
            if width % CELL_WIDTH or height % CELL_HEIGHT:
                raise ImageError(
                    f"is {width} x {height} pixels, but this model reads whole cells of {CELL_WIDTH} x {CELL_HEIGHT}"
                )
            if width * height > MAX_CELLS * CELL_WIDTH * CELL_HEIGHT:
                raise ImageError(f"has more than {MAX_CELLS} cells of {CELL_WIDTH} x {CELL_HEIGHT} pixels")
            digest = sha256(f"{image.mode} {width}x{height} ".encode() + image.tobytes()).hexdigest()
            return np.asarray(image.convert("L")), digest
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"is not a PNG file that can be read: {error}") from None
