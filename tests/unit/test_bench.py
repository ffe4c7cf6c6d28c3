"""`phalanx.bench`: operations, the arithmetic of the limit, the table and the plot."""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from rich.console import Console

from phalanx.bench import machine, results, systems
from phalanx.bench.measurement import buffer_count
from phalanx.bench.messages import PrepareCommand, TurnCommand
from phalanx.bench.operations import (
    OPERATIONS,
    STORAGE,
    decode,
    encode,
    expected_output,
    make_input,
)
from phalanx.bench.plan import Plan, format_size, parse_names, parse_sizes
from phalanx.bench.plot import plot
from phalanx.bench.results import Report, Result, Timing
from phalanx.bench.table import Display
from phalanx.bench.timed_operation import TimedOperation
from phalanx.cli.output import write_json
from phalanx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 2**20


# ---- options ----


def test_sizes_are_sorted_without_duplicates() -> None:
    assert parse_sizes("1KiB, 4,64mib,4", ["float32"]) == [4, 1024, 64 * MIB]


@pytest.mark.parametrize(
    ("text", "dtypes", "message"),
    [
        ("3", ["float32"], "size '3' given, expected a multiple of 4 bytes (float32)"),
        ("4,6", ["float16", "int64"], "size '4' given, expected a multiple of 8 bytes (int64)"),
        ("0", ["int8"], "size '0' given, expected a multiple of 1 bytes (int8)"),
        ("4,oops", ["float32"], "size 'oops' given, expected bytes such as 4, 16KiB or 64MiB"),
        ("4kb", ["float32"], "size '4kb' given"),
        ("", ["float32"], "size '' given"),
    ],
)
def test_an_invalid_size_is_rejected(text: str, dtypes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_sizes(text, dtypes)


def test_names_have_no_duplicates() -> None:
    assert parse_names("b, a,b", "thing", ["a", "b", "c"]) == ["b", "a"]
    assert parse_names("all", "thing", ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize("text", ["a,x", "x", "", "all,a"])
def test_an_unknown_name_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match=r"^thing '(x|all|)' given, expected .* a, b, or all$"):
        parse_names(text, "thing", ["a", "b"])


def test_labels() -> None:
    labels = [format_size(size) for size in (4, 1500, 3 * MIB, 2**30)]
    assert labels == ["4 B", "1500 B", "3 MiB", "1 GiB"]


# ---- operations and their limit ----

# Bytes that the memory must move for an operation whose largest buffer has n bytes, with p ranks,
# as in the documentation.
TRAFFIC = {
    "all_reduce": lambda p, n: 2 * p * n,
    "reduce": lambda p, n: (p + 1) * n,
    "broadcast": lambda p, n: p * n,
    "gather": lambda p, n: 2 * n,
    "scatter": lambda p, n: 2 * n,
    "all_gather": lambda p, n: (p + 1) * n,
    "all_gather_into_tensor": lambda p, n: (p + 1) * n,
    "reduce_scatter": lambda p, n: (p + 1) * n,
    "all_to_all": lambda p, n: 2 * p * n,
    "send_recv": lambda p, n: 2 * n,
    "isend_irecv": lambda p, n: 2 * p * n,
    "barrier": lambda p, n: 0,
}


def test_every_operation_has_its_traffic() -> None:
    assert TRAFFIC.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", OPERATIONS)
def test_traffic_is_every_input_once_and_every_output_once(name: str, ranks: int) -> None:
    assert OPERATIONS[name].traffic(ranks, 24 * ranks) == TRAFFIC[name](ranks, 24 * ranks)


@pytest.mark.parametrize(
    ("name", "count"), [("all_reduce", 1), ("all_gather", 3), ("all_to_all", 3), ("barrier", 0)]
)
def test_sizes_are_rounded_up_to_whole_elements_for_every_rank(name: str, count: int) -> None:
    assert OPERATIONS[name].element_count(4, 4, 3) == count
    assert OPERATIONS[name].element_count(12, 4, 3) == (count and 3)


def test_buffers_exceed_the_caches_except_for_small_sizes() -> None:
    assert buffer_count(4) == 64
    assert buffer_count(4 * MIB) == 24
    assert buffer_count(64 * MIB) == 2
    assert buffer_count(256 * MIB) == 1


@pytest.mark.parametrize("dtype", STORAGE)
def test_elements_equal_those_of_torch(dtype: str) -> None:
    values = np.arange(120)
    stored = encode(values, dtype)
    bits = torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint8)
    assert bits.numpy().tobytes() == stored.tobytes()
    assert decode(stored, dtype).tolist() == values.tolist()


@pytest.mark.parametrize("ranks", [2, 63, 64])
def test_the_largest_sum_fits_into_eight_bits(ranks: int) -> None:
    largest = max(int(make_input(5, rank, ranks, 100).max()) for rank in range(ranks))
    assert largest == (2 if ranks < 64 else 1)
    assert largest * ranks <= np.iinfo(np.int8).max


def test_the_expected_outputs() -> None:
    a, b, c = (make_input(5, rank, 3, 6) for rank in range(3))
    parts = [make_input(5, rank, 3, 2) for rank in range(3)]

    def result(name: str, rank: int) -> list[int]:
        values: list[int] = expected_output(OPERATIONS[name], 5, rank, 3, 6).tolist()
        return values

    assert a.tolist() != b.tolist()
    assert result("all_reduce", 1) == result("reduce", 0) == (a + b + c).tolist()
    assert result("reduce", 1) == result("gather", 2) == result("send_recv", 2) == []
    assert result("broadcast", 2) == a.tolist()
    assert result("scatter", 1) == a[2:4].tolist()
    assert result("gather", 0) == result("all_gather", 2) == np.concatenate(parts).tolist()
    assert result("reduce_scatter", 2) == (a + b + c)[4:].tolist()
    assert result("all_to_all", 1) == [*a[2:4], *b[2:4], *c[2:4]]
    assert result("send_recv", 0) == b.tolist()
    assert result("send_recv", 1) == result("isend_irecv", 1) == a.tolist()
    assert result("isend_irecv", 0) == c.tolist()


class SingleRankSystem:
    """A system of one rank whose operation the test defines."""

    rank, ranks, version = 0, 1, ""

    def __init__(self, call: Callable[[Any, Any], object]) -> None:
        self._call = call

    def empty(self, count: int, dtype: str) -> tuple[Any, Any]:
        array = np.empty(count, STORAGE[dtype])
        return array, array

    def bind(self, operation: str, source: Any, target: Any, dtype: str) -> Callable[[], object]:
        return lambda: self._call(source, target)

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


def check(operation: str, dtype: str, call: Callable[[Any, Any], object]) -> str:
    return TimedOperation(
        SingleRankSystem(call), PrepareCommand(operation, dtype, 1000, 2, seed=7)
    ).check(7)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_wrong_result_is_reported(name: str, dtype: str) -> None:
    def wrong(source: Any, target: Any) -> None:
        target[...] = source
        target[437] = encode(np.array([7]), dtype)[0]

    assert check(name, dtype, lambda source, target: np.copyto(target, source)) == ""
    assert "1 of 1000 elements are wrong on rank 0, the first at 437: 7" in check(
        name, dtype, wrong
    )


@pytest.mark.parametrize("dtype", STORAGE)
def test_an_untouched_output_is_wrong(dtype: str) -> None:
    assert "1000 of 1000 elements are wrong" in check("all_gather", dtype, lambda *_: None)


def test_a_turn_rewrites_every_buffer_and_uses_all_of_them() -> None:
    seen: list[tuple[int, float]] = []
    system = SingleRankSystem(lambda _, target: seen.append((id(target), float(target[0]))))
    work = TimedOperation(system, PrepareCommand("all_reduce", "bfloat16", 10, 3, None))
    assert 0 < work.time(TurnCommand(value=2, operations=4, warm_ups=2)) < 10
    warm_ups, timed = seen[:2], seen[2:]
    assert warm_ups == timed[:2]
    assert len(timed) == 4
    assert len(set(timed)) == 3
    assert {value for _, value in seen} == {float(encode(np.array([2]), "bfloat16")[0])}


# ---- results ----


def timing(median: float) -> Timing:
    return Timing.of([median * 0.9e-6, median * 1e-6, median * 1.3e-6])


def make_result(size: int = 4 * MIB, cached: bool = False, **medians: float) -> Result:
    timings = {name.replace("_", "-"): timing(median) for name, median in medians.items()}
    return Result("all_reduce", "float32", size, size, 4 * size, cached, 200e-6, timings)


def report(*entries: Result) -> Report:
    plan = Plan(["all_reduce"], ["float32"], [4], systems.SYSTEMS)
    return Report(
        command="phalanx bench",
        date="2025-01-01 00:00 UTC",
        machine=machine.machine(),
        versions=machine.versions(),
        settings={**vars(plan), "rounds_at_least": 5},
        bandwidth={"copy": 40e9, "blocks": 60e9},
        results=list(entries),
        notes=["mpich is not available"],
    )


def test_quartiles() -> None:
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(3.0, 2.0, 4.0, 5)


def test_speedups_and_bandwidth_fraction() -> None:
    entry = make_result(phalanx=400, gloo=2000, openmpi=900, mpich=800)
    assert entry.speedup("phalanx", ["gloo"]) == pytest.approx(5)
    assert entry.speedup("phalanx", systems.MPI) == pytest.approx(2)
    assert entry.bandwidth_fraction("phalanx") == pytest.approx(0.5)
    assert entry.speedup("phalanx-shared", ["gloo"]) is None
    assert make_result(phalanx=400).speedup("phalanx", systems.MPI) is None
    assert make_result(phalanx=400, cached=True).bandwidth_fraction("phalanx") is None


def make_display(names: list[str], console: Console | None = None) -> Display:
    return Display(Plan(["all_reduce"], ["float32"], [4 * MIB], names), console)


def test_a_row_has_median_spread_speedups_and_limit() -> None:
    entry = make_result(phalanx=400, phalanx_shared=250, gloo=2000, openmpi=900)
    names = ["phalanx", "phalanx-shared", "gloo", "openmpi", "mpich"]
    display = make_display(names)
    (cells,) = display.rows(entry, wide=True)
    assert cells == [
        *("4 MiB", "400 ±40.0", "250 ±25.0", "2000 ±200", "900 ±90.0", "-"),
        *("5.0x", "2.2x", "50% (80%)"),
    ]
    assert len(display.header()) == len(cells)
    assert display.rows(entry, wide=False)[0][1] == "400\n±40.0"
    fast = make_result(4, phalanx=4.5, openmpi=0.5)
    assert make_display(["phalanx"]).rows(fast, wide=True)[0][-3:] == ["-", "0.11x", "4444%"]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [80, 140])
def test_the_table_shows_every_result_and_note(terminal: bool, width: int) -> None:
    entry = make_result(phalanx=400, gloo=2000)
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=width, highlight=False)
    with make_display(["phalanx"], console) as display:
        display.begin(report(), 1)
        display.add_note("mpich is not available")
        display.begin_section("all_reduce", "float32", ["phalanx", "gloo"])
        display.begin_activity("all_reduce of 4 MiB, float32")
        display.add_result(entry)
        display.add_note("gloo is dropped")
    text = output.getvalue()
    if not terminal:
        assert "\x1b" not in text
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for word in ("60.0 GB/s", "all_reduce, float32, 2 ranks", "4 MiB", "2000", "±200", "5.0x"):
        assert word in words
    assert "note: mpich is not available" in words
    assert "note: gloo is dropped" in words


def test_a_stored_report_is_read_back(tmp_path: Path) -> None:
    stored = report(make_result(phalanx=400, gloo=2000), make_result(16 * MIB, phalanx=900))
    stored.settings = {"ranks": 2}
    write_json(results.as_json([stored]), False, tmp_path / "a.json")
    assert results.read(tmp_path / "a.json") == [stored]


@pytest.mark.parametrize("text", ['{"all_reduce": {}}', "[]", '"text"'])
def test_a_file_of_another_format_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(UsageError, match=r"old\.json has the format None, expected"):
        results.read(tmp_path / "old.json")


def test_a_file_without_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UsageError, match="can't read"):
        results.read(tmp_path / "a.json")
    with pytest.raises(UsageError, match="can't read"):
        results.read(tmp_path / "none.json")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_plot_has_two_panels_for_each_operation(tmp_path: Path, count: int) -> None:
    entries = []
    for name in ("all_reduce", "broadcast", "all_gather", "barrier")[:count]:
        for size in (4, 4 * MIB, 64 * MIB):
            entry = make_result(size, size == 4, phalanx=size / 1e3, gloo=size / 100, openmpi=3)
            entries.append(Result(**{**vars(entry), "operation": name}))
    path = tmp_path / "out.svg"
    plot(report(*entries), path)
    text = path.read_text()
    assert text.count('id="axes_') == 2 * min(count, 3)  # a barrier has none
    path = tmp_path / "out.png"
    plot(report(*entries), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_legend_of_a_plot_is_inside_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    from matplotlib.figure import Figure

    medians = {name.replace("-", "_"): 30.0 for name in systems.SYSTEMS}
    entries = [
        Result(**{**vars(make_result(size, **medians)), "operation": name})
        for name in ("all_reduce", "broadcast", "all_gather", "reduce")[:count]
        for size in (4, 4 * MIB)
    ]
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot(report(*entries), tmp_path / "out.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, panels = legend.get_window_extent(), [each.get_tightbbox() for each in figure.axes]
    assert [text.get_text() for text in legend.get_texts()] == [
        *("Phalanx", "Phalanx, prepared operations", "Phalanx, shared tensors"),
        *("Gloo", "Open MPI", "MPICH", "memory bandwidth limit"),
    ]
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert max(panel.y1 for panel in panels if panel) <= box.y0 < box.y1 <= figure.bbox.height


def test_a_plot_without_results_is_rejected(tmp_path: Path) -> None:
    barrier = Result("barrier", "float32", 0, 0, 0, True, None, {"phalanx": timing(3)})
    with pytest.raises(UsageError, match="nothing to plot"):
        plot(report(barrier), tmp_path / "out.png")
    with pytest.raises(UsageError, match=r"expected a name that ends with \.png or \.svg"):
        plot(report(make_result(phalanx=1)), tmp_path / "out.xyz")


# ---- the machine and its systems ----


def test_caches_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    caches = [("1", "Data", "32K", "own"), ("1", "Instruction", "64K", "own")]
    caches += [("2", "Unified", "1M", "own"), ("3", "Unified", "8M", "0-1")]
    for core in (0, 1):
        for index, (level, kind, size, cores) in enumerate(caches):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            values = {"level": level, "type": kind, "size": size}
            values["shared_cpu_list"] = str(core) if cores == "own" else cores
            for name, value in values.items():
                (folder / name).write_text(f"{value}\n")
    assert machine.cache_bytes(tmp_path) == 2 * (32 * 2**10 + MIB) + 8 * MIB
    assert machine.cache_bytes(tmp_path / "nowhere") == 32 * MIB


def test_available_memory_respects_the_limit_of_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert machine.available_memory(tmp_path) == 4 * MIB
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert machine.available_memory(tmp_path) == 4 * MIB
    (group / "memory.max").write_text(f"{3 * MIB}\n")
    (group / "memory.current").write_text(f"{MIB}\n")
    assert machine.available_memory(tmp_path) == 2 * MIB


@pytest.mark.parametrize("name", systems.MPI)
def test_each_mpi_has_its_own_launcher_and_library(name: str) -> None:
    (program,) = systems.programs(name, 2, [sys.executable])
    assert program.arguments[0].endswith({"openmpi": "/prterun", "mpich": "/mpiexec.hydra"}[name])
    library = {"openmpi": "/libmpi.so.40", "mpich": "/libmpi.so.12"}[name]
    assert program.environment["MPI4PY_LIBMPI"].endswith(library)


def test_a_missing_mpi_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise systems.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(systems.importlib.metadata, "files", missing)
    with pytest.raises(systems.UnavailableError, match="pip install matplotlib mpi4py"):
        systems.programs("mpich", 2, [])


def test_a_setting_of_the_user_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MPIR_CVAR_CH4_CMA_ENABLE" in systems.settings("mpich", 2)
    monkeypatch.setenv("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    assert "MPIR_CVAR_CH4_CMA_ENABLE" not in systems.settings("mpich", 2)
