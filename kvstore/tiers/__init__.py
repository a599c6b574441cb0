"""Places for bytes: plain blocking I/O. Files, sockets and mmap live here only."""
