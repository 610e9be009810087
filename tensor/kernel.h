// Kernel: a function that depends on the device, one per device with one signature. All writes to the
// memory of tensors go through the call operator of a kernel. Each is declared beside its op under
// lockstep::kernels and entered per device by whoever implements it: tensor/cpu/ for the CPU, a
// plug-in for its own device. Arguments are values that can be kept, so that calls can be recorded
// and made again.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <lockstep/tensor/tensor.h>

namespace lockstep {

/// A set of dtypes, one bit each.
using DTypes = unsigned;
namespace dtypes {
constexpr DTypes only(DType t) { return 1u << static_cast<int>(t); }
constexpr DTypes where(bool (*condition)(const detail::DTypeRow&)) {
  DTypes set = 0;
  for (const detail::DTypeRow& row : detail::dtype_rows)
    if (condition(row)) set |= only(row.dtype);
  return set;
}
inline constexpr DTypes kAll = where([](auto&) { return true; });
inline constexpr DTypes kFloating = where([](auto& row) { return row.is_floating; });
inline constexpr DTypes kFloats = only(DType::f32) | only(DType::f64);
inline constexpr DTypes kComputed = kAll & ~(kFloating & ~kFloats);
inline constexpr DTypes kNumbers = kComputed & ~only(DType::boolean);
}  // namespace dtypes

/// What all kernels have in common: a name and, per device type, a function and the dtypes it takes.
class LOCKSTEP_API KernelEntry {
 public:
  using AnyFunction = void (*)();
  /// `part` is what the kernel does of the op's work: errors name the op alone.
  constexpr KernelEntry(const char* op, const char* part) : op_(op), part_(part) {}
  KernelEntry(const KernelEntry&) = delete;

  /// The op's name and the part's, as in "conv2d_backward_data".
  std::string name() const { return std::string(op_) + part_; }
  /// The dtypes that the device's function takes; none where there is no function.
  DTypes dtypes(DeviceType type) const {
    return functions_[static_cast<size_t>(type)].load(std::memory_order_acquire)
               ? dtypes_[static_cast<size_t>(type)]
               : 0;
  }

 protected:
  bool enter(DeviceType type, AnyFunction f, DTypes dtypes);
  AnyFunction function_on(Device device) const {
    const AnyFunction f =
        functions_[static_cast<size_t>(device.type)].load(std::memory_order_acquire);
    if (!f) [[unlikely]]
      fail_missing(device);
    return f;
  }
  [[noreturn]] void fail_devices(Device a, Device b) const;

 private:
  friend std::vector<const KernelEntry*> all_kernels();
  [[noreturn]] void fail_missing(Device device) const;

  const char *op_, *part_;
  std::array<std::atomic<AnyFunction>, kDeviceTypes> functions_{};
  std::array<DTypes, kDeviceTypes> dtypes_{};
  KernelEntry* next_ = nullptr;  // in the list of all
  bool listed_ = false;
};

/// All kernels that some device has entered, sorted by name.
LOCKSTEP_API std::vector<const KernelEntry*> all_kernels();
/// The support matrix as text: a line per kernel, with the dtypes it takes on each device.
LOCKSTEP_API std::string kernel_table();

/// Told of each kernel call of its thread while it lives; calls inside kernels are part of those.
class LOCKSTEP_API KernelRecorder {
 public:
  KernelRecorder();
  virtual ~KernelRecorder();
  KernelRecorder(const KernelRecorder&) = delete;
  /// After the call: `again` makes it again, with the same tensors and what their memory holds then.
  virtual void called(const KernelEntry& kernel, std::function<void()> again) = 0;

 private:
  KernelRecorder* outer_;
};

/// Up to six tensors as one argument of a kernel, the result first. It refers to them; what is kept of
/// it are handles.
class Operands {
 public:
  static constexpr size_t kMost = 6;
  template <class... Tensors>
  requires(std::is_same_v<Tensors, Tensor>&&...) explicit Operands(const Tensors&... tensors)
      : tensors_{&tensors...}, count_(sizeof...(tensors)) {
    static_assert(sizeof...(tensors) <= kMost);
  }
  explicit Operands(std::span<const Tensor> tensors) : count_(tensors.size()) {
    for (size_t i = 0; i < count_; ++i) tensors_[i] = &tensors[i];
  }
  void push_back(const Tensor& t) { tensors_[count_++] = &t; }
  void replace(size_t i, const Tensor& t) { tensors_[i] = &t; }
  size_t size() const { return count_; }
  const Tensor& operator[](size_t i) const { return *tensors_[i]; }
  std::span<const Tensor* const> all() const { return {tensors_.data(), count_}; }

 private:
  std::array<const Tensor*, kMost> tensors_{};
  size_t count_;
};

/// A tensor in the host's memory, whatever device the kernel runs on: the other side of a transfer.
struct OnHost {
  Tensor tensor;
  template <class F>
  void each_tensor(const F&) const {}  // none that says which device
};

/// Host memory that kernels read when they run: what changes from step to step (a learning rate, a
/// step count, the state of a generator) is given to a kernel as a Ref<Cell<T>>.
template <class T>
struct Cell final : RefCounted {
  T value{};
  Cell() = default;
  explicit Cell(T v) : value(std::move(v)) {}
};

namespace detail {

LOCKSTEP_API extern LOCKSTEP_THREAD_LOCAL KernelRecorder* kernel_recorder;

/// How an argument is kept, passed again, and which tensors it names.
template <class A>
struct KernelArgument {
  static constexpr bool lists_tensors = requires(const A& a) { a.each_tensor([](const Tensor&) {}); };
  static_assert(lists_tensors || (std::is_trivially_copyable_v<A> && !std::is_pointer_v<A>),
                "an argument of a kernel is a Tensor, Operands, OnHost, a Ref<Cell<T>>, a plain value, "
                "or a class with each_tensor(f), so that the call can be kept");
  using Kept = A;
  static const A& pass(const A& kept) { return kept; }
  template <class F>
  static void each_tensor(const A& a, const F& f) {
    if constexpr (lists_tensors) a.each_tensor(f);
  }
};
template <>
struct KernelArgument<Tensor> {
  using Kept = Tensor;  // another handle, whose shape no later change of this one reaches
  static Kept keep(const Tensor& t) { return t.defined() ? t.detach() : t; }
  static const Tensor& pass(const Tensor& kept) { return kept; }
  template <class F>
  static void each_tensor(const Tensor& t, const F& f) {
    if (t.defined()) f(t);
  }
};
template <>
struct KernelArgument<std::vector<Tensor>> {
  using Kept = std::vector<Tensor>;
  static Kept keep(const std::vector<Tensor>& tensors) {
    Kept kept;
    for (const Tensor& t : tensors) kept.push_back(KernelArgument<Tensor>::keep(t));
    return kept;
  }
  static const Kept& pass(const Kept& kept) { return kept; }
  template <class F>
  static void each_tensor(const Kept& tensors, const F& f) {
    for (const Tensor& t : tensors)
      if (t.defined()) f(t);
  }
};
template <>
struct KernelArgument<Operands> {
  using Kept = std::vector<Tensor>;
  static Kept keep(const Operands& o) {
    Kept tensors;
    for (const Tensor* t : o.all()) tensors.push_back(t->detach());
    return tensors;
  }
  static Operands pass(const Kept& kept) { return Operands(std::span(kept)); }
  template <class F>
  static void each_tensor(const Operands& o, const F& f) {
    for (const Tensor* t : o.all()) f(*t);
  }
};
template <class T>
struct KernelArgument<Ref<Cell<T>>> {
  using Kept = Ref<Cell<T>>;
  static const Kept& pass(const Kept& kept) { return kept; }
  template <class F>
  static void each_tensor(const Kept&, const F&) {}
};

/// The argument as it is kept.
template <class A>
typename KernelArgument<A>::Kept keep(const A& a) {
  if constexpr (requires { KernelArgument<A>::keep(a); })
    return KernelArgument<A>::keep(a);
  else
    return a;
}

}  // namespace detail

template <class Signature>
class Kernel;
/// Results come first among the arguments, then operands, then parameters. A result that only the
/// device knows is a tensor.
template <class... Args>
class Kernel<void(Args...)> final : public KernelEntry {
 public:
  using Function = void (*)(Args...);
  constexpr explicit Kernel(const char* op, const char* part = "") : KernelEntry(op, part) {}

  /// Gives a device its function; true, so that a constant at namespace scope can do it.
  bool set(DeviceType type, Function f, DTypes dtypes) {
    return enter(type, reinterpret_cast<AnyFunction>(f), dtypes);
  }
  /// The device's function. Throws DeviceError for a device that has none.
  Function on(Device device) const { return reinterpret_cast<Function>(function_on(device)); }

  /// Runs the function of the device that all operands are on (the CPU if there are none). Operands on
  /// several devices are a DeviceError.
  void operator()(Args... args) const {
    const Function f = on(device_of(args...));
    if (KernelRecorder* recorder = detail::kernel_recorder) [[unlikely]]
      return record(*recorder, f, args...);
    f(args...);
  }

 private:
  template <class A>
  using Argument = detail::KernelArgument<std::remove_cvref_t<A>>;

  Device device_of(const std::remove_cvref_t<Args>&... args) const {
    Device device;
    bool known = false;
    const auto see = [&](const Tensor& t) {
      if (!known)
        device = t.device(), known = true;
      else if (t.device() != device) [[unlikely]]
        fail_devices(device, t.device());
    };
    (Argument<Args>::each_tensor(args, see), ...);
    return device;
  }
  void record(KernelRecorder& recorder, Function f,
              const std::remove_cvref_t<Args>&... args) const {
    detail::kernel_recorder = nullptr;  // for the calls inside
    struct Restore {
      KernelRecorder* recorder;
      ~Restore() { detail::kernel_recorder = recorder; }
    } restore{&recorder};
    f(args...);
    recorder.called(*this, [f, kept = std::tuple<typename Argument<Args>::Kept...>(
                                   detail::keep<std::remove_cvref_t<Args>>(args)...)] {
      std::apply([f](const auto&... k) { f(Argument<Args>::pass(k)...); }, kept);
    });
  }
};

}  // namespace lockstep
