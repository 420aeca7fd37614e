"""Reads the Python source of an engine's release: a wheel, an sdist, a zip, or an unpacked tree.

Nothing is unpacked to disk, imported or run: members are read into memory, by name, up to limits that no release
reaches. Raises `CatalogError` with one sentence for what is no release.
"""

from __future__ import annotations

import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from runbooks.catalog_data import CatalogError
from runbooks.versions import version_key

MARKS = {"vllm": "vllm/engine/arg_utils.py", "sglang": "sglang/srt/server_args.py"}
MAX_MEMBERS = 200_000
MAX_FILE_BYTES = 8 << 20
MAX_TOTAL_BYTES = 512 << 20

_SKIPPED = {"tests", "test", "third_party", "benchmarks", "examples", "csrc", "build", "__pycache__", "node_modules"}
_METADATA = ("METADATA", "PKG-INFO")
_VERSION_FILE = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?["']([^"']+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """Source files of one version by path from the package's parent, such as `vllm/envs.py`."""

    engine: str
    version: str
    files: dict[str, str]


def open_release(path: Path, *, engine: str | None = None, version: str | None = None) -> Release:
    """The source at `path`; `engine` and `version` overrule what it says of itself."""
    found = dict(_members(path))
    known, root = _root(found, path, engine)
    at = len(root)
    files = {name[at:]: text for name, text in found.items() if name.startswith(f"{root}{known}/")}
    stated = version or _version(found, root, known)
    if stated is None:
        raise CatalogError(f"{path} does not say its version: no METADATA, PKG-INFO or _version.py; give --version.")
    if not version_key(stated):
        raise CatalogError(f"{path} calls its version {stated!r}, which is none; give --version, such as 0.34.0.")
    return Release(known, stated.split("+")[0], files)


def _root(found: dict[str, str], path: Path, engine: str | None) -> tuple[str, str]:
    """Engine and the prefix its package has in the archive."""
    if engine is not None and engine not in MARKS:
        raise CatalogError(f"Only releases of {' and '.join(MARKS)} can be read, not of {engine!r}.")
    for known, mark in MARKS.items():
        if engine not in (None, known):
            continue
        roots = [name.removesuffix(mark) for name in found if name == mark or name.endswith(f"/{mark}")]
        if roots:
            return known, min(roots, key=len)
    what = engine or " or ".join(MARKS)
    raise CatalogError(f"{path} holds no source of {what}: there is no {' or '.join(MARKS.values())} in it.")


def _version(found: dict[str, str], root: str, engine: str) -> str | None:
    """By the metadata of this package, the one nearest to it first; else by its version file."""
    stated = []
    for name, text in found.items():
        if PurePosixPath(name).name in _METADATA:
            headers = HeaderParser().parsestr(text)
            package = re.sub(r"[-_.]+", "-", headers.get("Name", "")).lower()
            if (package == engine or package.startswith(f"{engine}-")) and headers.get("Version"):
                stated.append((package != engine, name.count("/"), str(headers["Version"])))
    if stated:
        return min(stated)[2]
    for name in (f"{root}{engine}/_version.py", f"{root}{engine}/version.py"):
        if match := _VERSION_FILE.search(found.get(name, "")):
            return match[1]
    return None


def _members(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every member that may matter."""
    if path.is_dir():
        yield from _bounded(_of_tree(path), path)
    elif not path.is_file():
        raise CatalogError(f"There is no {path}: name a wheel, an sdist or an unpacked tree.")
    elif zipfile.is_zipfile(path):
        yield from _bounded(_of_zip(path), path)
    elif path.suffix in (".whl", ".zip"):
        raise CatalogError(f"{path} is no readable zip archive: it is damaged or cut short; fetch it again.")
    else:
        yield from _bounded(_of_tar(path), path)


def _bounded(members: Iterator[tuple[str, bytes]], path: Path) -> Iterator[tuple[str, str]]:
    total = 0
    for name, content in members:
        total += len(content)
        if total > MAX_TOTAL_BYTES:
            raise CatalogError(f"{path} holds over {MAX_TOTAL_BYTES >> 20} MiB of source: this is no release.")
        yield name, content.decode("utf-8", errors="replace")


def _wanted(name: str, size: int, path: Path) -> bool:
    """Whether to read a member; refuses names that lead out of the archive."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if ".." in parts or name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
        raise CatalogError(f"{path} holds a member named {name[:80]!r}, which leads out of it: this is no release.")
    if not _matters(parts):
        return False
    if size > MAX_FILE_BYTES:
        raise CatalogError(f"{path} holds {name[:80]} of {size >> 20} MiB: too large for source; this is no release.")
    return True


def _matters(parts: tuple[str, ...]) -> bool:
    if not parts:
        return False
    if parts[-1] in _METADATA:
        return len(parts) <= 4
    return parts[-1].endswith(".py") and not _SKIPPED & set(parts[:-1])


def _of_tree(path: Path) -> Iterator[tuple[str, bytes]]:
    beside = path if path.name not in MARKS else path.parent  # the package itself: its metadata lies beside it
    roots = [path] if beside == path else [path, *(p for p in beside.glob(f"{path.name}*-info") if p.is_dir())]
    for root in roots:
        for file in sorted(root.rglob("*")):
            name = file.relative_to(beside)
            if not _matters(name.parts) or not file.is_file():
                continue
            if file.stat().st_size > MAX_FILE_BYTES:
                raise CatalogError(f"{file} has {file.stat().st_size >> 20} MiB: too large for source.")
            try:
                yield name.as_posix(), file.read_bytes()
            except OSError as error:
                raise CatalogError(f"{file} cannot be read: {error.strerror or error}.") from error


def _of_zip(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            if len(infos) > MAX_MEMBERS:
                raise CatalogError(f"{path} holds {len(infos)} members: this is no release.")
            for info in infos:
                if _wanted(info.filename, info.file_size, path) and not info.is_dir():
                    yield info.filename, archive.read(info)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise CatalogError(f"{path} is no readable zip archive: {error}; fetch it again.") from error


def _of_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(path, mode="r|*") as archive:
            for count, member in enumerate(archive):
                if count >= MAX_MEMBERS:
                    raise CatalogError(f"{path} holds over {MAX_MEMBERS} members: this is no release.")
                if _wanted(member.name, member.size, path) and member.isreg():
                    content = archive.extractfile(member)
                    if content is not None:
                        yield member.name, content.read()
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        raise CatalogError(f"{path} is no archive that can be read: {error}; name a wheel or an sdist.") from error
