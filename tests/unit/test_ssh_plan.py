"""The hosts, options and variables that `phalanx run --hosts` reads from its command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from phalanx import key as keys
from phalanx.errors import UsageError
from phalanx.launcher.arguments import as_words, parse_arguments
from phalanx.launcher.options import make_job
from phalanx.launcher.ssh.plan import (
    HostSpec,
    Plan,
    make_plan,
    parse_hosts,
)
from phalanx.system.ssh import LineSplitter, pack_message, unpack_message


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
    assert parse_hosts(text) == [HostSpec(*each) for each in expected]


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode-a:2\n\nme@node-b slots=4  # the big one\n node-c\n")
    assert parse_hosts(f"@{path}") == [
        HostSpec("node-a", 2),
        HostSpec("me@node-b", 4),
        HostSpec("node-c", None),
    ]
    assert parse_hosts(f"@{path}")[1].name == "node-b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a host; expected HOST or HOST:RANKS"),
        ("a,,b", "'' is not a host"),
        ("a b", "'a b' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("me@-x", "is not a host"),
        ("fd00::1", "'fd00::1' is not a host"),
        ("a:0", "'a:0' has '0' as its number of ranks; expected an integer, at least 1"),
        ("a:two", "'a:two' has 'two' as its number of ranks"),
        ("a:", "'a:' has '' as its number of ranks"),
        ("a:1,a:2", "a is given twice; give it once, with all ranks"),
        ("@/no/file", "--hosts is '@/no/file': can't read the file: No such file"),
        ("@/dev/null", "the file lists no host"),
    ],
)
def test_invalid_hosts(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_hosts(text)


def make_test_plan(*options: str) -> Plan:
    args = parse_arguments([*options, "--hosts", "a:1,b:1", "script.py", "--ssh", "x"])
    return make_plan(args, as_words(args))


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", "gloo")
    monkeypatch.setenv("PHALANX_HOST_ID", "this one")
    monkeypatch.setenv("NAME", "a value")
    options = "--master-addr x --tee 3 --monitor_interval 2 -m --master-port=29500 --replace=gloo"
    exports = ("--export", "NAME", "--export", "OTHER=a=b", "--export=EMPTY=")
    plan = make_test_plan(*options.split(), "--shutdown-timeout", "3", *exports)
    assert sorted(plan.options) == [
        "--module",
        "--monitor-interval=2.0",
        "--replace=gloo",
        "--shutdown-timeout=3",
        "--tee=3",
    ]
    assert plan.command == ["script.py", "--ssh", "x"]
    assert (plan.master_addr, plan.master_port, plan.stop_timeout) == ("x", "29500", 3.0)
    assert plan.python == sys.executable
    assert plan.environment.items() >= {"PHALANX_TRANSPORT": "gloo", "NAME": "a value"}.items()
    assert plan.environment.items() >= {"OTHER": "a=b", "EMPTY": ""}.items()
    assert not {"PHALANX_HOST_ID", "PATH", "HOME"} & plan.environment.keys()
    assert len(plan.key) == keys.SIZE
    assert plan.key.hex() not in repr(plan)


def test_defaults_from_the_environment_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_STANDALONE", "0")
    assert make_test_plan().options == ["--max-restarts=3"]
    assert make_test_plan("--max-restarts", "3").options == ["--max-restarts=3"]


@pytest.mark.parametrize(
    ("given", "forwarded"), [("eth1", True), ("192.0.2.1", False), ("fd00::1", False)]
)
def test_interface_names_are_forwarded_but_not_addresses(
    given: str, forwarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_INTERFACE", given)
    assert ("PHALANX_INTERFACE" in make_test_plan().environment) is forwarded


def test_a_given_key(tmp_path: Path) -> None:
    path = str(tmp_path / "key")
    keys.create_file(path)
    plan = make_test_plan("--key-file", path)
    assert plan.key == keys.from_file(path)
    assert plan.options == []


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nnodes=2", "--hosts determines the hosts of the job: omit --nnodes"),
        ("--node-rank=0", "omit --node-rank"),
        ("--rdzv-endpoint=a:1", "omit --rdzv-endpoint"),
        ("--key-fd=3", "omit --key-fd"),
        ("--export=NO_SUCH_NAME", "'NO_SUCH_NAME', which is not set here"),
        ("--export==x", "--export is '=x': expected NAME or NAME=VALUE"),
        ("--ssh=no-such-ssh -p 22", "there is no program 'no-such-ssh': --hosts needs OpenSSH"),
        ("--ssh=ssh 'x", "No closing quotation"),
        ("--shutdown-timeout=soon", "shutdown-timeout"),
    ],
)
def test_invalid_options(option: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make_test_plan(option)


def test_an_option_that_needs_hosts() -> None:
    message = "--remote-python is for starting hosts over ssh: give --hosts"
    with pytest.raises(UsageError, match=message):
        make_job(parse_arguments(["--remote-python", "python3", "x.py"]))


def test_messages_among_shell_output() -> None:
    content = {"text": "é\n\udcff", "number": 1}
    data = b"Welcome!\nno end" + pack_message(kind="hello", **content) + b"\x1ephalanx [1]\nrest"
    lines = LineSplitter()
    found = [
        line for start in range(0, len(data), 7) for line in lines.feed(data[start : start + 7])
    ]
    messages = [unpack_message(line) for line in found]
    assert messages == [None, None, {"kind": "hello", **content}, None]
    assert unpack_message(pack_message(kind="end").strip()) is None
    assert lines.flush() == [b"rest"]
    assert lines.flush() == []
