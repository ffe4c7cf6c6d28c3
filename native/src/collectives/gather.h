// The common part of gather and all_gather: some ranks take the data of all others.
#pragma once

#include "stream.h"

namespace phalanx {

template <class Gives, class Takes>
Status gather_to(Collective& collective, const void* input, void* const* outputs, std::size_t bytes,
                 Gives gives, Takes takes) {
  const int self = collective.self();
  const Chunks chunks(collective, bytes);
  if (!collective.status().ok()) {
    return collective.status();
  }
  if (gives(self) && !chunks.small()) {
    publish_location(collective, input, bytes);
  }
  const Status status = stream(
      collective, chunks, Peers::all, gives, takes,
      [&](std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        copy_bytes(chunks.place(piece, chunk), at(input, span.begin), span.size);
      },
      [&](int peer, const std::byte* piece, std::uint64_t chunk) {
        const Span span = chunks.span(chunk);
        deliver(at(outputs[peer], span.begin), chunks.place(piece, chunk), span.size, bytes);
      },
      [&](int peer, Status& mapped) {
        if (const std::byte* source = map_source(collective, peer, mapped)) {
          deliver(outputs[peer], source, bytes, bytes);
        }
      });
  if (status.ok() && takes(self)) {
    deliver(outputs[self], input, bytes, bytes);
  }
  return status;
}

}  // namespace phalanx
