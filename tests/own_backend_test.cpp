// A backend from outside the library: it moves the bytes itself, through named pipes to and from rank 0, and is
// registered by name. DistributedDataParallel trains with it as with any other.
#include <doctest/doctest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>

#include <lockstep/distributed/registry.h>
#include <lockstep/lockstep.h>

#include "equality.h"
#include "ranks.h"

using namespace lockstep;
using dist::Collective, dist::CollectiveKind, dist::WorkPtr;

namespace {

/// A pipe that is read and written whole, within a deadline.
class Pipe {
 public:
  explicit Pipe(const std::string& path) : file_(open(path.c_str(), O_RDWR | O_NONBLOCK)) {
    ranks::require(file_ >= 0, "cannot open " + path);
  }
  ~Pipe() { close(file_); }
  Pipe(const Pipe&) = delete;
  void put(const void* data, size_t bytes) { move(const_cast<void*>(data), bytes, POLLOUT); }
  void get(void* data, size_t bytes) { move(data, bytes, POLLIN); }

 private:
  void move(void* data, size_t bytes, short event) {
    for (auto* at = static_cast<char*>(data); bytes > 0;) {
      pollfd wait{file_, event, 0};
      if (poll(&wait, 1, 20000) <= 0) fail<DistError>("pipes: a peer is late");
      const ssize_t n = event == POLLIN ? read(file_, at, bytes) : write(file_, at, bytes);
      if (n < 0 && errno == EAGAIN) continue;
      if (n <= 0) fail<DistError>("pipes: broken");
      at += n;
      bytes -= static_cast<size_t>(n);
    }
  }
  int file_;
};

class Finished final : public dist::Work {
 public:
  Finished(uint64_t sequence, std::vector<Tensor> result)
      : sequence_(sequence), result_(std::move(result)) {}
  void wait(dist::Milliseconds) override { run_then(); }
  bool is_completed() override { return true; }
  std::exception_ptr exception() const override { return nullptr; }
  uint64_t sequence_number() const override { return sequence_; }
  std::vector<Tensor> result() const override { return result_; }

 private:
  uint64_t sequence_;
  std::vector<Tensor> result_;
};

/// Every collective is done when it is called: all give their part to rank 0, which answers each.
class PipeGroup final : public dist::ProcessGroup {
 public:
  PipeGroup(int rank, int size, const std::string& folder) : rank_(rank), size_(size) {
    for (int r = 1; r < size; ++r) {
      up_.push_back(std::make_shared<Pipe>(folder + "/up" + std::to_string(r)));
      down_.push_back(std::make_shared<Pipe>(folder + "/down" + std::to_string(r)));
    }
  }
  std::string_view backend() const override { return "pipes"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  // Nothing is ever under way, so one set of pipes serves all.
  std::shared_ptr<ProcessGroup> child() override { return std::make_shared<PipeGroup>(*this); }
  std::shared_ptr<ProcessGroup> new_group(const std::vector<int>&) override {
    fail<DistError>("new_group: backend pipes has none");
  }
  void abort(const std::string&) override {}
  void destroy() override {}

  WorkPtr start(Collective call) override {
    switch (call.kind) {
      case CollectiveKind::all_reduce:
        all_reduce_now(call);
        break;
      case CollectiveKind::broadcast: {
        const auto all = exchange(rank_ == call.root ? call.inputs[0] : call.outputs[0]);
        if (rank_ != call.root) call.outputs[0].detach().copy_(all[static_cast<size_t>(call.root)]);
        break;
      }
      case CollectiveKind::all_gather: {
        const auto all = exchange(call.inputs[0]);
        for (size_t r = 0; r < all.size(); ++r) call.outputs[r].detach().copy_(all[r]);
        break;
      }
      case CollectiveKind::barrier:
        exchange(zeros({1}));
        break;
      default:
        fail<DistError>(call.text(), ": backend pipes lacks it");
    }
    return std::make_shared<Finished>(++sequence_, call.outputs);
  }

 private:
  static size_t bytes_of(const Tensor& t) {
    return static_cast<size_t>(t.numel()) * size_of(t.dtype());
  }

  /// What every rank gives, by rank.
  std::vector<Tensor> exchange(const Tensor& mine) {
    const Tensor dense = mine.detach().contiguous();
    std::vector<Tensor> all;
    for (int r = 0; r < size_; ++r) all.push_back(empty(dense.shape(), {.dtype = dense.dtype()}));
    const size_t bytes = bytes_of(dense);
    all[static_cast<size_t>(rank_)].copy_(dense);
    if (rank_ > 0) {
      up_[static_cast<size_t>(rank_ - 1)]->put(dense.data_ptr(), bytes);
      for (Tensor& t : all) down_[static_cast<size_t>(rank_ - 1)]->get(t.data_ptr(), bytes);
      return all;
    }
    for (size_t r = 1; r < all.size(); ++r) up_[r - 1]->get(all[r].data_ptr(), bytes);
    for (size_t r = 1; r < all.size(); ++r)
      for (const Tensor& t : all) down_[r - 1]->put(t.data_ptr(), bytes);
    return all;
  }

  void all_reduce_now(const Collective& call) {
    ranks::require(call.reduce == dist::ReduceOp::sum || call.reduce == dist::ReduceOp::avg,
                   "pipes: sums and means only");
    const auto all = exchange(call.inputs[0]);
    Tensor sum = all[0];
    for (size_t r = 1; r < all.size(); ++r) sum.add_(all[r]);
    if (call.reduce == dist::ReduceOp::avg) sum.mul_(1.0 / size_);
    call.outputs[0].detach().copy_(sum);
  }

  int rank_, size_;
  uint64_t sequence_ = 0;
  std::vector<std::shared_ptr<Pipe>> up_, down_;  // by rank - 1: to rank 0, and from it
};

}  // namespace

TEST_CASE("rank: pipes" * doctest::skip()) {
  dist::register_backend("pipes", [](const dist::Environment& env, const dist::InitOptions&) {
    return std::make_shared<PipeGroup>(env.rank, env.size, std::getenv("PIPES"));
  });
  auto group = dist::init({.backend = "pipes"});
  REQUIRE(group.backend() == "pipes");
  const auto mine = equality::train(group, {.most_delay_ms = 1});
  const auto one = equality::train(dist::Group(), {});
  CHECK(equality::difference(mine.weights, one.weights) <= 1e-12);
  const Tensor all = group.all_gather(tensor(mine.weights));
  for (int r = 0; r < group.size(); ++r) CHECK(all[r].to_vector<double>() == mine.weights);
  // What it lacks throws on the caller, at once.
  CHECK_THROWS_AS(group.reduce(zeros({3})), DistError);
  group.barrier();
}

TEST_CASE("a backend registered by a program trains like the library's own") {
  for (const int size : {2, 3}) {
    char folder[] = "/tmp/lockstep-pipes-XXXXXX";
    REQUIRE(mkdtemp(folder));
    for (int r = 1; r < size; ++r)
      for (const char* way : {"/up", "/down"})
        REQUIRE(mkfifo((folder + std::string(way) + std::to_string(r)).c_str(), 0600) == 0);
    const auto ended =
        ranks::run_ranks(size, "rank: pipes", {.deadline = 60, .variables = {{"PIPES", folder}}});
    CHECK(ranks::failures(ended) == "");
    std::filesystem::remove_all(folder);
  }
}
