"""A replay in which one session saw another's text: conversations, figures and prefix trees on the incidents page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import app.runtime as runtime_module
import app.ui.incidents_page as incidents_page
from app.runtime import Runtime
from app.ui import prefix_tree
from app.ui.conversations import segments, side_by_side
from app.ui.isolation_replay import figures, shorten
from probe.store import Store

Open = Callable[..., Any]
Use = Callable[..., Runtime]
RESULT: dict[str, Any] = json.loads(Path(__file__).with_name("isolation.json").read_text())["replay"]


def finished(store: Store) -> str:
    replay = store.replays.create("prefix-collision", "drill-1")
    store.replays.finish(replay.id, "done", RESULT)
    return replay.id


def test_replay_shows_both_conversations_the_figures_and_both_trees(store: Store, use: Use, open_page: Open) -> None:
    use(store)
    page = open_page("incidents", replay=finished(store))
    page.assert_calm()
    [before] = [h.value for h in page.at.get("html") if "Session A" in h.value]
    assert before.count(">4711</mark>") == 3
    assert "Session B" in before
    assert "■ leaked" in page.text
    assert "Nothing to show after the change: no request was a breach." in page.text
    assert "“<0815>”" in page.text  # what the question gets when nothing is cached
    table = next(t for t in page.tables if "breaches" in t.to_string()).set_index("figure")
    assert table.loc["breaches"].tolist() == ["31 (77.5%)", "0 (0.0%)"]
    assert table.loc["breach rate, upper bound"].tolist() == ["89.22%", "0.37%"]
    assert table.loc["wrong blocks counted by the engine"].tolist() == ["62 of another tenant or session", "none"]
    assert table.loc["hits refused by the engine"].tolist() == ["—", "5 of another tenant or session"]
    assert table.loc["cached told by time to first token"].tolist() == ["—", "no leak, AUC 0.51 (0.41 to 0.61)"]
    assert table.loc["wrong answers of the model itself"].tolist() == ["2", "—"]
    assert table.loc["hit rate lost to isolation"].tolist() == ["0.0%", "25.0%"]
    trees = [t for t in page.tables if "prefix" in t.columns]
    assert ["1f0c9a7b" in tree.to_string() for tree in trees] == [True, False]
    assert "◆ 2 owners" in trees[0]["owners"][0]
    assert "◇ public" in trees[1]["owners"][0]
    assert page.at.dataframe[-1].value["scenario"].tolist() == ["prefix-collision, collision"]
    assert "safe" not in page.text.lower()


def test_a_replay_that_waits_for_its_change_shows_what_leaked(store: Store, use: Use, open_page: Open) -> None:
    replay = store.replays.create("prefix-collision", "drill-1")
    store.replays.append(replay.id, "inject", "drill engine runs", {"memory_plan": {}})
    told = {key: value for key, value in RESULT["isolation"]["before"].items() if key != "tree"}
    store.replays.append(replay.id, "inject", "31 breaches in 40 cross-session requests", told)
    store.replays.set_step(replay.id, "apply")
    store.replays.set_status(replay.id, "waiting_apply")
    use(store)
    page = open_page("incidents", replay=replay.id)
    page.assert_calm()
    assert len([h for h in page.at.get("html") if ">4711</mark>" in h.value]) == 1
    assert "apply the change" in page.text


def test_a_replay_without_isolation_shows_none_of_it(store: Store, use: Use, open_page: Open) -> None:
    replay = store.replays.create("oom", "drill-1")
    store.replays.finish(replay.id, "done", {k: v for k, v in RESULT.items() if k != "isolation"})
    use(store)
    page = open_page("incidents", replay=replay.id)
    page.assert_calm()
    assert "What one session saw of another" not in page.text
    assert not [h for h in page.at.get("html") if "Session A" in h.value]


def test_figures_of_a_replay_that_ended_before_its_change() -> None:
    rows = {row.pop("figure"): row for row in figures({"before": RESULT["isolation"]["before"], "after": None})}
    assert rows["cross-session requests"] == {"before": "40", "after": "—"}


@pytest.mark.parametrize(
    ("marks", "pieces"),
    [
        ([], [("secret", False)]),
        ([[0, 6]], [("secret", True)]),
        ([[1, 3], [2, 4]], [("s", False), ("ec", True), ("r", True), ("et", False)]),
        ([[4, 99], [-3, 1]], [("s", True), ("ecr", False), ("et", True)]),
        ([[3, 3], [5, 2]], [("secret", False)]),
    ],
)
def test_marks_cut_the_text_without_losing_any(marks: list[list[int]], pieces: list[tuple[str, bool]]) -> None:
    assert list(segments("secret", marks)) == pieces


def test_a_long_leak_is_told_by_its_beginning() -> None:
    assert shorten("4711") == "4711"
    assert shorten("abcdef", most=4) == "abc…"


def test_no_text_becomes_markup() -> None:
    evil = '"><img src=x onerror=alert(1)>'
    message = {"role": evil, "text": evil + evil, "marks": [[0, len(evil)]]}
    html = side_by_side([{"name": evil, "owner": evil, "messages": [message]}])
    assert "<img" not in html
    assert html.count("&lt;img src=x") == 6
    assert 'aria-label="&quot;&gt;&lt;img' in html


def node(node_id: str, parent: str | None, blocks: int, *owners: str, public: bool = False) -> dict[str, Any]:
    return {"id": node_id, "parent": parent, "num_blocks": blocks, "num_tokens": 16 * blocks, "bytes": 1024 * blocks,
            "owners": list(owners), "public": public, "hits": 0, "age_s": 5.0, "idle_s": 1.0}  # fmt: skip


NODES = [
    node("root", None, 2, "a", "b"), node("small", "root", 1, "a"), node("large", "root", 3, "b"),
    node("leaf", "large", 4, "b"), node("other", None, 5, "", public=True), node("orphan", "not sent", 1, "c"),
]  # fmt: skip


def test_tree_is_drawn_depth_first_larger_branches_first() -> None:
    spaces = str.maketrans("\u2007\u00a0", "  ")  # none at which a line may break
    found = [(branch.indent.translate(spaces), branch.node["id"]) for branch in prefix_tree.branches(NODES)]
    assert [name for _, name in found] == ["root", "large", "leaf", "small", "other", "orphan"]
    assert [indent for indent, _ in found] == ["", "├─ ", "│  └─ ", "└─ ", "", ""]


def test_a_tree_too_large_keeps_its_largest_nodes_and_their_parents() -> None:
    found = [branch.node["id"] for branch in prefix_tree.branches(NODES, limit=3)]
    assert found == ["root", "large", "other"]
    text = prefix_tree.said({"nodes": NODES, "num_cached_blocks": 40, "bytes": 40960, "truncated": 7}, shown=3)
    assert text.endswith("3 nodes are drawn, shared and large ones first; 10 are not.")
    assert "served to more than one owner: 2; public: 5." in text


def test_a_small_shared_node_is_drawn_before_large_ones() -> None:
    nodes = [*NODES, node("deep", "leaf", 1, "a", "b"), node("huge", None, 99, "a")]
    assert [branch.node["id"] for branch in prefix_tree.branches(nodes, limit=4)] == ["root", "large", "leaf", "deep"]


def test_a_chain_deeper_than_the_recursion_limit_is_drawn() -> None:
    chain = [node(str(i), str(i - 1) if i else None, 1, "a") for i in range(3000)]
    assert len(prefix_tree.branches(chain, limit=3000)) == 3000


def test_owners_are_words_and_never_markdown() -> None:
    assert prefix_tree.owners(node("x", None, 1, "")) == "unnamed"
    shared = prefix_tree.owners(node("x", None, 1, "a", "b]:red[", "c", "d"))
    assert not isinstance(shared, str)
    assert shared.text == "◆ 4 owners: a, b]:red[, c …"
    assert r"b\]\:red\[" in shared.badge


def test_variant_is_chosen_and_started(
    store: Store, use: Use, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Runner:
        def __init__(self, store: Store, scenario: Any, *, interactive: bool, log_dir: Any) -> None:
            started.append(scenario)
            self.replay_id = store.replays.create(scenario.id, "drill-x").id

        def run(self) -> None:
            pass

    monkeypatch.setattr(runtime_module, "ReplayRunner", Runner)
    use(store)
    page = open_page("incidents")
    variants = incidents_page.VARIANTS["int4-degradation"]
    page.at.selectbox(key="variant-int4-degradation").select(list(variants)[1]).run()
    page.assert_calm()
    page.at.button(key="run-int4-degradation").click().run()
    assert started == [list(variants.values())[1]]
