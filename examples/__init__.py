"""Programs that show the store at work."""
