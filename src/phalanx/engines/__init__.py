"""What carries bytes between hosts: existing engines behind one small interface.

`interface` says what an engine is: sends and receives between the ranks of a group, each with a
tag, in the order of their posting. There is a module for each engine. Nothing here knows of
collectives or of shared memory; engines don't know each other.
"""

from phalanx.engines import ending as ending  # its place among what runs at the end is now
from phalanx.engines.choice import DEFAULT, NAMES, check_name, open_engine
from phalanx.engines.interface import Engine, EngineError, Transfer

__all__ = ["DEFAULT", "NAMES", "Engine", "EngineError", "Transfer", "check_name", "open_engine"]
