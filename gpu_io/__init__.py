"""Moves blocks between an engine's paged memory and host RAM. The only package besides connectors that imports torch."""
