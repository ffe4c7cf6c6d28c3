// Rows in shared memory: a reader always gets a whole write.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <utility>

#include "few_rows.h"
#include "phalanx/rows.h"

using namespace few_rows;

namespace {

// The numbers of layout version 1: a change of any of them requires a new kRowsVersion.
static_assert(kRowsVersion == 1);
static_assert(kRowsMagic == 0x53574f5258485002);
static_assert(kRowWriters == 64 && kRowLocks == 8192);
static_assert(sizeof(RowsHeader) == 128 && offsetof(RowsHeader, version) == 8);
static_assert(offsetof(RowsHeader, dtype) == 12 && offsetof(RowsHeader, nonce) == 16);
static_assert(offsetof(RowsHeader, bytes) == 24 && offsetof(RowsHeader, rows) == 32);
static_assert(offsetof(RowsHeader, width) == 40 && offsetof(RowsHeader, parts) == 44);
static_assert(offsetof(RowsHeader, step) == 64);
static_assert(sizeof(RowWriter) == 64 && offsetof(RowWriter, owner) == 0);
static_assert(offsetof(RowWriter, row) == 8 && offsetof(RowWriter, saved) == 16);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// Random writes and reads, against plain arrays.
template <class T>
void like_arrays(DType dtype, std::uint32_t width, std::uint32_t parts) {
  constexpr std::size_t kRows = 50;
  const auto rows = create({.rows = kRows, .width = width, .parts = parts, .dtype = dtype});
  std::vector<std::vector<T>> expected(parts, std::vector<T>(kRows * width));
  Random random(width * 10 + parts);
  for (int round = 0; round < ranks::scaled(480); ++round) {
    Buffers<T> buffers(*rows, some(random, random.below(40), kRows));
    const bool write = random.one_in(2);
    const std::uint32_t left_out =
        random.one_in(2) ? static_cast<std::uint32_t>(random.below(parts)) : parts;
    if (left_out < parts) {
      buffers.from[left_out] = nullptr;
      buffers.to[left_out] = nullptr;
    }
    if (write) {
      for (std::uint32_t part = 0; part < parts; ++part) {
        for (auto& value : buffers.parts[part]) value = any<T>(random);
        for (std::size_t i = 0; i < buffers.numbers.size() && part != left_out; ++i) {
          std::copy_n(buffers.parts[part].begin() + static_cast<std::ptrdiff_t>(i * width), width,
                      expected[part].begin() + buffers.numbers[i] * width);
        }
      }
      CHECK(rows->write(buffers.list(), buffers.from.data(), kTimeout).ok());
      continue;
    }
    CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
    for (std::uint32_t part = 0; part < parts; ++part) {
      for (std::size_t i = 0; i < buffers.numbers.size() * width; ++i) {
        const auto row = static_cast<std::size_t>(buffers.numbers[i / width]);
        const T right = part == left_out ? T{-77} : expected[part][row * width + i % width];
        CHECK(buffers.parts[part][i] == right);
      }
    }
  }
}

template <class T>
void pooled_like_a_loop(DType dtype) {
  constexpr std::size_t kRows = 30;
  constexpr std::uint32_t kThin = 45;  // whole vectors, and a remainder
  const auto rows = create({.rows = kRows, .width = kThin, .dtype = dtype});
  Random random(5);
  std::vector<std::int64_t> all(kRows);
  std::iota(all.begin(), all.end(), 0);
  Buffers<T> table(*rows, all);
  for (auto& value : table.parts[0]) value = any<T>(random);
  CHECK(rows->write(table.list(), table.from.data(), kTimeout).ok());
  for (int round = 0; round < ranks::scaled(240); ++round) {
    const auto numbers = some(random, random.below(60), kRows);
    std::vector<std::int64_t> offsets = some(random, random.below(10), numbers.size() + 1);
    std::sort(offsets.begin(), offsets.end());
    if (!offsets.empty()) offsets[0] = 0;
    const auto pooling = static_cast<Pooling>(random.below(3));
    std::vector<T> weights(numbers.size());
    for (auto& weight : weights) weight = any<T>(random);
    const bool weighted = pooling == Pooling::sum && random.one_in(2);
    std::vector<T> out(offsets.size() * kThin, T{-77});
    CHECK(rows->pool({numbers.data(), numbers.size()}, {offsets.data(), offsets.size()}, pooling,
                     weighted ? weights.data() : nullptr, out.data(), kTimeout)
              .ok());
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t bag = i / kThin;
      const auto begin = static_cast<std::size_t>(offsets[bag]);
      const std::size_t end =
          bag + 1 < offsets.size() ? static_cast<std::size_t>(offsets[bag + 1]) : numbers.size();
      double right = 0;
      for (std::size_t k = begin; k < end; ++k) {
        const double value =
            table.parts[0][static_cast<std::size_t>(numbers[k]) * kThin + i % kThin];
        if (pooling == Pooling::max) {
          right = k == begin ? value : std::max(right, value);
        } else {
          right += weighted ? value * weights[k] : value;
        }
      }
      if (pooling == Pooling::mean && end > begin) right /= static_cast<double>(end - begin);
      CHECK(std::abs(right - static_cast<double>(out[i])) < (sizeof(T) == 8 ? 1e-12 : 1e-4));
    }
  }
}

std::unique_ptr<Rows> open(const Rows& rows) {
  Status status;
  auto opened = Rows::open(getpid(), rows.descriptor(), kNonce, status);
  CHECK(opened != nullptr);
  return opened;
}

}  // namespace

TEST(rows_behave_like_arrays) {
  for (const std::uint32_t width : {1U, 2U, 16U, 37U, 64U}) {
    for (std::uint32_t parts = 1; parts <= 3; ++parts) {
      like_arrays<float>(DType::float32, width, parts);
      like_arrays<double>(DType::float64, width, parts);
    }
  }
}

TEST(bags_are_pooled) {
  pooled_like_a_loop<float>(DType::float32);
  pooled_like_a_loop<double>(DType::float64);
}

// The instruction set is chosen once per process, so each one needs its own.
TEST(narrower_instruction_sets_give_the_same_results) {
  if (std::getenv("PHALANX_ISA") != nullptr) return;  // this is such a process
  for (const char* limit : {"baseline", "avx2"}) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("PHALANX_ISA", limit, 1);
      execl("/proc/self/exe", "test_rows", "rows_behave_like_arrays", "bags_are_pooled", nullptr);
      _exit(2);
    }
    int ending = 0;
    CHECK_EQ(waitpid(child, &ending, 0), child);
    CHECK_EQ(ending, 0);
  }
}

TEST(a_wrong_index_is_reported_and_nothing_done) {
  const auto rows = few();
  for (const std::int64_t wrong : {std::int64_t{-1}, static_cast<std::int64_t>(kFew)}) {
    Buffers<float> buffers(*rows, {0, 1, wrong, 2});
    const std::vector<float> gradients(4 * kWidth, 1.0F);
    const std::int64_t offset = 0;
    for (const RowsResult& result :
         {rows->gather(buffers.list(), buffers.to.data(), kTimeout),
          rows->write(buffers.list(), buffers.from.data(), kTimeout),
          rows->pool(buffers.list(), {&offset, 1}, Pooling::sum, nullptr, buffers.to[0], kTimeout),
          rows->update(buffers.list(), gradients.data(), {.lr = 1}, kTimeout)}) {
      CHECK(result.kind == ResultKind::index);
      CHECK_EQ(result.at, 2UL);
      CHECK_EQ(result.value, wrong);
    }
    CHECK(buffers.parts[0] == std::vector<float>(4 * kWidth, -77));
    CHECK_EQ(rows->step(), 0UL);
    Buffers<float> after(*rows, {0, 1, 2});
    CHECK(rows->gather(after.list(), after.to.data(), kTimeout).ok());
    CHECK(after.parts[0] == std::vector<float>(3 * kWidth, 0));
  }
}

TEST(wrong_offsets_are_reported) {
  const auto rows = few();
  Buffers<float> buffers(*rows, {0, 1, 2});
  const auto pooled = [&](std::vector<std::int64_t> offsets) {
    return rows->pool(buffers.list(), {offsets.data(), offsets.size()}, Pooling::sum, nullptr,
                      buffers.to[0], kTimeout);
  };
  for (const auto& [offsets, at] : std::vector<std::pair<std::vector<std::int64_t>, std::size_t>>{
           {{1, 2}, 0}, {{-1, 2}, 0}, {{0, 4}, 1}, {{0, 2, 1}, 2}, {{0, -2, 1}, 1}}) {
    const RowsResult result = pooled(offsets);
    CHECK(result.kind == ResultKind::offset);
    CHECK_EQ(result.at, at);
    CHECK_EQ(result.value, offsets[at]);
  }
  CHECK(pooled({0, 0, 3}).ok());
  CHECK(pooled({}).ok());
}

TEST(memory_follows_the_layout) {
  const auto rows = few();
  const Raw raw(*rows);
  CHECK_EQ(rows->bytes(), 12288UL + 3 * 4096 + 36864);
  CHECK_EQ(rows->stride(), Raw::kRowBytes);
  const RowsHeader& header = raw.header();
  CHECK_EQ(header.magic, kRowsMagic);
  CHECK_EQ(header.version, kRowsVersion);
  CHECK_EQ(header.dtype, 11U);
  CHECK_EQ(header.nonce, kNonce);
  CHECK_EQ(header.bytes, rows->bytes());
  CHECK_EQ(header.rows, kFew);
  CHECK_EQ(header.width, kWidth);
  CHECK_EQ(header.parts, kParts);
  CHECK(write_one(*rows, 3, 5).ok());
  CHECK(write_one(*rows, 3, 6).ok());
  CHECK_EQ(raw.lock(3), 0x200UL);  // its second version, and not held
  for (std::size_t row = 0; row < kFew; ++row) {
    CHECK(row == 3 || raw.lock(row) == 0);
    for (std::uint32_t part = 0; part < kParts; ++part) {
      CHECK_EQ(raw.row(part, row)[0], row == 3 ? 6.0F : 0.0F);
      CHECK_EQ(raw.row(part, row)[kWidth - 1], row == 3 ? 6.0F : 0.0F);
    }
  }
  const auto slot = static_cast<std::size_t>(getpid()) % kRowWriters;
  CHECK_EQ(raw.writer(slot).owner.load(), 0UL);
  CHECK_EQ(raw.writer(slot).row.load(), 3UL);
  CHECK_EQ(raw.writer(slot).saved.load(), 4UL);
  for (std::uint32_t part = 0; part < kParts; ++part) {
    CHECK_EQ(raw.backup(slot, part)[kWidth - 1], 5.0F);
  }
  CHECK(rows->update({.rows = nullptr, .count = 0}, nullptr, {.lr = 1}, kTimeout).ok());
  CHECK_EQ(header.step.load(), 1UL);
}

TEST(another_layout_is_refused) {
  const auto rows = few();
  const Raw raw(*rows);
  Status status;
  const auto refused = [&](auto& field, auto value) {
    const auto before = std::exchange(field, value);
    CHECK(Rows::open(getpid(), rows->descriptor(), kNonce, status) == nullptr);
    CHECK_EQ(status.error, EPROTO);
    field = before;
  };
  RowsHeader& header = raw.header();
  refused(header.magic, kRowsMagic + 1);
  refused(header.version, kRowsVersion + 1);
  refused(header.dtype, header.dtype + 256);
  refused(header.dtype, static_cast<std::uint32_t>(DType::int32));
  refused(header.dtype, static_cast<std::uint32_t>(DType::float64));
  refused(header.rows, std::uint64_t{1} << 20);
  refused(header.rows, ~std::uint64_t{0});
  refused(header.width, 0U);
  refused(header.width, ~0U);
  refused(header.parts, 0U);
  refused(header.parts, ~0U);
  refused(header.bytes, header.bytes + 4096);
  const int other = memfd_create("phalanx-rows", 0);  // the same bytes, but not sealed
  CHECK_EQ(ftruncate(other, static_cast<off_t>(header.bytes)), 0);
  CHECK_EQ(pwrite(other, &header, offsetof(RowsHeader, step), 0), 64);
  CHECK(Rows::open(getpid(), other, kNonce, status) == nullptr);
  CHECK_EQ(status.error, EPROTO);
  close(other);
  CHECK(open(*rows) != nullptr);
}

TEST(a_process_in_another_pid_namespace_is_refused) {
  const auto rows = few();
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    // Root may, others in their own user namespace, and some containers forbid both.
    if (unshare(CLONE_NEWPID) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) _exit(2);
    const pid_t inner = fork();
    if (inner == 0) {
      Status status;
      _exit(Rows::open(parent, rows->descriptor(), kNonce, status) == nullptr ? 0 : 1);
    }
    int ending = 0;
    _exit(waitpid(inner, &ending, 0) == inner && WIFEXITED(ending) ? WEXITSTATUS(ending) : 3);
  }
  int ending = 0;
  CHECK_EQ(waitpid(child, &ending, 0), child);
  CHECK(WIFEXITED(ending));
  if (WEXITSTATUS(ending) == 2) {
    std::printf("not tried: this machine makes no namespaces\n");
    return;
  }
  CHECK_EQ(WEXITSTATUS(ending), 0);
}

TEST(invalid_shapes_are_refused) {
  Status status;
  for (const RowsShape& shape :
       {RowsShape{.rows = 1, .width = 0}, RowsShape{.rows = 1, .width = 1, .parts = 0},
        RowsShape{.rows = 1, .width = 1, .parts = 9},
        RowsShape{.rows = 1, .width = 1, .dtype = DType::int32},
        RowsShape{.rows = ~0ULL, .width = 1}, RowsShape{.rows = 1, .width = ~0U}}) {
    CHECK(Rows::create(shape, 1, status) == nullptr);
    CHECK_EQ(status.error, EINVAL);
  }
  CHECK(Rows::create({.rows = kMaxRows, .width = kMaxRowElements}, 1, status) == nullptr);
  CHECK(!status.ok());
}

TEST(other_memory_is_refused) {
  const auto rows = few();
  Status status;
  CHECK(Rows::open(getpid(), rows->descriptor(), kNonce + 1, status) == nullptr);
  CHECK_EQ(status.error, EPROTO);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  CHECK(Rows::open(getpid(), ends[0], kNonce, status) == nullptr);
  CHECK_EQ(status.error, EPROTO);
  close(ends[0]);
  close(ends[1]);
  CHECK(Rows::open(getpid(), ends[0], kNonce, status) == nullptr);
  CHECK_EQ(status.error, ENOENT);
  const auto other = open(*rows);
  CHECK_EQ(other->shape().rows, kFew);
  CHECK_EQ(other->shape().width, kWidth);
  CHECK_EQ(other->shape().parts, kParts);
  CHECK(write_one(*other, 3, 5).ok());
  Buffers<float> buffers(*rows, {3});
  CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
  CHECK(buffers.parts[2] == std::vector<float>(kWidth, 5));
}

// Threads over one mapping, which ThreadSanitizer sees, and over several.
void read_beside_writers(bool mapped_once) {
  const auto rows = few();
  std::atomic<int> writing = 2;
  std::vector<std::thread> threads;
  for (int self = 0; self < 4; ++self) {
    threads.emplace_back([&, self] {
      const auto opened = mapped_once ? nullptr : open(*rows);
      Rows& mine = mapped_once ? *rows : *opened;
      Random random(static_cast<std::uint64_t>(self));
      if (self < 2) {
        for (int round = 0; round < ranks::scaled(20'000); ++round) {
          const auto row = static_cast<std::int64_t>(random.below(kFew));
          CHECK(write_one(mine, row, static_cast<float>(random.below(1000))).ok());
        }
        --writing;
        return;
      }
      while (writing > 0) {
        Buffers<float> buffers(mine, some(random, 20, kFew));
        CHECK(mine.gather(buffers.list(), buffers.to.data(), kTimeout).ok());
        for (std::size_t i = 0; i < buffers.numbers.size(); ++i) CHECK(one_write(buffers, i));
        // A bag of one row is that row.
        const std::int64_t offset = 0;
        CHECK(mine.pool({buffers.numbers.data(), 1}, {&offset, 1}, Pooling::max, nullptr,
                        buffers.to[0], kTimeout)
                  .ok());
        const auto& out = buffers.parts[0];
        CHECK(std::count(out.begin(), out.begin() + kWidth, out[0]) == kWidth);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(all_whole(*rows));
}

TEST(readers_see_whole_rows) { read_beside_writers(true); }

TEST(readers_with_their_own_mapping_see_whole_rows) { read_beside_writers(false); }

TEST(no_update_is_lost) {
  const auto rows = few();
  constexpr int kRounds = ranks::scaled(12'000);
  std::vector<std::thread> threads;
  for (int self = 0; self < 3; ++self) {
    threads.emplace_back([&] {
      std::vector<std::int64_t> all(kFew);
      std::iota(all.begin(), all.end(), 0);
      const std::vector<float> gradients(kFew * kWidth, -1.0F);
      for (int round = 0; round < kRounds; ++round) {
        CHECK(rows->update({all.data(), kFew}, gradients.data(), {.lr = 1}, kTimeout).ok());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  Buffers<float> buffers(*rows, {0, 5});
  CHECK(rows->gather(buffers.list(), buffers.to.data(), kTimeout).ok());
  CHECK(buffers.parts[0] == std::vector<float>(2 * kWidth, 3 * kRounds));
  CHECK_EQ(rows->step(), 3UL * kRounds);
}

TEST(optimizer_steps) {
  // By hand; the tests of the package compare all optimizers at length with PyTorch's.
  const auto rows = create({.rows = 3, .width = 1, .parts = 3, .dtype = DType::float64});
  const std::vector<std::int64_t> numbers = {2};
  const double gradient = 3;
  const RowList list{.rows = numbers.data(), .count = 1};
  Buffers<double> got(*rows, {2, 1});
  CHECK(rows->update(list, &gradient, {.optimizer = RowOptimizer::sgd, .lr = 0.5}, kTimeout).ok());
  CHECK(rows->gather(got.list(), got.to.data(), kTimeout).ok());
  CHECK_EQ(got.parts[0][0], -1.5);
  const OptimizerStep adagrad{.optimizer = RowOptimizer::adagrad, .lr = 1, .lr_decay = 1};
  CHECK(rows->update(list, &gradient, adagrad, kTimeout).ok());
  CHECK(rows->gather(got.list(), got.to.data(), kTimeout).ok());
  CHECK_EQ(got.parts[1][0], 9.0);
  CHECK_EQ(got.parts[0][0], -2.0);  // the table's second step: half the learning rate
  CHECK_EQ(got.parts[0][1], 0.0);
  CHECK(rows->update({.rows = nullptr, .count = 0}, nullptr, adagrad, kTimeout).ok());
  CHECK_EQ(rows->step(), 3UL);
}
