// Collectives that meet once, against the same ones run one by one.
#include "operations.h"
#include "phalanx/merged.h"
#include "ranks.h"

using namespace phalanx;
using namespace operations;
using ranks::Rank;
using ranks::within;

namespace {

// An operation with the buffers of this rank.
struct Part {
  Operation o;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  bool in_place = false;

  const std::byte* input(std::size_t index) { return (in_place ? outputs : inputs)[index].data(); }
};

bool comes_from_root(Kind kind) { return kind == Kind::broadcast || kind == Kind::scatter; }
bool goes_to_root(Kind kind) { return kind == Kind::gather || kind == Kind::reduce; }
bool gives_parts(Kind kind) {
  return kind == Kind::scatter || kind == Kind::reduce_scatter || kind == Kind::all_to_all;
}
bool takes_parts(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::gather || kind == Kind::all_to_all;
}

std::vector<Buffer> buffers(const Operation& o, std::size_t number, bool filled, Rank& rank) {
  std::vector<Buffer> all;
  for (std::size_t i = 0; i < number; ++i) {
    all.emplace_back(o.count, o.dtype, rank.random);
    if (filled) {
      Operation own = o;
      own.salt += i * 1'000'003;
      all.back() = input_of(own, rank.self, rank.random);
    }
  }
  return all;
}

Part make_part(const Operation& o, Rank& rank) {
  const bool is_root = rank.self == o.root;
  const auto size = static_cast<std::size_t>(rank.size);
  Part part{.o = o, .inputs = {}, .outputs = {}};
  if (o.kind == Kind::barrier) {
    return part;
  }
  if (is_root || !comes_from_root(o.kind)) {
    part.inputs = buffers(o, gives_parts(o.kind) ? size : 1, true, rank);
  }
  if (is_root ? o.kind != Kind::broadcast : !goes_to_root(o.kind)) {
    part.outputs = buffers(o, takes_parts(o.kind) ? size : 1, false, rank);
  }
  if (o.kind == Kind::all_reduce) {
    part.in_place = true;
    part.outputs[0] = part.inputs[0];
  }
  return part;
}

MergedPart merged(Part& part) {
  const Operation& o = part.o;
  MergedPart to{
      .own = {.count = o.count, .kind = o.kind, .dtype = o.dtype}, .inputs = {}, .outputs = {}};
  to.own.op = reduces(o.kind) ? o.op : ReduceOp::none;
  to.own.root = comes_from_root(o.kind) || goes_to_root(o.kind) ? o.root : -1;
  for (std::size_t i = 0; i < part.inputs.size(); ++i) to.inputs.push_back(part.input(i));
  for (Buffer& each : part.outputs) to.outputs.push_back(each.data());
  return to;
}

Status run_alone(Part& part, Group& group) {
  const Operation& o = part.o;
  if (o.kind == Kind::reduce && !part.outputs.empty()) part.outputs[0] = part.inputs[0];
  const std::vector<void*> from = pointers(part.inputs), to = pointers(part.outputs);
  void* const output = to.empty() ? nullptr : to[0];
  void* const input = from.empty() ? nullptr : from[0];
  const Bounds bounds = within();
  switch (o.kind) {
    case Kind::broadcast:
      return broadcast(group, input != nullptr ? input : output, o.count, o.dtype, o.root, bounds);
    case Kind::all_reduce: return all_reduce(group, output, o.count, o.dtype, o.op, bounds);
    case Kind::reduce:
      return reduce(group, output != nullptr ? output : input, o.count, o.dtype, o.op, o.root,
                    bounds);
    case Kind::all_gather: return all_gather(group, input, to.data(), o.count, o.dtype, bounds);
    case Kind::gather: return gather(group, input, to.data(), o.count, o.dtype, o.root, bounds);
    case Kind::scatter:
      return scatter(group, from.data(), output, o.count, o.dtype, o.root, bounds);
    case Kind::reduce_scatter:
      return reduce_scatter(group, from.data(), output, o.count, o.dtype, o.op, bounds);
    case Kind::all_to_all: {
      const std::vector<std::uint64_t> counts(from.size(), o.count);
      return all_to_all(group, {from.data(), counts.data(), to.data(), counts.data()}, o.dtype,
                        bounds);
    }
    default: return barrier(group, bounds);
  }
}

// The same on all ranks, if these have the same `random`.
Operation random_operation(ranks::Random& random, int size) {
  constexpr std::array kinds = {Kind::barrier, Kind::broadcast,      Kind::all_reduce,
                                Kind::reduce,  Kind::all_gather,     Kind::gather,
                                Kind::scatter, Kind::reduce_scatter, Kind::all_to_all};
  Operation o;
  o.kind = kinds[random.below(kinds.size())];
  o.dtype = kReduced[random.below(kReduced.size())];
  constexpr std::array operators = {ReduceOp::sum, ReduceOp::min, ReduceOp::max};
  o.op = operators[random.below(operators.size())];
  o.count = o.kind == Kind::barrier ? 0 : random.below(random.one_in(4) ? 200 : 12);
  o.root = static_cast<int>(random.below(static_cast<std::size_t>(size)));
  o.salt = random.bits();
  return o;
}

bool all_right(Rank& rank, ranks::Random& common) {
  const std::size_t number = 1 + common.below(common.one_in(10) ? 128 : 8);
  std::vector<Part> parts;
  parts.reserve(number);
  MergedCollectives together(rank.size);
  for (std::size_t i = 0; i < number; ++i) {
    Part part = make_part(random_operation(common, rank.size), rank);
    if (!together.add(merged(part))) break;
    parts.push_back(std::move(part));
  }
  std::vector<Part> alone = parts;
  if (rank.random.one_in(2)) ranks::random_delay(rank.random);
  bool right = together.run(rank.group, within()).ok();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    right = run_alone(alone[i], rank.group).ok() && right;
    for (std::size_t j = 0; j < parts[i].outputs.size(); ++j) {
      right = right && parts[i].outputs[j].guards_intact() &&
              parts[i].outputs[j] == alone[i].outputs[j];
    }
  }
  return right;
}

}  // namespace

TEST(merged_collectives_have_the_results_of_single_ones) {
  for (const int size : {1, 2, 3, 5}) {
    ranks::run(size, [](Rank& rank) {
      ranks::Random common(77);
      for (int i = 0; i < ranks::scaled(600); ++i) CHECK(all_right(rank, common));
    });
  }
}

TEST(parts_that_share_memory_are_not_merged) {
  std::array<std::int32_t, 8> data{};
  auto* const begin = reinterpret_cast<std::byte*>(data.data());
  const Fingerprint reduction{
      .count = 4, .kind = Kind::all_reduce, .dtype = DType::int32, .op = ReduceOp::sum};
  MergedCollectives together(2);
  CHECK(together.add({reduction, {begin}, {begin}}));
  CHECK(!together.add({reduction, {begin}, {begin}}));
  CHECK(!together.add({reduction, {begin + 12}, {begin + 12}}));
  CHECK(together.add({reduction, {begin + 16}, {begin + 16}}));
  CHECK_EQ(together.size(), 2UL);
}

TEST(parts_have_16_KiB_in_all) {
  std::vector<std::byte> data(3 * 8192);
  const auto part = [&](std::size_t offset, std::size_t count) {
    const Fingerprint own{.count = count, .kind = Kind::all_reduce, .dtype = DType::uint8};
    return MergedPart{own, {data.data() + offset}, {data.data() + offset}};
  };
  MergedCollectives together(2);
  CHECK(together.add(part(0, 8192)));
  CHECK(!together.add(part(8192, 8192)));
  CHECK(together.add(part(8192, 8192 - 32)));
  CHECK(!together.add(part(16384, 1)));
}

TEST(a_mismatch_names_the_first_parts_that_differ) {
  ranks::run(3, [](Rank& rank) {
    std::array<std::int32_t, 2> data{};
    MergedCollectives together(3);
    for (int i = 0; i < 2; ++i) {
      auto* const own = reinterpret_cast<std::byte*>(&data[static_cast<std::size_t>(i)]);
      const ReduceOp op = i == 1 && rank.self == 2 ? ReduceOp::max : ReduceOp::sum;
      const Fingerprint print{
          .count = 1, .kind = Kind::all_reduce, .dtype = DType::int32, .op = op};
      CHECK(together.add({print, {own}, {own}}));
    }
    const Status status = together.run(rank.group, within());
    CHECK(status.code == Code::mismatch);
    const auto report = rank.group.failure_report();
    CHECK(report.mine.kind == Kind::all_reduce && report.theirs.kind == Kind::all_reduce);
    CHECK(report.mine.op != report.theirs.op);
  });
}

TEST(a_plan_and_a_collective_disagree) {
  ranks::run(2, [](Rank& rank) {
    std::array<std::int32_t, 2> data{};
    MergedCollectives together(2);
    for (std::int32_t& each : data) {
      auto* const own = reinterpret_cast<std::byte*>(&each);
      const Fingerprint print{
          .count = 1, .kind = Kind::all_reduce, .dtype = DType::int32, .op = ReduceOp::sum};
      CHECK(together.add({print, {own}, {own}}));
    }
    const Status status = rank.self == 0 ? together.run(rank.group, within())
                                         : all_reduce(rank.group, data.data(), 2, DType::int32,
                                                      ReduceOp::sum, within());
    CHECK(status.code == Code::mismatch);
  });
}
