// The device "late", of tests alone: two devices whose memory the host cannot touch, whose streams run late
// and in random order, and which count how often the host waits for them. Its kernels are the CPU's, run
// on another mapping of the same memory. It stands for what a GPU's plug-in does, and registers by the
// same means.
#pragma once

#include <cstdint>
#include <functional>

#include <lockstep/tensor/device_backend.h>
#include <lockstep/tensor/kernel.h>

namespace late {

/// Registers the device and its kernels; the first call in a process does.
lockstep::DeviceType type();
inline lockstep::Device device(int index = 0) { return {type(), index}; }

/// How often the host has waited for a device: in synchronize(), and to read elements.
int64_t synchronizations();
/// The seed of the order in which streams run.
void set_order(uint64_t seed);
/// Kernel calls that have not run yet.
int64_t pending();

/// Puts work behind what the device's current stream holds. What it throws comes out of the next wait.
void enqueue(int index, std::function<void()> work);
/// Waits for the device, and counts it.
void wait_for(int index);
/// Where kernels see the byte that is at `p` for the host.
void* mapped(const void* p, int index);

/// Enters the kernels; part of type().
void enter_kernels(lockstep::DeviceType type);

}  // namespace late
