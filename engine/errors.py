"""Errors that users meet: each message is one sentence that says what is wrong and what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """A flag, a value or a model directory that cannot work; the message is one sentence for the user."""


class ModelLoadError(ConfigError):
    """A model directory that cannot be loaded; the message is one sentence for the user."""
