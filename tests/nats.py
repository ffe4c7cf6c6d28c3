"""Hosts behind NATs: each has its own router, and all have the same private address.

The routers are connected by a network, the switch of `tests.networks`. They permit outgoing
connections; the router of host 0 also forwards one port. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import subprocess

from tests.networks import Network, run

__all__ = ["NatNetwork"]

PRIVATE, GATEWAY = "192.168.1.2", "192.168.1.1"
_RULES = """
table ip nat {{
  chain out {{
    type nat hook postrouting priority 100
    oifname "eth0" masquerade
  }}
  chain in {{
    type nat hook prerouting priority -100
    {open}
  }}
}}
table ip filter {{
  chain forward {{
    type filter hook forward priority 0
    policy drop
    ct state established,related accept
    iifname "inside" accept
    ct status dnat accept
  }}
}}
"""


class NatNetwork(Network):
    """Hosts, each behind a NAT; `addresses` holds those of the routers.

    Args:
        hosts: The number of hosts.
        port: The port that the router of host 0 forwards to it.
    """

    def __init__(self, hosts: int, port: int) -> None:
        super().__init__(hosts)
        self._port = port
        self._routers, self.names = self.names, [f"{name}-home" for name in self.names]

    def _build(self) -> None:
        homes, self.names = self.names, self._routers
        super()._build()
        self.names = homes
        for number, (router, home) in enumerate(zip(self._routers, homes, strict=True)):
            run("ip", "netns", "add", home)
            run(
                *("ip", "-n", router, "link", "add", "inside", "type", "veth"),
                *("peer", "name", "eth0", "netns", home),
            )
            for name, device, address in ((router, "inside", GATEWAY), (home, "eth0", PRIVATE)):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
                run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", home, "link", "set", "lo", "up")
            run("ip", "-n", home, "route", "add", "default", "via", GATEWAY)
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            run("ip", "netns", "exec", router, "sh", "-c", forward)
            opened = f'iifname "eth0" tcp dport {self._port} dnat to {PRIVATE}'
            rules = _RULES.format(open="" if number else opened)
            nft = ["ip", "netns", "exec", router, "nft", "--file", "-"]
            result = subprocess.run(nft, input=rules, capture_output=True, text=True, timeout=30)
            if result.returncode != 0:
                raise OSError(f"nft: {result.stderr.strip()}")

    def _remove(self) -> None:
        homes = self.names if self.names is not self._routers else []
        self.names = [*homes, *self._routers]
        super()._remove()
