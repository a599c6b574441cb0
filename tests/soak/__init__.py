"""Clients that store, load, abort, die and return, against a host full of faults; every byte read is checked."""
