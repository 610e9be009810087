// Checkpoints: a run that stops and goes on is, bit for bit, the run that never stopped; also in
// other processes, and on other ranks as far as that can be.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <set>

#include "checkpoint_program.h"
#include "temporary_folder.h"

using namespace checkpoints;

namespace {

/// Straight through 10 steps against `cut`, save, everything anew, load, and on to 10.
void check_resume(const dist::Group& group, const std::string& kind, int cut,
                  const std::string& path) {
  Program straight(group, kind, 3);
  straight.train(10);
  const Bits expected = bits(straight.checkpoint(), true);
  const double next_draw = rand({1}).item<double>();
  require(expected.at("steps.") == std::vector<double>{10}, "10 steps were made");

  Program first(group, kind, 3);
  first.train(cut);
  dist::save_checkpoint(path, first.checkpoint());
  first.train(cut + 1);  // what comes after the checkpoint is lost

  Program second(group, kind, 1000);
  require(!first_difference(bits(second.checkpoint()), bits(first.checkpoint())).empty(),
          "a new run differs");
  require(dist::load_checkpoint(path, second.checkpoint()), "there is a checkpoint");
  require(second.steps == cut, "the count came back");
  second.train(10);
  const std::string different = first_difference(bits(second.checkpoint(), true), expected);
  require(different.empty(), kind + " cut at " + std::to_string(cut) + ": " + different +
                                 " differs from the run that never stopped");
  require(rand({1}).item<double>() == next_draw, "the generator goes on alike");
}

}  // namespace

TEST_CASE(
    "load_checkpoint: a run that stops and goes on equals, bitwise, the one that never stopped") {
  const TemporaryFolder folder;
  for (const std::string kind : {"sgd", "adamw"})
    for (int cut : {1, 4, 5, 7}) {  // 5: the last batch of an epoch
      CAPTURE(kind);
      CAPTURE(cut);
      CHECK_NOTHROW(check_resume(dist::Group(), kind, cut, folder / "one"));
      for (int size : {2, 4})
        CHECK_NOTHROW(on_ranks(
            size, [&](dist::Group group) { check_resume(group, kind, cut, folder / "ranks"); }));
    }
}

// Three sets of processes: one that trains straight, one that stops, one that goes on.
TEST_CASE("rank: trains and stops or goes on" * doctest::skip()) {
  const std::string stage = std::getenv("STAGE"), folder = std::getenv("FOLDER"),
                    kind = std::getenv("KIND");
  auto group = dist::init({.timeout = std::chrono::seconds(20)});
  Program program(group, kind, stage == "resume" ? 1000 : 3);
  if (stage == "resume") CHECK(dist::load_checkpoint(folder + "/" + kind, program.checkpoint()));
  program.train(stage == "stop" ? 7 : 10);
  if (stage == "stop") dist::save_checkpoint(folder + "/" + kind, program.checkpoint());
  const dist::Checkpoint whole = program.checkpoint();
  NamedTensors all;
  for (const dist::CheckpointPart& part : whole.parts)
    for (const auto& [name, t] : part.state()) all.emplace_back(part.name() + "." + name, t);
  save_safetensors(folder + "/" + kind + "." + stage + std::to_string(group.rank()), all);
}

TEST_CASE("load_checkpoint between ranks as processes: others go on where the first ones stopped") {
  const TemporaryFolder folder;
  for (const std::string kind : {"sgd", "adamw"}) {
    for (const std::string stage : {"straight", "stop", "resume"}) {
      const auto ended = ranks::run_ranks(
          2, "rank: trains and stops or goes on",
          {.deadline = 60,
           .variables = {{"STAGE", stage}, {"KIND", kind}, {"FOLDER", folder.path().string()}}});
      REQUIRE(ranks::failures(ended) == "");
    }
    for (const std::string rank : {"0", "1"})  // last losses too, which differ by rank
      CHECK(get_file(folder / (kind + ".straight" + rank)) ==
            get_file(folder / (kind + ".resume" + rank)));
    CHECK(get_file(folder / (kind + ".straight0")) != get_file(folder / (kind + ".straight1")));
    CHECK(get_file(folder / (kind + ".straight0")) != get_file(folder / (kind + ".stop0")));
  }
}

TEST_CASE("load_checkpoint on another number of ranks sees the samples that were left, in order") {
  const TemporaryFolder folder;
  // samples by global batch, over all ranks
  const auto run = [&](int size, int from, int to) {
    std::mutex mutex;
    std::map<int, std::multiset<int64_t>> batches;
    on_ranks(size, [&](dist::Group group) {
      Program program(group, "sgd", 3);
      if (from > 0)
        require(dist::load_checkpoint(folder / "run", program.checkpoint()), "it is there");
      program.train(to);
      if (from == 0) dist::save_checkpoint(folder / "run", program.checkpoint());
      const std::lock_guard lock(mutex);
      for (const auto& [step, samples] : program.seen)
        batches[step].insert(samples.begin(), samples.end());
    });
    return batches;
  };
  const auto whole = run(1, 0, 10);
  for (int before : {1, 2, 4})
    for (int after : {1, 2, 4}) {
      auto joined = run(before, 0, 3);
      joined.merge(run(after, 3, 10));
      CHECK(joined == whole);
    }
}

TEST_CASE("save_checkpoint: the file is plain safetensors with names that say what they are") {
  const TemporaryFolder folder;
  Program program(dist::Group(), "sgd", 3);
  program.train(3);
  dist::save_checkpoint(folder / "run", program.checkpoint());
  const Safetensors file = load_safetensors(folder / "run");
  CHECK(file.metadata.at("lockstep_checkpoint") == "1");
  CHECK(file.metadata.at("parts") == "model.optimizer.schedule.loader.steps.last_loss");
  for (const char* name : {"model.a.weight", "model.norm.running_var", "optimizer.state.0.step",
                           "optimizer.param_groups.0.lr", "schedule.steps", "loader.samples"})
    CHECK(file.find(name));
  CHECK(file.at("loader.samples").item<int64_t>() == 48);
  CHECK(file.at("steps").item<int64_t>() == 3);
  CHECK(file.at("generator").shape() == Shape{1, 2});
  NamedTensors model;
  for (const auto& [name, t] : file.tensors)
    if (name.starts_with("model.")) model.emplace_back(name.substr(6), t);
  Net net;
  net.load_state_dict(model);
  CHECK(net.b.weight.to_vector<float>() == program.net.module().b.weight.to_vector<float>());
}

TEST_CASE("load_checkpoint without a file: false on every rank, and nothing has changed") {
  const TemporaryFolder folder;
  on_ranks(3, [&](dist::Group group) {
    Program program(group, "sgd", 3);
    program.train(2);
    const Bits before = bits(program.checkpoint());
    require(!dist::load_checkpoint(folder / "none", program.checkpoint()), "there is none");
    require(first_difference(bits(program.checkpoint()), before).empty(), "nothing changed");
    program.train(3);
  });
  CHECK(folder.entries() == 0);
}

TEST_CASE("CheckpointPart: names") {
  const TemporaryFolder folder;
  int64_t a = 1, b = 2;
  const auto names = [&](const std::string& first, const std::string& second) {
    return dist::Checkpoint{dist::Group(), {{first, a}, {second, b}}};
  };
  for (const char* bad : {"", "a.b", "generator", "x"}) {
    CHECK_THROWS_AS(dist::save_checkpoint(folder / "run", names("x", bad)), ValueError);
    CHECK_THROWS_AS(dist::load_checkpoint(folder / "run", names("x", bad)), ValueError);
  }
  CHECK(folder.entries() == 0);
  dist::save_checkpoint(folder / "run", names("x", "xy"));
  a = b = 0;
  dist::load_checkpoint(folder / "run", names("x", "xy"));
  CHECK(a == 1);
  CHECK(b == 2);
}

TEST_CASE("load_checkpoint: numbers and tensors of the program come back as they were") {
  const TemporaryFolder folder;
  uint64_t large = ~uint64_t{0} - 4;
  int small = -7;
  bool flag = true;
  double third = 1.0 / 3;
  Tensor t = tensor<double>({1e-300, -0.0, 2}), shared = t;
  const dist::Checkpoint run{
      dist::Group(),
      {{"large", large}, {"small", small}, {"flag", flag}, {"third", third}, {"t", t}}};
  const auto expected = bits(run);
  dist::save_checkpoint(folder / "run", run);
  large = 0;
  small = 0;
  flag = false;
  third = 0;
  t.zero_();
  CHECK(dist::load_checkpoint(folder / "run", run));
  CHECK(large == ~uint64_t{0} - 4);
  CHECK(small == -7);
  CHECK(flag);
  CHECK(third == 1.0 / 3);
  CHECK(shared.to_vector<double>()[0] == 1e-300);
  CHECK(std::signbit(t.to_vector<double>()[1]));
  CHECK(first_difference(bits(run), expected) == "");
}

TEST_CASE("load_checkpoint gives every rank tensors of every dtype and form, to the last bit") {
  const TemporaryFolder folder;
  struct Everything {
    NamedTensors state;
    NamedTensors state_dict() const { return state; }
    void load_state_dict(const NamedTensors& given) { state = given; }
  };
  const auto made = [] {
    NamedTensors all;
    for (DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i64, DType::i32,
                        DType::i16, DType::i8, DType::u8, DType::boolean})
      for (const Shape& shape : {Shape{}, Shape{0}, Shape{3, 0, 2}, Shape{2, 3}})
        all.emplace_back(str_cat(dtype, shape), ones(shape, {.dtype = dtype}));
    all.emplace_back("i64", tensor<int64_t>({INT64_MIN, INT64_MAX, (int64_t{1} << 53) + 1}));
    all.emplace_back("f64", tensor<double>({1.0 / 3, -0.0, 5e-324, INFINITY}));
    all.emplace_back("strided", arange(0, 6).view({2, 3}).t());
    return all;
  };
  on_ranks(3, [&](dist::Group group) {
    Everything program{group.is_main() ? made() : NamedTensors()};
    dist::save_checkpoint(folder / "run", {group, {{"all", program}}});
    program.state.clear();
    require(dist::load_checkpoint(folder / "run", {group, {{"all", program}}}), "it is there");
    const NamedTensors expected = made();
    require(program.state.size() == expected.size(), "all are there");
    std::map<std::string, Tensor> found(program.state.begin(), program.state.end());
    for (const auto& [name, t] : expected) {
      const Tensor& there = found.at(name);
      require(there.dtype() == t.dtype() && there.shape() == t.shape(), name);
      const Tensor dense = t.contiguous();
      require(
          t.numel() == 0 || std::memcmp(there.contiguous().data_ptr(), dense.data_ptr(),
                                        static_cast<size_t>(t.numel()) * size_of(t.dtype())) == 0,
          name);
    }
  });
}

// ---- what each rank has for itself ----

namespace {

/// As a compression with error feedback: other tensors on each rank.
struct Hook {
  Tensor error;
  NamedTensors state_dict() const { return {{"bucket.0.error", error}}; }
  void load_state_dict(const NamedTensors& state) {
    StateReader in("Hook", state);
    error = in.tensor("bucket.0.error");
    in.finish();
  }
};

}  // namespace

TEST_CASE(
    "load_checkpoint: a part of each rank comes back to each; on other ranks it starts anew, with "
    "a warning") {
  const TemporaryFolder folder;
  std::vector<std::string> warnings;
  set_warning_handler([&](const std::string& text) { warnings.push_back(text); });
  const auto error_of = [](int rank) { return full({rank + 1, 2}, 10.5 + rank); };
  const auto run_of = [](const dist::Group& group, Hook& hook, int& rank) {
    return dist::Checkpoint{
        group, {{"hook", hook, {.per_rank = true}}, {"rank", rank, {.per_rank = true}}}};
  };
  on_ranks(3, [&](dist::Group group) {
    Hook hook{error_of(group.rank())};
    int rank = group.rank();
    dist::save_checkpoint(folder / "run", run_of(group, hook, rank));
  });
  CHECK(load_safetensors(folder / "run").find("hook.rank.2.bucket.0.error"));
  CHECK(load_safetensors(folder / "run").find("rank.rank.1"));
  on_ranks(3, [&](dist::Group group) {
    Hook hook{zeros({1})};
    int rank = -1;
    require(dist::load_checkpoint(folder / "run", run_of(group, hook, rank)), "it is there");
    require(rank == group.rank(), "its own number");
    require(hook.error.shape() == error_of(rank).shape(), "its own shape");
    require(hook.error.to_vector<float>() == error_of(rank).to_vector<float>(), "its own values");
  });
  CHECK(warnings.empty());
  const Safetensors good = load_safetensors(folder / "run");
  for (const char* name : {"hook", "hook.bucket", "hook.rank", "hook.rank.3.x", "hook.rank.-1.x",
                           "hook.rank.01.x", "hook.rank.1x", "hook.rank.1.", "hook.ranks.1.x",
                           "hook.rank..x", "hook.rank.99999999999999999999.x"}) {
    NamedTensors entries = good.tensors;
    entries.emplace_back(name, ones({1}));
    save_safetensors(folder / "bad", entries, good.metadata);
    CHECK_THROWS_WITH_AS(on_ranks(3,
                                  [&](dist::Group group) {
                                    Hook hook{zeros({1})};
                                    int rank = -1;
                                    dist::load_checkpoint(folder / "bad",
                                                          run_of(group, hook, rank));
                                  }),
                         doctest::Contains(name), ValueError);
  }
  on_ranks(2, [&](dist::Group group) {
    Hook hook{zeros({1})};
    int rank = -1;
    require(dist::load_checkpoint(folder / "run", run_of(group, hook, rank)), "it is there");
    require(rank == -1 && hook.error.numel() == 1, "as they were");
  });
  set_warning_handler({});
  REQUIRE(warnings.size() == 2);
  CHECK(warnings[0].find("each of 3 ranks had its own 'hook', and there are 2") !=
        std::string::npos);
}

TEST_CASE("load_checkpoint: each rank's generator again; on other ranks no draw is repeated") {
  const TemporaryFolder folder;
  const auto save = [&](bool one_seed) {
    on_ranks(2, [&, one_seed](dist::Group group) {
      manual_seed(one_seed ? 5 : 5 + static_cast<uint64_t>(group.rank()));
      default_generator().state().offset = 10 + static_cast<uint64_t>(group.rank());
      dist::save_checkpoint(folder / "run", {group, {}});
    });
  };
  const auto loaded = [&](int size) {
    std::vector<std::pair<uint64_t, uint64_t>> all(static_cast<size_t>(size));
    on_ranks(size, [&](dist::Group group) {
      manual_seed(70 + static_cast<uint64_t>(group.rank()));
      require(dist::load_checkpoint(folder / "run", {group, {}}), "it is there");
      all[static_cast<size_t>(group.rank())] = {default_generator().state().seed,
                                                default_generator().state().offset};
    });
    return all;
  };
  using Generators = std::vector<std::pair<uint64_t, uint64_t>>;
  save(false);
  CHECK(loaded(2) == Generators{{5, 10}, {6, 11}});
  CHECK(loaded(3) == Generators{{70, 11}, {71, 11}, {72, 11}});
  save(true);
  CHECK(loaded(2) == Generators{{5, 10}, {5, 11}});
  CHECK(loaded(1) == Generators{{5, 11}});
}
