"""The incidents, one a file; those of `--engine-fault` share one. `load_scenario` is what most have in common."""
