"""A process that forwards packets between hosts with a delay, where the kernel has no netem.

Each host has a TUN device, whose packets this process reads, keeps for the time that they would
take on the link, and writes to the device of the destination. Run by `networks.Network(delay=...)`.

    python -m tests.delayed_links DELAY_SECONDS BITS_PER_SECOND NAMESPACE=ADDRESS...
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque

from tests.networks import enter, run

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 9000
_QUEUE_SECONDS = 0.1
"""The longest time that packets wait for the link; later ones are dropped, as by a router."""


class Device:
    """A host's end of its link, and the packets under way from it."""

    def __init__(self, namespace: str, address: str) -> None:
        enter(namespace)
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TUN | _IFF_NO_PI))
        run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "mtu", str(_MTU), "up")
        run("ip", "link", "set", "lo", "up")
        self.address = socket.inet_aton(address)
        self.free_at = 0.0
        self.under_way: deque[tuple[float, bytes]] = deque()

    def read(self, delay: float, rate: float) -> None:
        """Read the packets that the host has sent; each occupies the link for its length."""
        while True:
            try:
                packet = os.read(self.fd, _MTU)
            except BlockingIOError:
                return
            now = time.monotonic()
            if packet[0] >> 4 != 4 or self.free_at > now + _QUEUE_SECONDS:
                continue
            self.free_at = max(self.free_at, now) + 8 * len(packet) / rate
            self.under_way.append((self.free_at + delay, packet))


def forward(devices: list[Device], delay: float, rate: float) -> None:
    """Forward packets until this process is killed."""
    by_address = {device.address: device for device in devices}
    poller = select.poll()
    for device in devices:
        poller.register(device.fd, select.POLLIN)
    while True:
        due = min((each.under_way[0][0] for each in devices if each.under_way), default=None)
        wait = None if due is None else max(0.0, 1e3 * (due - time.monotonic()))
        poller.poll(wait)
        for device in devices:
            device.read(delay, rate)
            while device.under_way and device.under_way[0][0] <= time.monotonic():
                packet = device.under_way.popleft()[1]
                target = by_address.get(packet[16:20])
                if target is not None:
                    os.write(target.fd, packet)


def main() -> None:
    """Create the devices, print "ready", and forward."""
    delay, rate = float(sys.argv[1]), float(sys.argv[2])
    devices = [Device(*each.split("=")) for each in sys.argv[3:]]
    print("ready", flush=True)
    forward(devices, delay, rate)


if __name__ == "__main__":
    main()
