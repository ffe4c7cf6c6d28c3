"""Mistakes in the decisions of an agreement (agreement.h)."""

from mutant import Mutant

AGREEMENT = "src/agreement.cpp"
MEMORY = "src/sealed_memory.cpp"
SEGMENT = "include/phalanx/segment.h"

AGREEMENT_TEST = "plain:test_agreement"
TSAN_AGREEMENT = "thread:test_agreement"

CLAIM = """\
  const bool is_first = segment_.decision(round, rank)
                            .compare_exchange_strong(found, wanted, std::memory_order_seq_cst);
"""

ORDERS = [
    Mutant(
        "a decision is made relaxed",
        AGREEMENT,
        TSAN_AGREEMENT,
        (
            (
                "(found, wanted, std::memory_order_seq_cst)",
                "(found, wanted, std::memory_order_relaxed)",
            ),
        ),
    ),
    Mutant(
        "a decision is loaded relaxed",
        AGREEMENT,
        TSAN_AGREEMENT,
        (("load(std::memory_order_seq_cst)", "load(std::memory_order_relaxed)"),),
    ),
    Mutant(
        "a location is published relaxed",
        AGREEMENT,
        TSAN_AGREEMENT,
        (("store(1, std::memory_order_release)", "store(1, std::memory_order_relaxed)"),),
    ),
    Mutant(
        "a location is loaded relaxed",
        AGREEMENT,
        TSAN_AGREEMENT,
        (("load(std::memory_order_acquire)", "load(std::memory_order_relaxed)"),),
    ),
    Mutant(
        "a location is published before its words",
        AGREEMENT,
        TSAN_AGREEMENT,
        (
            (
                "  own.pid = location.pid;\n",
                "  own.is_published.store(1);\n  own.pid = location.pid;\n",
            ),
            ("  own.is_published.store(1, std::memory_order_release);\n", ""),
        ),
    ),
]

STEPS = [
    Mutant(
        "a decision is overwritten",
        AGREEMENT,
        AGREEMENT_TEST,
        (
            (
                CLAIM,
                "  segment_.decision(round, rank).store(wanted);\n  const bool is_first = true;\n",
            ),
        ),
    ),
    Mutant(
        "a decision is checked and then stored",
        AGREEMENT,
        AGREEMENT_TEST,
        (
            (
                CLAIM,
                "  found = segment_.decision(round, rank).load();\n"
                "  const bool is_first = found == Decision::none;\n"
                "  if (is_first) {\n"
                "    segment_.decision(round, rank).store(wanted);\n"
                "  }\n",
            ),
        ),
    ),
    Mutant(
        "the decision that is wanted is returned",
        AGREEMENT,
        AGREEMENT_TEST,
        (("is_first ? wanted : found;", "is_first || found != wanted ? wanted : found;"),),
    ),
    Mutant(
        "two rounds share their decisions",
        SEGMENT,
        AGREEMENT_TEST,
        (("(&agreement_round(round) + 1)", "(&agreement_round(round & ~1) + 1)"),),
    ),
    Mutant(
        "two ranks share a decision",
        SEGMENT,
        AGREEMENT_TEST,
        (("return first[rank];", "return first[rank / 2];"),),
    ),
    Mutant(
        "a decision is made without memory",
        AGREEMENT,
        AGREEMENT_TEST,
        (("if (!status.ok()) {", "if (status.ok() && round < 0) {"),),
    ),
    Mutant(
        "a decision does not allocate the next round",
        SEGMENT,
        AGREEMENT_TEST,
        (("std::min(2, agreement_rounds()", "std::min(1, agreement_rounds()"),),
    ),
    Mutant(
        "a decision does not allocate its last page",
        MEMORY,
        AGREEMENT_TEST,
        (("  bytes += before;\n", ""),),
    ),
    Mutant(
        "a lack of memory within a page is not reported",
        MEMORY,
        AGREEMENT_TEST,
        (
            (
                "reinterpret_cast<std::uintptr_t>(start) % kPage;",
                "reinterpret_cast<std::uintptr_t>(start) & 0;",
            ),
        ),
    ),
]

AGREEMENT_MUTANTS = [*ORDERS, *STEPS]
