// Reducer: the control records of a round. They travel beside the first bucket, and errors about them
// name it, like those of the buckets themselves.
#include <algorithm>

#include <lockstep/distributed/ddp/reducer.h>

namespace lockstep::dist {

ControlRecord Reducer::record_of_round() const {
  ControlRecord record{.forwards = forwards_, .local_backwards = local_backwards_};
  if (join_) record.join = shadowing_ ? ControlRecord::Join::finished : ControlRecord::Join::active;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const bool trains = parameters_[i].parameter.requires_grad();
    // What local backwards left in a frozen parameter waits until it trains again.
    record.used.push_back(reached_[i] || (trains && parameters_[i].leaf->accumulated));
    record.trainable.push_back(trains);
  }
  for (size_t i = 0; i < frozen_.size() && record.unfrozen < 0; ++i)
    if (frozen_[i].second.requires_grad()) record.unfrozen = static_cast<int32_t>(i);
  return record;
}

/// A static graph repeats each rank's first record, so that none need be sent where sending costs.
bool Reducer::posts_records() const {
  const bool is_known = !first_.empty() && std::none_of(first_.begin(), first_.end(),
                                                        [](auto& r) { return r.is_finished(); });
  return !options_.static_graph || !is_known || join_ || group_->records_are_free();
}

void Reducer::fail_about_records(const DistError& e) const {
  lockstep::fail<DistError>("DDP's control record of synchronised backward ",
                            stats_.synchronised_backwards + 1, ", sent with ", buckets_[0].label,
                            ": ", e.what());
}

void Reducer::post_record() {
  try {
    group_->post(++epoch_, mine_.encode());
  } catch (const DistError& e) {
    fail_about_records(e);
  }
}

void Reducer::collect_records() {
  try {
    for (const auto& bytes : group_->collect(epoch_))
      records_.push_back(ControlRecord::decode(bytes, parameters_.size()));
  } catch (const DistError& e) {
    fail_about_records(e);
  }
}

}  // namespace lockstep::dist
