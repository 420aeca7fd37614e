"""Runbooks page."""

from app.ui.runbooks_page import render

render()
