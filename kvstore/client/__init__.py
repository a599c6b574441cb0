"""A store in another process, used like one of one's own."""
