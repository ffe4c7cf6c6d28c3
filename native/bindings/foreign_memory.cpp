#include "foreign_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

namespace phalanx::bindings {

CarefulReader::CarefulReader() {
  if (pipe2(pipe_.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    raise_system_error(errno);
  }
}

CarefulReader::~CarefulReader() {
  close(pipe_[0]);
  close(pipe_[1]);
}

bool CarefulReader::read(Word address, void* to, std::size_t size) const {
  const auto expected = static_cast<ssize_t>(size);
  return write(pipe_[1], reinterpret_cast<const void*>(address), size) == expected &&
         ::read(pipe_[0], to, size) == expected;
}

}  // namespace phalanx::bindings
