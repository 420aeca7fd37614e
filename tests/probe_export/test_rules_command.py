"""`kvoncall rules`: what goes where, and one sentence for what cannot be done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from probe.alerts.rules import DEFAULT_RULES
from probe.export import command
from probe.export.naming import ExportError


def run(*arguments: str) -> tuple[str | None, list[str]]:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    said: list[str] = []
    return command.run(parser.parse_args(arguments), said.append), said


def test_list_names_every_rule() -> None:
    text, _ = run("list")
    assert text is not None
    assert [line.split()[0] for line in text.splitlines()] == [rule.id for rule in DEFAULT_RULES]
    assert [entry["id"] for entry in command.listing_data()] == [rule.id for rule in DEFAULT_RULES]
    json.dumps(command.listing_data())


def test_one_file_goes_to_stdout_and_what_is_left_out_beside_it() -> None:
    text, said = run("export", "--to", "prometheus", "--dialect", "tgi")
    assert text is not None
    assert yaml.safe_load(text)["groups"]
    assert any(line.startswith("left out: eviction-storm: ") for line in said)


@pytest.mark.parametrize("to", ["prometheus", "prometheusrule", "alertmanager", "grafana"])
def test_files_are_written(tmp_path: Path, to: str) -> None:
    text, said = run("export", "--to", to, "--out", str(tmp_path / "new" / "dir"), "--dialect", "tensorrt-llm@1.0.0")
    assert text is None
    (written,) = (tmp_path / "new" / "dir").iterdir()
    assert said[-1] == f"wrote {written}"
    load = json.loads if written.suffix == ".json" else yaml.safe_load
    assert isinstance(load(written.read_text()), dict)


def test_unit_tests_come_with_the_rules_they_test(tmp_path: Path) -> None:
    run("export", "--to", "promtool-tests", "--out", str(tmp_path), "--dialect", "tensorrt-llm@1.0.0")
    assert (tmp_path / "kvoncall-rules.yaml").is_file()
    for path in (tmp_path / "tests").iterdir():
        (named,) = yaml.safe_load(path.read_text())["rule_files"]
        assert (path.parent / named).resolve() == (tmp_path / "kvoncall-rules.yaml").resolve()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("export",), "Name one with --to"),
        (("export", "--to", "promtool-tests"), "name a folder with --out"),
        (("export", "--to", "prometheus", "--dialect", "nothing"), "are not known"),
        (("export", "--to", "prometheus", "--base-url", "nothing"), "must be http"),
        (("export", "--to", "prometheus", "--scrape-interval", "0"), "0.1 to 3600"),
        (("export", "--to", "prometheus", "--job", ""), "--job needs a name"),
    ],
)
def test_one_sentence_for_what_cannot_be_done(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ExportError, match=sentence):
        run(*arguments)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        run("export", "--to", "alertmanager", "--out", str(tmp_path / "file"), "--dialect", "tensorrt-llm@1.0.0")
