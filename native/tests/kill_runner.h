// Runs cases one after another, and judges the results of the survivors.
#pragma once

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <optional>
#include <sstream>

#include "kill_ranks.h"
#include "phalanx/flight_recorder_reader.h"

namespace kills {

constexpr std::size_t kMaxLatencies = 1 << 20;

// The state shared by all processes.
struct Shared {
  Steps steps;
  std::atomic<std::uint64_t> next, cases, deaths, failures;
  std::atomic<std::size_t> n_latencies;
  std::array<std::atomic<std::int32_t>, kMaxLatencies> latencies;  // us
};

template <class T>
T& in_shared_memory() {
  void* memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::exit(2);
  }
  return *new (memory) T{};
}

inline std::string text_of(const Case& c) {
  std::ostringstream out;
  out << kOperationNames[static_cast<std::size_t>(c.task.operation)] << ' '
      << kPathNames[static_cast<std::size_t>(c.task.path)] << ' ' << c.task.size << ' '
      << c.task.root << ' ' << c.task.fan << ' ' << c.task.salt << ' ' << c.victim << ' ' << c.fatal
      << ' ' << c.second << ' ' << c.second_fatal << ' '
      << kOrderNames[static_cast<std::size_t>(c.order)] << ' ' << c.yields << ' ' << c.every_word;
  return out.str();
}

template <class Enum, std::size_t n>
void find(const std::array<const char*, n>& names, const std::string& name, Enum& value) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) {
    std::fprintf(stderr, "unknown name in a case: %s\n", name.c_str());
    std::exit(2);
  }
  value = static_cast<Enum>(found - names.begin());
}

inline Case case_of(const std::string& text) {
  std::istringstream in(text);
  std::string what, path, order;
  Case c;
  in >> what >> path >> c.task.size >> c.task.root >> c.task.fan >> c.task.salt >> c.victim >>
      c.fatal >> c.second >> c.second_fatal >> order >> c.yields >> c.every_word;
  find(kOperationNames, what, c.task.operation);
  find(kPathNames, path, c.task.path);
  find(kOrderNames, order, c.order);
  return c;
}

// Runs one case after another, in a process of its own.
class CaseRunner {
 public:
  explicit CaseRunner(Shared& shared) : shared_(shared), states_(in_shared_memory<RankStates>()) {}

  // Returns whether the victim, or the second one, died at its step, rather than after the task.
  bool run(const Case& c) {
    new (&states_) RankStates{};
    Status status;
    const auto segment = Segment::create(c.task.size, kNonce, kTestChunk, status);
    if (segment == nullptr) return fail(c, "no segment"), false;
    std::vector<int> pids;
    open_recorders(c);
    for (int rank = 0; rank < c.task.size; ++rank) {
      pids.push_back(fork());
      if (pids.back() == 0) {
        alarm(2 * kHang.count());
        Rank(c, rank, states_, shared_.steps)
            .live(getppid(), segment->descriptor(), kNonce,
                  recorders_[static_cast<std::size_t>(rank)]);
        _exit(0);
      }
    }
    const std::string wrong = reap(c, pids);
    const std::string problems = wrong.empty() ? judge(c) + judge_recorders(c) : wrong;
    for (const int recorder : recorders_) ::close(recorder);
    if (!problems.empty()) fail(c, problems);
    shared_.cases.fetch_add(1);
    return !state(c.second < 0 ? c.victim : c.second).done.load();
  }

  // Runs all deaths of one rank in one task, until it has survived it three times in a row: the
  // number of its steps depends on how often it sleeps. With a second victim: all of its deaths
  // while it learns of the first.
  void run_all_steps(Case c, std::optional<Order> order) {
    const int orders = c.task.size > 2 && c.second < 0 ? 4 : 3;
    std::uint32_t& step = c.second < 0 ? c.fatal : c.second_fatal;
    if (c.second >= 0) c.fatal = 1;
    for (int lived = 0; lived < 3 && shared_.failures.load() < kMaxFailures;) {
      ++step;
      ++c.task.salt;
      const auto turn = static_cast<int>(step) + c.victim + c.task.size;
      c.order = order.value_or(static_cast<Order>(turn % orders));
      lived = run(c) ? 0 : lived + 1;
    }
  }

  static constexpr std::uint64_t kMaxFailures = 5;

 private:
  static constexpr std::uint64_t kNonce = 0x7068616c616e78;

  const RankState& state(int rank) const { return states_[static_cast<std::size_t>(rank)]; }

  // Waits for all ranks, the victims last: they are reaped when the survivors have ended, as by a
  // slow launcher. Returns what was wrong with their ends.
  std::string reap(const Case& c, const std::vector<int>& pids) {
    std::string wrong;
    for (const bool is_victim : {false, true}) {
      for (int rank = 0; rank < c.task.size; ++rank) {
        if (c.is_victim(rank) != is_victim) continue;
        const int pid = pids[static_cast<std::size_t>(rank)];
        const bool ended = has_ended(pid);
        if (!ended) {
          wrong += " rank " + std::to_string(rank) + " hangs;";
          kill(pid, SIGKILL);
        }
        int status = 0;
        waitpid(pid, &status, 0);
        const bool as_expected = is_victim ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                           : WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (ended && !as_expected) {
          wrong += " rank " + std::to_string(rank) + " ended with " + std::to_string(status) + ";";
        }
      }
    }
    return wrong;
  }

  void open_recorders(const Case& c) {
    recorders_.clear();
    for (int rank = 0; rank < c.task.size; ++rank) {
      recorders_.push_back(memfd_create("recorder", MFD_CLOEXEC));
      if (ftruncate(recorders_.back(), sizeof(RecorderLayout)) != 0) std::perror("ftruncate");
    }
  }

  // Returns what is wrong with the flight recorders. A death tears at most one record of each
  // thread, and the record of a victim that died while it waited shows the wait.
  std::string judge_recorders(const Case& c) const {
    std::string wrong;
    for (int rank = 0; rank < c.task.size; ++rank) {
      std::vector<std::byte> bytes(sizeof(RecorderLayout));
      RecorderContents contents;
      const int file = recorders_[static_cast<std::size_t>(rank)];
      const bool whole = pread(file, bytes.data(), bytes.size(), 0) == sizeof(RecorderLayout);
      const std::string refused =
          whole ? parse_recorder(bytes, kRecorderHistory, contents) : "unreadable";
      if (!refused.empty() || !sound(c, rank, contents)) {
        wrong += " rank " + std::to_string(rank) + " leaves a flight recorder that is " +
                 (refused.empty() ? "incorrect" : refused) + ";";
      }
    }
    return wrong;
  }

  bool sound(const Case& c, int rank, const RecorderContents& contents) const {
    const auto numbered = [&](const Record& each) { return each.number <= contents.operations; };
    if (!std::ranges::all_of(contents.done, numbered) ||
        !std::ranges::all_of(contents.open, numbered)) {
      return false;
    }
    if (!c.is_victim(rank))
      return contents.torn == 0 && contents.open.empty() && !contents.done.empty();
    if (state(rank).done.load()) return contents.torn == 0;
    const bool waits = std::strncmp(state(rank).step.load(), "wait: ", 6) == 0;
    if (contents.torn > (c.task.operation == Operation::served ? 2 : 1)) return false;
    const bool shown = std::ranges::any_of(
        contents.open, [](const Record& each) { return each.waiting_for >= 0; });
    return !waits || !collective(c.task.operation) || (contents.torn == 0 && shown);
  }

  static bool has_ended(int pid) {
    const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    pollfd poller{.fd = descriptor, .events = POLLIN, .revents = 0};
    constexpr auto limit = std::chrono::milliseconds(kHang);
    const bool ended = poll(&poller, 1, static_cast<int>(limit.count())) == 1;
    ::close(descriptor);
    return ended;
  }

  // Returns what is wrong with the results of the survivors; empty if all is well.
  std::string judge(const Case& c) {
    std::string wrong;
    const bool all_lived =
        state(c.victim).done.load() && state(c.victim).task.ok() &&
        (c.second < 0 || (state(c.second).done.load() && state(c.second).task.ok()));
    int named = -1;
    for (int rank = 0; rank < c.task.size; ++rank) {
      const RankState& its = state(rank);
      if (c.is_victim(rank)) continue;
      const auto report = [&](const char* what) {
        wrong += " rank " + std::to_string(rank) + " " + what + ";";
      };
      if (!its.ready) report("was never ready");
      if (!its.right) report("has wrong data");
      if (!its.clean) report("leaked resources");
      if (its.missed) report("was awaited in vain");
      if (!its.task.ok() && !names(c, its.task)) report("names the wrong rank in the task");
      if (!names(c, its.after)) report("does not name the lost rank after the task");
      if (!its.task.ok() && (its.after.code != its.task.code || its.after.peer != its.task.peer)) {
        report("reports two different failures");
      }
      if (all_lived && settles(c.task) && !its.task.ok()) {
        report("failed in a task that the victim completed");
      }
      if (named >= 0 && its.after.peer != named) report("names another rank than the others");
      named = its.after.peer;
      record_latency(its, c);
    }
    return wrong;
  }

  // Whether a rank that has completed a task knows that no rank needs any other any more: a later
  // failure must not spoil it for a slower rank. A sender knows only about its own part, and a root
  // may wait for takers of large data that the others do not wait for. Over a tree, a rank does not
  // know about those below others, which need the ranks between.
  static bool settles(const Task& task) {
    if (task.fan != 0 && task.path == Path::small) return false;
    switch (task.operation) {
      case Operation::broadcast:
      case Operation::scatter: return task.size == 2 || task.path == Path::small;
      case Operation::gather:
      case Operation::reduce:
      case Operation::messages:
      case Operation::served: return task.size == 2;
      case Operation::leaving: return false;
      default: return true;
    }
  }

  bool names(const Case& c, const Status& status) const {
    const bool left = c.task.operation == Operation::leaving && status.code == Code::left;
    return (status.code == Code::peer_lost || left) && c.is_victim(status.peer);
  }

  // Only a figure: a survivor that nobody notified names no rank, but reports its timeout.
  void record_latency(const RankState& its, const Case& c) {
    const std::int64_t died =
        state(c.is_victim(its.after.peer) ? its.after.peer : c.victim).died.load();
    const std::int64_t took =
        its.task.ok() ? its.returned_after.load() - std::max(died, its.began_after.load())
                      : its.returned.load() - std::max(died, its.began.load());
    const std::size_t i = shared_.n_latencies.fetch_add(1);
    if (i < kMaxLatencies) shared_.latencies[i].store(static_cast<std::int32_t>(took / 1000));
  }

  void fail(const Case& c, const std::string& what) {
    std::ostringstream out;
    out << "FAILED:" << what << "\n  --case '" << text_of(c) << "'\n";
    for (int rank = 0; rank < c.task.size; ++rank) {
      const RankState& its = state(rank);
      const char* step = its.step.load();
      out << "  rank " << rank << (c.is_victim(rank) ? " (victim)" : "") << ": task code "
          << static_cast<int>(its.task.code) << " peer " << its.task.peer << " reporter "
          << its.task.reporter << " errno " << its.task.error << ", after it code "
          << static_cast<int>(its.after.code) << " peer " << its.after.peer << "; at step "
          << its.steps.load() << ", '" << (step != nullptr ? step : "") << "'\n";
    }
    std::fputs(out.str().c_str(), stderr);
    shared_.failures.fetch_add(1);
  }

  Shared& shared_;
  RankStates& states_;
  std::vector<int> recorders_;  // by rank
};

}  // namespace kills
