"""What travels between a sidecar and its clients: generated from ``protos`` by ``make protos``."""
