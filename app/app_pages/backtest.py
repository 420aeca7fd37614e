"""Backtest page."""

from app.ui.backtest_page import render

render()
