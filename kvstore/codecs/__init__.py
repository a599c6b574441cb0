"""Block encodings for Redis and remote streams."""
