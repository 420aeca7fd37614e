"""The incidents, one a file."""
