// Ref<T>: an intrusive reference-counted pointer, and RefCounted, the base class with the count.
// One word per handle and no control block, so that a tensor is one allocation.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <lockstep/tensor/export.h>

namespace lockstep {

/// Base of reference-counted classes. `dispose` runs when the last reference is released; a
/// subclass may override it to control its destruction (Node does, to destroy long chains without
/// recursion).
class LOCKSTEP_API RefCounted {
 public:
  RefCounted() = default;
  RefCounted(const RefCounted&) = delete;
  RefCounted& operator=(const RefCounted&) = delete;

  int64_t use_count() const noexcept { return count_.load(std::memory_order_acquire); }
  void retain() const noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  /// retain(), unless the last reference is released: for whoever knows the object by a pointer alone.
  bool retain_if_alive() const noexcept {
    int64_t count = count_.load(std::memory_order_relaxed);
    while (count > 0)
      if (count_.compare_exchange_weak(count, count + 1, std::memory_order_relaxed)) return true;
    return false;
  }
  void release() const noexcept {
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      const_cast<RefCounted*>(this)->dispose();
  }

 protected:
  virtual ~RefCounted() = default;
  virtual void dispose() noexcept { delete this; }

 private:
  mutable std::atomic<int64_t> count_{0};
};

template <class T>
class Ref {
 public:
  Ref() = default;
  Ref(std::nullptr_t) {}
  explicit Ref(T* p) : p_(p) {
    if (p_) p_->retain();
  }
  Ref(const Ref& o) : p_(o.p_) {
    if (p_) p_->retain();
  }
  Ref(Ref&& o) noexcept : p_(std::exchange(o.p_, nullptr)) {}
  template <class U>
  requires std::is_convertible_v<U*, T*> Ref(const Ref<U>& o) : Ref(static_cast<T*>(o.get())) {}
  Ref& operator=(Ref o) noexcept {
    std::swap(p_, o.p_);
    return *this;
  }
  ~Ref() {
    if (p_) p_->release();
  }

  T* get() const noexcept { return p_; }
  T* operator->() const noexcept { return p_; }
  T& operator*() const noexcept { return *p_; }
  explicit operator bool() const noexcept { return p_ != nullptr; }
  bool operator==(const Ref&) const = default;

 private:
  T* p_ = nullptr;
};

template <class T, class... Args>
Ref<T> make_ref(Args&&... args) {
  return Ref<T>(new T(std::forward<Args>(args)...));
}

}  // namespace lockstep
