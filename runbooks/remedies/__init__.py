"""The arithmetic behind each runbook: `advise(facts)` computes its flag changes from the target's own numbers."""
