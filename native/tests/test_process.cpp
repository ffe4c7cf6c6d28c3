// Processes that end, and how their peers detect that. ThreadSanitizer does not follow forks of a
// process that has threads: under it, only tests without a child run.
#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

#include "ranks.h"

using namespace phalanx;
using ranks::within;

namespace {

std::size_t open_files() {
  std::size_t found = 0;
  for (int fd = 0; fd < 256; ++fd) found += fcntl(fd, F_GETFD) >= 0;
  return found;
}

}  // namespace

TEST(a_closed_handle_reports_nothing) {
  const Process process;
  CHECK(!process.ended());
  CHECK(!process.wait_status().has_value());
}

TEST(a_nonexistent_process_cannot_be_opened) {
  Process process;
  CHECK_EQ(process.open(0x3fffffff), ESRCH);
  CHECK(process.open(0) != 0);
  CHECK(!process.ended());
}

TEST(a_running_process_has_not_ended) {
  const std::size_t files = open_files();
  {
    Process self;
    CHECK_EQ(self.open(getpid()), 0);
    CHECK(!self.ended());
    CHECK(!self.wait_status().has_value());
    CHECK_EQ(self.open(getppid()), 0);  // the first handle is closed
    Process moved = std::move(self);
    CHECK(!moved.ended());
    CHECK_EQ(open_files(), files + 1);
  }
  CHECK_EQ(open_files(), files);
}

#if !defined(PHALANX_TEST_TSAN)

namespace {

// Forks a child process that runs `body`, which ends it.
template <class Body>
int fork_child(Body&& body) {
  std::fflush(nullptr);
  const int pid = fork();
  if (pid == 0) {
    alarm(60);  // an orphan must not stay
    body();
    _exit(99);
  }
  CHECK(pid > 0);
  return pid;
}

// The pipe is closed when the child ends: no child waits for a parent that has failed.
struct Gate {
  Gate() { CHECK_EQ(pipe(ends), 0); }
  ~Gate() {
    ::close(ends[0]);
    ::close(ends[1]);
  }
  void open() const { CHECK_EQ(write(ends[1], "g", 1), 1); }
  void pass() const {
    char byte;
    (void)!read(ends[0], &byte, 1);
  }
  int ends[2];
};

// Checks the wait status that a handle reports, while the child is a zombie and after.
template <class Body>
void check_end(Body&& end_child, int expected) {
  const Gate gate;
  const int pid = fork_child([&] {
    gate.pass();
    end_child();
  });
  Process process;
  CHECK_EQ(process.open(pid), 0);
  CHECK(!process.ended());
  CHECK(!process.wait_status().has_value());
  gate.open();
  CHECK(ranks::eventually([&] { return process.ended(); }));
  const auto zombie = process.wait_status();
  if (CHECK(zombie.has_value())) CHECK_EQ(*zombie, expected);
  int status = 0;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK_EQ(status, expected);
  CHECK(process.ended());
  // From Linux 6.15 on the kernel reports it; earlier kernels do not.
  const auto reaped = process.wait_status();
  CHECK(!reaped.has_value() || *reaped == expected);
}

constexpr std::uint64_t kNonce = 77;

// Rank 1 of two in a process of its own, which joins and then runs `body`.
class Peer {
 public:
  template <class Body>
  explicit Peer(const Body& body) {
    Status status;
    auto segment = Segment::create(2, kNonce, status);
    CHECK(status.ok());
    const int descriptor = segment->descriptor();
    const int parent = getpid();
    RankControl& control = segment->control(1);
    pid = fork_child([&] {
      Status opened;
      Group other(Segment::open(parent, descriptor, 2, kNonce, opened), 1);
      const RankControl& parent_control = other.segment().control(0);
      CHECK(ranks::eventually([&] { return parent_control.presence.load() != Presence::absent; }));
      Mailbox messages(other);
      body(other, messages);
    });
    group.emplace(std::move(segment), 0);
    CHECK(ranks::eventually([&] { return control.presence.load() != Presence::absent; }));
    CHECK(group->connect().ok());
    mailbox.emplace(*group);
  }
  ~Peer() {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  // Waits until rank 0 sleeps on `event`, then kills rank 1.
  std::thread killer(const Event& event) {
    return std::thread([this, &event] {
      CHECK(ranks::eventually([&] { return event.sleepers.load() != 0; }));
      kill(pid, SIGKILL);
    });
  }

  int pid = 0;
  std::optional<Group> group;
  std::optional<Mailbox> mailbox;
};

void wait_forever() {
  while (true) pause();
}

void check_killed(const Status& status, const Group& group) {
  CHECK_EQ(status.code, Code::peer_lost);
  CHECK_EQ(status.peer, 1);
  CHECK_EQ(status.reporter, 0);
  const auto ending = group.wait_status(1);
  if (CHECK(ending.has_value())) CHECK(WIFSIGNALED(*ending) && WTERMSIG(*ending) == SIGKILL);
}

}  // namespace

TEST(the_exit_code_is_reported) {
  check_end([] { _exit(0); }, 0);
  check_end([] { _exit(3); }, 3 << 8);
  check_end([] { _exit(255); }, 255 << 8);
}

TEST(the_signal_is_reported) {
  check_end([] { kill(getpid(), SIGKILL); }, SIGKILL);
  check_end([] { signal(SIGTERM, SIG_DFL), kill(getpid(), SIGTERM); }, SIGTERM);
}

TEST(a_misleading_process_name_is_parsed_correctly) {
  const Gate gate;
  const Gate named;
  const int pid = fork_child([&] {
    CHECK_EQ(pthread_setname_np(pthread_self(), ") Z 1 (x) 7"), 0);
    named.open();
    gate.pass();
    _exit(5);
  });
  named.pass();
  Process process;
  CHECK_EQ(process.open(pid), 0);
  CHECK(!process.wait_status().has_value());
  gate.open();
  CHECK(ranks::eventually([&] { return process.ended(); }));
  const auto status = process.wait_status();
  if (CHECK(status.has_value())) CHECK_EQ(*status, 5 << 8);
  waitpid(pid, nullptr, 0);
}

TEST(a_killed_rank_is_lost_to_a_rank_in_a_collective) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{1} << 20}) {
    Peer peer([](Group&, Mailbox&) { wait_forever(); });
    std::thread killer = peer.killer(peer.group->segment().control(1).step_event);
    std::vector<float> data(count);
    const Status status =
        all_reduce(*peer.group, data.data(), count, DType::float32, ReduceOp::sum, within());
    killer.join();
    check_killed(status, *peer.group);
  }
}

TEST(a_rank_killed_during_a_collective_is_lost) {
  ranks::Random random(5);
  for (int round = 0; round < ranks::scaled(30) + 3; ++round) {
    constexpr std::size_t count = 1 << 20;
    Peer peer([](Group& group, Mailbox&) {
      std::vector<float> data(count);
      while (all_reduce(group, data.data(), count, DType::float32, ReduceOp::sum, within()).ok()) {
      }
    });
    std::vector<float> data(count);
    const std::size_t good = random.below(4);
    Status status;
    std::thread killer;
    for (std::size_t i = 0; status.ok(); ++i) {
      if (i == good) {
        killer = std::thread([&] {
          const auto until = Clock::now() + std::chrono::microseconds(random.below(2'000));
          while (Clock::now() < until) sched_yield();
          kill(peer.pid, SIGKILL);
        });
      }
      status = all_reduce(*peer.group, data.data(), count, DType::float32, ReduceOp::sum, within());
    }
    killer.join();
    check_killed(status, *peer.group);
  }
}

TEST(a_killed_rank_is_lost_to_a_rank_that_waits_for_its_message) {
  Peer peer([](Group&, Mailbox&) { wait_forever(); });
  std::thread killer = peer.killer(peer.group->segment().control(0).message_event);
  float value = 0;
  const auto message = peer.mailbox->irecv(&value, 1, DType::float32, 1, 0, false);
  const Status status = peer.mailbox->wait(*message, within());
  killer.join();
  check_killed(status, *peer.group);
  CHECK_EQ(peer.group->failure_report().mine.kind, Kind::recv);
  CHECK_EQ(peer.group->failure_report().mine.root, 1);
}

TEST(a_killed_rank_is_lost_to_a_rank_that_sends_to_it) {
  Peer peer([](Group&, Mailbox&) { wait_forever(); });
  std::thread killer = peer.killer(peer.group->segment().control(0).message_event);
  const std::vector<std::byte> data(4 * kRingBytes);
  const auto message = peer.mailbox->isend(data.data(), data.size(), DType::uint8, 1, 0, false);
  const Status status = peer.mailbox->wait(*message, within());
  killer.join();
  check_killed(status, *peer.group);
  CHECK_EQ(peer.group->failure_report().mine.kind, Kind::send);
}

TEST(messages_sent_before_a_rank_was_killed_arrive) {
  Peer peer([](Group&, Mailbox& mailbox) {
    const int values[] = {11, 22};
    for (const int& value : values) {
      (void)mailbox.isend(&value, 1, DType::int32, 0, value, false);
    }
    kill(getpid(), SIGKILL);
  });
  Process process;
  CHECK_EQ(process.open(peer.pid), 0);
  CHECK(ranks::eventually([&] { return process.ended(); }));
  for (const int tag : {22, 11}) {
    int value = 0;
    const auto message = peer.mailbox->irecv(&value, 1, DType::int32, 1, tag, false);
    CHECK(peer.mailbox->wait(*message, within()).ok());
    CHECK_EQ(value, tag);
  }
  int value = 0;
  const auto message = peer.mailbox->irecv(&value, 1, DType::int32, 1, 11, false);
  check_killed(peer.mailbox->wait(*message, within()), *peer.group);
}

TEST(a_rank_that_died_before_connect_is_lost) {
  Status status;
  auto segment = Segment::create(2, kNonce, status);
  const int descriptor = segment->descriptor();
  const int parent = getpid();
  const int pid = fork_child([&] {
    Status opened;
    Group other(Segment::open(parent, descriptor, 2, kNonce, opened), 1);
    _exit(0);
  });
  CHECK_EQ(waitpid(pid, nullptr, 0), pid);
  Group group(std::move(segment), 0);
  const Status lost = group.connect();
  CHECK_EQ(lost.code, Code::peer_lost);
  CHECK_EQ(lost.peer, 1);
  CHECK_EQ(group.failure().code, Code::peer_lost);
}

TEST(a_rank_that_exits_without_leaving_is_lost_and_its_exit_code_reported) {
  const Gate gate;
  Peer peer([&](Group&, Mailbox&) { _exit(7); });
  const Status status = barrier(*peer.group, within());
  CHECK_EQ(status.code, Code::peer_lost);
  const auto ending = peer.group->wait_status(1);
  if (CHECK(ending.has_value())) CHECK_EQ(*ending, 7 << 8);
}

TEST(a_rank_that_leaves_is_not_lost) {
  Peer peer([](Group& group, Mailbox&) {
    group.leave();
    _exit(0);
  });
  CHECK_EQ(barrier(*peer.group, within()).code, Code::left);
}

TEST(a_process_has_ended_before_its_memory_is_freed) {
  bool before = false;
  for (int round = 0; round < 10 && !before; ++round) {
    const Gate full;
    const int pid = fork_child([&] {
      std::vector<char> large(std::size_t{256} << 20, 'x');
      // Clang drops memory that nobody reads.
      asm volatile("" : : "r"(large.data()) : "memory");
      full.open();
      wait_forever();
    });
    full.pass();
    Process process;
    CHECK_EQ(process.open(pid), 0);
    const int handle = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    CHECK(!process.ended());
    kill(pid, SIGKILL);
    CHECK(ranks::eventually([&] { return process.ended(); }));
    const auto status = process.wait_status();
    if (CHECK(status.has_value())) CHECK_EQ(*status, SIGKILL);
    pollfd poller{.fd = handle, .events = POLLIN, .revents = 0};
    before = poll(&poller, 1, 0) == 0;
    ::close(handle);
    waitpid(pid, nullptr, 0);
  }
  CHECK(before);
}

TEST(a_rank_that_leaves_because_of_a_death_does_not_hide_it) {
  Status status;
  auto segment = Segment::create(3, kNonce, status);
  const int descriptor = segment->descriptor();
  const int parent = getpid();
  int pids[3] = {};
  for (const int rank : {1, 2}) {
    pids[rank] = fork_child([&] {
      Status opened;
      Group other(Segment::open(parent, descriptor, 3, kNonce, opened), rank);
      if (rank == 2) other.leave();
      wait_forever();
    });
  }
  const auto presence = [&](int rank) { return segment->control(rank).presence.load(); };
  CHECK(ranks::eventually([&] { return presence(1) == Presence::joined; }));
  CHECK(ranks::eventually([&] { return presence(2) == Presence::left; }));
  Group group(std::move(segment), 0);
  CHECK(group.connect().ok());
  CHECK_EQ(group.peer_status(2).code, Code::left);
  kill(pids[1], SIGKILL);
  CHECK(ranks::eventually([&] { return group.peer_status(2).code == Code::peer_lost; }));
  CHECK_EQ(group.peer_status(2).peer, 1);
  kill(pids[2], SIGKILL);
  for (const int rank : {1, 2}) waitpid(pids[rank], nullptr, 0);
}

TEST(a_failing_rank_that_aborts_is_lost) {
  Peer peer([](Group& other, Mailbox&) {
    other.fail(false);
    (void)other.abort(Status{.code = Code::aborted, .reporter = 1});
    wait_forever();
  });
  const Status status = barrier(*peer.group, within());
  CHECK_EQ(status.code, Code::peer_lost);
  CHECK_EQ(status.peer, 1);
}

TEST(a_forked_child_cannot_leave_for_its_parent) {
  Status status;
  Group group(Segment::create(1, kNonce, status), 0);
  const int pid = fork_child([&] {
    group.leave();
    _exit(0);
  });
  CHECK_EQ(waitpid(pid, nullptr, 0), pid);
  CHECK_EQ(group.segment().control(0).presence.load(), Presence::joined);
  group.leave();
  CHECK_EQ(group.segment().control(0).presence.load(), Presence::left);
}

TEST(collectives_between_processes_are_correct) {
  constexpr std::size_t count = 300'001;
  const auto work = [](Group& group) {
    bool good = true;
    for (int round = 0; round < 20; ++round) {
      const std::size_t n = round % 2 == 0 ? 5 : count;
      std::vector<std::int64_t> data(n);
      for (std::size_t i = 0; i < n; ++i) {
        data[i] = static_cast<std::int64_t>(i) * (group.rank() + 1) + round;
      }
      good = good && all_reduce(group, data.data(), n, DType::int64, ReduceOp::sum, within()).ok();
      for (std::size_t i = 0; i < n; ++i) {
        good = good && data[i] == static_cast<std::int64_t>(i) * 3 + 2 * round;
      }
    }
    return good;
  };
  Peer peer([&](Group& group, Mailbox&) { _exit(group.connect().ok() && work(group) ? 0 : 1); });
  CHECK(work(*peer.group));
  CHECK(ranks::eventually([&] { return peer.group->wait_status(1).has_value(); }));
  CHECK_EQ(*peer.group->wait_status(1), 0);
}

#endif
