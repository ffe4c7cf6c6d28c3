#include "tensor.h"

#include <array>
#include <cstdint>

#include "tensor_memory.h"

namespace phalanx::bindings {

namespace {

// The structures of DLPack 1, as far as they are used here. Their layout is fixed by its standard.

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};
constexpr std::int32_t kHostDevice = 1;

struct ElementType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct TensorView {
  void* data;
  Device device;
  std::int32_t ndim;
  ElementType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: the tensor has no gaps
  std::uint64_t byte_offset;
};
static_assert(sizeof(TensorView) == 48);

struct ExchangeApi {
  Version version;
  void* previous;
  void* allocate;
  void* export_owning;
  void* import_owning;
  int (*view)(void* tensor, TensorView* out);  // borrows the tensor; -1 with an error of Python
  void* current_stream;
};

struct TensorApi {
  const ExchangeApi* table = nullptr;
  std::array<PyTypeObject*, 2> types{};
  PyObject* is_grad_enabled = nullptr;
};
TensorApi api;  // guarded by the GIL; set once

// By code and the logarithm of the number of bytes; -1: none.
constexpr int kCodes = 7;
constexpr std::array<std::array<std::int8_t, 5>, kCodes> kDTypes = {{
    {2, 4, 6, 8, -1},      // int
    {1, 3, 5, 7, -1},      // unsigned
    {-1, 9, 11, 12, -1},   // float
    {-1, -1, -1, -1, -1},  // opaque
    {-1, 10, -1, -1, -1},  // bfloat
    {-1, -1, -1, 13, 14},  // complex
    {0, -1, -1, -1, -1},   // bool
}};

// Returns -1 for a dtype that the core lacks.
int dtype_of(const ElementType& type) {
  if (type.code >= kCodes || type.lanes != 1) {
    return -1;
  }
  for (std::size_t i = 0; i < kDTypes[type.code].size(); ++i) {
    if (type.bits == 8U << i) {
      return kDTypes[type.code][i];
    }
  }
  return -1;
}

bool is_contiguous(const TensorView& view, std::size_t& count) {
  count = 1;
  for (int d = 0; d < view.ndim; ++d) {
    count *= static_cast<std::size_t>(view.shape[d]);
  }
  std::int64_t expected = 1;
  for (int d = view.ndim - 1; view.strides != nullptr && d >= 0 && count != 0; --d) {
    if (view.shape[d] != 1 && view.strides[d] != expected) {
      return false;
    }
    expected *= view.shape[d];
  }
  return true;
}

}  // namespace

bool set_tensor_api(nb::handle capsule, const nb::tuple& types, nb::handle is_grad_enabled) {
  const auto* table =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (table == nullptr) {
    throw nb::python_error();
  }
  if (table->version.major != 1 || table->view == nullptr || types.size() != api.types.size()) {
    return false;
  }
  for (std::size_t i = 0; i < api.types.size(); ++i) {
    api.types[i] = reinterpret_cast<PyTypeObject*>(nb::object(types[i]).release().ptr());
  }
  api.is_grad_enabled = nb::borrow(is_grad_enabled).release().ptr();
  api.table = table;
  return true;
}

bool read_tensor(PyObject* tensor, Operand& operand) {
  const PyTypeObject* type = Py_TYPE(tensor);
  if (type != api.types[0] && type != api.types[1]) {
    return false;
  }
  TensorView view;
  if (api.table->view(tensor, &view) != 0 || view.device.type != kHostDevice) {
    return false;
  }
  const int dtype = dtype_of(view.dtype);
  if (dtype < 0 || !is_contiguous(view, operand.count)) {
    return false;
  }
  operand.rows = view.ndim == 0 ? 1 : static_cast<std::size_t>(view.shape[0]);
  operand.dtype = static_cast<DType>(dtype);
  operand.address = reinterpret_cast<Address>(view.data) + view.byte_offset;
  // A tensor without memory, of a class of torch's own.
  if (view.data == nullptr && operand.count != 0) {
    return false;
  }
  return !is_lazy_view(tensor);
}

bool is_followed(PyObject* tensor) {
  if (!may_require_grad(tensor)) {
    return false;
  }
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  const nb::object required = nb::steal(PyObject_GetAttr(tensor, name));
  if (!required.is_valid() || required.ptr() == Py_False) {
    return !required.is_valid();
  }
  const nb::object enabled = nb::steal(PyObject_CallNoArgs(api.is_grad_enabled));
  return !enabled.is_valid() || enabled.ptr() != Py_False;
}

}  // namespace phalanx::bindings
