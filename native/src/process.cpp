#include "phalanx/process.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace phalanx {
namespace {

// <linux/pidfd.h> of Linux 6.15; older headers lack it, older kernels answer with an error.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroup;
  std::uint32_t identities[11];
  std::int32_t wait_status;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr std::uint64_t kPidfdInfoExit = 1 << 3;
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);

std::optional<int> reaped_status(int handle) {
  PidfdInfo info{};
  info.mask = kPidfdInfoExit;
  if (ioctl(handle, kPidfdGetInfo, &info) != 0 || (info.mask & kPidfdInfoExit) == 0) {
    return std::nullopt;
  }
  return info.wait_status;
}

// The last field of /proc/<pid>/stat is the wait status of a zombie.
std::optional<int> zombie_status(int pid) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
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
  if (name_end == std::string::npos || stat.compare(name_end, 3, ") Z") != 0) {
    return std::nullopt;
  }
  return std::atoi(stat.c_str() + last);
}

}  // namespace

struct Process::Handle {
  Handle(int of, int fd) : pid(of), descriptor(fd) {}
  ~Handle() { ::close(descriptor); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  bool ended() const {
    pollfd poller{.fd = descriptor, .events = POLLIN, .revents = 0};
    return poll(&poller, 1, 0) == 1;
  }

  int pid;
  int descriptor;
};

int Process::open(int pid) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<const Handle>> handles;
  const std::lock_guard lock(mutex);
  auto& known = handles[pid];
  handle_ = known.lock();
  // The handle of a process that has ended may be one of an earlier process with this pid.
  if (handle_ && !handle_->ended()) {
    return 0;
  }
  const long descriptor = syscall(SYS_pidfd_open, pid, 0);
  if (descriptor < 0) {
    handle_ = nullptr;
    return errno;
  }
  known = handle_ = std::make_shared<const Handle>(pid, static_cast<int>(descriptor));
  return 0;
}

bool Process::ended() const { return handle_ && handle_->ended(); }

std::optional<int> Process::wait_status() const {
  if (!handle_) {
    return std::nullopt;
  }
  const int descriptor = handle_->descriptor;
  if (const auto status = reaped_status(descriptor)) {
    return status;
  }
  const auto status = zombie_status(handle_->pid);
  // Only now, after the read, is it sure that the pid was this process's: it is until it is reaped.
  const bool reaped =
      syscall(SYS_pidfd_send_signal, descriptor, 0, nullptr, 0) != 0 && errno == ESRCH;
  return reaped ? reaped_status(descriptor) : status;
}

}  // namespace phalanx
