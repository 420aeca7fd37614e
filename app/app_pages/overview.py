"""Overview page."""

from app.ui.overview_page import render

render()
