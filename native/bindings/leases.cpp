#include "phalanx/leases.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "core.h"

namespace phalanx::bindings {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentPtr = std::shared_ptr<LeaseSegment>;
using ViewPtr = std::shared_ptr<LeaseSegmentView>;

// Copying less takes no longer than releasing the GIL.
constexpr std::size_t kMinUnlockedCopy = std::size_t{16} * 1024;

const char* name_of(BlockState state) {
  switch (state) {
    case BlockState::free: return "free";
    case BlockState::filling: return "filling";
    case BlockState::leased: return "leased";
    case BlockState::unwritten: return "unwritten";
  }
  return "unknown";
}

// The data of a block that this process has taken, and gives back at the end of this object.
class Lease {
 public:
  Lease(ViewPtr view, std::uint32_t block, const LeaseSegmentView::Block& taken, std::size_t bytes)
      : view_(std::move(view)), block_(block), taken_(taken), bytes_(bytes) {}
  Lease(Lease&&) = default;  // leaves no view
  Lease& operator=(Lease&&) = delete;
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    if (view_) {
      view_->give_back(block_, taken_.word);
    }
  }

  static int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
    const Lease& lease = *nb::inst_ptr<Lease>(self);
    return PyBuffer_FillInfo(buffer, self, lease.taken_.data, static_cast<Py_ssize_t>(lease.bytes_),
                             0, flags);
  }

 private:
  ViewPtr view_;
  std::uint32_t block_;
  LeaseSegmentView::Block taken_;
  std::size_t bytes_;
};

PyType_Slot lease_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&Lease::get_buffer)},
                             {0, nullptr}};

SegmentPtr create(std::uint64_t number, std::size_t block_bytes, std::uint32_t blocks,
                  std::uint64_t nonce) {
  Status status;
  SegmentPtr segment = LeaseSegment::create(number, block_bytes, blocks, nonce, status);
  if (!segment) {
    raise_system_error(status.error);
  }
  return segment;
}

nb::object lease(LeaseSegment& self, std::int64_t holder) {
  const auto leased = self.lease(holder);
  return leased ? nb::object(nb::make_tuple(leased->block, leased->number)) : nb::none();
}

void check(const LeaseSegment& self, std::uint32_t block, std::size_t bytes) {
  if (block >= self.blocks() || bytes > self.block_bytes()) {
    throw nb::value_error("the segment has no such block");
  }
}

void write(LeaseSegment& self, std::uint32_t block, std::uint64_t number, Address data,
           std::size_t bytes) {
  check(self, block, bytes);
  if (bytes < kMinUnlockedCopy) {
    std::memcpy(self.data(block), pointer(data), bytes);
  } else {
    const WithoutGil released;
    std::memcpy(self.data(block), pointer(data), bytes);
  }
  self.finish({.block = block, .number = number}, BlockState::leased);
}

void finish(LeaseSegment& self, std::uint32_t block, std::uint64_t number, std::string_view state) {
  check(self, block, 0);
  for (const BlockState each : {BlockState::free, BlockState::leased, BlockState::unwritten}) {
    if (state == name_of(each)) {
      self.finish({.block = block, .number = number}, each);
      return;
    }
  }
  throw nb::value_error("a copy can't end in this state");
}

// An array keeps the whole segment alive.
Bytes view(const SegmentPtr& self, std::uint32_t block) {
  check(*self, block, 0);
  const nb::capsule owner(new SegmentPtr(self), [](void* owner_data) noexcept {
    delete static_cast<SegmentPtr*>(owner_data);
  });
  return Bytes(self->data(block), {self->block_bytes()}, owner);
}

// `descriptor` comes from a message.
ViewPtr open(int pid, std::uint32_t descriptor, std::uint64_t nonce) {
  Status status;
  auto opened = LeaseSegmentView::open(pid, static_cast<int>(descriptor), nonce, status);
  if (!opened) {
    raise_system_error(status.error);
  }
  return opened;
}

nb::object take(const ViewPtr& self, std::uint32_t block, std::size_t bytes, double seconds) {
  auto taken = self->take(block, bytes);
  if (taken.state == BlockState::filling) {
    const auto span = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(std::min(seconds, 1e6)));
    {
      const WithoutGil released;
      self->wait_for_copy(block, Clock::now() + span);
    }
    taken = self->take(block, bytes);
  }
  if (taken.state != BlockState::leased) {
    return nb::cast(name_of(taken.state));
  }
  return nb::cast(Lease(self, block, taken, bytes));
}

}  // namespace

void bind_leases(nb::module_& module) {
  [[maybe_unused]] const nb::class_<Lease> lease_type(module, "Lease", nb::type_slots(lease_slots));
  nb::class_<LeaseSegment>(module, "LeaseSegment")
      .def_static("create", &create, nb::arg("number"), nb::arg("block_size"), nb::arg("blocks"),
                  nb::arg("nonce"))
      .def("lease", &lease, nb::arg("holder"))
      .def("write", &write, nb::arg("block"), nb::arg("lease"), nb::arg("data"), nb::arg("size"))
      .def("view", &view, nb::arg("block"))
      .def("finish", &finish, nb::arg("block"), nb::arg("lease"), nb::arg("state"))
      .def("take_back", &LeaseSegment::take_back, nb::arg("block"), nb::arg("holder").none())
      .def("take_back_all", &LeaseSegment::take_back_all, nb::arg("holder"))
      .def("close_descriptor", &LeaseSegment::close_descriptor)
      .def_prop_ro("number", &LeaseSegment::number)
      .def_prop_ro("block_size", &LeaseSegment::block_bytes)
      .def_prop_ro("size", &LeaseSegment::bytes)
      .def_prop_ro("descriptor", &LeaseSegment::descriptor)
      .def_prop_ro("leased", &LeaseSegment::leased)
      .def_prop_ro("used", &LeaseSegment::used);
  nb::class_<LeaseSegmentView>(module, "LeaseSegmentView")
      .def_static("open", &open, nb::arg("pid"), nb::arg("descriptor"), nb::arg("nonce"))
      .def("take", &take, nb::arg("block"), nb::arg("size"), nb::arg("seconds"))
      .def_prop_ro("number", &LeaseSegmentView::number);
  module.attr("MAX_BLOCKS") = kMaxBlocks;
}

}  // namespace phalanx::bindings
