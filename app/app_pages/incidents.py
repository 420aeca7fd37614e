"""Incidents page."""

from app.ui.incidents_page import render

render()
