// torchrun's error file: {"message": {"message": ..., "extraInfo": {"py_callstack": ...,
// "timestamp": seconds since 1970, as text}}}.
#include <lockstep/distributed/error_file.h>

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <typeinfo>

#include <lockstep/tensor/file.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::dist {

namespace {

std::string error_file() {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  return path ? path : "";
}

std::string type_of(const std::exception& error) {
  const char* mangled = typeid(error).name();
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : mangled;
}

std::terminate_handler terminate_before = nullptr;

[[noreturn]] void record_and_terminate() {
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    try {
      write_error_file(e);
    } catch (...) {  // the process ends with the error at hand, not with this one
    }
  } catch (...) {  // says nothing about itself
  }
  if (terminate_before) terminate_before();
  std::abort();
}

}  // namespace

int report_failure(std::string_view program, const std::exception& error) {
  std::fprintf(stderr, "%.*s: %s\n", static_cast<int>(program.size()), program.data(),
               error.what());
  write_error_file(error);
  return 1;
}

void write_error_file(const std::exception& error) {
  const std::string path = error_file();
  if (path.empty()) return;
  const std::string text = str_cat(type_of(error), ": ", error.what());
  const nlohmann::json file = {
      {"message",
       {{"message", text},
        {"extraInfo",
         {{"py_callstack", text}, {"timestamp", std::to_string(std::time(nullptr))}}}}}};
  try {
    // A message may quote bytes that are no UTF-8.
    write_file_atomically(path,
                          file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  } catch (const Error& e) {
    warn("TORCHELASTIC_ERROR_FILE: ", e.what());
  }
}

void record_errors() {
  if (error_file().empty()) return;
  [[maybe_unused]] static const bool once = [] {
    terminate_before = std::set_terminate(record_and_terminate);
    return true;
  }();
}

}  // namespace lockstep::dist
