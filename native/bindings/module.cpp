#include "core.h"
#include "environment.h"
#include "prepared.h"

NB_MODULE(_native, module) {
  using namespace phalanx::bindings;
  module.doc() = "The native core: messages between the ranks of a group on one host.";
  // Groups may outlive the interpreter if a script ends without leaving them: that is not a leak.
  nb::set_leak_warnings(false);
  bind_status(module);
  bind_reduce(module);
  bind_quantization(module);
  bind_overlap(module);
  bind_call_site(module);
  bind_flight_recorder(module);
  bind_sealed_memory(module);
  bind_arena(module);
  bind_cow_memory(module);
  bind_leases(module);
  bind_rows(module);
  bind_row_gradients(module);
  auto group = bind_group(module);
  bind_collectives(group);
  bind_composite(group);
  bind_mailbox(module, group);
  bind_environment(module);
  bind_direct_calls(module);
  bind_prepared(module);
  bind_plan(module);
}
