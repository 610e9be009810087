// Environment: what the launcher told this process, whoever it was: lockstep-run, torchrun,
// accelerate, mpirun, srun or nobody.
#pragma once

#include <functional>
#include <string>

#include <lockstep/tensor/export.h>

namespace lockstep::dist {

struct Environment {
  std::string launcher = "no launcher";  // what errors and logs call it
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  bool one_host = true;  // all ranks are on this host
  std::string run_id;    // tells jobs of one user apart; may be empty
  std::string master_addr, master_port;
  int attempt = 0;      // grows when the launcher restarts the job
  std::string token;    // the job's secret, which lets a process in over TCP; may be empty
  std::string host_id;  // LOCKSTEP_HOST_ID: ranks of one value are taken for ranks of one host
};

/// Returns a variable's value, or null.
using GetVariable = std::function<const char*(const char*)>;

/// In this order: lockstep-run's variables; RANK + WORLD_SIZE; OMPI_COMM_WORLD_*; PMI_*; a Slurm
/// step (SLURM_PROCID with SLURM_STEP_NUM_TASKS, so never a batch script by itself); else a group
/// of one. MASTER_ADDR without RANK is a group of one. Throws DistError that names the variable
/// when half of a pair is missing, a number is none, or a rank is not below its size.
LOCKSTEP_API Environment read_environment(const GetVariable& get);
/// From the process's own variables.
LOCKSTEP_API Environment read_environment();

/// LOCKSTEP_JOIN_TIMEOUT in seconds, or 60. Throws DistError when it is no positive number.
LOCKSTEP_API double join_timeout_seconds(const GetVariable& get);

}  // namespace lockstep::dist
