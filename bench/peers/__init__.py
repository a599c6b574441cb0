"""The same work as the peers', beside them in one run: ``make bench-peers``."""
