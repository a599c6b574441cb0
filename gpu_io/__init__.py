"""Moves blocks between an engine's paged memory and host RAM; besides connectors, the only package with torch."""
