"""YAML for people: keys in the order given, expressions as blocks, a comment on top."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, nothing folded, lists indented."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(document: Any, comment: Iterable[str] = ()) -> str:
    """A document with comment lines on top."""
    head = "".join(f"# {line}\n" if line else "#\n" for line in comment)
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
