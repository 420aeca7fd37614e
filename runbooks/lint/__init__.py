"""What `runbooks.config_lint` checks: one module a kind of mistake."""
