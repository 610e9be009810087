// LossLog: a loss curve as a text file, one line "step loss" per optimizer step, for comparing
// runs: the mean over the samples of all ranks, with every digit.
#pragma once

#include <fstream>
#include <iomanip>
#include <string>

#include <lockstep/distributed/on_main.h>

class LossLog {
 public:
  /// An empty path: nothing is written, or communicated. A run that is resumed after `steps` steps
  /// keeps the lines up to there.
  LossLog(std::string path, lockstep::dist::Group group, int64_t steps)
      : path_(std::move(path)), group_(std::move(group)) {
    if (!path_.empty()) lockstep::dist::run_on_main(group_, [&] { open(steps); });
  }

  /// A micro-batch of this rank.
  void add(double mean_loss, int64_t samples) {
    sum_ += mean_loss * static_cast<double>(samples);
    samples_ += samples;
  }
  /// All that was added since the last step makes a line. A collective call.
  void step(int64_t step) {
    if (path_.empty()) return;
    const lockstep::Tensor all =
        lockstep::tensor<double>({sum_, static_cast<double>(samples_)});  // [2]
    group_.all_reduce(all);
    if (group_.is_main()) write(step, all[0].item<double>() / all[1].item<double>());
    sum_ = 0;
    samples_ = 0;
  }

 private:
  void open(int64_t steps) {
    std::string kept;
    std::ifstream old(path_);
    for (std::string line; std::getline(old, line);)
      if (std::atoll(line.c_str()) <= steps && steps > 0) kept += line + "\n";
    out_.open(path_);
    out_ << kept << std::setprecision(17) << std::flush;
    check();
  }
  void write(int64_t step, double loss) {
    out_ << step << ' ' << loss << std::endl;
    check();
  }
  void check() const {
    LOCKSTEP_CHECK(out_.good(), lockstep::IoError, "cannot write the losses to ", path_);
  }

  std::string path_;
  lockstep::dist::Group group_;
  std::ofstream out_;
  double sum_ = 0;
  int64_t samples_ = 0;
};
