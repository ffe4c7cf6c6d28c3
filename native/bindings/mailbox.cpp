#include "phalanx/mailbox.h"

#include "core.h"

namespace phalanx::bindings {
namespace {

MessagePtr py_send(const PyGroup& self, Address data, std::size_t count, int dtype, int destination,
                   int tag, bool detached) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.send(pointer(data), count, static_cast<DType>(dtype), destination, tag,
                            detached);
}

MessagePtr py_recv(const PyGroup& self, Address data, std::size_t count, int dtype, int source,
                   int tag, bool detached) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.recv(pointer(data), count, static_cast<DType>(dtype), source, tag, detached);
}

nb::object py_wait(const PyGroup& self, Message& message, double timeout) {
  return run(self, timeout,
             [&](Core& core, const Bounds& bounds) { return core.mailbox.wait(message, bounds); });
}

std::vector<MessagePtr> py_serve(const PyGroup& self) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.serve();
}

// All without the GIL: another thread may hold the mailbox while a large message streams.

void py_stop(const PyGroup& self) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  core->mailbox.stop();
}

void py_watch(const PyGroup& self, const MessagePtr& message) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  core->mailbox.watch(message);
}

std::size_t py_outstanding(const PyGroup& self) {
  const auto core = self.held();
  const nb::gil_scoped_release release;
  return core->mailbox.outstanding();
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
           nb::arg("destination"), nb::arg("tag"), nb::arg("detached"))
      .def("recv", &py_recv, nb::arg("data"), nb::arg("count"), nb::arg("dtype"), nb::arg("source"),
           nb::arg("tag"), nb::arg("detached"))
      .def("wait", &py_wait, nb::arg("message"), nb::arg("timeout"))
      .def("serve", &py_serve)
      .def("stop", &py_stop)
      .def("watch", &py_watch, nb::arg("message"))
      .def_prop_ro("outstanding", &py_outstanding);
}

}  // namespace phalanx::bindings
