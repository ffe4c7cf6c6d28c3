// The frames of the calling thread's Python code, innermost first.
//
// PyFrame_GetBack makes a Python object of every frame that it passes, which costs as much as a
// small collective's whole flight recorder. So the interpreter's own frames are read, where their
// structure is known (3.11 to 3.13); other versions get the public functions.
#pragma once

#include <Python.h>

namespace phalanx::bindings {

class Frames {
 public:
  // At the innermost frame. The GIL is held, and no Python code runs while this lives.
  Frames();
  // Where the public functions are used it has a reference to drop.
  ~Frames();  // NOLINT(performance-trivially-destructible)
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  bool end() const { return frame_ == nullptr; }
  void next();
  // Borrowed from the frame.
  PyCodeObject* code() const;
  // The byte in the code that the frame stands at; PyCode_Addr2Line makes a line of it.
  int address() const;

 private:
  void skip_incomplete();

  void* frame_;
};

}  // namespace phalanx::bindings
