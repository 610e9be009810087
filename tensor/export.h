// LOCKSTEP_API exports a symbol from liblockstep.so, which is built with hidden visibility.
#pragma once

#define LOCKSTEP_API __attribute__((visibility("default")))
