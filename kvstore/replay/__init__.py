"""Replays traces of requests against eviction policies: the very policy objects that the store runs."""
