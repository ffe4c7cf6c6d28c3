"""The command `phalanx`, run as `python -m phalanx`."""

from phalanx.cli import main

main()
