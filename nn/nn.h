// All of lockstep::nn: modules, layers, losses, initialisation, summaries.
#pragma once

#include <lockstep/nn/activation.h>
#include <lockstep/nn/batch_norm.h>
#include <lockstep/nn/conv2d.h>
#include <lockstep/nn/dropout.h>
#include <lockstep/nn/flatten.h>
#include <lockstep/nn/init.h>
#include <lockstep/nn/layer_norm.h>
#include <lockstep/nn/linear.h>
#include <lockstep/nn/loss.h>
#include <lockstep/nn/module.h>
#include <lockstep/nn/pool.h>
#include <lockstep/nn/sequential.h>
#include <lockstep/nn/summary.h>
