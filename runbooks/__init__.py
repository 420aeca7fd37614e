"""Runbooks: what to do about each alert, and the flag changes computed from a target's own numbers."""
