"""Measures what a KV-cache format does to answers: exact-answer suites, likelihoods, intervals, a canary."""
