#include <lockstep/tensor/storage.h>

#include <lockstep/tensor/device_backend.h>

namespace lockstep {

Ref<Storage> Storage::allocate(size_t bytes, Device device) {
  return Ref<Storage>(new Storage(backend_of(device).allocate(bytes, device.index), bytes, device));
}
Storage::Storage(void* data, size_t bytes, Device device, std::function<void()> release)
    : data_(data), bytes_(bytes), device_(device), release_(release ? std::move(release) : [] {}) {}
Storage::~Storage() {
  if (release_)
    release_();
  else
    backend_of(device_).deallocate(data_, bytes_, device_.index);
}

}  // namespace lockstep
