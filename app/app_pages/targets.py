"""Targets page."""

from app.ui.targets_page import render

render()
