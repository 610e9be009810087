// LossLog: a loss curve as a text file, one line "step loss" per optimizer step, for comparing
// runs: the mean over the samples of all ranks, with every digit.
#pragma once

#include <fstream>
#include <iomanip>
#include <string>

#include <lockstep/distributed/on_main.h>

class LossLog {
 public:
  /// Rank 0 writes; an empty path: nobody. A run that is resumed after `steps` steps keeps the lines
  /// up to there.
  LossLog(std::string path, const lockstep::dist::Group& group, int64_t steps)
      : path_(std::move(path)) {
    if (!path_.empty()) lockstep::dist::run_on_main(group, [&] { open(steps); });
  }

  void step(int64_t step, double mean_loss) {
    if (out_.is_open()) write(step, mean_loss);
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
  std::ofstream out_;
};
