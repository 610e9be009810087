// What tests of DistributedDataParallel share: two smallest modules, ranks as threads whose exceptions are
// collected one by one, and the warnings of a scope.
#pragma once

#include <cmath>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>

#include "ranks.h"
#include "texts.h"

using namespace lockstep;
using dist::DistributedDataParallel, dist::Group, dist::run_local;
using ranks::require;

inline const dist::LocalOptions kQuick{.timeout = std::chrono::seconds(4)};
constexpr double kTol = 1e-12;

inline Tensor f64(std::vector<double> v) { return tensor(v); }
inline Tensor f64(double v) { return scalar(v, {.dtype = DType::f64}); }
inline void near(double got, double want, const std::string& what) {
  require(std::abs(got - want) <= kTol * std::max(1.0, std::abs(want)),
          str_cat(what, ": got ", got, ", want ", want));
}
inline void equal_on_all(const Group& group, const Tensor& t, const std::string& what) {
  const Tensor all = group.all_gather(t.detach().contiguous());
  for (int r = 1; r < group.size(); ++r)
    require(all[r].to_vector<double>() == all[0].to_vector<double>(),
            what + " differs between ranks");
}

/// Runs f on `size` ranks and returns what each threw ("" for nothing), so that misuse can be
/// checked on all.
inline std::vector<std::string> texts(int size, const std::function<void(Group)>& f) {
  std::vector<std::string> out(static_cast<size_t>(size));
  run_local(
      size,
      [&](Group group) {
        try {
          f(group);
        } catch (const std::exception& e) {
          out[static_cast<size_t>(group.rank())] = e.what();
        }
      },
      kQuick);
  return out;
}
/// Warnings of one scope.
struct Warnings {
  std::mutex mutex;
  std::vector<std::string> all;
  Warnings() {
    set_warning_handler([this](const std::string& w) {
      std::lock_guard lock(mutex);
      all.push_back(w);
    });
  }
  ~Warnings() { set_warning_handler({}); }
};

struct Scalar : nn::Module {  // w x
  nn::Parameter w{f64(10)};
  Tensor forward(Tensor x) { return w * x; }
  LOCKSTEP_MODULE(Scalar, w)
};
struct Two : nn::Module {  // a x and b x
  nn::Parameter a{f64(2)}, b{f64(3)};
  std::pair<Tensor, Tensor> forward(Tensor x) { return {a * x, b * x}; }
  LOCKSTEP_MODULE(Two, a, b)
};
