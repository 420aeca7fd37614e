"""Replays: incidents reproduced on a drill engine, from hypothesis to verified remedy."""
