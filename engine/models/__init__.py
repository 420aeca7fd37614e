"""Model architectures the engine can run, and the loader of Hugging Face directories."""
