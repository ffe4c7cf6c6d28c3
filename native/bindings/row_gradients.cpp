#include "phalanx/row_gradients.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "core.h"

namespace phalanx::bindings {
namespace {

// Addresses of rows, offsets, weights and outputs (0: none), each but the last two with a count.
using Batch = std::tuple<Address, std::size_t, Address, std::size_t, int, Address, Address>;

BagGradients batch_of(const Batch& batch) {
  const auto& [rows, count, offsets, bags, mode, weights, outputs] = batch;
  return {.list = {.rows = static_cast<const std::int64_t*>(pointer(rows)), .count = count},
          .bags = {.offsets = static_cast<const std::int64_t*>(pointer(offsets)), .count = bags},
          .pooling = static_cast<Pooling>(mode),
          .weights = pointer(weights),
          .outputs = pointer(outputs)};
}

std::size_t add_up_rows(const std::vector<Batch>& batches, std::size_t width, std::uint8_t dtype,
                        double divisor, const std::pair<std::int64_t, std::int64_t>& share,
                        const std::pair<Address, Address>& room) {
  std::vector<BagGradients> all;
  all.reserve(batches.size());
  for (const Batch& batch : batches) {
    all.push_back(batch_of(batch));
  }
  const nb::gil_scoped_release release;
  return add_up(
      all, width, static_cast<DType>(dtype), divisor, {.rest = share.first, .shares = share.second},
      {.rows = static_cast<std::int64_t*>(pointer(room.first)), .gradients = pointer(room.second)});
}

}  // namespace

void bind_row_gradients(nb::module_& module) {
  module.def("add_up_rows", &add_up_rows, nb::arg("batches"), nb::arg("width"), nb::arg("dtype"),
             nb::arg("divisor"), nb::arg("share"), nb::arg("room"));
}

}  // namespace phalanx::bindings
