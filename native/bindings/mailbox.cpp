#include "phalanx/mailbox.h"

#include <nanobind/stl/string_view.h>

#include <algorithm>

#include "core.h"

namespace phalanx::bindings {
namespace {

// All without the GIL: another thread may hold the mailbox's lock while a long message moves.

MessagePtr py_isend(const PyGroup& self, Address data, std::size_t count, int dtype,
                    int destination, int tag) {
  const auto core = self.require_core();
  mark_call_site();
  const WithoutGil released;
  return core->mailbox.isend(pointer(data), count, static_cast<DType>(dtype), destination, tag,
                             true);
}

MessagePtr py_irecv(const PyGroup& self, Address data, std::size_t count, int dtype, int source,
                    int tag) {
  const auto core = self.require_core();
  mark_call_site();
  const WithoutGil released;
  return core->mailbox.irecv(pointer(data), count, static_cast<DType>(dtype), source, tag, true);
}

nb::object py_send(const PyGroup& self, Address data, std::size_t count, int dtype, int destination,
                   int tag, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return core.mailbox.send(pointer(data), count, static_cast<DType>(dtype), destination, tag,
                             bounds);
  });
}

nb::object py_recv(const PyGroup& self, Address data, std::size_t count, int dtype, int source,
                   int tag, double timeout) {
  int peer = source;
  nb::object status = run(self, timeout, [&](Core& core, const Bounds& bounds) {
    return core.mailbox.recv(pointer(data), count, static_cast<DType>(dtype), source, tag, bounds,
                             &peer);
  });
  return status.is_none() ? nb::int_(peer) : status;
}

nb::object py_wait(const PyGroup& self, Message& message, double timeout) {
  return run(self, timeout,
             [&](Core& core, const Bounds& bounds) { return core.mailbox.wait(message, bounds); });
}

bool py_test(const PyGroup& self, Message& message) {
  const auto core = self.require_core();
  const WithoutGil released;
  return core->mailbox.test(message);
}

bool py_withdraw(const PyGroup& self, Message& message, int rank) {
  const auto core = self.require_core();
  const WithoutGil released;
  return core->mailbox.withdraw(message, static_cast<std::int16_t>(rank));
}

MessagePtr py_begin_remote(const PyGroup& self, std::string_view kind, std::size_t count, int dtype,
                           int rank, int tag) {
  const auto core = self.require_core();
  mark_call_site();
  const WithoutGil released;
  return core->mailbox.begin_remote(kind_of(kind), count, static_cast<DType>(dtype),
                                    static_cast<std::int16_t>(rank), tag);
}

// These two do nothing once the group is closed: the end of a message may be noticed after that.
void py_begin_remote_wait(const PyGroup& self, Message& message) {
  if (const auto core = self.core) {
    const WithoutGil released;
    core->mailbox.begin_remote_wait(message);
  }
}

void py_end_remote(const PyGroup& self, Message& message, std::string_view outcome, int rank) {
  const Code code = code_of(outcome);
  if (const auto core = self.core) {
    const WithoutGil released;
    core->mailbox.end_remote(message, code, static_cast<std::int16_t>(rank));
  }
}

std::vector<MessagePtr> py_serve(const PyGroup& self) {
  const auto core = self.require_core();
  const WithoutGil released;
  return core->mailbox.serve();
}

void py_stop(const PyGroup& self) {
  const auto core = self.require_core();
  const WithoutGil released;
  core->mailbox.stop();
}

void py_watch(const PyGroup& self, const MessagePtr& message, double timeout) {
  const auto core = self.require_core();
  const WithoutGil released;
  const auto span = std::chrono::duration<double>(std::min(timeout, 24.0 * 3600 * 365));
  core->mailbox.watch(message, Clock::now() + std::chrono::duration_cast<Clock::duration>(span));
}

}  // namespace

void bind_mailbox(nb::module_& module, nb::class_<PyGroup>& group) {
  nb::class_<Message>(module, "Message", "A send or recv under way.")
      .def_prop_ro("id", &Message::id)
      .def_prop_ro("done", &Message::done)
      .def_prop_ro(
          "status",
          [](const Message& self) { return self.done() ? to_python(self.failure()) : nb::none(); })
      .def_prop_ro("peer", &Message::peer);
  group
      .def("send", &py_send, nb::arg("data"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("destination"), nb::arg("tag"), nb::arg("timeout"))
      .def("recv", &py_recv, nb::arg("data"), nb::arg("count"), nb::arg("dtype"), nb::arg("source"),
           nb::arg("tag"), nb::arg("timeout"))
      .def("isend", &py_isend, nb::arg("data"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("destination"), nb::arg("tag"))
      .def("irecv", &py_irecv, nb::arg("data"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("source"), nb::arg("tag"))
      .def("wait", &py_wait, nb::arg("message"), nb::arg("timeout"))
      .def("test", &py_test, nb::arg("message"))
      .def("withdraw", &py_withdraw, nb::arg("message"), nb::arg("rank"))
      .def(
          "expect_remote",
          [](const PyGroup& self, bool may_come) {
            const auto core = self.require_core();
            const WithoutGil released;
            core->mailbox.expect_remote(may_come);
          },
          nb::arg("may_come"))
      .def("begin_remote", &py_begin_remote, nb::arg("kind"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("rank"), nb::arg("tag"))
      .def("begin_remote_wait", &py_begin_remote_wait, nb::arg("message"))
      .def("end_remote", &py_end_remote, nb::arg("message"), nb::arg("outcome"), nb::arg("rank"))
      .def("serve", &py_serve)
      .def("stop", &py_stop)
      .def("watch", &py_watch, nb::arg("message"), nb::arg("timeout"))
      .def_prop_ro("outstanding",
                   [](const PyGroup& self) { return self.require_core()->mailbox.outstanding(); })
      .def_prop_ro("unexpected_peak", [](const PyGroup& self) {
        return self.core ? self.core->mailbox.unexpected_peak() : 0;
      });
}

}  // namespace phalanx::bindings
