#include "tensor_memory.h"

#include <malloc.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace phalanx::bindings {
namespace {

using Word = std::uint64_t;

// The position of the pointer to the C++ object in a tensor of Python, and positions in the C++
// object: of the bits of views, of the pointers to autograd's state and to the counter of versions.
// `count`: the position in what the latter points to. Guarded by the GIL; set once.
struct Positions {
  int object = -1;  // -1: unknown
  int keys = -1;
  Word lazy = 0;
  int autograd = -1;
  int version = -1;
  int count = -1;
};
Positions known;

Word word_at(const void* memory, int position) {
  Word value;
  std::memcpy(&value, static_cast<const char*>(memory) + position, sizeof value);
  return value;
}

const void* object_of(PyObject* tensor) {
  return reinterpret_cast<const void*>(word_at(tensor, known.object));
}

Word address_attribute(nb::handle object) { return nb::cast<Word>(object.attr("_cdata")); }

int size_of_object(const void* object) {
  return static_cast<int>(malloc_usable_size(const_cast<void*>(object)) / sizeof(Word) *
                          sizeof(Word));
}

// Returns the only position in the first `size` bytes of every memory that has its value; -1 if
// there is none, or more than one.
template <class Memory, class Value>
int find_position(int size, std::size_t count, Memory memory, Value value) {
  int found = -1;
  for (int position = 0; position + 8 <= size; position += 8) {
    bool matches = count != 0;
    for (std::size_t i = 0; matches && i < count; ++i) {
      matches = word_at(memory(i), position) == value(i);
    }
    if (matches && found >= 0) {
      return -1;
    }
    found = matches ? position : found;
  }
  return found;
}

int smallest_size(std::initializer_list<const nb::list*> lists) {
  int size = INT32_MAX;
  for (const nb::list* list : lists) {
    for (const nb::handle each : *list) {
      size = std::min(size, size_of_object(object_of(each.ptr())));
    }
  }
  return size;
}

// Finds the only bit that is set in all of `with` and clear in all of `without`.
bool find_bit(const nb::list& without, const nb::list& with, int& position, Word& bit) {
  const int size = smallest_size({&without, &with});
  int candidates = 0;
  for (int at = 0; at + 8 <= size; at += 8) {
    Word all_with = ~Word{0};
    Word any_without = 0;
    for (const nb::handle each : with) {
      all_with &= word_at(object_of(each.ptr()), at);
    }
    for (const nb::handle each : without) {
      any_without |= word_at(object_of(each.ptr()), at);
    }
    if (const Word bits = all_with & ~any_without; bits != 0) {
      candidates += __builtin_popcountll(bits);
      position = at;
      bit = bits;
    }
  }
  return candidates == 1;
}

bool find_views(const nb::list& plain, const nb::list& negative, const nb::list& conjugate) {
  int conjugate_at = -1;
  Word negative_bit = 0;
  Word conjugate_bit = 0;
  const bool found = find_bit(plain, negative, known.keys, negative_bit) &&
                     find_bit(plain, conjugate, conjugate_at, conjugate_bit);
  known.lazy = negative_bit | conjugate_bit;
  return found && known.keys == conjugate_at;
}

// Finds the only pointer that is null in all of `plain`, and in none of `graded`.
bool find_autograd(const nb::list& plain, const nb::list& graded) {
  const int size = smallest_size({&plain, &graded});
  int found = 0;
  for (int at = 0; at + 8 <= size; at += 8) {
    bool differs = true;
    for (const nb::handle each : plain) {
      differs = differs && word_at(object_of(each.ptr()), at) == 0;
    }
    for (const nb::handle each : graded) {
      differs = differs && word_at(object_of(each.ptr()), at) != 0;
    }
    if (differs) {
      known.autograd = at;
      ++found;
    }
  }
  return found == 1;
}

constexpr int kCounterBytes = 32;
using CounterMemory = std::array<std::byte, kCounterBytes>;

// Reads memory that may not exist.
bool read_carefully(Word address, CounterMemory& memory) {
  const iovec to{.iov_base = memory.data(), .iov_len = memory.size()};
  const iovec from{.iov_base = reinterpret_cast<void*>(address), .iov_len = memory.size()};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == kCounterBytes;
}

// Finds the only pointer to something that has the version at the same position in all tensors.
bool find_counter(const nb::list& changed) {
  const int size = smallest_size({&changed});
  int found = 0;
  for (int at = 0; at + 8 <= size; at += 8) {
    std::array<bool, kCounterBytes / 4> matches;
    matches.fill(true);
    for (const nb::handle each : changed) {
      CounterMemory memory;
      if (!read_carefully(word_at(object_of(each.ptr()), at), memory)) {
        matches.fill(false);
        break;
      }
      const auto version = nb::cast<std::uint32_t>(each.attr("_version"));
      for (std::size_t i = 0; i < matches.size(); ++i) {
        matches[i] = matches[i] && std::memcmp(&memory[4 * i], &version, sizeof version) == 0;
      }
    }
    for (std::size_t i = 0; i < matches.size(); ++i) {
      if (matches[i]) {
        known.version = at;
        known.count = static_cast<int>(4 * i);
        ++found;
      }
    }
  }
  return found == 1;
}

}  // namespace

bool find_tensor_memory(const nb::list& plain, const nb::list& negative, const nb::list& conjugate,
                        const nb::list& graded, const nb::list& changed) {
  std::vector<PyObject*> tensors;
  std::vector<Word> addresses;
  for (const nb::list* list : {&plain, &negative, &conjugate}) {
    for (const nb::handle each : *list) {
      tensors.push_back(each.ptr());
      addresses.push_back(address_attribute(each));
    }
  }
  const int head =
      tensors.empty() ? 0 : nb::cast<int>(nb::handle(tensors[0]).type().attr("__basicsize__"));
  known.object = find_position(
      head, tensors.size(), [&](std::size_t i) { return tensors[i]; },
      [&](std::size_t i) { return addresses[i]; });
  return known.object >= 0 && find_views(plain, negative, conjugate) &&
         find_autograd(changed, graded) && find_counter(changed);
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
  if (known.object < 0) {
    return;
  }
  const void* object = object_of(tensor.ptr());
  const auto* storage = reinterpret_cast<const void*>(address_attribute(storage_));
  const Word data = nb::cast<Word>(storage_.attr("data_ptr")());
  const auto words_from = [](const void* memory, Word value) {
    const int size = size_of_object(memory);
    const auto* begin = static_cast<const Word*>(memory);
    const auto* end = begin + size / 8;
    const auto* first = std::find(begin, end, value);
    return first == end ? Words{} : Words{first, {first, end}};
  };
  fields_ = words_from(object, reinterpret_cast<Word>(storage));
  memory_ = words_from(storage, data);
  object_ = fields_.begin != nullptr && memory_.begin != nullptr ? object : nullptr;
}

bool TensorState::Words::are_current() const {
  return std::memcmp(begin, values.data(), values.size() * sizeof(Word)) == 0;
}

bool TensorState::is_current() const {
  return object_ != nullptr && object_of(tensor_.ptr()) == object_ && fields_.are_current() &&
         memory_.are_current();
}

}  // namespace phalanx::bindings
