#include "phalanx/agreement.h"

#include "phalanx/hooks.h"

namespace phalanx {

Decision Agreement::decide(int round, int rank, Decision wanted, Status& status) const {
  status = segment_.allocate_round(round);
  if (!status.ok()) {
    return Decision::none;
  }
  Decision found = Decision::none;
  PHALANX_STEP("decide: claim the decision");
  // Pairs with the load in `decision`: what a rank did before it entered the round is visible to
  // those that find it entered; and all ranks see the decisions in one order.
  const bool is_first = segment_.decision(round, rank)
                            .compare_exchange_strong(found, wanted, std::memory_order_seq_cst);
  return is_first ? wanted : found;
}

Decision Agreement::decision(int round, int rank) const {
  PHALANX_STEP("decision: look");
  return segment_.decision(round, rank).load(std::memory_order_seq_cst);
}

void Agreement::publish(int round, const SegmentLocation& location) const {
  AgreementRound& own = segment_.agreement_round(round);
  own.pid = location.pid;
  own.descriptor = location.descriptor;
  own.nonce = location.nonce;
  PHALANX_STEP("publish: show the location");
  // Pairs with the load in `location`.
  own.is_published.store(1, std::memory_order_release);
}

std::optional<SegmentLocation> Agreement::location(int round) const {
  const AgreementRound& found = segment_.agreement_round(round);
  PHALANX_STEP("location: look");
  // Pairs with the store in `publish`.
  if (found.is_published.load(std::memory_order_acquire) == 0) {
    return std::nullopt;
  }
  return SegmentLocation{.pid = found.pid, .descriptor = found.descriptor, .nonce = found.nonce};
}

}  // namespace phalanx
