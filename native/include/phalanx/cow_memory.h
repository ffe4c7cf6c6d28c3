// Memory that the ranks of a host hold once, and of which each can still change its own.
//
// It is mapped twice in every process. What is written to `common` all ranks see. `own` shows the
// same pages, until this process writes to one: from then on that page is a private copy (the
// kernel's copy-on-write), which no other rank sees and which no longer follows `common`, until it
// is published or dropped. So replicas of a model cost the memory of one for as long as they are
// equal, and behave like replicas when they are not.
//
// Nothing here synchronises: ranks agree by other means on who writes to `common`, and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "phalanx/status.h"

namespace phalanx {

// How pages are found that this process has written: by the kernel's scan (Linux 6.7), by its map
// of all pages, or, where neither can be had, by taking all of them for written.
enum class PageFinder { scan, map, none };

class CowMemory {
 public:
  // Whole pages, backed by memory. Null with `out_of_memory` or `system`, and errno.
  static std::unique_ptr<CowMemory> create(std::size_t bytes, Status& status);
  // What another process has made, as long as it keeps the descriptor open. Null with `system`:
  // EPROTO if it is something else, or of another size.
  static std::unique_ptr<CowMemory> open(int pid, int descriptor, std::size_t bytes,
                                         Status& status);
  ~CowMemory();
  CowMemory(const CowMemory&) = delete;
  CowMemory& operator=(const CowMemory&) = delete;

  std::byte* shared_view() const { return shared_; }
  std::byte* private_view() const { return private_; }
  // In whole pages.
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return fd_; }
  // Once everybody has opened it: the memory lives as long as somebody maps it.
  void close_descriptor();

  // Ranges are in bytes, and of whole pages.

  // Copies the pages in the range that this process has written in `own` to `common`, and drops
  // them. Returns how many those were.
  std::size_t publish(std::size_t offset, std::size_t bytes, PageFinder finder = PageFinder::scan);
  // Drops what this process has written there: `own` shows `common` again. Returns how many pages.
  std::size_t drop(std::size_t offset, std::size_t bytes, PageFinder finder = PageFinder::scan);

 private:
  CowMemory(std::byte* shared, std::byte* priv, std::size_t bytes, int fd);
  static std::unique_ptr<CowMemory> map(int fd, std::size_t bytes, Status& status);

  std::byte* shared_;
  std::byte* private_;
  std::size_t bytes_;
  int fd_;
};

}  // namespace phalanx
