// All of lockstep::optim: optimizers, schedules, gradient clipping.
#pragma once

#include <lockstep/optim/adam.h>
#include <lockstep/optim/clip.h>
#include <lockstep/optim/schedule.h>
#include <lockstep/optim/sgd.h>
