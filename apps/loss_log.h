// LossLog: a loss curve as a text file, one line "step loss" per optimizer step, for comparing
// runs: the mean over the samples of all ranks, with all digits. Rank 0 writes.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <memory>
#include <string>

#include <lockstep/distributed/on_main.h>
#include <lockstep/tensor/file.h>
#include <lockstep/tensor/file_error.h>
#include <lockstep/tensor/system_text.h>

class LossLog {
 public:
  /// An empty path writes nothing. A run that is resumed after `steps` steps keeps the lines up to
  /// there. IoError on every rank if the file cannot be written. A collective call.
  LossLog(std::string path, const lockstep::dist::Group& group, int64_t steps)
      : path_(std::move(path)) {
    if (!path_.empty()) lockstep::dist::run_on_main(group, [&] { open(steps); });
  }
  ~LossLog() {
    if (fd_ >= 0) ::close(fd_);
  }
  LossLog(const LossLog&) = delete;
  LossLog& operator=(const LossLog&) = delete;

  /// Whether this rank writes.
  explicit operator bool() const { return out_ != nullptr; }

  /// IoError when the line cannot be written.
  void step(int64_t step, double mean_loss) {
    if (!out_) return;
    out_->write(lockstep::str_cat(step, ' ', mean_loss, '\n'));
    out_->flush();
  }

 private:
  void open(int64_t steps) {
    std::error_code ignored;  // the open below reports errors
    if (steps > 0 && std::filesystem::is_regular_file(path_, ignored))
      lockstep::write_file_atomically(path_, lines_until(steps));
    fd_ = lockstep::detail::above_standard(::open(
        path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (steps ? 0 : O_TRUNC), 0666));
    LOCKSTEP_CHECK(fd_ >= 0, lockstep::IoError, "LossLog: cannot write ", path_, ": ",
                   lockstep::system_text(errno), "; check the path and its permissions");
    out_ = std::make_unique<lockstep::FileWriter>(fd_, path_, "LossLog");
  }
  /// A last line without its end was cut off by a crash and is left out.
  std::string lines_until(int64_t steps) const {
    std::string text = lockstep::read_file(path_), kept;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      int64_t step = 0;
      std::from_chars(text.data() + begin, text.data() + end, step);
      if (step > 0 && step <= steps) kept.append(text, begin, end + 1 - begin);
    }
    return kept;
  }

  std::string path_;
  int fd_ = -1;
  std::unique_ptr<lockstep::FileWriter> out_;
};
