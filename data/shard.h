// Shard: which part of a data set is read here: part `rank` of `size` equal ones. A dist::Group
// converts to it.
#pragma once

namespace lockstep::data {

struct Shard {
  int rank = 0;
  int size = 1;
};

}  // namespace lockstep::data
