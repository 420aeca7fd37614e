"""Quality page."""

from app.ui.quality_page import render

render()
