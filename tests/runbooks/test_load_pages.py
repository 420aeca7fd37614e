"""Where pages come from: ours, the user's folder, translations; and what becomes of those that are not well formed."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbooks import load
from runbooks.load import (
    HEADINGS,
    SECTIONS,
    RunbookError,
    get_runbook,
    languages,
    list_runbooks,
    sha256_of,
    unreadable_pages,
    user_folder,
)
from runbooks.page_schema import ENGINES
from runbooks.version_range import parse_range

PAGE = """---
title: "Ours at work"
alert: null
severity: info
engines: {vllm: ">=0.20,<0.34"}
tested: {result: not drilled}
drill: {replay: null}
owner: me
look_alikes: []
inhibited_by: []
flags: {}
---
""" + "".join(f"## {name}\ntext\n" for name in SECTIONS)


def translation(of: str) -> str:
    body = "".join(f"## {name}\n文字\n" for name in HEADINGS["zh"])
    return f'---\ntitle: "我们的"\ntranslated_from: {sha256_of(of)}\n---\n{body}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVONCALL_RUNBOOKS", str(tmp_path))
    return tmp_path


def test_a_file_in_the_users_folder_is_a_runbook(folder: Path) -> None:
    (folder / "house-rule.md").write_text(PAGE, encoding="utf-8")
    page = get_runbook("house-rule")
    assert (page.title, page.alert, page.incidents, page.own) == ("Ours at work", None, (), False)
    (folder / "house-rule.md").write_text(PAGE.replace("at work", "at rest"), encoding="utf-8")
    assert get_runbook("house-rule").title == "Ours at rest"
    (folder / "house-rule.md").unlink()
    with pytest.raises(RunbookError, match="no runbook named 'house-rule'"):
        get_runbook("house-rule")


def test_the_users_page_does_not_take_the_place_of_ours(folder: Path) -> None:
    (folder / "oom.md").write_text(PAGE, encoding="utf-8")
    assert get_runbook("oom").own
    assert [page.id for page in list_runbooks()].count("oom") == 1
    assert unreadable_pages() == [
        f"{folder}/oom.md: 'oom' is the id of a page of ours, which stays: give the file another name"
    ]


def test_a_broken_page_of_the_user_is_told_and_hides_no_other(folder: Path) -> None:
    ours = [page.id for page in list_runbooks()]
    (folder / "broken.md").write_text(PAGE.replace("severity: info", "severity: loud"), encoding="utf-8")
    (folder / "binary.md").write_bytes(b"\xff\xfe\x00")
    assert [page.id for page in list_runbooks()] == ours
    binary, broken = unreadable_pages()
    assert "binary.md cannot be read" in binary
    assert "severity is 'loud': write one of info, warning, critical" in broken


def test_where_the_users_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVONCALL_RUNBOOKS", raising=False)
    monkeypatch.setenv("KVONCALL_DATA", str(tmp_path))
    assert user_folder() == tmp_path / "runbooks"
    monkeypatch.setenv("KVONCALL_DATA", "postgresql://db/kvoncall")
    assert user_folder().parts[-2:] == ("kvoncall", "runbooks")
    assert list_runbooks()  # a folder that is not there is no error


def test_a_translation_stands_in_for_the_page_and_says_when_it_is_stale(folder: Path) -> None:
    (folder / "house-rule.md").write_text(PAGE, encoding="utf-8")
    untranslated = get_runbook("house-rule", "zh")
    assert untranslated.lang == "en"
    assert "not translated (zh) yet" in (untranslated.note or "")
    (folder / "zh").mkdir()
    (folder / "zh" / "house-rule.md").write_text(translation(PAGE), encoding="utf-8")
    page = get_runbook("house-rule", "zh")
    assert (page.title, page.lang, page.note) == ("我们的", "zh", None)
    assert list(page.sections) == list(SECTIONS)  # by the English names
    assert page.meta == get_runbook("house-rule").meta
    (folder / "house-rule.md").write_text(PAGE + "more\n", encoding="utf-8")
    assert "newer than this translation" in (get_runbook("house-rule", "zh").note or "")


def test_a_broken_translation_leaves_the_english_page(folder: Path) -> None:
    (folder / "house-rule.md").write_text(PAGE, encoding="utf-8")
    (folder / "zh").mkdir()
    (folder / "zh" / "house-rule.md").write_text(translation(PAGE).replace("## 来源", "## 其他"), encoding="utf-8")
    page = get_runbook("house-rule", "zh")
    assert page.lang == "en"
    assert "missing or empty sections: 来源" in (page.note or "")


def test_languages() -> None:
    assert languages() == ("en", "zh")
    assert all(len(headings) == len(SECTIONS) for headings in HEADINGS.values())
    with pytest.raises(RunbookError, match="write one of en, zh"):
        list_runbooks("fr")


def test_every_engine_that_pages_may_name_has_a_dialect() -> None:
    from probe.dialects import ENGINES as DIALECTS

    assert set(ENGINES) == set(DIALECTS)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        (">=0.20,<0.34", ["0.20.0", "0.33.2"], ["0.19.1", "0.34.0"]),
        ("<=0.33", ["0.33.2", "0.6.6"], ["0.34.0"]),
        (">0.20", ["0.21.0"], ["0.20.2", "0.20.0"]),
        ("==0.8.5", ["0.8.5", "0.8.5.post1"], ["0.8.4"]),
    ],
)
def test_version_ranges(text: str, inside: list[str], outside: list[str]) -> None:
    versions = parse_range(text)
    assert versions is not None
    assert versions.of(inside + outside) == inside


@pytest.mark.parametrize("text", ["", "0.20", ">=", ">=0.20, <", "~=0.20", ">=x", 0.2, None])
def test_what_is_no_version_range(text: object) -> None:
    assert parse_range(text) is None


def test_our_pages_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    list_runbooks()
    monkeypatch.setattr(load, "parse_runbook", None)  # would be called
    assert get_runbook("oom").id == "oom"
