#include "tensor_memory.h"

#include <algorithm>

namespace phalanx::bindings {
namespace {

// In a tensor of Python: the position of the pointer to the C++ object. In that object: the
// positions of the bits of views, and of the pointers to autograd's state, to the counter of
// versions and to the storage; `count`: the position of the count in the counter; `data`: that of
// the pointer to the data in the storage. Guarded by the GIL; set once.
struct Layout {
  std::size_t object = 0;
  std::size_t bytes = 0;
  std::size_t storage = 0;
  std::size_t autograd = 0;
  std::size_t version = 0;
  std::size_t keys = 0;
  Word lazy = 0;
  std::size_t count = 0;
  std::size_t storage_bytes = 0;
  std::size_t data = 0;
  bool is_confirmed = false;
};
Layout known;

const void* object_of(PyObject* tensor) {
  return reinterpret_cast<const void*>(word_at(tensor, known.object));
}

Word address_attribute(nb::handle object) { return nb::cast<Word>(object.attr("_cdata")); }

// Reads tensors by a layout that may be wrong.
class Experiment {
 public:
  explicit Experiment(const Layout& layout) : layout_(layout) {}

  // Whether the pointers to the object, the storage and the data are where they should be.
  bool has_pointers(nb::handle tensor) const {
    const nb::object storage = tensor.attr("untyped_storage")();
    const Word object = address_attribute(tensor);
    const Word address = address_attribute(storage);
    return reader_.has(address_of(tensor) + layout_.object, object, sizeof(Word)) &&
           reader_.has(object + layout_.storage, address, sizeof(Word)) &&
           reader_.has(address + layout_.data, nb::cast<Word>(storage.attr("data_ptr")()),
                       sizeof(Word));
  }
  Word lazy_bits(nb::handle tensor) const { return field(tensor, layout_.keys) & layout_.lazy; }
  bool has_autograd(nb::handle tensor) const { return field(tensor, layout_.autograd) != 0; }
  bool has_version(nb::handle tensor) const {
    return reader_.has(field(tensor, layout_.version) + layout_.count,
                       nb::cast<std::uint32_t>(tensor.attr("_version")), sizeof(std::uint32_t));
  }

 private:
  static Word address_of(nb::handle object) { return reinterpret_cast<Word>(object.ptr()); }
  Word field(nb::handle tensor, std::size_t position) const {
    return reader_.pointer_at(address_attribute(tensor) + position);
  }

  const Layout& layout_;
  CarefulReader reader_;
};

template <class Predicate>
bool all_of(const nb::list& tensors, Predicate predicate) {
  return !tensors.empty() && std::all_of(tensors.begin(), tensors.end(), predicate);
}

std::size_t number(const nb::dict& layout, const char* name) {
  return nb::cast<std::size_t>(layout[name]);
}

}  // namespace

bool set_tensor_layout(const nb::dict& layout, const nb::list& plain, const nb::list& negative,
                       const nb::list& conjugate, const nb::list& graded, const nb::list& changed) {
  Layout given{.object = number(layout, "object"),
               .bytes = number(layout, "bytes"),
               .storage = number(layout, "storage"),
               .autograd = number(layout, "autograd"),
               .version = number(layout, "version"),
               .keys = number(layout, "keys"),
               .lazy = number(layout, "lazy"),
               .count = number(layout, "count"),
               .storage_bytes = number(layout, "storage_bytes"),
               .data = number(layout, "data")};
  const Experiment experiment(given);
  for (const nb::list* list : {&plain, &negative, &conjugate, &graded, &changed}) {
    if (!all_of(*list, [&](nb::handle each) { return experiment.has_pointers(each); })) {
      return false;
    }
  }
  const Word negative_bit = experiment.lazy_bits(negative[0]);
  const Word conjugate_bit = experiment.lazy_bits(conjugate[0]);
  const auto has_bits = [&](const nb::list& list, Word bits) {
    return all_of(list, [&](nb::handle each) { return experiment.lazy_bits(each) == bits; });
  };
  given.is_confirmed =
      has_bits(plain, 0) && has_bits(negative, negative_bit) &&
      has_bits(conjugate, conjugate_bit) && negative_bit != 0 && conjugate_bit != 0 &&
      (negative_bit ^ conjugate_bit) == given.lazy &&
      all_of(graded, [&](nb::handle each) { return experiment.has_autograd(each); }) &&
      all_of(changed, [&](nb::handle each) {
        return !experiment.has_autograd(each) && experiment.has_version(each);
      });
  known = given;
  return known.is_confirmed;
}

bool is_lazy_view(PyObject* tensor) {
  return (word_at(object_of(tensor), known.keys) & known.lazy) != 0;
}

bool may_require_grad(PyObject* tensor) { return word_at(object_of(tensor), known.autograd) != 0; }

VersionCounter* version_counter(PyObject* tensor) {
  const Word counter = word_at(object_of(tensor), known.version);
  return counter == 0 ? nullptr : reinterpret_cast<VersionCounter*>(counter + known.count);
}

// The fields from the pointer to the storage on: before it are counters of references. In the
// storage likewise, from the pointer to the data on.
TensorState::TensorState(nb::handle tensor)
    : tensor_(nb::borrow(tensor)), storage_(tensor.attr("untyped_storage")()) {
  if (!known.is_confirmed) {
    return;
  }
  object_ = object_of(tensor.ptr());
  const auto words = [](const void* memory, std::size_t from, std::size_t to) {
    const auto* begin = static_cast<const std::byte*>(memory);
    return Words{begin + from, {begin + from, begin + to}};
  };
  fields_ = words(object_, known.storage, known.bytes);
  const auto* storage = reinterpret_cast<const void*>(address_attribute(storage_));
  memory_ = words(storage, known.data, known.storage_bytes);
}

bool TensorState::Words::are_current() const {
  return std::memcmp(begin, values.data(), values.size()) == 0;
}

bool TensorState::is_current() const {
  return object_ != nullptr && object_of(tensor_.ptr()) == object_ && fields_.are_current() &&
         memory_.are_current();
}

}  // namespace phalanx::bindings
