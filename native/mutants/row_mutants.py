"""Mistakes in the protocol of rows in shared memory (rows.h)."""

from mutant import Mutant

ACCESS = "src/rows_access.h"
WRITERS = "src/rows_writers.cpp"
LOOKUP = "src/rows_lookup.cpp"
UPDATE = "src/rows_update.cpp"
GRADIENTS = "src/row_gradients.cpp"
STORE = "src/rows.cpp"

ROW_MODEL = "model:row"
STEPS = "plain:test_row_steps"
DEATHS = "plain:test_row_deaths"
ROWS_TEST = "plain:test_rows"
TSAN_ROWS = "thread:test_rows"
SUMS_TEST = "plain:test_row_gradients"


def order(name: str, file: str, caught_by: str, access: str, old: str, new: str) -> Mutant:
    """Change the memory order of an access, given by the text before the order."""
    before, after = (f"{access}std::memory_order_{each})" for each in (old, new))
    return Mutant(name, file, caught_by, ((before, after),))


_RESTORE = """      for (std::uint32_t part = 0; part < shape_.parts; ++part) {
        PHALANX_STEP("rows: restore");
        store_row(words(part, row), backup(slot, part), row_bytes());
      }
"""
_RELEASE_RESTORED = """    PHALANX_STEP("rows: release the restored row");
    // As in RowWriterSlot::release.
    lock(row).store(next_version(word), std::memory_order_release);
"""

ORDERS = [
    order(
        "the lock of a row is loaded without acquire",
        ACCESS,
        ROW_MODEL,
        "words[k] = lock_of(rows[k]).load(",
        "acquire",
        "relaxed",
    ),
    order(
        "words of a row loaded relaxed",
        ACCESS,
        ROW_MODEL,
        "word = from[i].load(",
        "acquire",
        "relaxed",
    ),
    order(
        "words of a row stored relaxed",
        ACCESS,
        ROW_MODEL,
        "to[at / sizeof word].store(word, ",
        "release",
        "relaxed",
    ),
    order(
        "a row is acquired without acquire order",
        WRITERS,
        ROW_MODEL,
        "lock.compare_exchange_strong(word_, word_ | (slot_ + 1), ",
        "acq_rel",
        "release",
    ),
    order(
        "a row is released without release order",
        WRITERS,
        ROW_MODEL,
        "rows_.lock(row_).store(next_version(word_), ",
        "release",
        "relaxed",
    ),
    order(
        "a writer slot is freed without release",
        WRITERS,
        TSAN_ROWS,
        "rows_.writer(slot_).owner.store(0, ",
        "release",
        "relaxed",
    ),
    order(
        "a writer slot is claimed without acquire",
        WRITERS,
        TSAN_ROWS,
        "writer.owner.compare_exchange_strong(no_owner, own, ",
        "acq_rel",
        "release",
    ),
]

READING = [
    Mutant(
        "no second check of a row",
        ACCESS,
        STEPS,
        (
            (
                "const bool same = now == words[k] && (now & kRowOwner) == 0;",
                "const bool same = now >= words[k] && (words[k] & kRowOwner) == 0;",
            ),
        ),
    ),
    Mutant(
        "no second check after a wait for a row",
        ACCESS,
        STEPS,
        (
            (
                "if (lock.load(std::memory_order_relaxed) == word) {",
                "if (lock.load(std::memory_order_relaxed) >= word) {",
            ),
        ),
    ),
    Mutant(
        "a locked row is read",
        ACCESS,
        STEPS,
        (("now == words[k] && (now & kRowOwner) == 0;", "now == words[k];"),),
    ),
    Mutant(
        "a locked row is read after a wait",
        ACCESS,
        STEPS,
        (("      if (owner == 0) {\n        copy();", "      {\n        copy();"),),
    ),
    Mutant(
        "indices to read are not validated first",
        LOOKUP,
        ROWS_TEST,
        (
            (
                "Rows::gather(const RowList& list, void* const* parts, Timeout timeout) {\n"
                "  if (const RowsResult result = check(list); !result.ok()) {\n",
                "Rows::gather(const RowList& list, void* const* parts, Timeout timeout) {\n"
                "  if (const RowsResult result = check({list.rows, 0}); !result.ok()) {\n",
            ),
        ),
    ),
]

WRITING = [
    Mutant(
        "the version of a row stays",
        WRITERS,
        STEPS,
        (("rows_.lock(row_).store(next_version(word_), ", "rows_.lock(row_).store(word_, "),),
    ),
    Mutant(
        "a locked row is acquired",
        WRITERS,
        STEPS,
        (("    if ((word_ & kRowOwner) == 0 &&\n", "    if (\n"),),
    ),
    Mutant(
        "a row is read before it is acquired",
        WRITERS,
        STEPS,
        (
            (
                "    // Acquires the writes of the last writer (release), and releases",
                "    load_row(rows_.backup(slot_, 0), rows_.words(0, row), rows_.row_bytes());\n"
                '    PHALANX_STEP("rows: acquire now");\n'
                "    // Acquires the writes of the last writer (release), and releases",
            ),
            (
                "  for (std::uint32_t part = 0; part < rows_.shape_.parts; ++part) {\n"
                '    PHALANX_STEP("rows: back up");',
                "  for (std::uint32_t part = 1; part < rows_.shape_.parts; ++part) {\n"
                '    PHALANX_STEP("rows: back up");',
            ),
        ),
    ),
    Mutant(
        "a row is released before its last part is written",
        UPDATE,
        STEPS,
        (
            (
                "      if (parts[part] != nullptr) {\n        slot.store(",
                "      if (part + 1 == shape_.parts) {\n        slot.release();\n      }\n"
                "      if (parts[part] != nullptr) {\n        slot.store(",
            ),
            (
                "i * row_bytes());\n      }\n    }\n    slot.release();\n",
                "i * row_bytes());\n      }\n    }\n",
            ),
        ),
    ),
    Mutant(
        "a step is lost",
        UPDATE,
        STEPS,
        (
            (
                "    if (!slot.acquire(static_cast<std::uint64_t>(list.rows[i]))) {\n"
                "      return slot.stuck(i);\n    }\n    Change<T> row{};",
                "    std::vector<T> stale(width);\n"
                "    load_row(reinterpret_cast<std::byte*>(stale.data()),\n"
                "             words(0, static_cast<std::uint64_t>(list.rows[i])), row_bytes());\n"
                "    if (!slot.acquire(static_cast<std::uint64_t>(list.rows[i]))) {\n"
                "      return slot.stuck(i);\n    }\n    Change<T> row{};",
            ),
            (
                "    apply(row, gradients",
                "    row.old[0] = stale.data();\n    apply(row, gradients",
            ),
        ),
    ),
    Mutant(
        "indices to update are validated afterwards",
        UPDATE,
        ROWS_TEST,
        (
            (
                "                        Timeout timeout) {\n"
                "  if (const RowsResult result = check(list); !result.ok()) {\n"
                "    return result;\n  }\n  if (shape_.dtype",
                "                        Timeout timeout) {\n"
                "  if (shape_.dtype == DType::float32) {\n"
                "    (void)update_as(list, static_cast<const float*>(gradients), step, timeout);\n"
                "    return check(list);\n  }\n  if (shape_.dtype",
            ),
        ),
    ),
]

DYING = [
    Mutant(
        "backup published too early",
        WRITERS,
        DEATHS,
        (
            (
                "  row_ = row;\n  for (std::uint32_t part = 0;",
                "  row_ = row;\n  self.saved.store(row + 1, std::memory_order_release);\n"
                "  for (std::uint32_t part = 0;",
            ),
        ),
    ),
    Mutant(
        "backup still published from before",
        WRITERS,
        DEATHS,
        (("  self.saved.store(0, std::memory_order_relaxed);\n", ""),),
    ),
    Mutant(
        "backup never published",
        WRITERS,
        DEATHS,
        (("  self.saved.store(row + 1, std::memory_order_release);\n", ""),),
    ),
    Mutant(
        "row number published too late",
        WRITERS,
        DEATHS,
        (
            ("  self.row.store(row, std::memory_order_relaxed);\n", ""),
            (
                '  PHALANX_STEP("rows: publish the backup");\n',
                "  self.row.store(row, std::memory_order_relaxed);\n",
            ),
        ),
    ),
    Mutant("nothing is restored", WRITERS, DEATHS, ((_RESTORE, ""),)),
    Mutant(
        "values are restored, state is not",
        WRITERS,
        DEATHS,
        (
            (
                'part < shape_.parts; ++part) {\n        PHALANX_STEP("rows: restore");',
                'part < 1; ++part) {\n        PHALANX_STEP("rows: restore");',
            ),
        ),
    ),
    Mutant(
        "released before it is restored",
        WRITERS,
        DEATHS,
        (
            (_RELEASE_RESTORED, ""),
            (
                "    // The backup precedes the first change. Without it there was no change.",
                _RELEASE_RESTORED
                + "    // The backup precedes the first change. Without it there was no change.",
            ),
        ),
    ),
    Mutant(
        "a repair keeps the version",
        WRITERS,
        STEPS,
        (
            (
                "    lock(row).store(next_version(word), ",
                "    lock(row).store(word & ~kRowOwner, ",
            ),
        ),
    ),
    Mutant(
        "two processes take over a slot",
        WRITERS,
        STEPS,
        (
            (
                "  if (!dead.owner.compare_exchange_strong(identity, own_identity(), "
                "std::memory_order_acq_rel)) {\n    return false;\n  }\n",
                "  dead.owner.store(own_identity());\n",
            ),
        ),
    ),
    Mutant(
        "a repair does not take over the slot",
        WRITERS,
        STEPS,
        (
            (
                "  if (!dead.owner.compare_exchange_strong(identity, own_identity(), "
                "std::memory_order_acq_rel)) {\n    return false;\n  }\n",
                "",
            ),
        ),
    ),
    Mutant(
        "a reused pid is taken for its last owner",
        WRITERS,
        DEATHS,
        (("found != identity) {\n    return true;", "found != identity) {\n    return false;"),),
    ),
    Mutant(
        "a process with an unknown start time is taken for dead",
        WRITERS,
        DEATHS,
        ((" && start_of(identity) != 0 &&", " &&"),),
    ),
    Mutant(
        "invalid slots are followed",
        WRITERS,
        DEATHS,
        (("row < shape_.rows ? lock(row)", "row < ~0ULL ? lock(row)"),),
    ),
]

POOLING = [
    Mutant(
        "an empty bag is not cleared",
        LOOKUP,
        ROWS_TEST,
        (("      if (first) {\n        std::fill_n", "      if (false) {\n        std::fill_n"),),
    ),
    Mutant(
        "a bag continues the one before",
        LOOKUP,
        ROWS_TEST,
        (("++bag, first = true)", "++bag)"),),
    ),
]

OPENING = [
    Mutant(
        "another layout of rows is opened",
        STORE,
        ROWS_TEST,
        (("header.version == kRowsVersion && ", ""),),
    ),
    Mutant(
        "memory without seals is opened",
        "src/sealed_memory.cpp",
        ROWS_TEST,
        (("(seals & needed) == needed", "seals != needed"),),
    ),
    Mutant(
        "rows of another size are opened",
        STORE,
        ROWS_TEST,
        (("offsets_for(shape).end == header.bytes &&", "header.bytes > 0 &&"),),
    ),
]

ADDING = [
    Mutant(
        "a duplicate row counts once",
        GRADIENTS,
        SUMS_TEST,
        (("sum[k] += terms[i].factor", "sum[k] = terms[i].factor"),),
    ),
    Mutant(
        "sums of gradients are not divided",
        GRADIENTS,
        SUMS_TEST,
        (("if (divisor != T{1}) {", "if (divisor == T{0}) {"),),
    ),
    Mutant(
        "rows are not sorted",
        GRADIENTS,
        SUMS_TEST,
        (("if (!std::is_sorted(", "if (std::is_sorted("),),
    ),
    Mutant(
        "batches are not merged",
        GRADIENTS,
        SUMS_TEST,
        (
            (
                "    std::inplace_merge(terms.begin(), terms.begin() + begin, terms.end(), "
                "precedes<T>);\n",
                "",
            ),
        ),
    ),
    Mutant(
        "another shard of the rows is summed",
        GRADIENTS,
        SUMS_TEST,
        (("% shard.count == shard.remainder)", "% shard.count != shard.remainder)"),),
    ),
    Mutant(
        "the gradient of a mean is not divided among its rows",
        GRADIENTS,
        SUMS_TEST,
        (("batch.pooling == Pooling::mean && end", "batch.pooling == Pooling::max && end"),),
    ),
    Mutant(
        "weights of rows are left out of gradients",
        GRADIENTS,
        SUMS_TEST,
        (("weights == nullptr ? equal : weights[i]", "equal"),),
    ),
    Mutant(
        "the rows of the last bag have no gradient",
        GRADIENTS,
        SUMS_TEST,
        ((": batch.list.count;\n    const T equal", ": begin;\n    const T equal"),),
    ),
    Mutant(
        "unpooled rows get the gradients of the rows before them",
        GRADIENTS,
        SUMS_TEST,
        (("const auto begin = unpooled ? bag :", "const auto begin = unpooled ? 0 :"),),
    ),
]

ROWS = [*ORDERS, *READING, *WRITING, *DYING, *POOLING, *OPENING, *ADDING]
