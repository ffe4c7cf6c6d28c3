"""Mistakes in the leases of blocks (leases.h)."""

from mutant import Mutant

LEASES = "src/leases.cpp"

LEASE_MODEL = "model:lease"
LEASE_TEST = "plain:test_leases"
TSAN_LEASES = "thread:test_leases"

ORDERS = [
    Mutant(
        "a free block is found without acquire",
        LEASES,
        TSAN_LEASES,
        (
            (
                "last = word.load(std::memory_order_acquire)",
                "last = word.load(std::memory_order_relaxed)",
            ),
        ),
    ),
    Mutant(
        "the end of a copy is published relaxed",
        LEASES,
        LEASE_MODEL,
        (
            (
                "store(word_of(lease.number, state), std::memory_order_seq_cst)",
                "store(word_of(lease.number, state), std::memory_order_relaxed)",
            ),
        ),
    ),
    Mutant(
        "a block is taken without acquire",
        LEASES,
        LEASE_MODEL,
        (
            (
                "words[block].load(std::memory_order_acquire);\n  if",
                "words[block].load(std::memory_order_relaxed);\n  if",
            ),
        ),
    ),
    Mutant(
        "a block is given back without release",
        LEASES,
        TSAN_LEASES,
        (
            (
                "compare_exchange_strong(word, freed, std::memory_order_release,",
                "compare_exchange_strong(word, freed, std::memory_order_relaxed,",
            ),
        ),
    ),
]

STEPS = [
    Mutant(
        "a leased block is leased again",
        LEASES,
        LEASE_TEST,
        (
            (
                "if (state_of(last) != BlockState::free) {",
                "if (state_of(last) == BlockState::filling) {",
            ),
        ),
    ),
    Mutant(
        "leases of a block have one number",
        LEASES,
        LEASE_TEST,
        ((".number = lease_of(last) + 1}", ".number = lease_of(last) | 1}"),),
    ),
    Mutant(
        "a copy is finished twice",
        LEASES,
        LEASE_TEST,
        (
            (
                "  if (word.load(std::memory_order_relaxed) != "
                "word_of(lease.number, BlockState::filling)) {\n    return;\n  }\n",
                "",
            ),
        ),
    ),
    Mutant(
        "a block that was taken back is leased at the end of its copy",
        LEASES,
        LEASE_TEST,
        (
            (
                "if (holders_[lease.block] == kNobody || state == BlockState::free) {",
                "if (state == BlockState::free) {",
            ),
        ),
    ),
    Mutant(
        "a block is taken back during its copy",
        LEASES,
        LEASE_TEST,
        (
            (
                "if (state_of(word) == BlockState::leased || "
                "state_of(word) == BlockState::unwritten) {",
                "if (state_of(word) != BlockState::free) {",
            ),
        ),
    ),
    Mutant(
        "anyone returns a block",
        LEASES,
        LEASE_TEST,
        (("(!holder || holders_[block] == *holder)", "(!holder || *holder >= 0)"),),
    ),
    Mutant(
        "a late return ends another lease",
        LEASES,
        LEASE_TEST,
        (
            (
                "  header().words[block].compare_exchange_strong(word, freed,",
                "  word = header().words[block].load(std::memory_order_relaxed);\n"
                "  header().words[block].compare_exchange_strong(word, freed,",
            ),
        ),
    ),
    Mutant(
        "a forked child returns blocks",
        LEASES,
        LEASE_TEST,
        (("if (getpid() != pid_) {", "if (pid_ == 0) {"),),
    ),
    Mutant(
        "an unwritten block is kept",
        LEASES,
        LEASE_TEST,
        (("    give_back(block, word);\n", ""),),
    ),
    Mutant(
        "a waiting holder is not woken",
        LEASES,
        LEASE_TEST,
        (("  notify(header().copy_event);\n", ""),),
    ),
    Mutant(
        "blocks beyond the last are taken",
        LEASES,
        LEASE_TEST,
        (("if (block >= blocks_ || bytes == 0", "if (bytes == 0"),),
    ),
    Mutant(
        "another layout of leases is opened",
        LEASES,
        LEASE_TEST,
        (("header.version == kLeasesVersion && ", ""),),
    ),
    Mutant(
        "the segment of another owner is opened",
        LEASES,
        LEASE_TEST,
        ((" && header.nonce == nonce", ""),),
    ),
]

LEASE_MUTANTS = [*ORDERS, *STEPS]
