#include "phalanx/message.h"

#include <algorithm>
#include <utility>

namespace phalanx {

void Matching::post_recv(MessagePtr recv) {
  ++recv_count(recv->peer_);
  auto& queue = recvs_[key(recv->peer_, recv->tag_)];
  queue.push_back(std::move(recv));
}

MessagePtr Matching::match(int source, std::int32_t tag) {
  auto found = recv_counts_[static_cast<std::size_t>(source)] == 0 ? recvs_.end()
                                                                   : recvs_.find(key(source, tag));
  if (any_source_recvs_ != 0) {
    const auto any = recvs_.find(key(kAnySource, tag));
    if (found == recvs_.end() ||
        (any != recvs_.end() && any->second.front()->id_ < found->second.front()->id_)) {
      found = any;
    }
  }
  if (found == recvs_.end()) {
    return nullptr;
  }
  MessagePtr recv = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) {
    recvs_.erase(found);
  }
  --recv_count(recv->peer_);
  recv->peer_ = source;
  return recv;
}

MessagePtr Matching::any_recv_from(int source) const {
  for (const auto& [unused, queue] : recvs_) {
    if (queue.front()->peer_ == source) {
      return queue.front();
    }
  }
  return nullptr;
}

MessagePtr Matching::withdraw(const Message& recv) {
  const auto found = recvs_.find(key(recv.peer_, recv.tag_));
  if (found == recvs_.end()) {
    return nullptr;
  }
  auto& queue = found->second;
  const auto position = std::find_if(queue.begin(), queue.end(),
                                     [&](const MessagePtr& each) { return each.get() == &recv; });
  if (position == queue.end()) {
    return nullptr;
  }
  MessagePtr withdrawn = std::move(*position);
  queue.erase(position);
  if (queue.empty()) {
    recvs_.erase(found);
  }
  --recv_count(recv.peer_);
  return withdrawn;
}

std::vector<MessagePtr> Matching::take_unawaited_recvs(int source) {
  std::vector<MessagePtr> taken;
  for (auto entry = recvs_.begin(); entry != recvs_.end();) {
    auto& queue = entry->second;
    for (auto recv = queue.begin(); recv != queue.end();) {
      if ((*recv)->peer_ == source && !(*recv)->awaited_ && !(*recv)->watched_) {
        taken.push_back(std::move(*recv));
        recv = queue.erase(recv);
        --recv_count(source);
      } else {
        ++recv;
      }
    }
    entry = queue.empty() ? recvs_.erase(entry) : std::next(entry);
  }
  return taken;
}

std::vector<MessagePtr> Matching::take_all_receives() {
  std::vector<MessagePtr> all;
  for (const auto& [unused, queue] : recvs_) {
    all.insert(all.end(), queue.begin(), queue.end());
  }
  recvs_.clear();
  recv_counts_.assign(recv_counts_.size(), 0);
  any_source_recvs_ = 0;
  return all;
}

void Matching::add_unexpected(int source, UnexpectedMessage unexpected) {
  unexpected_bytes_ += unexpected.envelope.bytes();
  unexpected_[key(source, unexpected.envelope.tag)].push_back(std::move(unexpected));
}

const UnexpectedMessage* Matching::find_unexpected(const Message& recv, int* source) const {
  if (unexpected_.empty()) {
    return nullptr;
  }
  const bool any = recv.peer_ == kAnySource;
  const int end = any ? static_cast<int>(recv_counts_.size()) : recv.peer_ + 1;
  for (int peer = any ? 0 : recv.peer_; peer < end; ++peer) {
    if (const auto found = unexpected_.find(key(peer, recv.tag_)); found != unexpected_.end()) {
      *source = peer;
      return &found->second.front();
    }
  }
  return nullptr;
}

void Matching::drop_unexpected(int source, std::int32_t tag) {
  const auto found = unexpected_.find(key(source, tag));
  unexpected_bytes_ -= found->second.front().envelope.bytes();
  found->second.pop_front();
  if (found->second.empty()) {
    unexpected_.erase(found);
  }
}

}  // namespace phalanx
