// The demo as its user meets it: real processes on a small data set, good and bad input, one
// message each.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <lockstep/tensor/safetensors.h>

#include "../apps/ddp_flags.h"
#include "equality.h"
#include "ranks.h"
#include "temporary_folder.h"

using namespace lockstep;
namespace fs = std::filesystem;

namespace {

const std::string kBin = fs::read_symlink("/proc/self/exe").parent_path().parent_path();

/// Writes a set of images whose label shows as a bright row.
void write_split(const fs::path& folder, const std::string& name, int count, int bad_label = -1) {
  auto big_endian = [](std::ofstream& out, uint32_t v) {
    for (int shift : {24, 16, 8, 0}) out.put(static_cast<char>(v >> shift));
  };
  std::ofstream images(folder / (name + "-images-idx3-ubyte"), std::ios::binary),
      labels(folder / (name + "-labels-idx1-ubyte"), std::ios::binary);
  for (uint32_t v : {0x803u, static_cast<uint32_t>(count), 28u, 28u}) big_endian(images, v);
  for (uint32_t v : {0x801u, static_cast<uint32_t>(count)}) big_endian(labels, v);
  for (int i = 0; i < count; ++i) {
    const int label = i * 7 % 10;
    for (int y = 0; y < 28; ++y)
      for (int x = 0; x < 28; ++x)
        images.put(static_cast<char>(y / 2 == label ? 200 : (i * 31 + y * x) % 50));
    labels.put(static_cast<char>(i == bad_label ? 11 : label));
  }
}

struct Data : TemporaryFolder {
  explicit Data(int bad_label = -1) {
    write_split(path(), "train", 256, bad_label);
    write_split(path(), "t10k", 101);
  }
};

ranks::Ended run(std::vector<std::string> command, double deadline = 60) {
  const int file = ranks::new_file();
  const pid_t pid = ranks::start(command, file, {});
  ranks::Ended e = ranks::wait_for(pid, ranks::now() + deadline * ranks::kPatience);
  e.output = ranks::read_all(file);
  close(file);
  return e;
}
ranks::Ended mnist(int size, const fs::path& data, std::vector<std::string> more = {}) {
  std::vector<std::string> command{kBin + "/lockstep-run",
                                   "-n",
                                   std::to_string(size),
                                   kBin + "/mnist",
                                   "--data",
                                   data.string(),
                                   "--threads",
                                   "1"};
  command.insert(command.end(), more.begin(), more.end());
  return run(command);
}
bool has(const ranks::Ended& e, const std::string& part) {
  return e.output.find(part) != std::string::npos;
}

std::vector<double> weights(const fs::path& file) {
  std::vector<double> all;
  for (const auto& [name, t] : load_safetensors(file.string()).tensors)
    for (double v : t.to_vector<double>()) all.push_back(v);
  return all;
}

}  // namespace

TEST_CASE("mnist trains on one rank and on two, evaluates each sample once and saves the model") {
  const Data data;
  std::vector<std::vector<double>> saved;
  for (int size : {1, 2}) {
    const fs::path file = data.path() / ("model" + std::to_string(size) + ".safetensors");
    const auto e = mnist(
        size, data.path(),
        {"--epochs", "2", "--batch-size", std::to_string(32 / size), "--save", file.string()});
    CHECK_MESSAGE(e.code == 0, e.output);
    CHECK_MESSAGE(has(e, "test accuracy 1"), e.output);  // 100.00 %, or close by
    CHECK_MESSAGE(has(e, "epoch 2/2"), e.output);
    saved.push_back(weights(file));
  }
  REQUIRE(saved[0].size() == 32 * 10 + 64 * 289 + 9217 * 128 - 128 + 128 + 1280);
  CHECK(equality::difference(saved[1], saved[0]) <= 1e-4);
}

TEST_CASE("accumulated micro-batches on two ranks follow one rank with the joint batch") {
  const Data data;
  const fs::path joint = data.path() / "joint", parts = data.path() / "parts";
  CHECK(mnist(1, data.path(), {"--epochs", "1", "--batch-size", "64", "--save", joint.string()})
            .code == 0);
  CHECK(mnist(2, data.path(),
              {"--epochs", "1", "--batch-size", "8", "--gradient_accumulation_steps", "4", "--save",
               parts.string()})
            .code == 0);
  CHECK(equality::difference(weights(parts), weights(joint)) <= 1e-4);
}

TEST_CASE("bad input ends with one clear message and a code") {
  const Data data;
  struct Bad {
    std::vector<std::string> command;
    int code;
    std::vector<std::string> parts;
  };
  const std::string mnist = kBin + "/mnist", folder = data.path().string();
  const Data mislabelled(17);
  const Data truncated, magic;
  fs::resize_file(truncated.path() / "train-images-idx3-ubyte", 100000);
  std::fstream(magic.path() / "t10k-labels-idx1-ubyte",
               std::ios::in | std::ios::out | std::ios::binary)
      .write("abcd", 4);
  const std::vector<Bad> cases{
      {{mnist, "--data", "/nowhere/at/all"}, 1, {"/nowhere/at/all", "train-images-idx3-ubyte"}},
      {{mnist, "--data", truncated.path().string()}, 1, {"train-images-idx3-ubyte"}},
      {{mnist, "--data", magic.path().string()}, 1, {"t10k-labels-idx1-ubyte"}},
      {{mnist, "--data", mislabelled.path().string()}, 1, {"11", "17"}},
      {{mnist, "--no-such-option"}, 2, {"--no-such-option"}},
      {{mnist, "--epochs", "many"}, 2, {"--epochs"}},
      {{mnist, "--data", folder, "--lr", "1e30", "--epochs", "5"}, 1, {"loss", "nan", "--lr"}},
      {{mnist, "--data", folder, "--epochs", "1", "--batch-size", "32", "--save",
        "/nowhere/model.safetensors"},
       1,
       {"/nowhere/model.safetensors"}},
  };
  for (const Bad& bad : cases) {
    const auto e = run(bad.command);
    CHECK_MESSAGE(e.code == bad.code, e.output);
    for (const std::string& part : bad.parts) CHECK_MESSAGE(has(e, part), part, " in: ", e.output);
  }
}

TEST_CASE("bad input on ranks ends them all with that rank's code") {
  const Data data;
  auto e = mnist(2, data.path(), {"--lr", "1e30", "--epochs", "5"});
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, "the loss is"), e.output);
  CHECK(e.seconds < 10 * ranks::kPatience);
  e = mnist(2, "/nowhere");
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, "/nowhere"), e.output);
}

TEST_CASE("mnist names an option that differs between ranks") {
  const Data data;
  const std::pair<std::string, std::string> odd[] = {
      {"--log-loss /tmp/unused", "--log_loss: not given on rank 0, given on rank 1"},
      {"--epochs 2", "--epochs: 1 on rank 0, 2 on rank 1"}};
  for (const auto& [option, text] : odd) {
    const auto e = run({kBin + "/lockstep-run", "-n", "2", "sh", "-c",
                        kBin + "/mnist --threads 1 --data " + data.path().string() +
                            " --epochs 1 $([ $RANK = 1 ] && echo " + option + ")"});
    CHECK(e.code == 1);
    CHECK_MESSAGE(has(e, "mnist: " + text), e.output);
  }
}

TEST_CASE("a full disk while saving leaves no half-written file") {
  const Data data;
  const TemporaryFolder out;
  const std::string script = "trap '' XFSZ; ulimit -f 100; exec " + kBin +
                             "/mnist --threads 1 --epochs 1 --data " + data.path().string() +
                             " --save " + out / "model.safetensors";
  const auto e = run({"bash", "-c", script});
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, "model.safetensors"), e.output);
  CHECK_MESSAGE(has(e, "File too large"), e.output);
  CHECK(out.entries() == 0);
}

TEST_CASE("a failed save ends every rank with an error") {
  const Data data;
  const auto e = mnist(2, data.path(), {"--epochs", "1", "--save", "/nowhere/model.safetensors"});
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, "/nowhere/model.safetensors"), e.output);
  CHECK_MESSAGE(!has(e, "test accuracy"), e.output);
}

// ---- loss curves ----

namespace {

/// Lines of "step loss".
std::vector<std::pair<int64_t, double>> curve(const fs::path& file) {
  std::vector<std::pair<int64_t, double>> lines;
  std::ifstream in(file);
  int64_t step = 0;
  for (double loss = 0; in >> step >> loss;) lines.emplace_back(step, loss);
  CHECK(in.eof());
  return lines;
}

}  // namespace

TEST_CASE("the loss curves of one rank and of many micro-batches part only by rounding") {
  const Data data;
  std::vector<std::vector<std::pair<int64_t, double>>> curves;
  struct Shape {
    int ranks;
    std::string batch, steps;
  };
  for (const Shape& s : {Shape{1, "64", "1"}, Shape{2, "8", "4"}, Shape{4, "4", "4"}}) {
    const fs::path file = data.path() / "losses";
    // 240 samples: three steps of 64 and one of 48, which is three micro-batches
    const auto e = mnist(s.ranks, data.path(),
                         {"--epochs", "2", "--train_samples", "240", "--batch_size", s.batch,
                          "--gradient_accumulation_steps", s.steps, "--log-loss", file.string()});
    REQUIRE_MESSAGE(e.code == 0, e.output);
    curves.push_back(curve(file));
  }
  REQUIRE(curves[0].size() == 8);
  CHECK(curves[0][0].second > 2);  // ten classes: ln 10 = 2.3
  CHECK(curves[0][7].second < 1.5);
  for (size_t c : {1, 2}) {
    REQUIRE(curves[c].size() == 8);
    for (size_t i = 0; i < 8; ++i) {
      CHECK(curves[c][i].first == static_cast<int64_t>(i + 1));
      CHECK(curves[c][i].second == doctest::Approx(curves[0][i].second).epsilon(2e-5));
    }
  }
}

// ---- checkpoints ----

namespace {

std::vector<std::string> training(const Data& data, const fs::path& folder) {
  return {"--data",
          data.path().string(),
          "--threads",
          "1",
          "--epochs",
          "2",
          "--batch-size",
          "4",
          "--log_loss",
          (folder / "losses").string(),
          "--checkpoint_every",
          "3",
          "--checkpoint",
          (folder / "run").string(),
          "--save",
          (folder / "model").string(),
          "--gradient_accumulation_steps",
          "2"};
}

struct Rank {
  pid_t pid;
  int file;
};
/// Two ranks without a launcher: when one dies nobody but the other notices.
std::vector<Rank> start_ranks(const Data& data, const fs::path& folder) {
  std::vector<std::string> command{kBin + "/mnist"};
  for (const std::string& o : training(data, folder)) command.push_back(o);
  const std::string run_id = ranks::next_run_id();
  std::vector<Rank> started;
  for (const std::string r : {"0", "1"}) {
    const int file = ranks::new_file();
    started.push_back({ranks::start(command, file,
                                    {{"RANK", r},
                                     {"WORLD_SIZE", "2"},
                                     {"LOCAL_RANK", r},
                                     {"LOCAL_WORLD_SIZE", "2"},
                                     {"TORCHELASTIC_RUN_ID", run_id}}),
                       file});
  }
  return started;
}
std::vector<ranks::Ended> wait_for(const std::vector<Rank>& started) {
  std::vector<ranks::Ended> all;
  for (const Rank& r : started) {
    all.push_back(ranks::wait_for(r.pid, ranks::now() + 60 * ranks::kPatience));
    all.back().output = ranks::read_all(r.file);
    close(r.file);
  }
  return all;
}
size_t lines_of(const fs::path& file) {
  const std::string text = get_file(file.string());
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace

TEST_CASE("a rank killed in mid-training: started again, the run ends as if nothing had happened") {
  const Data data;
  const TemporaryFolder undisturbed;
  CHECK(ranks::failures(wait_for(start_ranks(data, undisturbed.path()))) == "");
  REQUIRE(lines_of(undisturbed / "losses") == 32);  // 256 samples by 2 x 2 x 4, twice

  for (const auto& fault : {std::pair{1, size_t{5}}, {0, size_t{19}}}) {
    const int killed = fault.first;
    const size_t steps = fault.second;
    CAPTURE(killed);
    const TemporaryFolder folder;
    const auto first = start_ranks(data, folder.path());
    const double deadline = ranks::now() + 60 * ranks::kPatience;
    while (lines_of(folder / "losses") < steps && ranks::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    kill(first[static_cast<size_t>(killed)].pid, SIGKILL);
    const auto ended = wait_for(first);
    CHECK(ended[static_cast<size_t>(killed)].signal == SIGKILL);
    const ranks::Ended& other = ended[static_cast<size_t>(1 - killed)];
    CHECK_MESSAGE(other.code == 1, other.output);
    CHECK_MESSAGE(!other.hung, other.output);
    CHECK(!fs::exists(folder / "model"));

    const auto again = wait_for(start_ranks(data, folder.path()));
    CHECK_MESSAGE(ranks::failures(again) == "", again[0].output);
    CHECK_MESSAGE(has(again[0], "/run: going on after step "), again[0].output);
    CHECK(get_file(folder / "model") == get_file(undisturbed / "model"));
    CHECK(get_file(folder / "losses") == get_file(undisturbed / "losses"));
    CHECK(get_file(folder / "run") == get_file(undisturbed / "run"));
  }
}

TEST_CASE("a finished run started again trains no further; one rank takes over from two") {
  const Data data;
  const TemporaryFolder folder;
  const auto options = [&](const std::string& epochs, const std::string& batch) {
    return std::vector<std::string>{"--epochs", epochs,          "--batch-size",
                                    batch,      "--checkpoint",  folder / "run",
                                    "--save",   folder / "model"};
  };
  REQUIRE(mnist(2, data.path(), options("1", "16")).code == 0);
  const std::string model = get_file(folder / "model");
  auto e = mnist(2, data.path(), options("1", "16"));
  CHECK_MESSAGE(e.code == 0, e.output);
  CHECK_MESSAGE(has(e, "going on after step 8"), e.output);
  CHECK(get_file(folder / "model") == model);
  e = mnist(1, data.path(), options("2", "32"));
  CHECK_MESSAGE(e.code == 0, e.output);
  CHECK_MESSAGE(has(e, "going on after step 8"), e.output);
  CHECK_MESSAGE(has(e, "epoch 2/2"), e.output);
  CHECK_MESSAGE(!has(e, "epoch 1/2"), e.output);
  CHECK(get_file(folder / "model") != model);

  put_file(folder / "run", "no checkpoint at all");
  e = mnist(2, data.path(), options("2", "16"));
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, folder / "run"), e.output);
  CHECK(get_file(folder / "run") == "no checkpoint at all");
}

// ---- flags ----

TEST_CASE("the flags of distributed training, in both spellings") {
  const auto parsed = [](std::vector<std::string> arguments) {
    DdpFlags flags;
    CLI::App app;
    flags.add_to(app);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
    app.parse(arguments);
    return flags;
  };
  const DdpFlags none = parsed({});
  CHECK(none.init().backend.empty());
  CHECK(none.init().timeout == std::chrono::minutes(30));
  CHECK(none.options.bucket_cap_mb == 25);
  CHECK(!none.options.find_unused_parameters);
  CHECK(none.options.broadcast_buffers);

  for (const bool hyphens : {false, true}) {
    const auto spelled = [&](std::string name) {
      if (hyphens) std::replace(name.begin() + 2, name.end(), '_', '-');
      return name;
    };
    const DdpFlags all =
        parsed({spelled("--ddp_backend"), "shm", spelled("--ddp_timeout"), "1.5",
                spelled("--ddp_bucket_cap_mb"), "0.25", spelled("--ddp_find_unused_parameters"),
                spelled("--ddp_broadcast_buffers"), "false"});
    CHECK(all.init().backend == "shm");
    CHECK(all.init().timeout == std::chrono::milliseconds(1500));
    CHECK(all.options.bucket_cap_mb == 0.25);
    CHECK(all.options.find_unused_parameters);
    CHECK(!all.options.broadcast_buffers);
    const std::string unused = spelled("--ddp_find_unused_parameters");
    CHECK(parsed({unused, "true"}).options.find_unused_parameters);
    CHECK(parsed({unused + "=true"}).options.find_unused_parameters);
    CHECK(!parsed({unused, "false"}).options.find_unused_parameters);
    CHECK(parsed({spelled("--ddp_broadcast_buffers")}).options.broadcast_buffers);
    CHECK_THROWS_AS(parsed({unused, "perhaps"}), CLI::ParseError);
    CHECK_THROWS_AS(parsed({spelled("--ddp_timeout"), "0"}), CLI::ParseError);
    CHECK_THROWS_AS(parsed({spelled("--ddp_bucket_cap_mb"), "-1"}), CLI::ParseError);
  }
  CHECK(parsed({"--ddp_timeout", "1e300"}).init().timeout > std::chrono::hours(24 * 365));
}

TEST_CASE("the flags reach the group and the wrapper") {
  const Data data;
  const std::vector<std::string> brief{"--epochs",     "1", "--train_samples", "32",
                                       "--batch-size", "8"};
  auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), brief.begin(), brief.end());
    return mnist(2, data.path(), more);
  };
  auto e = with({"--ddp_backend", "carrier-pigeon"});
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, "no backend is registered as \"carrier-pigeon\""), e.output);
  e = with({"--ddp_find_unused_parameters", "--ddp_broadcast_buffers", "false",
            "--ddp-bucket-cap-mb", "0.5", "--ddp_timeout", "60"});
  CHECK_MESSAGE(e.code == 0, e.output);
}

TEST_CASE("mlp trains on one rank and on two, and names a missing file") {
  const Data data;
  for (const char* ranks : {"1", "2"}) {
    const auto e = run({kBin + "/lockstep-run", "-n", ranks, kBin + "/mlp", data.path().string()});
    CHECK_MESSAGE(e.code == 0, e.output);
    CHECK_MESSAGE(has(e, "test accuracy "), e.output);
  }
  const auto e = run({kBin + "/mlp", "/nowhere"});
  CHECK_MESSAGE(e.code == 1, e.output);
  CHECK_MESSAGE(has(e, "mlp: "), e.output);
  CHECK_MESSAGE(has(e, "/nowhere"), e.output);
}

TEST_CASE("--help names every option") {
  const auto e = run({kBin + "/mnist", "--help"});
  CHECK(e.code == 0);
  for (const char* option :
       {"--epochs", "--batch-size", "--lr", "--seed", "--data", "--save",
        "--gradient-accumulation-steps", "--threads", "--train-samples", "--checkpoint",
        "--checkpoint-every", "--log-loss", "--ddp-backend", "--ddp-timeout", "--ddp-bucket-cap-mb",
        "--ddp-find-unused-parameters", "--ddp-broadcast-buffers", "--ddp_broadcast_buffers"})
    CHECK_MESSAGE(has(e, option), option);
}
