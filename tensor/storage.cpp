#include <lockstep/tensor/storage.h>

#include <mutex>

#include <lockstep/tensor/device_backend.h>

namespace lockstep {

struct Storage::Extra {
  std::mutex mutex;  // of threads that bring the bytes back
  std::shared_ptr<BytesOwner> owner;
  std::string read_only;  // the reason; empty for none
};

BytesOwner::~BytesOwner() = default;

Ref<Storage> Storage::allocate(size_t bytes, Device device) {
  return Ref<Storage>(new Storage(backend_of(device).allocate(bytes, device.index), bytes, device));
}
Storage::Storage(void* data, size_t bytes, Device device, std::function<void()> release)
    : data_(data), bytes_(bytes), device_(device), release_(release ? std::move(release) : [] {}) {}
Storage::~Storage() {
  if (has_bytes()) free_bytes();
}
void Storage::free_bytes() {
  if (release_)
    release_();
  else
    backend_of(device_).deallocate(data_, bytes_, device_.index);
}

Storage::Extra& Storage::extra() {
  if (!extra_) extra_ = std::make_shared<Extra>();
  return *extra_;
}

void Storage::swap_memory(Storage& other) {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(release_, other.release_);
  std::swap(extra_, other.extra_);
  released_ = other.released_.exchange(released_);
}

// ---- bytes that go and come back ----

void Storage::set_owner(std::shared_ptr<BytesOwner> owner) {
  if (!owner) data();  // brings back what only the last owner can
  extra().owner = std::move(owner);
}

void Storage::release_bytes() {
  if (!has_bytes()) return;
  LOCKSTEP_CHECK(extra_ && extra_->owner, Error,
                 "release_bytes: the storage has no owner that could bring its ", bytes_,
                 " bytes back; see set_owner");
  free_bytes();
  data_ = nullptr;
  release_ = nullptr;
  released_.store(true, std::memory_order_release);
}

void Storage::restore_bytes() const {
  const std::lock_guard lock(extra_->mutex);
  if (has_bytes()) return;
  const Ref<Storage> bytes = extra_->owner->restore(*this);
  LOCKSTEP_CHECK(bytes && bytes->bytes() == bytes_ && bytes->device() == device_, Error,
                 "storage: its owner was to bring back ", bytes_, " bytes on ", device_,
                 " and returned ",
                 bytes ? str_cat(bytes->bytes(), " on ", bytes->device()) : std::string("none"));
  Storage& self = const_cast<Storage&>(*this);
  self.data_ = bytes->data();
  self.release_ = [bytes] {};
  self.released_.store(false, std::memory_order_release);
}

// ---- read-only ----

void Storage::set_read_only(std::string reason) { extra().read_only = std::move(reason); }
bool Storage::is_read_only() const { return extra_ && !extra_->read_only.empty(); }

void Storage::fail_if_read_only(std::string_view op) const {
  LOCKSTEP_CHECK(!is_read_only(), ValueError, op, ": the tensor is read-only: ", extra_->read_only);
}

}  // namespace lockstep
