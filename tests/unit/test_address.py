"""The address at which other hosts reach a rank."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from phalanx.address import local_address
from phalanx.errors import UsageError
from phalanx.system.host_identity import MemoryProbe
from phalanx.topology import HostLink, RankRecord, own_address


@pytest.fixture
def here() -> RankRecord:
    with MemoryProbe() as probe:
        return RankRecord.for_current_process(2, HostLink("gloo"), probe)


def test_address_towards_the_store(here: RankRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_INTERFACE", raising=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    assert own_address(dist.PrefixStore("a", store), [here, here]) == "127.0.0.1"  # type: ignore[attr-defined]
    assert own_address(dist.HashStore(), [here]) == "127.0.0.1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ("lo", "127.0.0.1"))
def test_named_interface(here: RankRecord, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", given)
    assert own_address(dist.HashStore(), [here]) == "127.0.0.1"  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ("eth77", "192.0.2.1"))
def test_unknown_interface(here: RankRecord, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", given)
    with pytest.raises(UsageError, match=f"PHALANX_INTERFACE='{given}'.*it has lo \\(127.0.0.1"):
        own_address(dist.HashStore(), [here])  # type: ignore[attr-defined]


def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the /etc/hosts of some distributions, the machine's own name is also on loopback."""
    monkeypatch.delenv("PHALANX_INTERFACE", raising=False)
    found = [
        (socket.AF_INET, socket.SOCK_DGRAM, 0, "", (address, 9))
        for address in ("127.0.1.1", "169.254.1.1", "0.0.0.0")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    connected = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, where: connected.append(where))
    local_address("node-a")
    assert connected == [("0.0.0.0", 9)]


def test_invalid_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_INTERFACE", raising=False)
    assert local_address("a..b") == ""


def test_loopback_with_other_machines(here: RankRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_INTERFACE", raising=False)
    elsewhere = here._replace(network="another")
    with pytest.raises(
        UsageError, match=r"cannot reach this machine at 127.0.0.1.*PHALANX_INTERFACE"
    ):
        own_address(dist.HashStore(), [here, elsewhere])  # type: ignore[attr-defined]
