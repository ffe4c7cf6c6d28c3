// Operations of the tests of collectives: the input of each rank, and the output that the naive
// oracle expects.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "ranks.h"

namespace operations {

using namespace phalanx;
using ranks::Random;

// One operation, the same on all ranks. The data are a function of `salt`, rank and position.
struct Operation {
  Kind kind = Kind::barrier;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  std::size_t count = 0;
  int root = 0;
  std::uint64_t salt = 0;
  bool uneven = false;
  // every rank's tensors lie in the arena; otherwise each rank decides for itself
  bool shared = false;
  bool ordinary = false;  // no tensor lies in the arena

  bool share(Random& random) const { return !ordinary && (shared || random.one_in(4)); }
};

inline bool reduces(Kind kind) {
  return kind == Kind::reduce || kind == Kind::all_reduce || kind == Kind::reduce_scatter;
}

inline std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15;
  return x ^ (x >> 29);
}

inline std::uint64_t word(std::uint64_t salt, int rank, std::size_t i) {
  return mixed(salt + i * 0x632be59bd9b4e019 + static_cast<std::uint64_t>(rank) * 7919);
}

// Ordinary memory, or memory of the arena.
class Memory {
 public:
  Memory(std::size_t size, std::byte poison, bool shared) : size_(size) {
    if (shared) {
      Status status;
      shared_ = Arena::own(status)->allocate(size, status);
      CHECK(status.ok());
    } else {
      ordinary_.resize(size);
    }
    std::fill(begin(), end(), poison);
  }
  Memory(const Memory& other) : size_(other.size_), ordinary_(other.begin(), other.end()) {}
  Memory(Memory&& other) noexcept
      : size_(other.size_),
        shared_(std::exchange(other.shared_, nullptr)),
        ordinary_(std::move(other.ordinary_)) {}
  Memory& operator=(const Memory& other) {
    if (this != &other) std::copy(other.begin(), other.end(), begin());
    return *this;
  }
  ~Memory() {
    Status status;
    if (shared_ != nullptr) Arena::own(status)->release(shared_);
  }
  std::byte* data() { return shared_ != nullptr ? shared_ : ordinary_.data(); }
  const std::byte* data() const { return shared_ != nullptr ? shared_ : ordinary_.data(); }
  std::byte* begin() { return data(); }
  std::byte* end() { return data() + size_; }
  const std::byte* begin() const { return data(); }
  const std::byte* end() const { return data() + size_; }
  std::size_t size() const { return size_; }
  const std::byte& operator[](std::size_t i) const { return data()[i]; }

 private:
  std::size_t size_;
  std::byte* shared_ = nullptr;
  std::vector<std::byte> ordinary_;
};

// Elements between two guards, with an arbitrary offset from the alignment of vectors, filled with
// poison.
class Buffer {
 public:
  Buffer(std::size_t count, DType dtype, Random& random, bool shared = false)
      : size_(count * size_of(dtype)),
        start_(kGuard + random.below(4) * size_of(dtype)),
        poison_(static_cast<std::byte>(random.below(255) + 1)),
        memory_(size_ + 2 * kGuard + 64, poison_, shared) {}

  std::byte* data() { return memory_.data() + start_; }
  std::size_t size() const { return size_; }
  template <class T>
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, memory_.data() + start_ + i * sizeof(T), sizeof value);
    return value;
  }
  template <class T>
  void set(std::size_t i, T value) {
    std::memcpy(memory_.data() + start_ + i * sizeof(T), &value, sizeof value);
  }
  bool guards_intact() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (i == start_) i += size_;
      if (i < memory_.size() && memory_[i] != poison_) return false;
    }
    return true;
  }
  bool poisoned() const {
    return std::all_of(memory_.begin(), memory_.end(), [this](auto b) { return b == poison_; });
  }
  friend bool operator==(const Buffer& a, const Buffer& b) {
    return a.size_ == b.size_ &&
           std::memcmp(a.memory_.data() + a.start_, b.memory_.data() + b.start_, a.size_) == 0;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::size_t size_, start_;
  std::byte poison_;
  Memory memory_;
};

// Calls `use` with a value of the C++ type of `dtype`, for the types that the mixtures reduce.
template <class Use>
void with_type(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::uint8: return use(std::uint8_t{});
    case DType::int16: return use(std::int16_t{});
    case DType::int32: return use(std::int32_t{});
    case DType::int64: return use(std::int64_t{});
    case DType::float32: return use(float{});
    default: return use(double{});
  }
}
inline constexpr std::array kReduced = {DType::uint8, DType::int16,   DType::int32,
                                        DType::int64, DType::float32, DType::float64};
inline constexpr std::array kMoved = {DType::boolean,   DType::uint8,     DType::bfloat16,
                                      DType::int32,     DType::float64,   DType::float32,
                                      DType::complex64, DType::complex128};

template <class T>
T element(std::uint64_t salt, int rank, std::size_t i) {
  const std::uint64_t bits = word(salt, rank, i);
  if constexpr (std::is_floating_point_v<T>) {
    // Sums of these round, so that another order would yield other bits.
    return static_cast<T>(static_cast<double>(static_cast<std::int64_t>(bits) >> 20) * 1e-9);
  } else {
    return static_cast<T>(bits);
  }
}

template <class T>
T combined(ReduceOp op, T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::uint64_t;
    const U x = static_cast<U>(a), y = static_cast<U>(b);
    switch (op) {
      case ReduceOp::sum: return static_cast<T>(x + y);
      case ReduceOp::product: return static_cast<T>(x * y);
      case ReduceOp::band: return static_cast<T>(x & y);
      case ReduceOp::bor: return static_cast<T>(x | y);
      case ReduceOp::bxor: return static_cast<T>(x ^ y);
      default: break;
    }
  }
  switch (op) {
    case ReduceOp::product: return static_cast<T>(a * b);
    case ReduceOp::min: return std::min(a, b);
    case ReduceOp::max: return std::max(a, b);
    default: return static_cast<T>(a + b);
  }
}

inline Buffer reduced(const Operation& o, int size, Random& random) {
  Buffer out(o.count, o.dtype, random);
  with_type(o.dtype, [&]<class T>(T) {
    for (std::size_t i = 0; i < o.count; ++i) {
      T value = element<T>(o.salt, 0, i);
      for (int rank = 1; rank < size; ++rank) {
        value = combined<T>(o.op, value, element<T>(o.salt, rank, i));
      }
      out.set<T>(i, o.op == ReduceOp::avg ? static_cast<T>(value / static_cast<T>(size)) : value);
    }
  });
  return out;
}

inline Buffer input_of(const Operation& o, int rank, Random& random) {
  Buffer out(o.count, o.dtype, random, o.share(random));
  if (reduces(o.kind)) {
    with_type(o.dtype, [&]<class T>(T) {
      for (std::size_t i = 0; i < o.count; ++i) out.set<T>(i, element<T>(o.salt, rank, i));
    });
    return out;
  }
  for (std::size_t i = 0; i < out.size(); i += sizeof(std::uint64_t)) {
    const std::uint64_t bits = word(o.salt, rank, i);
    std::memcpy(out.data() + i, &bits, std::min(sizeof bits, out.size() - i));
  }
  return out;
}

// Returns one buffer per rank; `filled` with that rank's data, otherwise with poison.
inline std::vector<Buffer> parts_of(const Operation& o, int size, bool filled, Random& random) {
  std::vector<Buffer> parts;
  for (int rank = 0; rank < size; ++rank) {
    parts.push_back(filled ? input_of(o, rank, random)
                           : Buffer(o.count, o.dtype, random, o.share(random)));
  }
  return parts;
}

inline std::vector<void*> pointers(std::vector<Buffer>& parts) {
  std::vector<void*> all;
  for (Buffer& part : parts) all.push_back(part.data());
  return all;
}

}  // namespace operations
