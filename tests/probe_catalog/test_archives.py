"""What is no release is refused in one sentence."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from probe.catalog import archive
from probe.catalog.archive import open_release
from runbooks.catalog_data import CatalogError


def _refused(path: Path, word: str) -> None:
    with pytest.raises(CatalogError) as caught:
        open_release(path)
    message = str(caught.value)
    assert word in message
    assert "\n" not in message
    assert message.endswith(".")


def test_nothing_there(tmp_path: Path) -> None:
    _refused(tmp_path / "vllm.whl", "There is no")


@pytest.mark.parametrize("name", ["notes.txt", "x.tar.gz", "x.whl"])
def test_not_an_archive(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("just text")
    _refused(file, "no readable zip" if name.endswith("whl") else "no archive")


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"")
    _refused(tmp_path / "x.tar.gz", "x.tar.gz")


@pytest.mark.parametrize("kept", [0.5, 0.98])
def test_a_zip_cut_short(releases: Any, tmp_path: Path, kept: float) -> None:
    file = releases.make_wheel(tmp_path / "vllm.whl", releases.VLLM, "vllm", "1.0.0")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    _refused(file, "no readable zip")


def test_a_tar_cut_short(releases: Any, tmp_path: Path) -> None:
    file = releases.make_sdist(tmp_path / "vllm.tar.gz", releases.VLLM, "vllm", "1.0.0")
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    _refused(file, "no archive that can be read")


def test_a_zip_with_damaged_members(releases: Any, tmp_path: Path) -> None:
    file = releases.make_wheel(tmp_path / "vllm.whl", releases.VLLM, "vllm", "1.0.0")
    content = bytearray(file.read_bytes())
    content[200:240] = b"\xff" * 40
    file.write_bytes(bytes(content))
    _refused(file, "no readable zip")


@pytest.mark.parametrize("name", ["../../evil.py", "/etc/evil.py", "vllm/../../evil.py", "C:/evil.py", "..\\evil.py"])
def test_names_that_lead_out(releases: Any, tmp_path: Path, name: str) -> None:
    file = releases.make_wheel(tmp_path / "vllm.whl", releases.VLLM | {name: "x = 1\n"}, "vllm", "1.0.0")
    _refused(file, "leads out of it")
    assert not list(tmp_path.parent.rglob("evil.py"))


def test_links_in_a_tar_are_not_followed(releases: Any, tmp_path: Path) -> None:
    file = tmp_path / "vllm.tar"
    with tarfile.open(file, "w") as made:
        link = tarfile.TarInfo("vllm-1.0.0/vllm/engine/arg_utils.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    _refused(file, "holds no source")


def test_too_large_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, releases: Any) -> None:
    monkeypatch.setattr(archive, "MAX_FILE_BYTES", 1000)
    big = releases.VLLM | {"vllm/big.py": "#" * 2000}
    _refused(releases.make_wheel(tmp_path / "vllm.whl", big, "vllm", "1.0.0"), "too large for source")
    _refused(releases.make_tree(tmp_path / "tree", big), "too large for source")


def test_too_much_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, releases: Any) -> None:
    monkeypatch.setattr(archive, "MAX_TOTAL_BYTES", 3000)
    _refused(releases.make_sdist(tmp_path / "vllm.tar.gz", releases.VLLM, "vllm", "1.0.0"), "MiB of source")


def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, releases: Any) -> None:
    monkeypatch.setattr(archive, "MAX_MEMBERS", 5)
    _refused(releases.make_wheel(tmp_path / "vllm.whl", releases.VLLM, "vllm", "1.0.0"), "members")
    _refused(releases.make_sdist(tmp_path / "vllm.tar.gz", releases.VLLM, "vllm", "1.0.0"), "members")


def test_another_package(tmp_path: Path, releases: Any) -> None:
    file = releases.make_wheel(tmp_path / "torch.whl", {"torch/__init__.py": ""}, "torch", "2.0")
    _refused(file, "holds no source of vllm or sglang")


@pytest.mark.parametrize("version", ["unknown", ""])
def test_a_version_that_is_none(tmp_path: Path, releases: Any, version: str) -> None:
    file = tmp_path / "vllm.zip"
    with zipfile.ZipFile(file, "w") as made:
        for name, text in releases.VLLM.items():
            made.writestr(name, text)
        made.writestr("vllm.dist-info/METADATA", releases.metadata_text("vllm", version))
    _refused(file, "version")
