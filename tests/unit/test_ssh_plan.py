"""Which hosts, options and variables `phalanx run --hosts` reads from its command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from phalanx import key as keys
from phalanx.errors import UsageError
from phalanx.launcher.options import parse
from phalanx.launcher.ssh.host_list import HostPlace, parse_hosts
from phalanx.launcher.ssh.plan import Plan, make_plan
from phalanx.launcher.ssh.protocol import Lines, pack, unpack


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:2,b:12", [("a", 2), ("b", 12)]),
        ("a", [("a", None)]),
        ("me@node-a.x.org:2, node_b", [("me@node-a.x.org", 2), ("node_b", None)]),
        ("[fd00::1]:2,me@[fe80::1%eth0]", [("fd00::1", 2), ("me@fe80::1%eth0", None)]),
        ("10.0.0.1:1", [("10.0.0.1", 1)]),
    ],
)
def test_hosts(text: str, expected: list[tuple[str, int | None]]) -> None:
    assert parse_hosts(text) == [HostPlace(*each) for each in expected]


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode-a:2\n\nme@node-b slots=4  # the big one\n node-c\n")
    assert parse_hosts(f"@{path}") == [
        HostPlace("node-a", 2),
        HostPlace("me@node-b", 4),
        HostPlace("node-c", None),
    ]
    assert parse_hosts(f"@{path}")[1].name == "node-b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no host; expected HOST or HOST:RANKS"),
        ("a,,b", "'' is no host"),
        ("a b", "'a b' is no host"),
        ("-oProxyCommand=x", "is no host"),
        ("me@-x", "is no host"),
        ("fd00::1", "'fd00::1' is no host"),
        ("a:0", "'a:0' has '0' for its ranks; expected an integer, at least 1"),
        ("a:two", "'a:two' has 'two' for its ranks"),
        ("a:", "'a:' has '' for its ranks"),
        ("a:1,a:2", "a comes twice; give it once, with all its ranks"),
        ("@/no/file", "--hosts is '@/no/file': can't read that file: No such file"),
        ("@/dev/null", "there is no host in that file"),
    ],
)
def test_what_is_no_host(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        parse_hosts(text)


def plan(hosts: str = "a:1,b:1", options: tuple[str, ...] = (), **given: object) -> Plan:
    extra = {name: given.pop(name) for name in ("export", "ssh", "python") if name in given}
    return make_plan(hosts, given, options, ["script.py"], **extra)  # type: ignore[arg-type]


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", "gloo")
    monkeypatch.setenv("PHALANX_HOST_ID", "this one")
    monkeypatch.setenv("NAME", "a value")
    options = ("--master-addr", "x", "--tee", "3", "--master-port", "29500")
    given = {"master_addr": "x", "master_port": "29500", "shutdown_timeout": "3"}
    made = plan(options=options, export=["NAME", "OTHER=a=b", "EMPTY="], **given)
    assert made.options == ["--tee", "3"]
    assert (made.master_addr, made.master_port, made.stop_limit) == ("x", "29500", 3.0)
    assert made.python == sys.executable
    assert made.environment.items() >= {"PHALANX_TRANSPORT": "gloo", "NAME": "a value"}.items()
    assert made.environment.items() >= {"OTHER": "a=b", "EMPTY": ""}.items()
    assert not {"PHALANX_HOST_ID", "PATH", "HOME"} & made.environment.keys()
    assert len(made.key) == keys.SIZE
    assert made.key.hex() not in repr(made)


@pytest.mark.parametrize(
    ("given", "forwarded"), [("eth1", True), ("192.0.2.1", False), ("fd00::1", False)]
)
def test_an_interface_has_the_same_name_elsewhere_but_another_address(
    given: str, forwarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", given)
    assert ("PHALANX_INTERFACE" in plan().environment) is forwarded


def test_a_key_that_is_given(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    keys.create_file(path)
    made = plan(options=("--key-file", path), key_file=path)
    assert made.key == keys.from_file(path)
    assert made.options == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nnodes": "2"}, "--hosts says which hosts there are: leave --nnodes out"),
        ({"node_rank": "0"}, "leave --node-rank out"),
        ({"key_fd": "3"}, "leave --key-fd out"),
        ({"export": ["NO_SUCH_NAME"]}, "'NO_SUCH_NAME', which isn't set here"),
        ({"export": ["=x"]}, "--export is '=x': expected NAME or NAME=VALUE"),
        ({"ssh": "no-such-ssh -p 22"}, "there is no program 'no-such-ssh': --hosts needs OpenSSH"),
        ({"ssh": "ssh 'x"}, "No closing quotation"),
        ({"shutdown_timeout": "soon"}, "--shutdown-timeout is 'soon': expected seconds"),
    ],
)
def test_what_cannot_be_planned(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        plan(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--monitor-interval 1 --hosts a:1 x.py", "--hosts comes too late: give it first"),
        ("--remote-python python3 x.py", "--remote-python says how to start hosts: give --hosts"),
    ],
)
def test_options_in_the_wrong_place(arguments: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(arguments.split())


def test_messages_among_what_a_shell_prints() -> None:
    content = {"text": "é\n\udcff", "number": 1}
    data = b"Welcome!\nno end" + pack("hello", **content) + b"\x1ephalanx [1]\nrest"
    lines = Lines()
    found = [
        line for start in range(0, len(data), 7) for line in lines.feed(data[start : start + 7])
    ]
    assert [unpack(line) for line in found] == [None, None, {"kind": "hello", **content}, None]
    assert lines.rest() == [b"rest"]
    assert lines.rest() == []
