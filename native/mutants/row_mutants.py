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
    """Another memory order for an access whose text stops before the order."""
    before, after = (f"{access}std::memory_order_{each})" for each in (old, new))
    return Mutant(name, file, caught_by, ((before, after),))


_PUT_BACK = """      for (std::uint32_t part = 0; part < shape_.parts; ++part) {
        PHALANX_STEP("rows: put back");
        put_row(words(part, row), aside(place, part), row_bytes());
      }
"""
_FREE_PUT_BACK = """    PHALANX_STEP("rows: free what was put back");
    // As in RowPlace::free.
    lock(row).store(next_version(word), std::memory_order_release);
"""

ORDERS = [
    order(
        "a row is looked at without acquire",
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
        "a row is taken without acquire",
        WRITERS,
        ROW_MODEL,
        "lock.compare_exchange_strong(word_, word_ | (place_ + 1), ",
        "acq_rel",
        "release",
    ),
    order(
        "a row is freed without release",
        WRITERS,
        ROW_MODEL,
        "rows_.lock(row_).store(next_version(word_), ",
        "release",
        "relaxed",
    ),
    order(
        "a writer's place is given back without release",
        WRITERS,
        TSAN_ROWS,
        "rows_.writer(place_).owner.store(0, ",
        "release",
        "relaxed",
    ),
    order(
        "a writer's place is claimed without acquire",
        WRITERS,
        TSAN_ROWS,
        "writer.owner.compare_exchange_strong(nobody, own, ",
        "acq_rel",
        "release",
    ),
]

READING = [
    Mutant(
        "no second look at a row",
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
        "no second look once a row was waited for",
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
        "a row that is taken is read",
        ACCESS,
        STEPS,
        (("now == words[k] && (now & kRowOwner) == 0;", "now == words[k];"),),
    ),
    Mutant(
        "a row that is taken is read after a wait",
        ACCESS,
        STEPS,
        (("      if (owner == 0) {\n        copy();", "      {\n        copy();"),),
    ),
    Mutant(
        "indices to read aren't looked at first",
        LOOKUP,
        ROWS_TEST,
        (
            (
                "Rows::gather(const RowList& list, void* const* parts, Patience patience) {\n"
                "  if (const RowsResult result = check(list); !result.ok()) {\n",
                "Rows::gather(const RowList& list, void* const* parts, Patience patience) {\n"
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
        "a row is taken that somebody has",
        WRITERS,
        STEPS,
        (("    if ((word_ & kRowOwner) == 0 &&\n", "    if (\n"),),
    ),
    Mutant(
        "a row is read before it is taken",
        WRITERS,
        STEPS,
        (
            (
                "    // Acquires what the last writer wrote (free), and releases",
                "    take_row(rows_.aside(place_, 0), rows_.words(0, row), rows_.row_bytes());\n"
                '    PHALANX_STEP("rows: take it now");\n'
                "    // Acquires what the last writer wrote (free), and releases",
            ),
            (
                "  for (std::uint32_t part = 0; part < rows_.shape_.parts; ++part) {\n"
                '    PHALANX_STEP("rows: set aside");',
                "  for (std::uint32_t part = 1; part < rows_.shape_.parts; ++part) {\n"
                '    PHALANX_STEP("rows: set aside");',
            ),
        ),
    ),
    Mutant(
        "a row is freed before its last part is written",
        UPDATE,
        STEPS,
        (
            (
                "      if (parts[part] != nullptr) {\n        place.put(",
                "      if (part + 1 == shape_.parts) {\n        place.free();\n      }\n"
                "      if (parts[part] != nullptr) {\n        place.put(",
            ),
            (
                "i * row_bytes());\n      }\n    }\n    place.free();\n",
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
                "    if (!place.take(static_cast<std::uint64_t>(list.rows[i]))) {\n"
                "      return place.stuck(i);\n    }\n    Change<T> row{};",
                "    std::vector<T> early(width);\n"
                "    take_row(reinterpret_cast<std::byte*>(early.data()),\n"
                "             words(0, static_cast<std::uint64_t>(list.rows[i])), row_bytes());\n"
                "    if (!place.take(static_cast<std::uint64_t>(list.rows[i]))) {\n"
                "      return place.stuck(i);\n    }\n    Change<T> row{};",
            ),
            (
                "    apply(row, gradients",
                "    row.old[0] = early.data();\n    apply(row, gradients",
            ),
        ),
    ),
    Mutant(
        "indices to update are looked at afterwards",
        UPDATE,
        ROWS_TEST,
        (
            (
                "                        Patience patience) {\n"
                "  if (const RowsResult result = check(list); !result.ok()) {\n"
                "    return result;\n  }\n  if (shape_.dtype",
                "                        Patience patience) {\n"
                "  if (shape_.dtype == DType::float32) {\n"
                "    (void)update_as(list, static_cast<const float*>(gradients), step, patience);\n"
                "    return check(list);\n  }\n  if (shape_.dtype",
            ),
        ),
    ),
]

DYING = [
    Mutant(
        "said to be set aside too early",
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
        "said to be set aside from before",
        WRITERS,
        DEATHS,
        (("  self.saved.store(0, std::memory_order_relaxed);\n", ""),),
    ),
    Mutant(
        "never said to be set aside",
        WRITERS,
        DEATHS,
        (("  self.saved.store(row + 1, std::memory_order_release);\n", ""),),
    ),
    Mutant(
        "which row is taken stands there too late",
        WRITERS,
        DEATHS,
        (
            ("  self.row.store(row, std::memory_order_relaxed);\n", ""),
            (
                '  PHALANX_STEP("rows: it is set aside");\n',
                "  self.row.store(row, std::memory_order_relaxed);\n",
            ),
        ),
    ),
    Mutant("nothing is put back", WRITERS, DEATHS, ((_PUT_BACK, ""),)),
    Mutant(
        "values are put back, state isn't",
        WRITERS,
        DEATHS,
        (
            (
                'part < shape_.parts; ++part) {\n        PHALANX_STEP("rows: put back");',
                'part < 1; ++part) {\n        PHALANX_STEP("rows: put back");',
            ),
        ),
    ),
    Mutant(
        "freed before it is put back",
        WRITERS,
        DEATHS,
        (
            (_FREE_PUT_BACK, ""),
            (
                "    // Set aside before the first change. Else there was no change.",
                _FREE_PUT_BACK
                + "    // Set aside before the first change. Else there was no change.",
            ),
        ),
    ),
    Mutant(
        "a repair leaves the version",
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
        "two take a place over",
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
        "who repairs doesn't take the place over",
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
        "a pid that was given out again is taken for its last owner",
        WRITERS,
        DEATHS,
        (("found != identity) {\n    return true;", "found != identity) {\n    return false;"),),
    ),
    Mutant(
        "whose beginning isn't known is taken for dead",
        WRITERS,
        DEATHS,
        ((" && start_of(identity) != 0 &&", " &&"),),
    ),
    Mutant(
        "places that can't be are followed",
        WRITERS,
        DEATHS,
        (("row < shape_.rows ? lock(row)", "row < ~0ULL ? lock(row)"),),
    ),
]

POOLING = [
    Mutant(
        "an empty bag is left as it was",
        LOOKUP,
        ROWS_TEST,
        (("      if (first) {\n        std::fill_n", "      if (false) {\n        std::fill_n"),),
    ),
    Mutant(
        "a bag goes on with the one before",
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
        ((" && header.version == kRowsVersion", ""),),
    ),
    Mutant(
        "memory that isn't sealed is opened",
        STORE,
        ROWS_TEST,
        (("(seals & F_SEAL_SHRINK) != 0", "seals != F_SEAL_SHRINK"),),
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
        "a row that comes twice counts once",
        GRADIENTS,
        SUMS_TEST,
        (("sum[k] += terms[i].factor", "sum[k] = terms[i].factor"),),
    ),
    Mutant(
        "sums of gradients aren't divided",
        GRADIENTS,
        SUMS_TEST,
        (("if (divisor != T{1}) {", "if (divisor == T{0}) {"),),
    ),
    Mutant(
        "rows stay in the order in which they come",
        GRADIENTS,
        SUMS_TEST,
        (("if (!std::is_sorted(", "if (std::is_sorted("),),
    ),
    Mutant(
        "batches aren't merged",
        GRADIENTS,
        SUMS_TEST,
        (
            (
                "    std::inplace_merge(terms.begin(), terms.begin() + begin, terms.end(), "
                "comes_before<T>);\n",
                "",
            ),
        ),
    ),
    Mutant(
        "another one's share of the rows is added up",
        GRADIENTS,
        SUMS_TEST,
        (("% share.shares == share.rest)", "% share.shares != share.rest)"),),
    ),
    Mutant(
        "a mean's gradient isn't divided among its rows",
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
        "the last bag's rows have no gradient",
        GRADIENTS,
        SUMS_TEST,
        ((": batch.list.count;\n    const T equal", ": begin;\n    const T equal"),),
    ),
    Mutant(
        "rows apart get the gradients of those before them",
        GRADIENTS,
        SUMS_TEST,
        (("const auto begin = apart ? bag :", "const auto begin = apart ? 0 :"),),
    ),
]

ROWS = [*ORDERS, *READING, *WRITING, *DYING, *POOLING, *OPENING, *ADDING]
