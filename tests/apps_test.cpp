// The demo as its user meets it: real processes on a small data set, good and bad input, one
// message each.
#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <lockstep/tensor/safetensors.h>

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

TEST_CASE("--help names every option") {
  const auto e = run({kBin + "/mnist", "--help"});
  CHECK(e.code == 0);
  for (const char* option : {"--epochs", "--batch-size", "--lr", "--seed", "--data", "--save",
                             "--gradient-accumulation-steps", "--threads"})
    CHECK_MESSAGE(has(e, option), option);
}
