"""Build the sdist and the wheels of a release, and check them.

`make wheels` runs it. Zig's C++ compiler (Clang, from the package ziglang) links for any version of
glibc and for both processors; docs/design/wheels.md gives the reasons. Each wheel is built from the
unpacked sdist, which proves that the sdist is complete. The checked files go to dist/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

from tools.interpreters import interpreters

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "wheels"
GLIBC = "2.28"
MACHINES = ("x86_64", "aarch64")
# The wheel for 3.12 uses the stable ABI, and is for every later version.
PYTHONS = ("3.10", "3.11", "3.12")
STABLE_ABI = "cp312"
MAX_BYTES = 2_000_000
# The libraries of glibc: nothing else is shared with the system.
SYSTEM_LIBRARIES = ("libc.so.", "libdl.so.", "libm.so.", "libpthread.so.", "librt.so.", "ld-linux-")
# The C library for programs of other processors, from Debian's libc6-arm64-cross.
LIBRARIES = Path("/usr/aarch64-linux-gnu")


class WheelError(Exception):
    """A wheel that must not be released."""


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser("make wheels", description=__doc__)
    parser.add_argument("--machine", choices=MACHINES, help="the only processor to build for")
    parser.add_argument("--python", choices=PYTHONS, help="the only version of Python to build for")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument(
        "--core-tests", action="store_true", help="build and run the tests of the core instead"
    )
    parser.add_argument(
        "--repair", metavar="WHEEL", type=Path, help="only tag and check a wheel that another built"
    )
    return parser.parse_args()


def main() -> int:
    """Build, check and list the files of a release; return the exit status."""
    options = parse_options()
    machines = [options.machine] if options.machine else MACHINES
    if options.repair:
        print(repair(options.repair, options.output))
        return 0
    sources = build_sdist(options.output)
    if options.core_tests:
        return sum(test_core(machine, sources) for machine in machines)
    missing = False
    for version in [options.python] if options.python else PYTHONS:
        python = next(interpreters(int(version.removeprefix("3."))), None)
        missing |= python is None
        for machine in machines:
            if python:
                built = build_wheel(python, version, machine, sources)
                print(repair(built, options.output), flush=True)
            else:
                print(f"Python {version} for {machine}: not built, no interpreter", flush=True)
    return missing


def build_sdist(output: Path) -> Path:
    """Build the sdist; return the directory into which it was unpacked."""
    output.mkdir(parents=True, exist_ok=True)
    backend = "import sys, scikit_build_core.build as b; print(b.build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", backend, str(output)]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    name = built.stdout.split()[-1]
    shutil.rmtree(FOLDER / "source", ignore_errors=True)
    with tarfile.open(output / name) as archive:
        archive.extractall(FOLDER / "source")
    print(describe(output / name), flush=True)
    # Always the same path: Zig keeps what it has compiled, by path and options.
    (unpacked,) = (FOLDER / "source").iterdir()
    return unpacked


def toolchain(machine: str) -> dict[str, str]:
    """Write the programs of the toolchain for a processor; return CMake's variables for them."""
    package = importlib.util.find_spec("ziglang")
    if package is None or package.origin is None:
        raise WheelError("ziglang is not installed: run `make wheels`")
    zig = Path(package.origin).with_name("zig")
    # The headers of nanobind rely on Python.h for stdio.h, which that of the stable ABI lacks.
    variables = {"CMAKE_CXX_FLAGS": "-include stdio.h"}
    for variable, name, arguments in (
        ("CMAKE_CXX_COMPILER", "c++", f"c++ -target {machine}-linux-gnu.{GLIBC}"),
        ("CMAKE_AR", "ar", "ar"),
        ("CMAKE_RANLIB", "ranlib", "ranlib"),
    ):
        program = FOLDER / "toolchain" / machine / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec "{zig}" {arguments} "$@"\n')
        program.chmod(0o755)
        variables[variable] = str(program)
    if machine != os.uname().machine:
        variables |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
    return variables


def build_wheel(python: str, version: str, machine: str, sources: Path) -> Path:
    """Build a wheel for an interpreter's version and a processor; return its path."""
    stable = version == PYTHONS[-1]
    name = f"cpython-{version.replace('.', '')}-{machine}-linux-gnu"
    settings = {f"cmake.define.{key}": value for key, value in toolchain(machine).items()}
    # The tag, and the extension's name, if the processor is not this machine's.
    settings["env._PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    settings["env.SETUPTOOLS_EXT_SUFFIX"] = f".{name}.so"
    settings["build-dir"] = str(FOLDER / name)
    settings["install.strip"] = "false"  # the linker strips, for any processor
    if stable:
        settings["wheel.py-api"] = STABLE_ABI
    built = FOLDER / f"{name}-wheel"
    shutil.rmtree(built, ignore_errors=True)
    command = ["pip", "--quiet", "--python", python, "wheel", "--no-deps", "--wheel-dir", built]
    for key, value in settings.items():
        command += ["--config-settings", f"{key}={value}"]
    run([*command, sources])
    (wheel,) = built.glob("*.whl")
    return wheel


def repair(wheel: Path, output: Path) -> str:
    """Give a wheel its manylinux tag, which auditwheel checks; check the result and describe it."""
    machine = next(machine for machine in MACHINES if wheel.stem.endswith(machine))
    repaired = FOLDER / f"{wheel.stem}-repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    # Of another processor, auditwheel grants the oldest tag possible, but accepts no name for it.
    run(["auditwheel", "repair", "--plat", "auto", "--wheel-dir", repaired, wheel])
    (found,) = repaired.glob("*.whl")
    check(found, machine)
    output.mkdir(parents=True, exist_ok=True)
    return describe(Path(shutil.copy(found, output)))


def check(wheel: Path, machine: str) -> None:
    """Check the tag, the size, and the extension's processor, symbols and libraries.

    Raises:
        WheelError: The wheel must not be released.
    """
    tags = re.findall(rf"manylinux_(\d+)_(\d+)_{machine}", wheel.stem)
    if not any(tuple(map(int, tag)) <= tuple(map(int, GLIBC.split("."))) for tag in tags):
        raise WheelError(f"{wheel.name}: needs a newer glibc than {GLIBC}")
    if wheel.stat().st_size > MAX_BYTES:
        raise WheelError(f"{describe(wheel)}: more than {MAX_BYTES / 1e6:g} MB")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        with archive.open(name) as stream:
            extension = ELFFile(stream)
            dynamic = extension.get_section_by_name(".dynamic")
            libraries = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
            is_stripped = extension.get_section_by_name(".symtab") is None
            processor = extension.get_machine_arch()
    shared = [library for library in libraries if not library.startswith(SYSTEM_LIBRARIES)]
    if processor != {"x86_64": "x64", "aarch64": "AArch64"}[machine]:
        raise WheelError(f"{wheel.name}: the extension is for {processor}")
    if not is_stripped:
        raise WheelError(f"{wheel.name}: the extension is not stripped")
    if shared:
        raise WheelError(f"{wheel.name}: the extension needs {', '.join(shared)}")


def describe(path: Path) -> str:
    """Return the name of a file and its size."""
    return f"{path.name}  {path.stat().st_size / 1e6:.2f} MB"


def test_core(machine: str, sources: Path) -> bool:
    """Build the tests of the core as the wheels are built, and run them.

    Programs of another processor run under qemu-user.

    Returns:
        True if a test failed.
    """
    variables = toolchain(machine) | {"PHALANX_PYTHON": "OFF", "PHALANX_TESTS": "ON"}
    if machine != os.uname().machine:
        emulator = shutil.which(f"qemu-{machine}")
        if not (emulator and LIBRARIES.is_dir()):
            print(
                f"The tests for {machine} were not run: apt-get install qemu-user libc6-arm64-cross"
            )
            return True
        variables["CMAKE_CROSSCOMPILING_EMULATOR"] = f"{emulator};-L;{LIBRARIES}"
    build = FOLDER / f"core-tests-{machine}"
    defines = [f"-D{key}={value}" for key, value in variables.items()]
    run(["cmake", "-S", sources, "-B", build, "-G", "Ninja", "--log-level=WARNING", *defines])
    run(["cmake", "--build", build])
    command = ["ctest", "--test-dir", build / "native", "--no-tests=error", "--output-on-failure"]
    return subprocess.run(command, check=False).returncode != 0


def run(command: list[str | Path]) -> None:
    """Run a command, whose output is shown.

    Raises:
        WheelError: It failed.
    """
    caches = {
        "ZIG_GLOBAL_CACHE_DIR": str(FOLDER / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(FOLDER / "zig"),
    }
    result = subprocess.run(command, env=os.environ | caches, check=False)
    if result.returncode:
        raise WheelError(f"failed with {result.returncode}: {' '.join(map(str, command))}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WheelError as error:
        sys.exit(f"wheels: {error}")
