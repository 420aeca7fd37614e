"""Flags and metrics of engines by version: tables, differences between two versions, and extraction from a release."""
