#include "phalanx/mailbox.h"

#include <nanobind/stl/string_view.h>

#include "core.h"

namespace phalanx::bindings {
namespace {

// All without the GIL: another thread may hold the mailbox while a long message moves.

MessagePtr py_isend(const PyGroup& self, Address data, std::size_t count, int dtype,
                    int destination, int tag) {
  const auto core = self.held();
  mark_call_site();
  const nb::gil_scoped_release release;
  return core->mailbox.send(pointer(data), count, static_cast<DType>(dtype), destination, tag,
                            true);
}

MessagePtr py_irecv(const PyGroup& self, Address data, std::size_t count, int dtype, int source,
                    int tag) {
  const auto core = self.held();
  mark_call_site();
  const nb::gil_scoped_release release;
  return core->mailbox.recv(pointer(data), count, static_cast<DType>(dtype), source, tag, true);
}

nb::object py_send(const PyGroup& self, Address data, std::size_t count, int dtype, int destination,
                   int tag, double timeout) {
  return run(self, timeout, [&](Core& core, const Bounds& bounds) {
    const auto message =
        core.mailbox.send(pointer(data), count, static_cast<DType>(dtype), destination, tag, false);
    return core.mailbox.wait(*message, bounds);
  });
}

nb::object py_recv(const PyGroup& self, Address data, std::size_t count, int dtype, int source,
                   int tag, double timeout) {
  int peer = source;
  nb::object status = run(self, timeout, [&](Core& core, const Bounds& bounds) {
    const auto message =
        core.mailbox.recv(pointer(data), count, static_cast<DType>(dtype), source, tag, false);
    const Status ended = core.mailbox.wait(*message, bounds);
    peer = message->peer();
    return ended;
  });
  return status.is_none() ? nb::int_(peer) : status;
}

nb::object py_wait(const PyGroup& self, Message& message, double timeout) {
  return run(self, timeout,
             [&](Core& core, const Bounds& bounds) { return core.mailbox.wait(message, bounds); });
}

bool py_test(const PyGroup& self, Message& message) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.test(message);
}

bool py_withdraw(const PyGroup& self, Message& message, int name) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.withdraw(message, static_cast<std::int16_t>(name));
}

MessagePtr py_begin_foreign(const PyGroup& self, std::string_view kind, std::size_t count,
                            int dtype, int name, int tag) {
  const auto core = self.held();
  mark_call_site();
  const nb::gil_scoped_release release;
  return core->mailbox.begin_foreign(kind_of(kind), count, static_cast<DType>(dtype),
                                     static_cast<std::int16_t>(name), tag);
}

// These two do nothing once the group is closed: the end of a message may be seen after it.
void py_foreign_waits(const PyGroup& self, Message& message) {
  if (const auto core = self.core) {
    const nb::gil_scoped_release release;
    core->mailbox.foreign_waits(message);
  }
}

void py_end_foreign(const PyGroup& self, Message& message, std::string_view outcome, int name) {
  const Code code = code_of(outcome);
  if (const auto core = self.core) {
    const nb::gil_scoped_release release;
    core->mailbox.end_foreign(message, code, static_cast<std::int16_t>(name));
  }
}

std::vector<MessagePtr> py_serve(const PyGroup& self) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.serve();
}

void py_stop(const PyGroup& self) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  core->mailbox.stop();
}

void py_watch(const PyGroup& self, const MessagePtr& message, double timeout) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  core->mailbox.watch(message, bounds_for(timeout).deadline);
}

}  // namespace

void bind_mailbox(nb::module_& module, nb::class_<PyGroup>& group) {
  nb::class_<Message>(module, "Message", "One send or recv under way.")
      .def_prop_ro("id", &Message::id)
      .def_prop_ro("done", &Message::done)
      .def_prop_ro(
          "status",
          [](const Message& self) { return self.done() ? to_python(self.status()) : nb::none(); })
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
      .def("withdraw", &py_withdraw, nb::arg("message"), nb::arg("name"))
      .def(
          "expect_foreign",
          [](const PyGroup& self, bool may_come) {
            const auto core = self.held();
            const nb::gil_scoped_release release;
            core->mailbox.expect_foreign(may_come);
          },
          nb::arg("may_come"))
      .def("begin_foreign", &py_begin_foreign, nb::arg("kind"), nb::arg("count"), nb::arg("dtype"),
           nb::arg("name"), nb::arg("tag"))
      .def("foreign_waits", &py_foreign_waits, nb::arg("message"))
      .def("end_foreign", &py_end_foreign, nb::arg("message"), nb::arg("outcome"), nb::arg("name"))
      .def("serve", &py_serve)
      .def("stop", &py_stop)
      .def("watch", &py_watch, nb::arg("message"), nb::arg("timeout"))
      .def_prop_ro("outstanding",
                   [](const PyGroup& self) { return self.held()->mailbox.outstanding(); })
      .def_prop_ro("early_peak", [](const PyGroup& self) {
        return self.core ? self.core->mailbox.early_peak() : 0;
      });
}

}  // namespace phalanx::bindings
