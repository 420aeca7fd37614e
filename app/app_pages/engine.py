"""Engine page."""

from app.ui.engine_page import render

render()
