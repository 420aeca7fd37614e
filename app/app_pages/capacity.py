"""Capacity page."""

from app.ui.capacity_page import render

render()
