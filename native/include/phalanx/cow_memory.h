// Memory that the ranks of a host hold once, with copy-on-write for each rank's own changes.
//
// Every process maps it twice. All ranks see what is written to the shared view. The private view
// shows the same pages until this process writes to one. From then on that page is a private copy
// (the kernel's copy-on-write): no other rank sees it, and it no longer follows the shared view,
// until it is published or dropped. So replicas of a model cost the memory of one while they are
// equal, and behave like replicas when they are not.
//
// Nothing here synchronises: ranks agree by other means on who writes to the shared view, and when.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "phalanx/sealed_memory.h"
#include "phalanx/status.h"

namespace phalanx {

// The way of finding the pages that this process has written: the kernel's scan (Linux 6.7), its
// map of all pages, or none, in which case all pages count as written.
enum class PageFinder { scan, map, none };

class CowMemory {
 public:
  // Creates memory of whole pages. Null with `out_of_memory` or `system`, and errno.
  static std::unique_ptr<CowMemory> create(std::size_t bytes, Status& status);
  // Opens the memory of another process, which must keep the descriptor open. Null with `system`;
  // EPROTO if it is other memory or has another size.
  static std::unique_ptr<CowMemory> open(int pid, int descriptor, std::size_t bytes,
                                         Status& status);
  ~CowMemory();
  CowMemory(const CowMemory&) = delete;
  CowMemory& operator=(const CowMemory&) = delete;

  std::byte* shared_view() const { return shared_.base(); }
  std::byte* private_view() const { return private_; }
  // In whole pages.
  std::size_t bytes() const { return shared_.bytes(); }
  int descriptor() const { return shared_.descriptor(); }
  // Call it once all processes have opened the memory, which lives as long as it is mapped.
  void close_descriptor() { shared_.close_descriptor(); }

  // Ranges are in bytes, and consist of whole pages.

  // Copies the pages in the range that this process has written to in the private view to the
  // shared view, and drops the private copies. Returns the number of pages.
  std::size_t publish(std::size_t offset, std::size_t bytes, PageFinder finder = PageFinder::scan);
  // Drops the private copies in the range: the private view shows the shared pages again. Returns
  // the number of pages.
  std::size_t drop(std::size_t offset, std::size_t bytes, PageFinder finder = PageFinder::scan);

 private:
  CowMemory(SealedMemory shared, std::byte* priv) : shared_(std::move(shared)), private_(priv) {}
  static std::unique_ptr<CowMemory> map(SealedMemory shared, Status& status);

  SealedMemory shared_;
  std::byte* private_;
};

}  // namespace phalanx
