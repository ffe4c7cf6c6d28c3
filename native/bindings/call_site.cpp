// Finds the call site of an operation in the user's code: the innermost frame that belongs neither
// to torch nor to Phalanx. The search runs for every operation. So results are cached by code
// object, and only a new call site costs more than a walk along the frames.
#include "phalanx/call_site.h"

#include <Python.h>
#include <nanobind/stl/string.h>

#include <mutex>
#include <string>
#include <unordered_map>

#include "core.h"
#include "frames.h"
#include "phalanx/flight_recorder.h"

namespace phalanx::bindings {
namespace {

// The number of call sites of a code object is bounded only by its length.
struct Code {
  nb::object owner;  // keeps the address from being reused
  bool is_library = false;
  std::unordered_map<int, std::uint32_t> sites;  // by address
};

// Guarded by the GIL.
struct Codes {
  std::vector<std::string> library_prefixes;
  std::unordered_map<PyCodeObject*, Code> cached_code;
};

Codes& codes() {
  // Never destroyed: it holds Python objects, and the interpreter ends before static objects do.
  static Codes* const all = new Codes;
  return *all;
}

constexpr std::size_t kMaxCodes = 8192;

std::string path_of(PyCodeObject* code) {
  const nb::object path = nb::borrow(reinterpret_cast<PyObject*>(code)).attr("co_filename");
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(path.ptr(), &size);
  if (text == nullptr) {  // a path that is not valid Unicode
    PyErr_Clear();
    return "?";
  }
  return {text, static_cast<std::size_t>(size)};
}

Code& cached_code(PyCodeObject* code) {
  Codes& all = codes();
  if (const auto found = all.cached_code.find(code); found != all.cached_code.end()) {
    return found->second;
  }
  // A notebook that has run very many cells. Dropping the last reference to a code object may run
  // Python, so that happens once the table is consistent again.
  std::unordered_map<PyCodeObject*, Code> old;
  if (all.cached_code.size() == kMaxCodes) {
    old.swap(all.cached_code);
  }
  Code& added = all.cached_code[code];
  added.owner = nb::borrow(reinterpret_cast<PyObject*>(code));
  const std::string path = path_of(code);
  for (const std::string& prefix : all.library_prefixes) {
    added.is_library = added.is_library || path.starts_with(prefix);
  }
  return added;
}

std::uint32_t site_of(const Frames& at, Code& code) {
  const auto [site, inserted] = code.sites.try_emplace(at.address(), 0);
  if (inserted) {
    site->second = call_site_number(path_of(at.code()) + ":" + std::to_string(at.line()));
    if (FlightRecorder* recorder = FlightRecorder::own()) {
      recorder->publish_sites();
    }
  }
  return site->second;
}

void set_library_code(std::vector<std::string> prefixes) {
  codes().library_prefixes = std::move(prefixes);
  std::unordered_map<PyCodeObject*, Code> old;
  old.swap(codes().cached_code);
}

// Whether this thread runs operations for others.
bool runs_for_others() { return current_caller().thread == Caller::kGroup; }

void set_caller(std::uint32_t site) { current_caller() = {.site = site, .thread = Caller::kGroup}; }

}  // namespace

std::uint32_t find_call_site() {
  for (Frames at; !at.end(); at.next()) {
    if (Code& code = cached_code(at.code()); !code.is_library) {
      return site_of(at, code);
    }
  }
  return 0;
}

void mark_call_site() {
  if (!runs_for_others()) {
    current_caller().site = find_call_site();
  }
}

void mark_call_site(std::uint32_t site) {
  if (!runs_for_others()) {
    current_caller().site = site;
  }
}

void bind_call_site(nb::module_& module) {
  module.def("set_library_code", &set_library_code, nb::arg("prefixes"));
  module.def("call_site", &find_call_site);
  module.def("call_site_text", &call_site_text, nb::arg("number"));
  module.def("set_caller", &set_caller, nb::arg("site"));
}

}  // namespace phalanx::bindings
