// Every collective against a naive oracle: all sizes at which the path changes, and long random
// mixtures, in which operations of other kinds reuse the buffers.
#include <algorithm>
#include <array>

#include "operations.h"
#include "phalanx/copy.h"
#include "ranks.h"

using namespace phalanx;
using namespace operations;
using ranks::Mapping;
using ranks::Random;
using ranks::Rank;
using ranks::within;

namespace {

// Ranks that only give data may run ahead or not, each as it likes.
Bounds some_bounds(Rank& rank) {
  Bounds bounds = within();
  bounds.runs_ahead = rank.random.one_in(2);
  return bounds;
}

bool right_in_place(Rank& rank, const Operation& o) {
  Random& random = rank.random;
  Buffer data = input_of(o, rank.self, random);
  const Buffer before = data;
  Status status;
  if (o.kind == Kind::broadcast) {
    if (rank.self != o.root) data = Buffer(o.count, o.dtype, random);
    status = broadcast(rank.group, data.data(), o.count, o.dtype, o.root, some_bounds(rank));
    return status.ok() && data.guards_intact() && data == input_of(o, o.root, random);
  }
  const bool everywhere = o.kind == Kind::all_reduce;
  status = everywhere
               ? all_reduce(rank.group, data.data(), o.count, o.dtype, o.op, some_bounds(rank))
               : reduce(rank.group, data.data(), o.count, o.dtype, o.op, o.root, some_bounds(rank));
  const bool wanted = everywhere || rank.self == o.root;
  return status.ok() && data.guards_intact() &&
         data == (wanted ? reduced(o, rank.size, random) : before);
}

bool right_gathered(Rank& rank, const Operation& o) {
  Random& random = rank.random;
  Buffer input = input_of(o, rank.self, random);
  const Buffer before = input;
  const bool everywhere = o.kind == Kind::all_gather;
  const bool wanted = everywhere || rank.self == o.root;
  std::vector<Buffer> outputs = parts_of(o, rank.size, false, random);
  const std::vector<void*> to = pointers(outputs);
  void* const* given = wanted || random.one_in(2) ? to.data() : nullptr;
  const Status status =
      everywhere
          ? all_gather(rank.group, input.data(), given, o.count, o.dtype, some_bounds(rank))
          : gather(rank.group, input.data(), given, o.count, o.dtype, o.root, some_bounds(rank));
  bool good = status.ok() && input == before;
  for (int from = 0; from < rank.size; ++from) {
    const Buffer& output = outputs[static_cast<std::size_t>(from)];
    good = good && output.guards_intact() &&
           (wanted ? output == input_of(o, from, random) : output.poisoned());
  }
  return good;
}

bool right_scattered(Rank& rank, const Operation& o) {
  Random& random = rank.random;
  const bool is_root = rank.self == o.root;
  std::vector<Buffer> inputs = parts_of(o, is_root ? rank.size : 0, true, random);
  const std::vector<void*> from = pointers(inputs);
  Buffer output(o.count, o.dtype, random);
  const Status status = scatter(rank.group, is_root ? from.data() : nullptr, output.data(), o.count,
                                o.dtype, o.root, some_bounds(rank));
  return status.ok() && output.guards_intact() && output == input_of(o, rank.self, random);
}

// The same operation for rank `to`, whose part has a salt of its own.
Operation part_for(const Operation& o, int to) {
  Operation part = o;
  part.salt += static_cast<std::uint64_t>(to) * 1'000'003;
  return part;
}

bool right_reduced_parts(Rank& rank, const Operation& o) {
  Random& random = rank.random;
  std::vector<Buffer> inputs;
  for (int to = 0; to < rank.size; ++to) {
    inputs.push_back(input_of(part_for(o, to), rank.self, random));
  }
  const std::vector<Buffer> before = inputs;
  const std::vector<void*> from = pointers(inputs);
  Buffer output(o.count, o.dtype, random);
  const bool in_place = random.one_in(2);
  void* to = in_place ? from[static_cast<std::size_t>(rank.self)] : output.data();
  const Status status =
      reduce_scatter(rank.group, from.data(), to, o.count, o.dtype, o.op, some_bounds(rank));
  bool good = status.ok() && output.guards_intact();
  for (int part = 0; part < rank.size; ++part) {
    const auto i = static_cast<std::size_t>(part);
    good = good && ((in_place && part == rank.self) || inputs[i] == before[i]);
  }
  const Buffer& got = in_place ? inputs[static_cast<std::size_t>(rank.self)] : output;
  return good && got == reduced(part_for(o, rank.self), rank.size, random);
}

// The part from `from` to `to`: from nothing to twice the count. Some ranks send nothing at all, so
// that some parts go inline and others in chunks.
Operation part_between(const Operation& o, int from, int to) {
  Operation part = part_for(o, to);
  if (o.uneven) {
    const bool nothing = mixed(o.salt + static_cast<std::uint64_t>(from)) % 4 == 0;
    part.count = nothing ? 0 : word(o.salt, from, static_cast<std::size_t>(to)) % (2 * o.count + 1);
  }
  return part;
}

bool right_exchanged(Rank& rank, const Operation& o) {
  Random& random = rank.random;
  std::vector<Buffer> inputs, outputs;
  std::vector<std::uint64_t> given, taken;
  for (int peer = 0; peer < rank.size; ++peer) {
    inputs.push_back(input_of(part_between(o, rank.self, peer), rank.self, random));
    given.push_back(part_between(o, rank.self, peer).count);
    taken.push_back(part_between(o, peer, rank.self).count);
    outputs.emplace_back(taken.back(), o.dtype, random);
  }
  const std::vector<Buffer> before = inputs;
  const std::vector<void*> from = pointers(inputs), to = pointers(outputs);
  const Splits own{from.data(), given.data(), to.data(), taken.data()};
  bool good = all_to_all(rank.group, own, o.dtype, some_bounds(rank)).ok() && inputs == before;
  for (int peer = 0; peer < rank.size; ++peer) {
    const Buffer& output = outputs[static_cast<std::size_t>(peer)];
    good = good && output.guards_intact() &&
           output == input_of(part_between(o, peer, rank.self), peer, random);
  }
  return good;
}

bool right(Rank& rank, const Operation& o) {
  switch (o.kind) {
    case Kind::barrier: return barrier(rank.group, some_bounds(rank)).ok();
    case Kind::gather:
    case Kind::all_gather: return right_gathered(rank, o);
    case Kind::scatter: return right_scattered(rank, o);
    case Kind::reduce_scatter: return right_reduced_parts(rank, o);
    case Kind::all_to_all: return right_exchanged(rank, o);
    default: return right_in_place(rank, o);
  }
}

bool check_right(Rank& rank, const Operation& o) {
  if (CHECK(right(rank, o))) return true;
  std::fprintf(stderr, "  rank %d of %d: kind %d dtype %d op %d count %zu root %d broken %d\n",
               rank.self, rank.size, static_cast<int>(o.kind), static_cast<int>(o.dtype),
               static_cast<int>(o.op), o.count, o.root,
               static_cast<int>(rank.group.failure().code));
  return false;
}

constexpr std::array kKinds = {Kind::barrier,    Kind::broadcast,      Kind::reduce,
                               Kind::all_reduce, Kind::gather,         Kind::scatter,
                               Kind::all_gather, Kind::reduce_scatter, Kind::all_to_all};

// Sizes in bytes near a change of path: nothing, an element, small data, chunks, slices.
std::size_t interesting_bytes(Random& script, std::size_t ranks, bool large) {
  const std::size_t off = script.below(130);
  switch (script.below(large ? 10 : 4)) {
    case 0: return script.below(3);
    case 1: return script.below(200);
    case 2: return kSmallBytes / ranks - 64 + off;
    case 3: return kSmallBytes - std::min<std::size_t>(64, kSmallBytes) + (large ? off : off / 2);
    case 4: return kChunkBytes - 64 + off;
    case 5: return kChunkBytes / ranks - 64 + off;
    case 6: return 2 * kChunkBytes - 64 + off;
    case 7:
      return (1 + script.below(4)) * (kChunkBytes / ranks / kCacheLine * kCacheLine) * ranks - 64 +
             off;
    case 8: return script.below(5 * kChunkBytes);
    default: return kSmallBytes + script.below(kChunkBytes);
  }
}

Operation random_operation(Random& script, int size, bool large) {
  Operation o;
  o.kind = kKinds[script.below(kKinds.size())];
  const bool combines = reduces(o.kind);
  o.dtype =
      combines ? kReduced[script.below(kReduced.size())] : kMoved[script.below(kMoved.size())];
  do {
    o.op = static_cast<ReduceOp>(1 + script.below(8));
  } while (combines && !supports(o.dtype, o.op));
  const auto n = static_cast<std::size_t>(size);
  o.count = interesting_bytes(script, n, large) / size_of(o.dtype);
  o.root = static_cast<int>(script.below(n));
  o.salt = script.bits();
  o.uneven = script.one_in(2);
  o.shared = script.one_in(2);
  return o;
}

constexpr std::array kAll = {DType::boolean, DType::uint8,     DType::int8,      DType::uint16,
                             DType::int16,   DType::uint32,    DType::int32,     DType::uint64,
                             DType::int64,   DType::float16,   DType::bfloat16,  DType::float32,
                             DType::float64, DType::complex64, DType::complex128};

// Enough data for a chain of caches.
std::size_t large_count(std::size_t caches, DType dtype, Random& script) {
  const std::size_t least = 2 * caches * kChunkBytes / 4;
  return (least + script.below(least)) / size_of(dtype) + 1;
}

// Any bits, NaN among them; of larger floats, mostly such whose sums round.
Buffer any_input(const Operation& o, int rank, Random& random) {
  Buffer out(o.count, o.dtype, random);
  const bool is_boolean = o.dtype == DType::boolean;
  for (std::size_t i = 0; i < out.size() / 8; ++i) {
    out.set(i, word(o.salt, rank, i) & (is_boolean ? 0x0101010101010101 : ~0UL));
  }
  for (std::size_t i = out.size() / 8 * 8; i < out.size(); ++i) {
    out.set(i, static_cast<std::uint8_t>(word(o.salt, rank, i) & (is_boolean ? 1 : 255)));
  }
  const bool is_single = o.dtype == DType::float32 || o.dtype == DType::complex64;
  for (std::size_t i = 0; is_single && i < out.size() / sizeof(float); ++i) {
    if (i % 16 != 0) out.set(i, element<float>(o.salt, rank, i));
  }
  const bool is_double = o.dtype == DType::float64 || o.dtype == DType::complex128;
  for (std::size_t i = 0; is_double && i < out.size() / sizeof(double); ++i) {
    if (i % 16 != 0) out.set(i, element<double>(o.salt, rank, i));
  }
  return out;
}

// Whether an operation over caches gives the bits of a flat group, and goes from cache to cache
// unless the rounding of partial results would change the bits.
bool same_over_caches(Rank& rank, const Operation& o, const std::vector<int>& caches) {
  const std::vector<int> star = [&] {
    std::vector<int> parents(static_cast<std::size_t>(rank.size), 0);
    parents[0] = -1;
    return parents;
  }();
  std::array<std::uint64_t, 2> steps{};
  std::vector<Buffer> results;
  for (const bool chained : {false, true}) {
    rank.group.set_tree(chained ? Tree(star, rank.self, caches) : Tree());
    Buffer data = any_input(o, rank.self, rank.random);
    const std::uint64_t before = rank.group.step();
    const Status status =
        o.kind == Kind::all_reduce
            ? all_reduce(rank.group, data.data(), o.count, o.dtype, o.op, within())
            : reduce(rank.group, data.data(), o.count, o.dtype, o.op, o.root, within());
    steps[chained] = rank.group.step() - before;
    if (!status.ok() || !data.guards_intact()) return false;
    results.push_back(std::move(data));
  }
  const bool rounds = (o.dtype == DType::float16 || o.dtype == DType::bfloat16) &&
                      o.op != ReduceOp::min && o.op != ReduceOp::max;
  // The entry over a tree takes two more steps, and each further cache one more round at least.
  const bool went_over_caches = steps[1] >= steps[0] + 2 + caches.size() - 1;
  const bool stayed_flat = steps[1] == steps[0] + 2;
  return results[0] == results[1] && (rounds ? stayed_flat : went_over_caches);
}

// A random mixture, in which one of `large_one_in` operations is larger than inline.
void mixture(int size, int operations, std::size_t large_one_in, Mapping mapping,
             bool send_signals) {
  ranks::run(
      size,
      [&](Rank& rank) {
        Random script(500 + static_cast<std::uint64_t>(size) + large_one_in);
        for (int i = 0; i < operations; ++i) {
          const bool large = large_one_in != 0 && script.one_in(large_one_in);
          Operation o = random_operation(script, size, large);
          // The arena has one address for all ranks here. ThreadSanitizer would see the accesses to
          // tensors, but not the steps that order them, which are at other addresses.
          o.ordinary = mapping == Mapping::own;
          ranks::random_delay(rank.random);
          if (!check_right(rank, o)) return;
        }
      },
      mapping, send_signals);
}

}  // namespace

TEST(every_collective_at_every_size) {
  for (const int size : {1, 2, 3, 4, 5}) {
    const auto n = static_cast<std::size_t>(size);
    const std::size_t slice = kChunkBytes / n / kCacheLine * kCacheLine;
    const std::array sizes = {std::size_t{0},  std::size_t{1},        std::size_t{7},
                              kSmallBytes / n, kSmallBytes - 1,       kSmallBytes,
                              kSmallBytes + 1, slice * n - 1,         slice * n,
                              slice * n + 1,   kChunkBytes,           kChunkBytes + 1,
                              2 * kChunkBytes, 3 * kChunkBytes + 4321};
    ranks::run(size, [&](Rank& rank) {
      std::uint64_t salt = ranks::seed;
      for (const Kind kind : kKinds) {
        for (const std::size_t count : sizes) {
          const int root = static_cast<int>(++salt % n);
          for (const bool shared : {false, true}) {
            const Operation o{
                .kind = kind, .count = count, .root = root, .salt = salt, .shared = shared};
            if (!check_right(rank, o)) return;
          }
        }
      }
    });
  }
}

TEST(every_operator_on_both_paths) {
  for (const int size : {1, 2, 3, 5}) {
    ranks::run(size, [](Rank& rank) {
      std::uint64_t salt = ranks::seed;
      for (const DType dtype : kReduced) {
        for (int op = 1; op <= 8; ++op) {
          if (!supports(dtype, static_cast<ReduceOp>(op))) continue;
          for (const std::size_t count : {std::size_t{11}, std::size_t{70'001} / size_of(dtype)}) {
            const Operation o{.kind = Kind::all_reduce,
                              .dtype = dtype,
                              .op = static_cast<ReduceOp>(op),
                              .count = count,
                              .salt = ++salt};
            if (!check_right(rank, o)) return;
          }
        }
      }
    });
  }
}

TEST(consecutive_small_operations) {
  for (const int size : {2, 3, 4, 5}) {
    mixture(size, ranks::scaled(2500), 0, Mapping::same, false);
  }
}

TEST(mixtures_of_all_kinds_and_sizes) {
  for (const int size : {1, 2, 3, 4, 5}) {
    mixture(size, ranks::scaled(400), 2, Mapping::same, false);
  }
}

TEST(mixtures_with_ranks_stopped_anywhere) {
  for (const int size : {2, 3, 5}) {
    mixture(size, ranks::scaled(300), 3, Mapping::same, true);
  }
}

TEST(mixtures_over_separate_mappings) {
  for (const int size : {2, 4}) {
    mixture(size, ranks::scaled(300), 4, Mapping::own, true);
  }
}

TEST(results_larger_than_the_caches) {
  ranks::run(2, [](Rank& rank) {
    std::uint64_t salt = 77;
    for (const Kind kind : kKinds) {
      for (const bool shared : {false, true}) {
        const Operation o{.kind = kind,
                          .dtype = DType::float64,
                          .count = kStreamedBytes / sizeof(double) + 4099,
                          .root = 1,
                          .salt = ++salt,
                          .shared = shared};
        if (!check_right(rank, o)) return;
      }
    }
  });
}

TEST(consecutive_large_reductions) {
  for (const int size : {2, 3, 4, 5}) {
    ranks::run(
        size,
        [size](Rank& rank) {
          Random script(42 + static_cast<std::uint64_t>(size));
          for (int i = 0; i < ranks::scaled(60) + 3; ++i) {
            const Kind kind = script.one_in(3) ? Kind::reduce : Kind::all_reduce;
            const Operation o{
                .kind = kind,
                .dtype = DType::float32,
                .count = kSmallBytes + script.below(3 * kChunkBytes / 2),
                .root = static_cast<int>(script.below(static_cast<std::size_t>(size))),
                .salt = script.bits()};
            if (!check_right(rank, o)) return;
          }
        },
        Mapping::same, true);
  }
}

TEST(large_reductions_over_caches_have_the_bits_of_a_flat_group) {
  struct Shape {
    int size;
    std::vector<int> caches;  // the first rank of each
    std::size_t one_in = 1;   // of all dtypes and operators
  };
  const std::array shapes = {Shape{4, {0, 2}}, Shape{3, {0, 1, 2}}, Shape{7, {0, 1, 4}},
                             Shape{12, {0, 4, 5, 9}}, Shape{33, {0, 8, 16, 21, 29}, 8}};
  for (const Shape& shape : shapes) {
    ranks::run(shape.size, [&shape](Rank& rank) {
      Random script(static_cast<std::uint64_t>(shape.size));
      for (const DType dtype : kAll) {
        for (int op = 1; op <= 8; ++op) {
          const Operation o{.kind = script.one_in(3) ? Kind::reduce : Kind::all_reduce,
                            .dtype = dtype,
                            .op = static_cast<ReduceOp>(op),
                            .count = large_count(shape.caches.size(), dtype, script),
                            .root = static_cast<int>(script.below(rank.group.ranks())),
                            .salt = script.bits()};
          if (!supports(dtype, o.op) || !script.one_in(shape.one_in * ranks::kShare)) continue;
          if (!CHECK(same_over_caches(rank, o, shape.caches))) return;
        }
      }
    });
  }
}

TEST(null_pointers_of_empty_tensors) {
  ranks::run(3, [](Rank& rank) {
    const std::vector<void*> none(3, nullptr);
    const auto bounds = within();
    constexpr DType f32 = DType::float32;
    CHECK(broadcast(rank.group, nullptr, 0, f32, 1, bounds).ok());
    CHECK(all_reduce(rank.group, nullptr, 0, f32, ReduceOp::sum, bounds).ok());
    CHECK(reduce(rank.group, nullptr, 0, f32, ReduceOp::avg, 1, bounds).ok());
    CHECK(gather(rank.group, nullptr, none.data(), 0, f32, 1, bounds).ok());
    CHECK(scatter(rank.group, none.data(), nullptr, 0, f32, 1, bounds).ok());
    CHECK(all_gather(rank.group, nullptr, none.data(), 0, f32, bounds).ok());
    CHECK(reduce_scatter(rank.group, none.data(), nullptr, 0, f32, ReduceOp::sum, bounds).ok());
    const std::vector<std::uint64_t> zero(3, 0);
    const Splits nothing{none.data(), zero.data(), none.data(), zero.data()};
    CHECK(all_to_all(rank.group, nothing, f32, bounds).ok());
  });
}

TEST(in_place_input_within_the_output) {
  for (const std::size_t count : {std::size_t{9}, 3 * kChunkBytes + 5}) {
    ranks::run(3, [count](Rank& rank) {
      const Operation o{.kind = Kind::all_gather, .count = count, .salt = 4};
      std::vector<Buffer> outputs = parts_of(o, 3, false, rank.random);
      Buffer& own = outputs[static_cast<std::size_t>(rank.self)];
      own = input_of(o, rank.self, rank.random);
      const auto to = pointers(outputs);
      CHECK(all_gather(rank.group, own.data(), to.data(), count, o.dtype, within()).ok());
      for (int from = 0; from < 3; ++from) {
        CHECK(outputs[static_cast<std::size_t>(from)] == input_of(o, from, rank.random));
      }
    });
  }
}

TEST(counts_that_disagree_are_refused_on_every_rank) {
  ranks::run(3, [](Rank& rank) {
    const Operation o{.kind = Kind::all_to_all, .dtype = DType::int32, .count = 4, .salt = 9};
    std::vector<Buffer> inputs = parts_of(o, 3, true, rank.random);
    std::vector<Buffer> outputs = parts_of(o, 3, false, rank.random);
    const std::vector<void*> from = pointers(inputs), to = pointers(outputs);
    const std::vector<std::uint64_t> given(3, 4);
    // Rank 2 expects less from rank 1 than it sends.
    const std::vector<std::uint64_t> taken = {4, rank.self == 2 ? 3UL : 4UL, 4};
    const Splits own{from.data(), given.data(), to.data(), taken.data()};
    const Status status = all_to_all(rank.group, own, o.dtype, within());
    CHECK(status.code == Code::mismatch);
    CHECK_EQ(status.peer, 1);
    CHECK_EQ(status.reporter, 2);
    CHECK_EQ(rank.group.failure_report().mine.count, 3UL);
    CHECK_EQ(rank.group.failure_report().theirs.count, 4UL);
    for (const Buffer& output : outputs) CHECK(output.poisoned());
  });
}

TEST(threads_of_one_rank_run_one_collective_at_a_time) {
  ranks::run(2, [](Rank& rank) {
    // The same operation from two threads: in either order, all ranks do the same.
    const auto work = [&] {
      for (int i = 0; i < ranks::scaled(300); ++i) {
        std::int32_t value = 1;
        CHECK(all_reduce(rank.group, &value, 1, DType::int32, ReduceOp::sum, within()).ok());
        CHECK_EQ(value, 2);
      }
    };
    std::thread other(work);
    work();
    other.join();
  });
}
