"""The engine's HTTP face: OpenAI's API, vLLM's extensions of it, metrics and debugging views."""
