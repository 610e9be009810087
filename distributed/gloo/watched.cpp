// Buffers that register while they live.
#include <lockstep/distributed/gloo/watched.h>

#include <algorithm>

#include <lockstep/tensor/error.h>

namespace lockstep::dist::gloo_backend {

class WatchedBuffer final : public gloo::transport::UnboundBuffer {
 public:
  WatchedBuffer(WatchedTransport& transport, void* ptr, size_t size)
      : gloo::transport::UnboundBuffer(ptr, size),
        transport_(transport),
        inner_(transport.inner_->createUnboundBuffer(ptr, size)) {
    std::lock_guard lock(transport_.mutex_);
    transport_.buffers_.insert(this);
  }
  ~WatchedBuffer() override {
    std::lock_guard lock(transport_.mutex_);
    transport_.buffers_.erase(this);
  }

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    transport_.check();
    if (!inner_->waitRecv(rank, timeout)) transport_.check();
    return true;
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    transport_.check();
    if (!inner_->waitSend(rank, timeout)) transport_.check();
    return true;
  }
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }

  void send(int to, uint64_t slot, size_t offset, size_t bytes) override {
    transport_.check();
    inner_->send(to, slot, offset, bytes);
  }
  void recv(int from, uint64_t slot, size_t offset, size_t bytes) override {
    transport_.check();
    inner_->recv(from, slot, offset, bytes);
  }
  void recv(std::vector<int> from, uint64_t slot, size_t offset, size_t bytes) override {
    transport_.check();
    inner_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  WatchedTransport& transport_;
  std::unique_ptr<gloo::transport::UnboundBuffer> inner_;
};

std::unique_ptr<gloo::transport::UnboundBuffer> WatchedTransport::createUnboundBuffer(void* ptr,
                                                                                      size_t size) {
  return std::make_unique<WatchedBuffer>(*this, ptr, size);
}

void WatchedTransport::stop(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    stopped_ = true;
    why_ = why;
    // Whoever is about to wait finds the mark, whoever waits is woken.
    for (WatchedBuffer* buffer : buffers_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }
  for (int r = 0; r < size; ++r)
    if (const auto& pair = inner_->getPair(r)) pair->close();
}

void WatchedTransport::check() const {
  std::lock_guard lock(mutex_);
  if (stopped_) throw DistError(why_);
}

WatchedContext::WatchedContext(const std::shared_ptr<gloo::transport::Device>& device, int rank,
                               int size, std::chrono::milliseconds connect_timeout)
    : gloo::Context(rank, size) {
  auto inner = device->createContext(rank, size);
  // Gloo waits five times the timeout for a connection.
  inner->setTimeout(std::max(connect_timeout / 5, std::chrono::milliseconds(1)));
  watched_ = std::make_shared<WatchedTransport>(std::move(inner), rank, size);
  device_ = device;
  transportContext_ = watched_;
}

}  // namespace lockstep::dist::gloo_backend
