"""Proves that runbook pages say nothing that is not so: flags, metrics, queries, commands, links and form."""
