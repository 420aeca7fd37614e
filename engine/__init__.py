"""A small live LLM engine: paged KV cache, scheduler, models, OpenAI-compatible server."""
