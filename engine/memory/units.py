"""Sizes of memory as people write them: reads one and says which unit it took, since 80 GB is 7% less than 80 GiB."""

from __future__ import annotations

import re

from engine.errors import ConfigError

_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
GIB = _BINARY["g"]


def parse_memory(text: str) -> tuple[int, str]:
    """(bytes, note): the note says which unit was taken, and how far the other one is; empty where nothing is open.

    "80GiB" is binary and needs no note, "80GB" is decimal, "80G" and a bare number below a million are GiB, as GPU
    memory is counted; a larger bare number is bytes. Raises `ConfigError` for anything else, zero and negative sizes.
    """
    written = text.strip()
    match = re.fullmatch(r"([+-]?\d[\d_,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([kmgtKMGT]?)(i?)([bB]?)", written)
    if not match or (match[3] and not match[2]):
        raise ConfigError(f"cannot read {text!r} as an amount of memory; write for example 80GiB or 80GB")
    number = float(match[1].replace(",", "").replace("_", ""))
    if number <= 0:
        raise ConfigError(f"an amount of memory must be more than zero, found {written!r}; write for example 80GiB")
    prefix, binary, byte = match[2].lower(), bool(match[3]), bool(match[4])
    if prefix and byte and not binary:
        return _noted(number, prefix, taken=_DECIMAL, other=_BINARY, word=f"{prefix.upper()}B (decimal)")
    if prefix and binary:
        return int(number * _BINARY[prefix]), ""
    if prefix:
        return _noted(number, prefix, taken=_BINARY, other=_DECIMAL, word=f"{prefix.upper()}iB")
    if byte or number >= 1e6:
        return int(number), "" if byte else f"{written} was taken as bytes"
    return _noted(number, "g", taken=_BINARY, other=_DECIMAL, word="GiB")


def gib(value: float) -> str:
    """`36.07 GiB`; MiB where two decimals of a GiB would say little."""
    if value and abs(value) < GIB / 10:
        return f"{value / _BINARY['m']:,.2f} MiB"
    return f"{value / GIB:,.2f} GiB"


def _noted(number: float, prefix: str, *, taken: dict[str, int], other: dict[str, int], word: str) -> tuple[int, str]:
    mine, theirs = int(number * taken[prefix]), int(number * other[prefix])
    unit = prefix.upper() + ("B" if taken is _BINARY else "iB")
    apart = abs(mine - theirs)
    return mine, (
        f"{number:g} was taken as {word} = {gib(mine)}; {number:g} {unit} would be {gib(theirs)}, "
        f"{gib(apart)} {'less' if theirs < mine else 'more'}"
    )
