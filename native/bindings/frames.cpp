#include <patchlevel.h>

#ifdef Py_LIMITED_API
#define PHALANX_KNOWS_FRAMES 0
#else
#define PHALANX_KNOWS_FRAMES (PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030e0000)
#endif

#if PHALANX_KNOWS_FRAMES
#define Py_BUILD_CORE 1
#include <Python.h>
#include <internal/pycore_frame.h>
#endif

#include "frames.h"

#if PY_VERSION_HEX < 0x030b0000
#include <frameobject.h>
#endif

namespace phalanx::bindings {

#if PHALANX_KNOWS_FRAMES

namespace {

_PyInterpreterFrame* frame_in(void* frame) { return static_cast<_PyInterpreterFrame*>(frame); }

PyCodeObject* code_in(_PyInterpreterFrame* frame) {
#if PY_VERSION_HEX >= 0x030d0000
  return _PyFrame_GetCode(frame);
#else
  return frame->f_code;
#endif
}

}  // namespace

Frames::Frames()
#if PY_VERSION_HEX >= 0x030d0000
    : frame_(PyThreadState_Get()->current_frame) {
#else
    : frame_(PyThreadState_Get()->cframe->current_frame) {
#endif
  skip_incomplete();
}

Frames::~Frames() = default;

void Frames::next() {
  frame_ = frame_in(frame_)->previous;
  skip_incomplete();
}

// Skips frames that the interpreter is setting up, and those of its own C code.
void Frames::skip_incomplete() {
  while (frame_ != nullptr && _PyFrame_IsIncomplete(frame_in(frame_))) {
    frame_ = frame_in(frame_)->previous;
  }
}

PyCodeObject* Frames::code() const { return code_in(frame_in(frame_)); }

int Frames::address() const {
  return _PyInterpreterFrame_LASTI(frame_in(frame_)) * static_cast<int>(sizeof(_Py_CODEUNIT));
}

int Frames::line() const { return PyCode_Addr2Line(code(), address()); }

#else

namespace {

PyFrameObject* frame_in(void* frame) { return static_cast<PyFrameObject*>(frame); }

#ifdef Py_LIMITED_API

PyFrameObject* back_of(PyFrameObject* frame) {
  static PyObject* const name = PyUnicode_InternFromString("f_back");
  PyObject* back = PyObject_GetAttr(reinterpret_cast<PyObject*>(frame), name);
  if (back == nullptr || Py_IsNone(back) != 0) {
    PyErr_Clear();  // out of memory: the frames end here
    Py_XDECREF(back);
    return nullptr;
  }
  return reinterpret_cast<PyFrameObject*>(back);
}

int address_in(PyFrameObject* frame) {
  PyObject* address = PyObject_GetAttrString(reinterpret_cast<PyObject*>(frame), "f_lasti");
  const long value = address == nullptr ? -1 : PyLong_AsLong(address);
  PyErr_Clear();  // out of memory: an unknown address
  Py_XDECREF(address);
  return static_cast<int>(value);
}

#else

PyFrameObject* back_of(PyFrameObject* frame) { return PyFrame_GetBack(frame); }

int address_in(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti * 2;  // counted in instructions
#endif
}

#endif

}  // namespace

Frames::Frames() : frame_(PyThreadState_GetFrame(PyThreadState_Get())) {}

Frames::~Frames() { Py_XDECREF(static_cast<PyObject*>(frame_)); }

void Frames::next() {
  PyFrameObject* back = back_of(frame_in(frame_));
  Py_DECREF(static_cast<PyObject*>(frame_));
  frame_ = back;
}

PyCodeObject* Frames::code() const {
  PyCodeObject* code = PyFrame_GetCode(frame_in(frame_));
  Py_DECREF(reinterpret_cast<PyObject*>(code));  // the frame holds another reference
  return code;
}

int Frames::address() const { return address_in(frame_in(frame_)); }

int Frames::line() const { return PyFrame_GetLineNumber(frame_in(frame_)); }

#endif

}  // namespace phalanx::bindings
