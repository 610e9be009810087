// Everything: #include <lockstep/lockstep.h>. Each header can be included alone as well.
#pragma once

#include <lockstep/autograd/grad.h>
#include <lockstep/autograd/gradcheck.h>
#include <lockstep/data/loader.h>
#include <lockstep/data/mnist.h>
#include <lockstep/data/progress.h>
#include <lockstep/data/sampler.h>
#include <lockstep/data/subset.h>
#include <lockstep/data/tensor_dataset.h>
#include <lockstep/distributed/accumulation.h>
#include <lockstep/distributed/checkpoint.h>
#include <lockstep/distributed/comm_hooks.h>
#include <lockstep/distributed/data_parallel.h>
#include <lockstep/distributed/error_file.h>
#include <lockstep/distributed/local.h>
#include <lockstep/distributed/on_main.h>
#include <lockstep/distributed/powersgd.h>
#include <lockstep/distributed/sync_batch_norm.h>
#include <lockstep/nn/nn.h>
#include <lockstep/optim/optim.h>
#include <lockstep/tensor/allocator.h>
#include <lockstep/tensor/ops.h>
#include <lockstep/tensor/parallel.h>
#include <lockstep/tensor/safetensors.h>
#include <lockstep/tensor/warning.h>
