// The frames of the calling thread's Python code, innermost first.
//
// PyFrame_GetBack creates a Python object for every frame that it passes, which costs as much as
// the flight recorder's work for a small collective. So the interpreter's own frames are read in
// versions with a known structure (3.11 to 3.13). Other versions use the public functions, and the
// stable ABI, which lacks some of these, uses attributes.
#pragma once

#include <Python.h>

namespace phalanx::bindings {

class Frames {
 public:
  // Starts at the innermost frame. Requires the GIL; no Python code may run while this lives.
  Frames();
  // With the public functions there is a reference to drop.
  ~Frames();  // NOLINT(performance-trivially-destructible)
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  bool end() const { return frame_ == nullptr; }
  void next();
  // Borrowed from the frame.
  PyCodeObject* code() const;
  // The byte offset of the frame in its code.
  int address() const;
  // The number of the line of address().
  int line() const;

 private:
  void skip_incomplete();

  void* frame_;
};

}  // namespace phalanx::bindings
