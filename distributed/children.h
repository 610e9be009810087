// Children: the communicators that a group has made by child() and that still live. The group's
// destroy() ends them too: their users (DistributedDataParallel) would not say goodbye by themselves.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <lockstep/distributed/process_group.h>

namespace lockstep::dist {

class Children {
 public:
  /// Returns it.
  std::shared_ptr<ProcessGroup> add(std::shared_ptr<ProcessGroup> child) {
    std::lock_guard lock(mutex_);
    std::erase_if(children_, [](const auto& c) { return c.expired(); });
    children_.push_back(child);
    return child;
  }
  /// Destroys them, in the order in which they were made.
  void destroy() {
    std::unique_lock lock(mutex_);
    const auto children = std::exchange(children_, {});
    lock.unlock();
    for (const auto& weak : children)
      if (const auto child = weak.lock()) child->destroy();
  }

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<ProcessGroup>> children_;
};

}  // namespace lockstep::dist
