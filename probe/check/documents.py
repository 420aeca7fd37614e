"""YAML and JSON documents whose strings know their line.

A file may hold several documents; strings that hold a file of their own (ConfigMaps) are read with `read_text` again,
with the line at which they begin.
"""

from __future__ import annotations

import bisect
import json
import json.scanner
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 16 * 1024 * 1024


class DocumentError(ValueError):
    """A file cannot be read as YAML or JSON; the message is one sentence for the user."""


class Located(str):
    """A string, the line it begins on, and whether its line breaks are those of the file."""

    line: int
    verbatim: bool

    def __new__(cls, text: str, line: int, verbatim: bool = False) -> Located:
        self = super().__new__(cls, text)
        self.line, self.verbatim = line, verbatim
        return self

    def line_at(self, offset: int) -> int:
        """The line of the character at `offset`, as far as it can be known."""
        return self.line + (self.count("\n", 0, offset) if self.verbatim else 0)


def read_file(path: Path) -> list[Any]:
    """The documents of a file; raises `DocumentError`."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DocumentError(f"{path} holds {size:,} bytes: more than {MAX_BYTES:,} are not read.")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror or error}).") from None
    except UnicodeDecodeError:
        raise DocumentError(f"{path} is not UTF-8 text.") from None
    return read_text(text, str(path))


def read_text(text: str, name: str, first_line: int = 1) -> list[Any]:
    """The documents in `text`, which begins at `first_line` of the file `name`; raises `DocumentError`."""
    text = str(text)  # libyaml takes no subclass of str
    try:
        if name.endswith(".json") or text.lstrip()[:1] == "{":
            try:
                return [_read_json(text, first_line)]
            except json.JSONDecodeError as error:
                if name.endswith(".json"):
                    line = first_line + error.lineno - 1
                    raise DocumentError(f"{name} is not JSON: line {line}: {error.msg}.") from None
        return _read_yaml(text, name, first_line)
    except RecursionError:
        raise DocumentError(f"{name} is nested too deeply to be rules or a dashboard.") from None


class _JsonDecoder(json.JSONDecoder):
    def __init__(self, text: str, first_line: int) -> None:
        super().__init__()
        self._breaks = [offset for offset, character in enumerate(text) if character == "\n"]
        self._first_line = first_line
        self.parse_string: Any = self._located
        scanner: Any = json.scanner
        self.scan_once: Any = scanner.py_make_scanner(self)  # the C scanner ignores `parse_string`

    def _located(self, text: str, begin: int, strict: bool) -> tuple[Located, int]:
        decoder: Any = json.decoder
        value, end = decoder.scanstring(text, begin, strict)
        return Located(value, self._first_line + bisect.bisect_left(self._breaks, begin)), end


def _read_json(text: str, first_line: int) -> Any:
    return _JsonDecoder(text, first_line).decode(text)


_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _read_yaml(text: str, name: str, first_line: int) -> list[Any]:
    class Loader(_BaseLoader):  # type: ignore[misc]
        pass

    def string(loader: Any, node: Any) -> Located:
        block = node.style in ("|", ">")
        line = first_line + node.start_mark.line + (1 if block else 0)
        return Located(loader.construct_scalar(node), line, verbatim=node.style == "|")

    Loader.add_constructor("tag:yaml.org,2002:str", string)
    Loader.add_multi_constructor("!", lambda _loader, _suffix, _node: None)
    try:
        return [document for document in yaml.load_all(text, Loader=Loader) if document is not None]
    except yaml.YAMLError as error:
        raise DocumentError(_yaml_sentence(error, text, name, first_line)) from None
    except (ValueError, TypeError) as error:  # constructors of dates and of unhashable keys
        raise DocumentError(f"{name} is not YAML that can be read ({error}).") from None


def _yaml_sentence(error: yaml.YAMLError, text: str, name: str, first_line: int) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" line {first_line + mark.line}:" if mark is not None else ""
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    hint = ""
    if "{{" in text and "}}" in text:
        hint = " (a Helm template must be rendered first: `helm template`)"
    return f"{name} is not YAML:{where} {problem}{hint}."
