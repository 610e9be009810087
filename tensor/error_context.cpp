#include <lockstep/tensor/error_context.h>

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>

#include <lockstep/tensor/error.h>
#include <lockstep/tensor/warning.h>

namespace lockstep::detail {
namespace {

// A derived class would be sliced, so only E itself.
template <class E>
void rethrow_if(const std::exception& e, std::string_view where) {
  if (typeid(e) == typeid(E)) throw E(str_cat(e.what(), "\n  ", where));
}

template <class... E>
void rethrow_if_any(const std::exception& e, std::string_view where) {
  (rethrow_if<E>(e, where), ...);
}

}  // namespace

void rethrow_with_context(std::string_view where) {
  try {
    throw;
  } catch (Error& e) {
    e.add_context(where);
    throw;
  } catch (const std::exception& e) {
    rethrow_if_any<std::runtime_error, std::range_error, std::overflow_error, std::underflow_error,
                   std::logic_error, std::domain_error, std::invalid_argument, std::length_error,
                   std::out_of_range>(e, where);
    warn(where, ": an exception of type ", type_name(typeid(e)), " was thrown: ", e.what());
    throw;
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    warn(where, ": an exception of type ", type ? type_name(*type) : "unknown", " was thrown");
    throw;
  }
}

std::string type_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : type.name();
}

}  // namespace lockstep::detail
