// Checkpoints that go wrong: a file that is damaged, foreign or does not fit changes nothing on any
// rank, and a failed write leaves the old file.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "checkpoint_program.h"
#include "temporary_folder.h"

using namespace checkpoints;

// ---- files and programs that do not fit ----

namespace {

/// What every rank was told; empty texts for ranks that were told nothing.
struct Told {
  std::vector<std::string> type, text;
};

/// f runs on `size` ranks whose run must be unchanged after it, and still able to train.
Told told(int size, const std::function<void(Program&)>& f) {
  Told all{std::vector<std::string>(static_cast<size_t>(size)),
           std::vector<std::string>(static_cast<size_t>(size))};
  on_ranks(size, [&](dist::Group group) {
    Program program(group, "adamw", 4);
    program.train(2);
    const Bits before = bits(program.checkpoint());
    const auto r = static_cast<size_t>(group.rank());
    try {
      f(program);
    } catch (const IoError& e) {
      all.type[r] = "IoError";
      all.text[r] = e.what();
    } catch (const ValueError& e) {
      all.type[r] = "ValueError";
      all.text[r] = e.what();
    } catch (const std::exception& e) {
      all.type[r] = "another";
      all.text[r] = e.what();
    }
    const std::string changed = first_difference(bits(program.checkpoint()), before);
    require(changed.empty(), "an error changed " + changed);
    program.train(4);
  });
  return all;
}

}  // namespace

TEST_CASE(
    "load_checkpoint: a file that is damaged or foreign changes nothing, on any rank, and says "
    "what is wrong") {
  const TemporaryFolder folder;
  const std::string path = folder / "run.safetensors";
  on_ranks(2, [&](dist::Group group) {
    Program program(group, "adamw", 3);
    program.train(3);
    dist::save_checkpoint(path, program.checkpoint());
  });
  const Safetensors good = load_safetensors(path);
  const std::string bytes = get_file(path);

  using Change = std::function<void(NamedTensors&, Metadata&)>;
  const auto set = [](const std::string& name, Tensor value) {
    return [=](NamedTensors& entries, Metadata&) {
      for (auto& [n, t] : entries)
        if (n == name) t = value;
    };
  };
  const auto drop = [](const std::string& name) {
    return [=](NamedTensors& entries, Metadata&) {
      REQUIRE(std::erase_if(entries, [&](auto& e) { return e.first == name; }) == 1);
    };
  };
  const auto add = [](const std::string& name) {
    return [=](NamedTensors& entries, Metadata&) { entries.emplace_back(name, ones({2})); };
  };
  const auto whole = [](int64_t v) { return tensor<int64_t>({v}, Shape{}); };
  struct Case {
    std::string what, type;
    Change change;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases{
      {"a weight is missing", "ValueError", drop("model.b.bias"), {"b.bias", "'model'"}},
      {"a weight has another shape",
       "ValueError",
       set("model.b.bias", ones({4})),
       {"b.bias", "[4]"}},
      {"an unknown weight", "ValueError", add("model.c.weight"), {"c.weight", "'model'"}},
      {"an entry of no part", "ValueError", add("ema.weight"), {"'ema.weight'"}},
      {"a name that only begins alike", "ValueError", add("models"), {"'models'"}},
      {"a momentum of another shape",
       "ValueError",
       set("optimizer.state.1.exp_avg", ones({2, 2})),
       {"state.1.exp_avg", "[2, 2]", "'optimizer'"}},
      {"no learning rate",
       "ValueError",
       drop("optimizer.param_groups.0.lr"),
       {"param_groups.0.lr"}},
      {"a learning rate of three numbers",
       "ValueError",
       set("optimizer.param_groups.0.lr", ones({3})),
       {"param_groups.0.lr", "[3]"}},
      {"a count of steps that is none",
       "ValueError",
       set("optimizer.state.0.step", scalar(NAN)),
       {"state.0.step", "nan"}},
      {"a count beyond all bounds",
       "ValueError",
       set("optimizer.state.0.step", scalar(1e300)),
       {"state.0.step"}},
      {"negative schedule", "ValueError", set("schedule.steps", whole(-1)), {"'steps'", "-1"}},
      {"a schedule of floats", "ValueError", set("schedule.steps", ones({})), {"'steps'", "f32"}},
      {"no schedule", "ValueError", drop("schedule.steps"), {"'steps'", "'schedule'"}},
      {"beyond the last sample",
       "ValueError",
       set("loader.samples", whole(79)),
       {"79", "'loader'"}},
      {"far beyond", "ValueError", set("loader.samples", whole(int64_t{1} << 62)), {"'loader'"}},
      {"before the first", "ValueError", set("loader.samples", whole(-8)), {"'samples'", "-8"}},
      {"a negative epoch", "ValueError", set("loader.epoch", whole(-1)), {"'epoch'", "-1"}},
      {"another order of samples",
       "ValueError",
       set("loader.seed", whole(12)),
       {"seed", "12", "11"}},
      {"another dataset",
       "ValueError",
       set("loader.dataset_size", whole(77)),
       {"dataset_size", "77"}},
      {"a number that is a list", "ValueError", set("steps", ones({2})), {"'steps'", "[2]"}},
      {"a number too large for the program",
       "ValueError",
       set("steps", whole(int64_t{1} << 40)),
       {"1099511627776", "'steps'"}},
      {"no generator", "IoError", drop("generator"), {"'generator'"}},
      {"generators of another form", "ValueError", set("generator", whole(1)), {"'generator'"}},
      {"no generators at all",
       "ValueError",
       set("generator", zeros({0, 2}, {.dtype = DType::i64})),
       {"'generator'"}},
      {"no checkpoint",
       "IoError",
       [](auto&, Metadata& m) { m.erase("lockstep_checkpoint"); },
       {"no checkpoint"}},
      {"a later format",
       "IoError",
       [](auto&, Metadata& m) { m["lockstep_checkpoint"] = "2"; },
       {"version 2"}},
      {"other parts",
       "ValueError",
       [](auto&, Metadata& m) { m["parts"] = "model.ema"; },
       {"it has the parts 'model', 'ema', and", "'schedule'"}},
      {"dots for parts",
       "ValueError",
       [](auto&, Metadata& m) { m["parts"] = "..."; },
       {"it has the parts '', '', '', '', and"}},
  };
  for (const Case& c : cases) {
    CAPTURE(c.what);
    NamedTensors entries = good.tensors;
    Metadata metadata = good.metadata;
    c.change(entries, metadata);
    save_safetensors(path, entries, metadata);
    const Told all = told(2, [&](Program& p) { dist::load_checkpoint(path, p.checkpoint()); });
    for (size_t r : {0, 1}) {
      CHECK(all.type[r] == c.type);
      CHECK(all.text[r].find(path) != std::string::npos);
      for (const std::string& part : c.parts)
        CHECK_MESSAGE(all.text[r].find(part) != std::string::npos, part, " in: ", all.text[r]);
    }
  }

  for (size_t length : {size_t{0}, size_t{7}, size_t{300}, bytes.size() - 1}) {
    CAPTURE(length);
    put_file(path, bytes.substr(0, length));
    const Told all = told(2, [&](Program& p) { dist::load_checkpoint(path, p.checkpoint()); });
    for (size_t r : {0, 1}) {
      CHECK(all.type[r] == "IoError");
      CHECK(all.text[r].find(path) != std::string::npos);
    }
  }
  std::filesystem::create_directory(folder / "a folder");
  const Told all =
      told(2, [&](Program& p) { dist::load_checkpoint(folder / "a folder", p.checkpoint()); });
  CHECK(all.type == std::vector<std::string>{"IoError", "IoError"});

  put_file(path, bytes);  // and as it was it still loads
  CHECK_NOTHROW(on_ranks(2, [&](dist::Group group) {
    Program program(group, "adamw", 4);
    require(dist::load_checkpoint(path, program.checkpoint()), "it is there");
  }));
}

TEST_CASE(
    "load_checkpoint: what does not fit on one rank is an error on all, and nothing has changed on "
    "any") {
  const TemporaryFolder folder;
  const std::string path = folder / "run";
  const auto extra = [](Program& p, Tensor& t) {
    dist::Checkpoint run = p.checkpoint();
    run.parts.insert(run.parts.end() - 1, {"extra", t});
    return run;
  };
  on_ranks(3, [&](dist::Group group) {
    Program program(group, "adamw", 3);
    program.train(3);
    Tensor t = ones({3});
    dist::save_checkpoint(path, extra(program, t));
  });
  const Told all = told(3, [&](Program& p) {
    Tensor t = p.group.rank() == 1 ? zeros({3, 1}) : zeros({3});
    try {
      dist::load_checkpoint(path, extra(p, t));
    } catch (...) {
      require(t.sum().item<float>() == 0, "the tensor is as it was");
      throw;
    }
  });
  for (size_t r : {0, 1, 2}) {
    CHECK(all.type[r] == "ValueError");
    CHECK(all.text[r].find("[3, 1]") != std::string::npos);
    CHECK(all.text[r].find("'extra'") != std::string::npos);
    CHECK((all.text[r].find("on rank 1") != std::string::npos) == (r != 1));
  }
}

// ---- writes that fail ----

TEST_CASE(
    "save_checkpoint: a failed write is an error on every rank, and the old file stays whole") {
  const TemporaryFolder folder;
  const std::string path = folder / "run";
  on_ranks(2, [&](dist::Group group) {
    Program program(group, "adamw", 3);
    program.train(1);
    dist::save_checkpoint(path, program.checkpoint());
  });
  const std::string old = get_file(path);

  // A file size limit stands in for a full disk: the write fails half way.
  const auto handler = ::signal(SIGXFSZ, SIG_DFL);  // not even the signal ends the process
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit limit = before;
  limit.rlim_cur = 4096;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  const Told full = told(2, [&](Program& p) { dist::save_checkpoint(path, p.checkpoint()); });
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  ::signal(SIGXFSZ, handler);
  CHECK(get_file(path) == old);
  CHECK(folder.entries() == 1);

  const Told missing =
      told(2, [&](Program& p) { dist::save_checkpoint(folder / "no/folder/run", p.checkpoint()); });
  for (size_t r : {0, 1}) {
    CHECK(full.type[r] == "IoError");
    CHECK(full.text[r].find(path) != std::string::npos);
    CHECK(missing.type[r] == "IoError");
    CHECK(missing.text[r].find("no/folder/run") != std::string::npos);
  }
}

// ---- kills, and several savers ----

TEST_CASE("rank: saves without end" * doctest::skip()) {
  ::alarm(60);
  const std::string path = std::getenv("RUN");
  int64_t number = 0;
  Tensor t = zeros({50'000});
  const dist::Checkpoint run{dist::Group(), {{"number", number}, {"t", t}}};
  for (;; ++number) {
    t.fill_(static_cast<double>(number % 1000));
    dist::save_checkpoint(path, run);
  }
}

TEST_CASE(
    "save_checkpoint of two jobs as processes, killed at any moment: what is there is whole") {
  const TemporaryFolder folder;
  const std::string path = folder / "run";
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const int output = ranks::new_file();
  int64_t number = -1;
  Tensor t = zeros({50'000});
  const dist::Checkpoint run{dist::Group(), {{"number", number}, {"t", t}}};
  const auto check = [&] {
    REQUIRE(dist::load_checkpoint(path, run));
    REQUIRE(t.to_vector<float>() == std::vector<float>(50'000, static_cast<float>(number % 1000)));
  };
  for (int i = 0; i < 5; ++i) {
    std::vector<pid_t> jobs;
    for (int job = 0; job < 2; ++job)
      jobs.push_back(ranks::start({self, "--test-case=rank: saves without end", "--no-skip"},
                                  output, {{"RUN", path}}));
    const double deadline = ranks::now() + 20 * ranks::kPatience;
    while (!std::filesystem::exists(path) && ranks::now() < deadline) ::usleep(1000);
    for (int k = 0; k < 5; ++k) check();
    ::usleep(static_cast<useconds_t>(3000 * i));
    for (const pid_t job : jobs) ::kill(job, SIGKILL);
    for (const pid_t job : jobs) CHECK(ranks::wait_for(job, deadline).signal == SIGKILL);
    check();
    CHECK(folder.entries() <= 3);  // two that were not finished
    dist::save_checkpoint(path, run);
    CHECK(folder.entries() == 1);
    std::filesystem::remove(path);
  }
  ::close(output);
}

TEST_CASE("Module::save and save_checkpoint on all ranks at the same time") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "store");
  std::filesystem::create_directory_symlink("store", folder / "link");
  std::vector<std::vector<float>> weights(4);
  on_ranks(4, [&](dist::Group group) {
    const auto r = static_cast<size_t>(group.rank());
    Program program(group, "sgd", 3);
    Net own = Program::made(r);
    weights[r] = own.a.weight.to_vector<float>();
    for (int i = 0; i < 5; ++i) {
      own.save(folder / "link/net");
      dist::save_checkpoint(folder / "link/run", program.checkpoint());
    }
  });
  Net net;
  net.load(folder / "store/net");
  CHECK(std::count(weights.begin(), weights.end(), net.a.weight.to_vector<float>()) == 1);
  CHECK_NOTHROW(on_ranks(4, [&](dist::Group group) {
    Program program(group, "sgd", 4);
    require(dist::load_checkpoint(folder / "store/run", program.checkpoint()), "it is there");
  }));
  CHECK(std::distance(std::filesystem::directory_iterator(folder / "store"),
                      std::filesystem::directory_iterator()) == 2);
  CHECK(std::filesystem::is_symlink(folder / "link"));
}

// ---- code of the program that throws ----

namespace {

/// Throws an int, in one of the two, on one rank.
struct Thrower {
  bool at_save = false, at_load = false;
  NamedTensors state_dict() const {
    if (at_save) throw 1;
    return {{"x", ones({1})}};
  }
  void load_state_dict(const NamedTensors&) {
    if (at_load) throw 1;
  }
};

}  // namespace

TEST_CASE("save_checkpoint and load_checkpoint: an int thrown on one rank is an error on all") {
  const TemporaryFolder folder;
  const std::string path = folder / "run";
  const auto with = [](Program& p, Thrower& t) {
    dist::Checkpoint run = p.checkpoint();
    run.parts.push_back({"thrower", t, {.per_rank = true}});
    return run;
  };
  const auto attempt = [&](bool save, const std::function<void(Program&, Thrower&)>& f) {
    return told(3, [&](Program& p) {
      Thrower t{save && p.group.rank() == 1, !save && p.group.rank() == 1};
      try {
        f(p, t);
      } catch (int) {
        require(p.group.rank() == 1, "rank 1 threw it");
        throw std::runtime_error("an int");
      }
    });
  };
  std::mutex mutex;
  std::vector<std::string> warnings;  // an int has no text to add to
  set_warning_handler([&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
  });
  const Told saving =
      attempt(true, [&](Program& p, Thrower& t) { dist::save_checkpoint(path, with(p, t)); });
  CHECK(folder.entries() == 0);
  on_ranks(3, [&](dist::Group group) {
    Program program(group, "adamw", 3);
    Thrower t;
    dist::save_checkpoint(path, with(program, t));
  });
  const Told loading =
      attempt(false, [&](Program& p, Thrower& t) { dist::load_checkpoint(path, with(p, t)); });
  set_warning_handler({});
  for (const std::string call : {"in save_checkpoint of ", "in load_checkpoint of "})
    CHECK(std::any_of(warnings.begin(), warnings.end(), [&](const std::string& text) {
      return text.find(call + path) != std::string::npos;
    }));
  CHECK(std::count(warnings.begin(), warnings.end(),
                   "in part 'thrower': an exception of type int was thrown") == 1);
  for (const Told* all : {&saving, &loading}) {
    CHECK(all->text[1] == "an int");
    for (size_t r : {0, 2})
      CHECK(all->text[r].find("no std::exception\n  on rank 1") != std::string::npos);
  }
}

TEST_CASE("load_checkpoint names parts that do not take their old state back") {
  const TemporaryFolder folder;
  struct Once {  // accepts one state in its life
    int loads = 0;
    NamedTensors state_dict() const { return {{"x", ones({1})}}; }
    void load_state_dict(const NamedTensors&) {
      if (loads++ > 0) throw std::runtime_error("no more");
    }
  } once;
  int64_t number = 1, other = 2;
  Tensor t = ones({2});
  const dist::Checkpoint saved{dist::Group(),
                               {{"n", number}, {"once", once}, {"m", other}, {"t", t}}};
  dist::save_checkpoint(folder / "run", saved);
  number = 5;
  other = 6;
  t = ones({3});
  CHECK_THROWS_WITH_AS(dist::load_checkpoint(folder / "run", saved),
                       doctest::Contains("the old state of 'once' could not be restored"),
                       ValueError);
  CHECK(number == 5);
  CHECK(other == 6);
}

TEST_CASE("load_checkpoint refuses entries of an unsupported dtype") {
  const TemporaryFolder folder;
  int64_t number = 1;
  const dist::Checkpoint run{dist::Group(), {{"n", number}}};
  dist::save_checkpoint(folder / "run", run);
  std::string bytes = get_file(folder / "run");
  bytes.replace(bytes.find("\"I64\""), 5, "\"U64\"");
  put_file(folder / "run", bytes);
  number = 3;
  CHECK_THROWS_WITH_AS(dist::load_checkpoint(folder / "run", run), doctest::Contains("dtype 'U64'"),
                       IoError);
  CHECK(number == 3);
}

TEST_CASE("save_checkpoint: names of parts with any characters come back, or are refused") {
  const TemporaryFolder folder;
  int64_t number = 7;
  const auto run = [&](const std::string& name) {
    return dist::Checkpoint{dist::Group(), {{name, number}}};
  };
  for (const std::string name : {"a/b", "/x", " ", "\"\\\n\t", "\xC3\xA4", "rank", "tied:x"}) {
    number = 7;
    dist::save_checkpoint(folder / "run", run(name));
    number = 0;
    CHECK(dist::load_checkpoint(folder / "run", run(name)));
    CHECK(number == 7);
  }
  CHECK(folder.entries() == 1);
  for (const std::string& name :
       {std::string("\xFF"), std::string("a\0b", 3), std::string(5000, 'a')})
    CHECK_THROWS_AS(dist::save_checkpoint(folder / "other", run(name)), ValueError);
  CHECK(folder.entries() == 1);
}
