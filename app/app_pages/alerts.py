"""Alerts page."""

from app.ui.alerts_page import render

render()
