"""The prefix cache as a tree (the JSON of an engine's `/debug/prefix`): which nodes are drawn, in which order.

A node is a run of blocks that all continue in one way. One owner's label is a keyed hash; a node with several owners
is one that several callers were served from. No Streamlit here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.ui import words

NODES_SHOWN = 30
OWNERS_SHOWN = 3
Node = Mapping[str, Any]
_SHARED, _PUBLIC = "orange", "blue"


@dataclass(frozen=True)
class Branch:
    """A node with the lines that lead to it (`│  └─ `)."""

    indent: str
    node: Node


@dataclass(frozen=True)
class Summary:
    """What a whole tree holds. `shared`: of several owners and not public."""

    blocks: int
    size: int
    nodes: int
    shared_blocks: int
    public_blocks: int
    truncated: int


def nodes_of(tree: Mapping[str, Any]) -> list[Node]:
    """The nodes as sent: parents before children."""
    return list(tree.get("nodes") or [])


def is_shared(node: Node) -> bool:
    """Whether callers that are not one owner were served from it without its being public."""
    return len(node.get("owners") or []) > 1 and not node.get("public")


def summary(tree: Mapping[str, Any]) -> Summary:
    """Sums over the nodes that were sent; `blocks` and `size` count those that were not as well."""
    nodes = nodes_of(tree)
    return Summary(
        blocks=int(tree.get("num_cached_blocks") or 0),
        size=int(tree.get("bytes") or 0),
        nodes=len(nodes),
        shared_blocks=sum(int(node["num_blocks"]) for node in nodes if is_shared(node)),
        public_blocks=sum(int(node["num_blocks"]) for node in nodes if node.get("public")),
        truncated=int(tree.get("truncated") or 0),
    )


def branches(nodes: Sequence[Node], limit: int = NODES_SHOWN) -> list[Branch]:
    """At most `limit` nodes, depth first: those that lead to shared blocks, then those that lead to many.

    A node whose parent was not sent stands at the top.
    """
    shared, weight = weights(nodes, is_shared), weights(nodes)
    heaviest = sorted(nodes, key=lambda node: (-shared[node["id"]], -weight[node["id"]]))[:limit]
    kept = {node["id"] for node in heaviest}
    children: dict[str | None, list[Node]] = {}
    for node in heaviest:
        parent = node.get("parent")
        children.setdefault(parent if parent in kept else None, []).append(node)
    out: list[Branch] = []
    # (node, lines before it, whether it is the last of its siblings), next first at the end
    open_: list[tuple[Node, str, bool]] = [(node, "", True) for node in reversed(children.get(None, []))]
    while open_:
        node, before, last = open_.pop()
        top = node.get("parent") not in kept
        out.append(Branch("" if top else before + ("└─\u00a0" if last else "├─\u00a0"), node))
        under = "" if top else before + ("\u2007\u2007\u00a0" if last else "│\u2007\u00a0")
        below = children.get(node["id"], [])
        open_ += [(child, under, child is below[-1]) for child in reversed(below)]
    return out


def weights(nodes: Sequence[Node], counts: Callable[[Node], bool] = lambda _: True) -> dict[str, int]:
    """Blocks at and below each node, of the nodes that count. A parent has no less than any child of it."""
    weight = {str(node["id"]): int(node["num_blocks"]) if counts(node) else 0 for node in nodes}
    for node in reversed(nodes):
        parent = node.get("parent")
        if parent in weight:
            weight[str(parent)] += weight[str(node["id"])]
    return weight


def owners(node: Node) -> words.Mark | str:
    """Whose the node is: a mark when it is everybody's or several owners', else the owner's label."""
    labels = [str(label) or "unnamed" for label in node.get("owners") or []]
    named = ", ".join(labels[:OWNERS_SHOWN]) + (" …" if len(labels) > OWNERS_SHOWN else "")
    if node.get("public"):
        return words.Mark("◇", f"public: {named}" if named else "public", _PUBLIC)
    if len(labels) > 1:
        return words.Mark("◆", f"{len(labels)} owners: {named}", _SHARED)
    return named or "unnamed"


def row(branch: Branch) -> dict[str, object]:
    """One line of the table."""
    node = branch.node
    beside = {"in use": node.get("referenced_blocks"), "more with the same content": node.get("copies")}
    notes = ", ".join(f"{n} {what}" for what, n in beside.items() if n)
    return {
        "prefix": branch.indent + str(node["id"])[:8],
        "owners": owners(node),
        "blocks": f"{node['num_blocks']} ({notes})" if notes else str(node["num_blocks"]),
        "tokens": words.count(node.get("num_tokens")),
        "size": words.size(node.get("bytes")),
        "hits": words.count(node.get("hits")),
        "age": _span(node.get("age_s")),
        "idle": _span(node.get("idle_s")),
    }


def _span(value: object) -> str:
    return words.span(float(value)) if isinstance(value, int | float) else words.DASH


def said(tree: Mapping[str, Any], shown: int) -> str:
    """The tree in a sentence or two, and how much of it is drawn."""
    found = summary(tree)
    text = (
        f"Blocks cached: {words.count(found.blocks)}, {words.size(found.size)}; served to more than one owner: "
        f"{words.count(found.shared_blocks)}; public: {words.count(found.public_blocks)}."
    )
    missing = found.nodes + found.truncated - shown
    return f"{text} {shown} nodes are drawn, shared and large ones first; {missing} are not." if missing > 0 else text
