// LOCKSTEP_API exports a symbol from liblockstep.so, which is built with hidden visibility.
#pragma once

// LOCKSTEP_THREAD_LOCAL is for the few words that every op reads: it is reached without a call. A library
// that is loaded late has little room for such variables.
#define LOCKSTEP_API __attribute__((visibility("default")))
#define LOCKSTEP_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) thread_local constinit
