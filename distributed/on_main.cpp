#include <lockstep/distributed/on_main.h>

#include <cstring>

#include <lockstep/distributed/failure_note.h>
#include <lockstep/distributed/peer_error.h>

namespace lockstep::dist {

void run_on_main(const Group& group, const std::function<void()>& f) {
  std::exception_ptr error;
  std::string text;
  if (group.is_main()) {
    try {
      f();
    } catch (const std::exception& e) {
      error = std::current_exception();
      text = e.what();
    } catch (...) {
      error = std::current_exception();
    }
    if (error && text.empty()) text = "an exception without a text";
  }
  Tensor length = tensor<int64_t>({static_cast<int64_t>(text.size())});
  group.broadcast(length, 0, {.label = "the outcome of what rank 0 did"});
  if (length.item<int64_t>() == 0) return;
  Tensor bytes = empty({length.item<int64_t>()}, {.dtype = DType::u8});
  if (group.is_main()) std::memcpy(bytes.data_ptr(), text.data(), text.size());
  group.broadcast(bytes, 0, {.label = "the error of rank 0"});
  if (error) std::rethrow_exception(error);
  note_failed_peer();
  throw PeerError(Cause::other,
                  str_cat("rank 0 failed: ",
                          std::string_view(static_cast<const char*>(bytes.data_ptr()),
                                           static_cast<size_t>(bytes.numel()))));
}

}  // namespace lockstep::dist
