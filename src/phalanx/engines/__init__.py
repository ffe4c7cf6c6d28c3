"""Engines that carry bytes between hosts: existing libraries behind one small interface.

`interface` defines an engine: tagged sends and receives between the ranks of a group, matched in
the order in which they are posted. Each engine has its own module. Engines are independent of
collectives, of shared memory and of each other.
"""

from phalanx.engines import ending as ending  # must register its exit handler early
from phalanx.engines.choice import DEFAULT, NAMES, check_name, open_engine
from phalanx.engines.interface import Engine, EngineError, Transfer

__all__ = ["DEFAULT", "NAMES", "Engine", "EngineError", "Transfer", "check_name", "open_engine"]
