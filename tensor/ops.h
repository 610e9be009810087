// All ops that work on tensors.
#pragma once

#include <lockstep/tensor/ops/batch_norm.h>
#include <lockstep/tensor/ops/conv2d.h>
#include <lockstep/tensor/ops/cross_entropy.h>
#include <lockstep/tensor/ops/elementwise.h>
#include <lockstep/tensor/ops/join.h>
#include <lockstep/tensor/ops/layer_norm.h>
#include <lockstep/tensor/ops/linear.h>
#include <lockstep/tensor/ops/matmul.h>
#include <lockstep/tensor/ops/mse_loss.h>
#include <lockstep/tensor/ops/pool.h>
#include <lockstep/tensor/ops/reduce.h>
#include <lockstep/tensor/ops/softmax.h>
#include <lockstep/tensor/random.h>
