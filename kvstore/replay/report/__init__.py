"""Replays as a page: one HTML file that needs nothing else, for screens light and dark and for paper."""
