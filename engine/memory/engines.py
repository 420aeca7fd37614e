"""Engine names and versions as people write them, and the newest version each plan knows.

Versions compare as tuples of their numbers: "0.6.4.post1" is (0, 6, 4, 1), so a post release is newer than its
release, and an era ("0.9.x V1", "mid-2026") is taken as what can be read of it.
"""

from __future__ import annotations

import re

from engine.errors import ConfigError

NEWEST = {"vllm": "0.33.0", "sglang": "0.5.23", "tensorrt-llm": "1.4.0", "tgi": "3.3.7", "kvoncall": "0"}
OLDEST = {"vllm": (0, 2), "sglang": (0, 4), "tensorrt-llm": (0, 8), "tgi": (2,), "kvoncall": (0,)}
_NAMES = {
    "vllm": "vllm",
    "aphrodite": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt-llm",
    "tensorrtllm": "tensorrt-llm",
    "tensorrt": "tensorrt-llm",
    "trtllm": "tensorrt-llm",
    "trt-llm": "tensorrt-llm",
    "triton": "tensorrt-llm",
    "tgi": "tgi",
    "text-generation-inference": "tgi",
    "kvoncall": "kvoncall",
}


def engine_name(text: str) -> str:
    """The canonical name: "vLLM wrapper" is vllm. Raises `ConfigError` for an engine that no plan knows."""
    words = text.strip().lower().replace("_", "-")
    for spelling, name in sorted(_NAMES.items(), key=lambda item: -len(item[0])):
        if re.match(rf"{re.escape(spelling)}(?![a-z])", words) or f"({spelling}" in words:
            return name
    raise ConfigError(f"engine {text!r} is not known; use vllm, sglang, tensorrt-llm, tgi or kvoncall")


def version_numbers(text: str) -> tuple[int, ...] | None:
    """ "0.6.4.post1" -> (0, 6, 4, 1), "0.9.x V1" -> (0, 9), "0.29.1-rc1" -> (0, 29, 1); None where nothing is read."""
    text = re.sub(r"(?<=\d)x\b", "0", text.strip().lower())  # "0.2x" is some 0.20
    match = re.search(r"(?<![\d.])v?(\d+(?:\.\d+)+)(?:\.?post(\d+))?", text)
    if match is None:
        return None
    numbers = tuple(int(part) for part in match[1].split(".") if part)
    if match[2] is not None:
        numbers = (*numbers, *(0,) * (3 - len(numbers)), int(match[2]))
    return numbers


def resolve_version(engine: str, version: str | None) -> tuple[tuple[int, ...], str]:
    """(numbers, note): the newest known version where none is given, the nearest where it is beyond what is known."""
    newest = version_numbers(NEWEST[engine]) or (0,)
    if engine == "kvoncall":
        return newest, ""
    if version is None:
        return newest, f"no version of {engine} was given: planned as {NEWEST[engine]}, the newest known"
    numbers = version_numbers(version)
    if numbers is None:
        return newest, f"version {version!r} of {engine} cannot be read: planned as {NEWEST[engine]}, the newest known"
    if numbers[: len(newest)] > newest:
        return newest, f"{engine} {version} is newer than what is known: planned as {NEWEST[engine]}"
    if numbers < OLDEST[engine]:
        oldest = ".".join(str(part) for part in OLDEST[engine])
        return OLDEST[engine], f"{engine} {version} is older than what is known: planned as {oldest}"
    return numbers, ""
