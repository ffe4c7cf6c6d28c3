#include "phalanx/row_gradients.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "core.h"

namespace phalanx::bindings {
namespace {

// Addresses of rows, offsets, weights and outputs (0: none); the first two with a count.
using Batch = std::tuple<Address, std::size_t, Address, std::size_t, int, Address, Address>;

BagGradients batch_of(const Batch& batch) {
  const auto& [rows, count, offsets, bags, mode, weights, outputs] = batch;
  return {.list = {.rows = static_cast<const std::int64_t*>(pointer(rows)), .count = count},
          .bags = {.offsets = static_cast<const std::int64_t*>(pointer(offsets)), .count = bags},
          .pooling = static_cast<Pooling>(mode),
          .weights = pointer(weights),
          .outputs = pointer(outputs)};
}

std::size_t coalesce_rows(const std::vector<Batch>& batches, std::size_t width, std::uint8_t dtype,
                          double divisor, const std::pair<std::int64_t, std::int64_t>& shard,
                          const std::pair<Address, Address>& output) {
  std::vector<BagGradients> all;
  all.reserve(batches.size());
  for (const Batch& batch : batches) {
    all.push_back(batch_of(batch));
  }
  const WithoutGil released;
  return coalesce_gradients(all, width, static_cast<DType>(dtype), divisor,
                            {.remainder = shard.first, .count = shard.second},
                            {.rows = static_cast<std::int64_t*>(pointer(output.first)),
                             .gradients = pointer(output.second)});
}

}  // namespace

void bind_row_gradients(nb::module_& module) {
  module.def("coalesce_rows", &coalesce_rows, nb::arg("batches"), nb::arg("width"),
             nb::arg("dtype"), nb::arg("divisor"), nb::arg("shard"), nb::arg("output"));
}

}  // namespace phalanx::bindings
