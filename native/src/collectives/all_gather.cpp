#include "exchange.h"
#include "gather.h"
#include "phalanx/collectives.h"

namespace phalanx {
namespace {

Status gather_by_exchange(Collective& collective, const void* input, void* const* outputs,
                          std::size_t bytes) {
  const int peer = 1 - collective.self();
  if (bytes > kSmallBytes) {
    publish_location(collective, input, bytes);
  }
  const auto stage = [&](std::byte* to, Span span) {
    copy_bytes(to, at(input, span.begin), span.size);
  };
  Exchange exchange(collective, bytes);
  Status status = exchange.enter(stage);
  if (!status.ok()) {
    return status;
  }
  if (all_located(collective)) {
    const std::byte* source = map_source(collective, peer, status);
    if (source == nullptr) {
      return status;
    }
    deliver(outputs[peer], source, bytes, bytes);
    status = exit_barrier(collective);
  } else {
    status = exchange.run(bytes + 1, stage, [&](const std::byte* from, Span span) {
      deliver(at(outputs[peer], span.begin), from, span.size, bytes);
    });
  }
  deliver(outputs[collective.self()], input, bytes, bytes);
  return status;
}

}  // namespace

Status all_gather(Group& group, const void* input, void* const* outputs, std::size_t count,
                  DType dtype, const Bounds& bounds) {
  Collective collective(group, {.count = count, .kind = Kind::all_gather, .dtype = dtype}, bounds);
  const std::size_t bytes = count * size_of(dtype);
  if (group.ranks() == 2) {
    return collective.status().ok() ? gather_by_exchange(collective, input, outputs, bytes)
                                    : collective.status();
  }
  const auto everyone = [](int) { return true; };
  return gather_to(collective, input, outputs, bytes, everyone, everyone);
}

}  // namespace phalanx
