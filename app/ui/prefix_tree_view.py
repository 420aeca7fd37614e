"""The prefix tree on a page: an indented table, nodes that several owners were served from marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app.ui import prefix_tree
from app.ui.tables import show_table


def show_tree(tree: Mapping[str, Any], *, limit: int = prefix_tree.NODES_SHOWN) -> None:
    """The tree in a sentence and as a table; says so when nothing is cached."""
    nodes = prefix_tree.nodes_of(tree)
    if not nodes:
        st.caption("No full block is cached: the cache is empty or switched off.")
        return
    found = prefix_tree.branches(nodes, limit)
    st.caption(prefix_tree.said(tree, len(found)))
    show_table([prefix_tree.row(branch) for branch in found])
