#include "overlap.h"

#include <algorithm>

#include "phalanx/reduce.h"

namespace phalanx::bindings {
namespace {

struct Memory {
  Address begin;
  Address end;
};

std::vector<Memory> memory_of(const std::vector<Address>& starts,
                              const std::vector<std::uint64_t>& counts, std::size_t size) {
  std::vector<Memory> memory;
  memory.reserve(starts.size());
  for (std::size_t i = 0; i < std::min(starts.size(), counts.size()); ++i) {
    if (counts[i] != 0 && starts[i] != 0) {  // a tensor that wraps others has no memory
      memory.push_back({starts[i], starts[i] + counts[i] * size});
    }
  }
  return memory;
}

}  // namespace

bool overlap(const std::vector<Address>& inputs, const std::vector<std::uint64_t>& input_counts,
             const std::vector<Address>& outputs, const std::vector<std::uint64_t>& output_counts,
             DType dtype) {
  const std::size_t size = size_of(dtype);
  std::vector<Memory> ordered = memory_of(outputs, output_counts, size);
  std::ranges::sort(ordered, {}, &Memory::begin);
  return std::ranges::any_of(memory_of(inputs, input_counts, size), [&](const Memory& input) {
    const auto after = std::ranges::lower_bound(ordered, input.end, {}, &Memory::begin);
    return after != ordered.begin() && std::prev(after)->end > input.begin;
  });
}

bool have_common_memory(const std::vector<Address>& starts,
                        const std::vector<std::uint64_t>& counts, std::size_t size) {
  std::vector<Memory> ordered = memory_of(starts, counts, size);
  std::ranges::sort(ordered, {}, &Memory::begin);
  const auto meet = [](const Memory& one, const Memory& next) { return next.begin < one.end; };
  return std::ranges::adjacent_find(ordered, meet) != ordered.end();
}

bool is_misplaced(Address part, const std::vector<Address>& parts, std::size_t bytes, int rank) {
  for (std::size_t owner = 0; owner < parts.size(); ++owner) {
    const bool apart = part >= parts[owner] + bytes || parts[owner] >= part + bytes;
    if (!apart && (part != parts[owner] || owner != static_cast<std::size_t>(rank))) {
      return true;
    }
  }
  return false;
}

void bind_overlap(nb::module_& module) {
  module.def(
      "overlap",
      [](const std::vector<Address>& inputs, const std::vector<std::uint64_t>& input_counts,
         const std::vector<Address>& outputs, const std::vector<std::uint64_t>& output_counts,
         int dtype) {
        return overlap(inputs, input_counts, outputs, output_counts, static_cast<DType>(dtype));
      },
      nb::arg("inputs"), nb::arg("input_counts"), nb::arg("outputs"), nb::arg("output_counts"),
      nb::arg("dtype"));
  module.def(
      "have_common_memory",
      [](const std::vector<Address>& starts, const std::vector<std::uint64_t>& sizes) {
        return have_common_memory(starts, sizes, 1);
      },
      nb::arg("starts"), nb::arg("sizes"));
  module.def(
      "is_misplaced",
      [](Address part, const std::vector<Address>& parts, std::size_t count, int dtype, int rank) {
        return is_misplaced(part, parts, count * size_of(static_cast<DType>(dtype)), rank);
      },
      nb::arg("part"), nb::arg("parts"), nb::arg("count"), nb::arg("dtype"), nb::arg("rank"));
}

}  // namespace phalanx::bindings
