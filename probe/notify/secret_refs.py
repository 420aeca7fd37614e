"""Where secrets come from: `env:NAME`, or `secret:NAME` in a secrets.toml. Looked up when needed, kept nowhere.

secrets.toml is the file that `KVONCALL_SECRETS` names, or else the first of: beside the database, `.streamlit/` of the
working directory, `.streamlit/` of the home directory. A dot in NAME goes into a table.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from probe.notify.receivers import is_reference

FILE = "secrets.toml"


class SecretError(Exception):
    """A secret that is not where it should be; the message is one sentence and holds no secret."""


def resolve(reference: str, store_where: str) -> str:
    """What a reference stands for; text that is none is returned as it is. Raises `SecretError`."""
    if not is_reference(reference):
        return reference
    place, _, name = reference.partition(":")
    if place == "env":
        value = os.environ.get(name, "").strip()
        if not value:
            raise SecretError(f"The environment variable {name} is empty: put the value there and restart.")
        return value
    files = _files(store_where)
    for file in files:
        found = _lookup(_read(file), name)
        if found:
            return found
    if not files:
        raise SecretError(f"No {FILE} is there to hold {name}: write one beside the data or set KVONCALL_SECRETS.")
    raise SecretError(f"{' and '.join(map(str, files))} lacks {name}: add it there.")


def redact(text: str, secrets: Iterable[str]) -> str:
    """The text without the secrets, whole or in part (host aside, every piece of an address longer than 5)."""
    pieces: set[str] = set()
    for secret in secrets:
        pieces.add(secret)
        pieces.update(piece for piece in _split(secret) if len(piece) > 5)
    for piece in sorted(pieces, key=len, reverse=True):
        if piece:
            text = text.replace(piece, "***")
    return text


def _split(secret: str) -> list[str]:
    for mark in "/?&=@:#+,; ":
        secret = secret.replace(mark, "\n")
    return secret.split("\n")


def _files(store_where: str) -> list[Path]:
    named = os.environ.get("KVONCALL_SECRETS")
    if named:
        if not _is_file(Path(named)):
            raise SecretError(f"KVONCALL_SECRETS names {named}, which is no file.")
        return [Path(named)]
    places = [] if "://" in store_where else [Path(store_where).parent]
    for find in (Path.cwd, Path.home):
        with contextlib.suppress(OSError, RuntimeError):  # a deleted working directory, a user without a home
            places.append(find() / ".streamlit")
    return [place / FILE for place in places if _is_file(place / FILE)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a directory this user may not look into holds nothing for it


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise SecretError(f"{file} cannot be read.") from None
    except tomllib.TOMLDecodeError:
        raise SecretError(f"{file} is not TOML.") from None  # the parser's words could hold a secret


def _lookup(table: dict[str, Any], name: str) -> str:
    value: Any = table.get(name)
    if value is None:
        value = table
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    return value.strip() if isinstance(value, str) else ""
