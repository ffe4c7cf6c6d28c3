// Common parts of the tests of rows: small tables, and buffers for their rows.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string_view>
#include <vector>

#include "phalanx/rows.h"
#include "ranks.h"

namespace few_rows {

using namespace phalanx;
using ranks::Random;
using ResultKind = RowsResult::Kind;

#if defined(PHALANX_HOOKS)
// Like ranks::give_way, but seldom between words: the write of a row has hundreds of them.
inline void give_way(const char* step) {
  thread_local unsigned words = 0;
  if (!std::string_view(step).starts_with("rows: word") || ++words % 32 == 0) {
    ranks::give_way(step);
  }
}
inline const bool gives_way = (step_hook.store(&give_way), true);
#endif

inline constexpr auto kTimeout = std::chrono::seconds(60);
inline constexpr std::uint64_t kNonce = 42;

inline std::unique_ptr<Rows> create(const RowsShape& shape) {
  Status status;
  auto made = Rows::create(shape, kNonce, status);
  CHECK(status.ok());
  CHECK(made != nullptr);
  return made;
}

// A list, and buffers for all parts of its rows.
template <class T>
struct Buffers {
  Buffers(const Rows& rows, std::vector<std::int64_t> of) : numbers(std::move(of)) {
    for (std::uint32_t part = 0; part < rows.shape().parts; ++part) {
      parts.emplace_back(numbers.size() * rows.shape().width, T{-77});
    }
    for (auto& part : parts) {
      to.push_back(part.data());
      from.push_back(part.data());
    }
  }
  RowList list() const { return {.rows = numbers.data(), .count = numbers.size()}; }

  std::vector<std::int64_t> numbers;
  std::vector<std::vector<T>> parts;
  std::vector<void*> to;
  std::vector<const void*> from;
};

inline std::vector<std::int64_t> some(Random& random, std::size_t count, std::size_t rows) {
  std::vector<std::int64_t> numbers(count);
  for (auto& number : numbers) {
    number = static_cast<std::int64_t>(random.below(rows));
  }
  return numbers;
}

template <class T>
T any(Random& random) {
  return static_cast<T>(random.below(2001)) / T{1000} - T{1};
}

inline constexpr std::uint32_t kWidth = 37;
inline constexpr std::uint32_t kParts = 3;
inline constexpr std::size_t kFew = 6;

// Whether a row and its state come from one write: all elements are the same number.
inline bool one_write(const Buffers<float>& buffers, std::size_t i) {
  for (const auto& part : buffers.parts) {
    for (std::size_t k = 0; k < kWidth; ++k) {
      if (part[i * kWidth + k] != buffers.parts[0][i * kWidth]) return false;
    }
  }
  return true;
}

inline bool all_whole(Rows& rows, Rows::Timeout timeout = kTimeout) {
  std::vector<std::int64_t> all(rows.shape().rows);
  std::iota(all.begin(), all.end(), 0);
  Buffers<float> buffers(rows, all);
  if (!CHECK(rows.gather(buffers.list(), buffers.to.data(), timeout).ok())) return false;
  bool good = true;
  for (std::size_t i = 0; i < all.size(); ++i) good = good && one_write(buffers, i);
  return good;
}

inline RowsResult write_one(Rows& rows, std::int64_t row, float value,
                            Rows::Timeout timeout = kTimeout) {
  Buffers<float> buffers(rows, {row});
  for (auto& part : buffers.parts) std::fill(part.begin(), part.end(), value);
  return rows.write(buffers.list(), buffers.from.data(), timeout);
}

inline std::unique_ptr<Rows> few() {
  return create({.rows = kFew, .width = kWidth, .parts = kParts});
}

// The memory of `few`, by the offsets of the layout.
class Raw {
 public:
  explicit Raw(const Rows& rows) : bytes_(rows.bytes()) {
    base_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, rows.descriptor(), 0));
    CHECK(base_ != MAP_FAILED);
  }
  ~Raw() { munmap(base_, bytes_); }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  RowsHeader& header() const { return at<RowsHeader>(0)[0]; }
  RowWriter& writer(std::size_t slot) const { return at<RowWriter>(4096)[slot]; }
  std::uint64_t& lock(std::size_t row) const { return at<std::uint64_t>(8192)[row]; }
  float* row(std::size_t part, std::size_t row) const {
    return at<float>(12288 + part * 4096 + row * kRowBytes);
  }
  float* backup(std::size_t slot, std::size_t part) const {
    return at<float>(12288 + kParts * 4096 + (slot * kParts + part) * 192);
  }

  static constexpr std::size_t kRowBytes = 152;  // 37 floats, and 4 bytes of padding to whole words

 private:
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  std::size_t bytes_;
  std::byte* base_;
};

}  // namespace few_rows
