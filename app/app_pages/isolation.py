"""Isolation page."""

from app.ui.isolation_page import render

render()
