"""Well-known models and GPUs by name: the sizes of their configs, and what drivers report of their memory.

`presets/models.json` keeps the keys of each `config.json` that decide memory, with its source; a preset is read as
any config is. `presets/gpus.json` keeps what an engine sees as the device's total, which is less than the box says.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.memory.deployment import Gpu
from engine.memory.hf_config import model_shape, read_config
from engine.memory.shape import ModelShape
from engine.memory.units import GIB, parse_memory


def model_names() -> list[str]:
    """The names of all model presets."""
    return list(_models())


def model_preset(name: str) -> ModelShape:
    """The preset of that name, in any case, with or without its organization; raises `ConfigError` with near names."""
    key = _find(name, _models())
    if key is None:
        raise ConfigError(
            f"there is no preset for the model {name!r}{_near(name, _models())}; give --model-config with its "
            "config.json, or --layers, --kv-heads and --head-dim"
        )
    return model_shape(_models()[key]["config"], key)


def model_config(name: str) -> dict[str, Any]:
    """The config of a preset: "config", and where it is from: "source", "parameters"."""
    key = _find(name, _models())
    if key is None:
        raise ConfigError(f"there is no preset for the model {name!r}{_near(name, _models())}")
    return _models()[key]


def read_model(source: str) -> ModelShape:
    """A preset's name, a config file, its directory, `-` or pasted JSON, as a shape; raises `ConfigError`."""
    return model_shape(*find_config(source))


def find_config(source: str) -> tuple[dict[str, Any], str]:
    """(config, name) of whatever `read_model` takes; raises `ConfigError`."""
    written = source.strip()
    path = Path(written).expanduser() if not written.startswith("{") else None
    key = _find(written, _models())
    if key is not None and not (path and path.exists()):
        return _models()[key]["config"], key
    a_file = path is None or written == "-" or path.exists() or re.search(r"\.(json|gguf)$|^[./~]", written)
    if not a_file:
        model_preset(written)  # tells near names
    return read_config(written)


def gpu_names() -> list[str]:
    """The names of all GPU presets."""
    return list(_gpus())


def gpu(name: str) -> Gpu:
    """The GPU of that name in any case, "H100-80GB" or "h100"; raises `ConfigError` with near names."""
    key = _find(name, _gpus())
    if key is None:
        raise ConfigError(
            f"there is no GPU {name!r}{_near(name, _gpus())}; `kvoncall plan --list-gpus` names them, or give "
            "--gpu-memory, for example --gpu-memory 80GiB"
        )
    facts = _gpus()[key]
    capability = facts["compute_capability"]
    return Gpu(
        name=key,
        memory_bytes=int(facts["memory_gib"] * GIB),
        compute_capability=(capability[0], capability[1]) if capability else None,
        memory_bandwidth=facts["bandwidth_gb_s"] * 1e9,
        unified=bool(facts.get("unified")),
    )


def gpu_from_memory(text: str) -> tuple[Gpu, str]:
    """(a GPU of that much memory, the note of the unit taken); raises `ConfigError`."""
    size, note = parse_memory(text)
    return Gpu(name=f"a GPU of {size / GIB:.2f} GiB", memory_bytes=size), note


@functools.cache
def _models() -> dict[str, dict[str, Any]]:
    return _read("models.json")


@functools.cache
def _gpus() -> dict[str, dict[str, Any]]:
    return _read("gpus.json")


def _read(name: str) -> dict[str, dict[str, Any]]:
    text = resources.files("engine.memory").joinpath(f"presets/{name}").read_text(encoding="utf-8")
    read: dict[str, dict[str, Any]] = json.loads(text)
    return read


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.rsplit("/", 1)[-1].lower().removeprefix("nvidia").strip())


def _find(name: str, presets: dict[str, dict[str, Any]]) -> str | None:
    wanted = _key(name)
    for preset, facts in presets.items():
        source = str(facts.get("source", ""))
        if wanted and wanted in {_key(preset), _key(source), *(_key(alias) for alias in facts["aliases"])}:
            return preset
    return None


def _near(name: str, presets: dict[str, dict[str, Any]]) -> str:
    by_key = {_key(known): preset for preset, facts in presets.items() for known in (preset, *facts["aliases"])}
    close = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.6)
    names = list(dict.fromkeys(by_key[key] for key in close))
    return f" (near: {', '.join(names)})" if names else ""
