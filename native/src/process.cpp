#include "phalanx/process.h"

#include <dirent.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace phalanx {
namespace {

// <linux/pidfd.h> of Linux 6.15. Older headers lack it, and older kernels return an error.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroup;
  std::uint32_t identities[11];
  std::int32_t wait_status;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kPidfdInfoExit = 1 << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

// Milliseconds to wait for the end of a process whose wait status may not be available yet.
constexpr int kWaitStatusTimeout = 200;

std::optional<int> reaped_status(int handle) {
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (ioctl(handle, kPidfdGetInfo, &info) != 0 || (info.mask & kPidfdInfoExit) == 0) {
    return std::nullopt;
  }
  return info.wait_status;
}

// The fields of /proc/<pid>/stat of a process or a thread.
struct Stat {
  char state = 0;
  unsigned long flags = 0;
  int wait_status = 0;

  // Whether it runs no more code of its own (PF_EXITING, unchanged since Linux 2.6).
  bool exiting() const { return state == 'Z' || (flags & 0x4) != 0; }
};

std::optional<Stat> stat_of(const char* path) {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) {
    return std::nullopt;
  }
  char text[2048] = {};
  const std::size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  const std::string stat(text, size);
  const auto name_end = stat.rfind(')');
  const auto last = stat.find_last_of(' ');
  Stat found;
  if (name_end == std::string::npos ||
      std::sscanf(stat.c_str() + name_end, ") %c %*d %*d %*d %*d %*d %lu", &found.state,
                  &found.flags) != 2) {
    return std::nullopt;
  }
  found.wait_status = std::atoi(stat.c_str() + last);
  return found;
}

std::optional<Stat> stat_of(int pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  return stat_of(path);
}

// Whether no thread of a process runs any more code of its own. The kernel then frees its memory,
// which can take a second for gigabytes; the pidfd becomes readable only after that.
bool exiting(int pid) {
  const auto leader = stat_of(pid);
  if (!leader || !leader->exiting()) {
    return false;
  }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR* threads = opendir(path);
  if (threads == nullptr) {
    return false;
  }
  bool all = true;
  while (const dirent* entry = readdir(threads)) {
    if (entry->d_name[0] != '.') {
      char thread[400];
      std::snprintf(thread, sizeof thread, "%s/%s/stat", path, entry->d_name);
      const auto stat = stat_of(thread);
      all = all && (!stat || stat->exiting());
    }
  }
  closedir(threads);
  return all;
}

}  // namespace

struct Process::Handle {
  Handle(int process, int fd) : pid(process), descriptor(fd) {}
  ~Handle() { ::close(descriptor); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Whether the kernel has finished with it, within so many milliseconds.
  bool ended(int timeout = 0) const {
    pollfd poller{.fd = descriptor, .events = POLLIN, .revents = 0};
    return poll(&poller, 1, timeout) == 1;
  }

  int pid;
  int descriptor;
};

int Process::open(int pid) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<const Handle>> handles;
  const std::lock_guard lock(mutex);
  auto& cached = handles[pid];
  handle_ = cached.lock();
  // The handle of a process that has ended may be that of an earlier process with this pid.
  if (handle_ && !handle_->ended()) {
    return 0;
  }
  const long descriptor = syscall(SYS_pidfd_open, pid, 0);
  if (descriptor < 0) {
    handle_ = nullptr;
    missing_ = errno == ESRCH;
    return errno;
  }
  cached = handle_ = std::make_shared<const Handle>(pid, static_cast<int>(descriptor));
  return 0;
}

bool Process::ended() const {
  return missing_ || (handle_ && (handle_->ended() || exiting(handle_->pid)));
}

std::optional<int> Process::wait_status() const {
  if (!handle_) {
    return std::nullopt;
  }
  const int descriptor = handle_->descriptor;
  if (const auto status = reaped_status(descriptor)) {
    return status;
  }
  auto stat = stat_of(handle_->pid);
  if (stat && stat->exiting() && stat->wait_status == 0) {
    // Not yet written, on some kernels.
    handle_->ended(kWaitStatusTimeout);
    stat = stat_of(handle_->pid);
  }
  const auto status =
      stat && stat->exiting() ? std::optional<int>(stat->wait_status) : std::nullopt;
  // Only now, after the read, is it certain that the pid was this process's: it is until it is
  // reaped.
  const bool reaped =
      syscall(SYS_pidfd_send_signal, descriptor, 0, nullptr, 0) != 0 && errno == ESRCH;
  return reaped ? reaped_status(descriptor) : status;
}

}  // namespace phalanx
