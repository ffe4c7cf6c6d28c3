#include "phalanx/sealed_memory.h"

#include <cerrno>

#include "core.h"

namespace phalanx::bindings {

void bind_sealed_memory(nb::module_& module) {
  module.def(
      "create_sealed_memory",
      [](const char* name, std::size_t size) {
        const int descriptor = create_sealed_memory(name, size);
        if (descriptor < 0) {
          raise_system_error(errno);
        }
        return descriptor;
      },
      nb::arg("name"), nb::arg("size"));
}

}  // namespace phalanx::bindings
