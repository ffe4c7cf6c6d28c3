#include "options.h"

#include <malloc.h>

#include <algorithm>

namespace phalanx::bindings {
namespace {

std::int64_t number_at(const std::byte* memory, int position, int size) {
  return size == 1 ? field_at<std::uint8_t>(memory, position)
                   : field_at<std::int64_t>(memory, position);
}

}  // namespace

int find_field(const nb::list& objects, const std::vector<std::int64_t>& values, int size) {
  std::vector<const std::byte*> memories;
  std::size_t bytes = SIZE_MAX;
  for (const nb::handle object : objects) {
    memories.push_back(memory_of(object.ptr()));
    bytes = std::min(bytes, malloc_usable_size(const_cast<std::byte*>(memories.back())));
  }
  if (memories.empty()) {
    return -1;
  }
  int found = -1;
  for (int position = 0; position + size <= static_cast<int>(bytes); position += size) {
    bool matches = memories.size() == values.size();
    for (std::size_t i = 0; matches && i < values.size(); ++i) {
      matches = number_at(memories[i], position, size) == values[i];
    }
    if (matches && found >= 0) {
      return -1;
    }
    found = matches ? position : found;
  }
  return found;
}

}  // namespace phalanx::bindings
