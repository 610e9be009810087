// Gloo's transport with a way out: every buffer that an operation waits on is known here, so that
// another thread can end the wait. By itself Gloo wakes a waiter at its timeout only, when the peer
// was lost in the middle of a message.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>

namespace lockstep::dist::gloo_backend {

class WatchedBuffer;

/// Forwards to a transport's own context, and hands out watched buffers.
class WatchedTransport final : public gloo::transport::Context {
 public:
  WatchedTransport(std::shared_ptr<gloo::transport::Context> inner, int rank, int size)
      : gloo::transport::Context(rank, size), inner_(std::move(inner)) {}

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override {
    return inner_->getPair(rank);
  }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override {
    return inner_->createPair(rank);
  }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* ptr,
                                                                      size_t size) override;

  /// Ends all waits, now and later, by a DistError with `why`, and closes the connections.
  void stop(const std::string& why);
  /// Throws once stopped.
  void check() const;

 private:
  friend class WatchedBuffer;
  std::shared_ptr<gloo::transport::Context> inner_;
  mutable std::mutex mutex_;
  std::set<WatchedBuffer*> buffers_;
  bool stopped_ = false;
  std::string why_;
};

/// A Gloo context that is connected by whoever owns it.
class WatchedContext final : public gloo::Context {
 public:
  /// Each connection is given up after `connect_timeout`.
  WatchedContext(const std::shared_ptr<gloo::transport::Device>& device, int rank, int size,
                 std::chrono::milliseconds connect_timeout);
  WatchedTransport& transport() { return *watched_; }

 private:
  std::shared_ptr<WatchedTransport> watched_;
};

}  // namespace lockstep::dist::gloo_backend
