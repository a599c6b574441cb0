"""The sidecar: one store per host, shared by every engine process on it."""
