#include "options.h"

namespace phalanx::bindings {

bool has_field(const nb::list& objects, const std::vector<std::int64_t>& values, int position,
               int size) {
  const CarefulReader reader;
  bool matches = objects.size() == values.size() && !values.empty();
  for (std::size_t i = 0; matches && i < values.size(); ++i) {
    const Word value =
        reader.pointer_at(reinterpret_cast<Word>(nb::handle(objects[i]).ptr()) + sizeof(PyObject));
    matches = reader.has(value + position, static_cast<Word>(values[i]), size);
  }
  return matches;
}

}  // namespace phalanx::bindings
