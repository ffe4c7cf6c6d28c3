"""Strangers, and a worker gone mad, send garbage to a worker of `phalanx.rpc`: `make fuzz`."""
