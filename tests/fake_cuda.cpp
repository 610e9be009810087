// What lockstep-run asks of libcuda.so.1, answered with LOCKSTEP_FAKE_DEVICES.
#include <cstdlib>

extern "C" {

int cuInit(unsigned) { return 0; }

int cuDeviceGetCount(int* count) {
  const char* n = std::getenv("LOCKSTEP_FAKE_DEVICES");
  *count = n ? std::atoi(n) : 0;
  return 0;
}
}
