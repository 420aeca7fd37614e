"""Alerts: rules as data, their evaluation as pure functions, and the state machine of each alert."""
