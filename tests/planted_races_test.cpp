// Built with the thread sanitizer only: it must report a race in a SIMD loop and one in DDP. If it
// did not, its silence over the other tests would mean nothing.
#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <thread>

#include <lockstep/lockstep.h>

#include "ranks.h"

using namespace lockstep;

TEST_CASE("race: two threads in one element-wise loop" * doctest::skip()) {
  std::vector<float> values(1024, 1);
  auto add = [&] {
    // A Storage each: what they race for is the elements alone.
    Tensor t = from_blob(values.data(), {1024});
    for (int i = 0; i < 100; ++i) t.mul_(1.5);
  };
  std::thread other(add);
  add();
  other.join();
}

TEST_CASE("race: a gradient written while its bucket is reduced" * doctest::skip()) {
  dist::run_local(2, [](dist::Group group) {
    nn::Sequential model{nn::Linear{64, 64}, nn::Linear{64, 64}};
    dist::DistributedDataParallel net{
        model, group, {.bucket_cap_mb = 1e-3, .first_bucket_mb = 1e-3}};
    const auto parameters = net.named_parameters();
    Tensor first = parameters[0].second,
           last = parameters[2].second;  // backward reaches the last first
    auto pause = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
    // Rank 1 comes late, so it is rank 1 that reduces the bucket of `last`; rank 0 then writes into
    // it.
    if (group.rank() == 1)
      last.register_post_accumulate_grad_hook([&](const Tensor&) { pause(50); });
    else
      first.register_post_accumulate_grad_hook([&](const Tensor&) {
        pause(200);
        static_cast<float*>(last.grad().data_ptr())[5] = 1;
      });
    net(ones({8, 64})).sum().backward();
  });
}

namespace {

std::string report_of(const std::string& test_case) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const int file = ranks::new_file();
  const pid_t pid = ranks::start({self, "--test-case=" + test_case, "--no-skip"}, file,
                                 {{"TSAN_OPTIONS", "exitcode=66"}});
  const ranks::Ended e = ranks::wait_for(pid, ranks::now() + 60);
  const std::string text = ranks::read_all(file);
  close(file);
  CHECK(e.code == 66);
  return text;
}

}  // namespace

TEST_CASE("planted races are reported") {
  CHECK(report_of("race: two threads in one element-wise loop").find("data race") !=
        std::string::npos);
  const std::string ddp = report_of("race: a gradient written while its bucket is reduced");
  CHECK(ddp.find("data race") != std::string::npos);
  CHECK_MESSAGE(ddp.find("reduce") != std::string::npos, ddp);
}
