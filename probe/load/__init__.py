"""Load: real traces fitted to a model, and the client that sends them to a target."""
