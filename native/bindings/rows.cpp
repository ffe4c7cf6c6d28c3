#include "phalanx/rows.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include <algorithm>
#include <cerrno>

#include "core.h"

namespace phalanx::bindings {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowsPtr = std::shared_ptr<Rows>;

RowsPtr ptr_or_raise(std::unique_ptr<Rows> rows, const Status& status) {
  if (!rows) {
    raise_system_error(status.error);
  }
  return rows;
}

RowsPtr create(std::uint64_t rows, std::uint32_t width, std::uint32_t parts, std::uint8_t dtype,
               std::uint64_t nonce) {
  const RowsShape shape{
      .rows = rows, .width = width, .parts = parts, .dtype = static_cast<DType>(dtype)};
  Status status;
  std::unique_ptr<Rows> created;
  {
    const WithoutGil released;  // the kernel zeroes all of it
    created = Rows::create(shape, nonce, status);
  }
  return ptr_or_raise(std::move(created), status);
}

RowsPtr open(int pid, int descriptor, std::uint64_t nonce) {
  Status status;
  auto rows = Rows::open(pid, descriptor, nonce, status);
  return ptr_or_raise(std::move(rows), status);
}

const char* name_of(RowsResult::Kind kind) {
  switch (kind) {
    case RowsResult::Kind::done: return "done";
    case RowsResult::Kind::index: return "index";
    case RowsResult::Kind::offset: return "offset";
    case RowsResult::Kind::stuck: return "stuck";
    case RowsResult::Kind::full: return "full";
  }
  return "unknown";
}

// Runs without the GIL. Returns None for done, otherwise (kind, at, value, pid).
template <class Operation>
nb::object run_rows(double timeout, Operation&& operation) {
  const auto span = std::chrono::duration_cast<Rows::Timeout>(
      std::chrono::duration<double>(std::min(timeout, 1e6)));
  RowsResult result;
  {
    const WithoutGil released;
    result = operation(span);
  }
  if (result.ok()) {
    return nb::none();
  }
  return nb::make_tuple(name_of(result.kind), result.at, result.value, result.pid);
}

RowList list_of(Address rows, std::size_t count) {
  return {.rows = static_cast<const std::int64_t*>(pointer(rows)), .count = count};
}

std::vector<void*> pointers(const Rows& self, const std::vector<Address>& parts) {
  if (parts.size() != self.shape().parts) {
    throw nb::value_error("expected one address per part");
  }
  std::vector<void*> all;
  for (const Address part : parts) {
    all.push_back(pointer(part));
  }
  return all;
}

// An array keeps the whole table alive.
Bytes view(const RowsPtr& self, std::uint32_t part) {
  if (part >= self->shape().parts) {
    throw nb::value_error("the table has no such part");
  }
  const nb::capsule owner(new RowsPtr(self), [](void* owner_data) noexcept {
    delete static_cast<RowsPtr*>(owner_data);
  });
  return Bytes(self->part(part), {self->shape().rows * self->stride()}, owner);
}

void bind_calls(nb::class_<Rows>& rows) {
  rows.def(
      "gather",
      [](Rows& self, Address list, std::size_t count, const std::vector<Address>& parts,
         double timeout) {
        const auto to = pointers(self, parts);
        return run_rows(timeout, [&](Rows::Timeout span) {
          return self.gather(list_of(list, count), to.data(), span);
        });
      },
      nb::arg("rows"), nb::arg("count"), nb::arg("parts"), nb::arg("timeout"));
  rows.def(
      "write",
      [](Rows& self, Address list, std::size_t count, const std::vector<Address>& parts,
         double timeout) {
        const auto from = pointers(self, parts);
        return run_rows(timeout, [&](Rows::Timeout span) {
          return self.write(list_of(list, count), from.data(), span);
        });
      },
      nb::arg("rows"), nb::arg("count"), nb::arg("parts"), nb::arg("timeout"));
  rows.def(
      "pool",
      [](Rows& self, Address list, std::size_t count, Address offsets, std::size_t bags, int mode,
         Address weights, Address output, double timeout) {
        const Bags of{.offsets = static_cast<const std::int64_t*>(pointer(offsets)), .count = bags};
        return run_rows(timeout, [&](Rows::Timeout span) {
          return self.pool(list_of(list, count), of, static_cast<Pooling>(mode), pointer(weights),
                           pointer(output), span);
        });
      },
      nb::arg("rows"), nb::arg("count"), nb::arg("offsets"), nb::arg("bags"), nb::arg("mode"),
      nb::arg("weights"), nb::arg("output"), nb::arg("timeout"));
  rows.def(
      "update",
      [](Rows& self, Address list, std::size_t count, Address gradients, int optimizer,
         const std::array<double, 5>& factors, std::uint64_t number, double timeout) {
        const OptimizerStep step{.optimizer = static_cast<RowOptimizer>(optimizer),
                                 .lr = factors[0],
                                 .lr_decay = factors[1],
                                 .eps = factors[2],
                                 .beta1 = factors[3],
                                 .beta2 = factors[4],
                                 .number = number};
        if (step.parts() > self.shape().parts) {
          throw nb::value_error("the table has too few parts for this optimizer's state");
        }
        return run_rows(timeout, [&](Rows::Timeout span) {
          return self.update(list_of(list, count), pointer(gradients), step, span);
        });
      },
      nb::arg("rows"), nb::arg("count"), nb::arg("gradients"), nb::arg("optimizer"),
      nb::arg("factors"), nb::arg("step"), nb::arg("timeout"));
}

}  // namespace

void bind_rows(nb::module_& module) {
  nb::class_<Rows> rows(module, "Rows");
  rows.def_static("create", &create, nb::arg("rows"), nb::arg("width"), nb::arg("parts"),
                  nb::arg("dtype"), nb::arg("nonce"));
  rows.def_static("open", &open, nb::arg("pid"), nb::arg("descriptor"), nb::arg("nonce"));
  rows.def_prop_ro("rows", [](const Rows& self) { return self.shape().rows; });
  rows.def_prop_ro("width", [](const Rows& self) { return self.shape().width; });
  rows.def_prop_ro("parts", [](const Rows& self) { return self.shape().parts; });
  rows.def_prop_ro("dtype", [](const Rows& self) { return static_cast<int>(self.shape().dtype); });
  rows.def_prop_ro("stride", &Rows::stride);
  rows.def_prop_ro("size", &Rows::bytes);
  rows.def_prop_rw("step", &Rows::step, &Rows::set_step);
  rows.def_prop_ro("descriptor", &Rows::descriptor);
  rows.def("close_descriptor", &Rows::close_descriptor);
  rows.def("view", &view, nb::arg("part"));
  bind_calls(rows);
}

}  // namespace phalanx::bindings
