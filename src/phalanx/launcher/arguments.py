"""The arguments of `phalanx run`: torchrun's, with other defaults and readable errors.

`parse_arguments` parses and checks them without importing torch, so that a mistake is answered at
once. What needs torch, such as the number of GPUs, is checked by `options.make_job`.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import shutil
import sys
from argparse import Action, ArgumentParser, Namespace
from typing import TYPE_CHECKING, NoReturn

from phalanx import env
from phalanx import key as keys
from phalanx.launcher.ssh.plan import HOST_OPTIONS, REPLACED_OPTIONS, parse_hosts
from phalanx.system.suggestions import find_similar, suggest
from phalanx.torch_sources import make_torchrun_parser
from phalanx.usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEVICES = ("auto", "cpu", "gpu", "xpu")
"""The values of `--nproc-per-node` that are no numbers; torch may know one more."""

_OTHER_NAMES = {
    **dict.fromkeys(
        ("-n", "-np", "--np", "--nprocs", "--nproc", "--ranks", "--num-processes", "--num-gpus"),
        "--nproc-per-node",
    ),
    **dict.fromkeys(("-N", "--nodes", "--num-nodes", "--num-machines"), "--nnodes"),
    **dict.fromkeys(("-H", "--host"), "--hosts"),
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "-x": "--export",
}
"""The options of mpirun, srun, accelerate and deepspeed, and those of `phalanx run` instead."""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """The arguments contain `--help`."""


class _Parser(ArgumentParser):
    """A parser that describes an unknown option before any other mistake."""

    _words: Sequence[str] = ()

    def parse(self, words: Sequence[str]) -> Namespace:
        """Parse the words; raises `UsageError` or `HelpRequested`."""
        self._words = words
        args, unknown = self.parse_known_args(list(words))
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return args

    def error(self, message: str) -> NoReturn:
        if unknown := self._find_unknown_option():
            option, value = unknown
            message = f"unrecognized arguments: {option}{self._suggest(option, value)}"
        elif "training_script" in message:
            message = "no script: expected `phalanx run [OPTIONS] SCRIPT [ARGS]...`"
        end = "" if message.endswith("?") else ";"
        raise UsageError(f"{message}{end} `phalanx run --help` lists the options")

    def print_help(self, _file: object = None) -> NoReturn:
        raise HelpRequested

    def find_action(self, option: str) -> Action | None:
        """Return the action of an option, which may be abbreviated; None if it is unknown."""
        if option in self._option_string_actions:
            return self._option_string_actions[option]
        if not option.startswith("--"):  # -t3
            return self._option_string_actions.get(option[:2])
        names = [name for name in self._option_string_actions if name.startswith(option)]
        return self._option_string_actions[names[0]] if len(names) == 1 else None

    def _find_unknown_option(self) -> tuple[str, str] | None:
        """Return the first option before the script that is unknown, and its value or ''."""
        words = list(self._words)
        while words and words[0].startswith("-") and words[0] not in ("-", "--"):
            option, equals, value = words.pop(0).partition("=")
            action = self.find_action(option)
            if action is None:
                return option, value or (words[0] if words and words[0][:1] != "-" else "")
            is_attached = equals or (option[:2] != "--" and len(option) > 2)
            if words and action.nargs != 0 and not is_attached:
                del words[0]
        return None

    def _suggest(self, option: str, value: str) -> str:
        """Return the end of a message on an unknown option."""
        if match := re.fullmatch(r"(-[a-zA-Z]+)(\d+)", option):  # -n2
            option, value = match.groups()
        name = option.replace("_", "-")
        if name == "--hostfile":
            return f"; did you mean `--hosts @{value or 'FILE'}`?"
        names = [each for each in self._option_string_actions if "_" not in each]
        similar = _OTHER_NAMES.get(name, "") or find_similar(name, names)
        if not similar:
            return ""
        if value and self._option_string_actions[similar].nargs != 0:
            similar = f"{similar} {value}"
        return f"; did you mean `{similar}`?"


def make_parser() -> _Parser:
    """Return torchrun's parser, extended by the options of Phalanx.

    The default of an option is None if its use with `--hosts` depends on whether it is given.
    """
    parser = _Parser("phalanx run", parents=[make_torchrun_parser()], add_help=False)
    if "PET_NPROC_PER_NODE" not in os.environ:
        parser.set_defaults(nproc_per_node="auto")
    # In torch 2.11, the default of the port is a number.
    for name in ("node_rank", "master_addr", "master_port", "max_restarts"):
        if f"PET_{name.upper()}" not in os.environ:
            parser.set_defaults(**{name: None})
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--keep-record", action="store_true")
    for name in ("spares", "rejoin", "replace", "simulate-hosts", "key-file", "key-fd", "hosts"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--ssh")
    parser.add_argument("--remote-python")
    parser.add_argument("--export", action="append")
    return parser


def parse_arguments(argv: Sequence[str]) -> Namespace:
    """Parse the options of `phalanx run`, the script and its arguments, and check them.

    This neither imports torch nor changes anything.

    Raises:
        UsageError: There is no script, or an option is unknown or has an invalid value, as far as
            can be checked without torch.
        HelpRequested: `--help` is among the options.
    """
    args = make_parser().parse(argv)
    _check_port(args)
    if args.hosts is not None:
        parse_hosts(args.hosts)
        return args
    _check_host_options(args)
    range_of_ranks = parse_nproc_range(args.nproc_per_node)
    _check_elastic(args, *range_of_ranks)
    _check_restarts(args)
    _check_output(args)
    _check_script(args)
    find_replaced_backends(args.replace)
    nnodes = parse_nnodes(args.nnodes)
    if nnodes == 1 and args.rejoin is not None:
        raise UsageError("--rejoin is for jobs on several hosts: give --nnodes too, or omit it")
    if nnodes == 1 and (other := find_other_launcher()):
        _check_other_launcher(args, other)
    if args.rdzv_backend == "static" and not 0 <= (args.node_rank or 0) < nnodes:
        raise UsageError(f"--node-rank is {args.node_rank}: expected 0 to {nnodes - 1}")
    check_simulated_hosts(args, range_of_ranks[1], nnodes)
    _check_key(args)
    return args


def as_words(args: Namespace) -> list[str]:
    """Return the options for every host of `--hosts` as words of a command line.

    These are the options that differ from their defaults, without those in `HOST_OPTIONS` and
    `REPLACED_OPTIONS`. Options whose defaults this machine's environment sets (`PET_*`) are
    included.

    Args:
        args: The result of `parse_arguments`.
    """
    words, omitted = [], (*HOST_OPTIONS, *REPLACED_OPTIONS)
    for action in make_parser()._actions:
        value = getattr(args, action.dest, None)
        is_default = value == action.default and f"PET_{action.dest.upper()}" not in os.environ
        is_given = not is_default and value is not None and value is not False
        if not (is_given and action.option_strings) or action.dest in omitted:
            continue
        option = next(name for name in action.option_strings if name.startswith("--"))
        if action.nargs == 0:
            words.append(option)
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"{option}={text}")
    return words


def describe_misplaced_options(args: Namespace) -> str:
    """Return a note on options of `phalanx run` after the script; empty if there are none.

    The script gets them. It may know them, so this is a mistake only if the script rejects them.
    """
    parser = make_parser()
    names = {name for name in parser._option_string_actions if name.startswith("--")}
    words = list(args.training_script_args)
    found = [word for word in words if word.partition("=")[0] in names - {"--help"}]
    if not found:
        return ""
    return (
        f"{args.training_script} got {', '.join(found)}: options of `phalanx run` come before the "
        "script"
    )


def parse_nproc_range(text: str) -> tuple[int | str, int | str]:
    """Return the least number of ranks on this host, and the number at the start.

    Instead of a number, each may be the name of a kind of device, of which there is one per rank.

    Raises:
        UsageError: One is no positive number, and no device has that name.
    """
    least, colon, most = text.rpartition(":")
    ranks = _parse_nproc(most)
    min_ranks = _parse_nproc(least) if colon else ranks
    check_nproc_range(text, min_ranks, ranks)
    return min_ranks, ranks


def check_nproc_range(text: str, least: int | str, most: int | str) -> None:
    """Raise `UsageError` if both are numbers, and the least is not the smaller one."""
    if isinstance(least, int) and isinstance(most, int) and least > most:
        raise UsageError(f"--nproc-per-node is {text!r}: expected MIN:MAX with MIN <= MAX")


def make_nproc_error(text: str) -> UsageError:
    """Return the error for a number of ranks that is none."""
    return UsageError(
        f"--nproc-per-node is {text if text.lstrip('-').isdecimal() else repr(text)}: expected an "
        "integer, at least 1, or auto, cpu, gpu"
        f"{suggest(text, _DEVICES)}"
    )


def parse_nnodes(text: str) -> int:
    """Return the largest number of hosts.

    Raises:
        UsageError: It is no number, and no range of numbers.
    """
    least, colon, most = text.partition(":")
    try:
        maximum = int(most if colon else least)
        minimum = int(least)
    except ValueError:
        raise UsageError(f"--nnodes is {text!r}: expected an integer, or MIN:MAX") from None
    if not 1 <= minimum <= maximum:
        raise UsageError(f"--nnodes is {text!r}: expected 1 <= MIN <= MAX")
    return maximum


def parse_small_integer(name: str, text: str | None, most: int) -> int:
    """Return the value of an option; 0 if it is not given.

    Raises:
        UsageError: It is not an integer from 0 to `most`.
    """
    text = text or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most))):
        raise UsageError(f"--{name} is {text!r}: expected an integer from 0 to {most}")
    return int(text)


def find_replaced_backends(text: str | None) -> tuple[str, ...]:
    """Return the backends that `--replace`, or without it the environment, names.

    Raises:
        UsageError: One cannot be replaced.
    """
    try:
        names = env.replaced_backends() if text is None else env.backend_names(text, "--replace")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if names and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise UsageError(
            "TORCH_DEVICE_BACKEND_AUTOLOAD in the environment keeps `import torch` from loading "
            "Phalanx, so it can't replace other backends: unset it"
        )
    return names


def find_other_launcher() -> str:
    """Return the launcher that has started several `phalanx run`; empty if none has."""
    other = {"mpi": "mpirun", "slurm": "srun"}.get(env.launcher(), "")
    counts = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    count = next((text for name in counts if (text := os.environ.get(name, ""))), "1")
    return other if count != "1" else ""


def check_simulated_hosts(args: Namespace, ranks: int | str, nodes: int) -> None:
    """Raise `UsageError` if the hosts to simulate, if any, are more than the ranks.

    Args:
        args: The arguments of `phalanx run`.
        ranks: The number of ranks; a text if it is not known yet.
        nodes: The number of hosts.
    """
    text = args.simulate_hosts
    if text is None:
        return
    expected = (
        f"expected an integer from 1 to {ranks}, the number of ranks"
        if isinstance(ranks, int)
        else "expected an integer, at least 1 and at most the number of ranks"
    )
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"--simulate-hosts is {text!r}: {expected}") from None
    if count < 1 or (isinstance(ranks, int) and count > ranks):
        raise UsageError(f"--simulate-hosts is {text}: {expected}")
    if nodes > 1:
        raise UsageError("--simulate-hosts simulates hosts on one machine: omit --nnodes")


def _check_host_options(args: Namespace) -> None:
    """Reject options that need `--hosts`."""
    for name in HOST_OPTIONS:
        if getattr(args, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is for starting hosts over ssh: give --hosts too"
            )


def _parse_nproc(text: str) -> int | str:
    try:
        count = int(text)
    except ValueError:
        if text in _DEVICES or (text.isidentifier() and _may_have_other_devices()):
            return text
        raise make_nproc_error(text) from None
    if count < 1:
        raise make_nproc_error(text)
    return count


def _may_have_other_devices() -> bool:
    """Return whether `import torch` may register a device that torch itself does not have."""
    from importlib import metadata  # for mistakes and rare devices only

    modules = {each.module for each in metadata.entry_points(group="torch.backends")}
    return bool(modules - {"phalanx._autoload"}) or bool(os.environ.get("PHALANX_PRELOAD"))


def _check_elastic(args: Namespace, least: int | str, most: int | str) -> None:
    if not args.elastic:
        for name in ("spares", "rejoin"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} is for jobs whose ranks are replaced: give --elastic too"
                )
        if least != most:
            raise UsageError(
                "--nproc-per-node MIN:MAX is for jobs that continue with fewer ranks: give "
                "--elastic too"
            )
        return
    if args.no_python:
        raise UsageError("--elastic starts Python scripts only: omit --no-python")
    if getattr(args, "numa_binding", None) is not None:
        raise UsageError(
            "--elastic cannot bind the processes that replace ranks to NUMA nodes: "
            "omit --numa-binding"
        )
    parse_small_integer("spares", args.spares, 999)
    parse_small_integer("rejoin", args.rejoin, 999_999)


def _check_other_launcher(args: Namespace, other: str) -> None:
    """Reject several `phalanx run`, each of which would start all ranks.

    With `--replace`, each becomes a rank of the other launcher.
    """
    if args.replace is None or args.simulate_hosts is not None:
        raise UsageError(
            f"{other} has started several instances of `phalanx run`, which starts ranks itself: "
            f"start the script with `{other} ... python SCRIPT`; or give --nnodes, for one "
            "`phalanx run` per host"
        )


def _check_restarts(args: Namespace) -> None:
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"--max-restarts is {args.max_restarts}: expected an integer, at least 0")


def _check_output(args: Namespace) -> None:
    for name in ("tee", "redirects"):
        text = getattr(args, name)
        if not re.fullmatch(r"[0-3]|\d:[0-3](,\d:[0-3])*", text):
            raise UsageError(
                f"--{name} is {text!r}: expected 0, 1 (stdout), 2 (stderr) or 3 (both), or "
                "RANK:N,... for some local ranks"
            )
    ranks = args.local_ranks_filter
    if ranks and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", ranks):
        raise UsageError(
            f"--local-ranks-filter is {ranks!r}: expected a comma-separated list of integers"
        )


def _check_port(args: Namespace) -> None:
    if args.master_port is not None and not 1 <= args.master_port <= 65535:
        raise UsageError(f"--master-port is {args.master_port}: expected 1 to 65535")


def _check_key(args: Namespace) -> None:
    if args.key_fd is not None:
        if args.key_file is not None:
            raise UsageError("--key-file and --key-fd are both given: omit one")
        if not args.key_fd.isdecimal():
            raise UsageError(f"--key-fd is {args.key_fd!r}: expected the number of an open file")
    elif args.key_file is not None:
        keys.from_file(args.key_file)


def _check_script(args: Namespace) -> None:
    script = args.training_script
    if args.module:
        _check_module(script)
    elif args.no_python:
        if shutil.which(script) is None:
            raise UsageError(f"there is no program {script!r} that can be run")
    elif os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise UsageError(f"{script} is a directory without a __main__.py: expected a script")
    elif not os.path.exists(script):
        raise UsageError(
            f"there is no script {script!r}: looked in {os.getcwd()}{_suggest_script(script)}"
        )


def _check_module(module: str) -> None:
    if module.endswith(".py") and os.path.isfile(module):
        raise UsageError(f"-m is for modules: omit it to run the script {module!r}")
    top = module.partition(".")[0]
    search_path = [os.getcwd(), *sys.path]
    if top not in sys.builtin_module_names and not (
        importlib.machinery.PathFinder.find_spec(top, search_path)
    ):
        hint = suggest(top, (name.removesuffix(".py") for name in _list_directory(".")))
        raise UsageError(f"there is no module {top!r}, in {os.getcwd()} or installed{hint}")


def _suggest_script(script: str) -> str:
    directory, name = os.path.split(script)
    scripts = [each for each in _list_directory(directory or ".") if each.endswith(".py")]
    similar = f"{name}.py" if f"{name}.py" in scripts else find_similar(name, scripts)
    return f"; did you mean {os.path.join(directory, similar)!r}?" if similar else ""


def _list_directory(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:  # there is nothing to suggest
        return []
