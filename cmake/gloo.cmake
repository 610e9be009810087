# Looks for Gloo, and for a version whose transports can be wrapped as distributed/gloo/watched.h does.
set(LOCKSTEP_HAS_GLOO OFF)
if(LOCKSTEP_GLOO)
  find_package(Gloo QUIET CONFIG)
endif()
if(Gloo_FOUND)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LIBRARIES gloo)
  check_cxx_source_compiles("
    #include <gloo/allreduce.h>
    #include <gloo/transport/context.h>
    #include <gloo/transport/tcp/device.h>
    struct Transport : gloo::transport::Context {
      using gloo::transport::Context::Context;
      std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override { return createPair(rank); }
      std::unique_ptr<gloo::transport::Pair>& createPair(int) override { throw 0; }
      std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void*, size_t) override {
        throw 0;
      }
    };
    int main() { Transport(0, 1); }" LOCKSTEP_GLOO_COMPILES)
  unset(CMAKE_REQUIRED_LIBRARIES)
  set(LOCKSTEP_HAS_GLOO ${LOCKSTEP_GLOO_COMPILES})
endif()
if(LOCKSTEP_GLOO AND NOT LOCKSTEP_HAS_GLOO)
  lockstep_package(gloo/context.h packages)
  message(STATUS "Lockstep without the backend gloo: no Gloo was found that it can use; it is in ${packages}")
endif()
