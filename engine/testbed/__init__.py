"""The testbed model: a small Llama trained here on conversations whose answers can be checked exactly.

`tasks` makes the conversations (pure Python), `train` makes the model, `evaluate` measures it,
`outliers` gives it the outlier key channels of real models, `adapters` other keys and the same answers,
and `font` draws what it can read in pictures.
Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

MODEL_DIR: Path = Path(__file__).resolve().parent / "model"
"""Hugging Face directory of the shipped model; loads in transformers, vLLM and the embedded engine."""

OUTLIERS_MODEL_DIR: Path = MODEL_DIR.with_name("model_outliers")
"""The same model with outlier key channels, written by `outliers`: the same function, keys that break plain INT4."""
