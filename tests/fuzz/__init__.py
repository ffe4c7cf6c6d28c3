"""Fuzzing of a worker by unauthenticated clients and a Byzantine worker: `make fuzz`."""
