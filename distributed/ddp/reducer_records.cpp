// Reducer: the control records of a round. They are sent with the first bucket, and errors about them
// name it, as errors about buckets do.
#include <algorithm>
#include <span>

#include <lockstep/data/loader.h>
#include <lockstep/distributed/ddp/reducer.h>
#include <lockstep/distributed/peer_error.h>

namespace lockstep::dist {

ControlRecord Reducer::record_of_round() const {
  ControlRecord record;
  record.since.local_backwards = local_backwards_;
  record.since.writes = static_cast<uint32_t>(replica_versions() - versions_before_);
  record.sample = {.elements = sample_of(compared_, epoch_),
                   .processor = processor_kind(),
                   .had_unwrapped_backward = flag_.had_unwrapped_backward()};
  if (!exact_windows_) {
    record.since.forwards = forwards_;
    record.since.skipped_forwards = forward_log_.skipped();
    // Before the first reduction rank 0 may have looked at a batch.
    if (stats_.synchronised_backwards > 0)
      record.since.batches =
          static_cast<uint32_t>(data::detail::sharded_batches_for_training() - first_batch_);
  }
  if (join_) {
    record.join = shadowing_ ? ControlRecord::Join::finished : ControlRecord::Join::active;
    record.join_options = *join_;
  }
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
  const std::string text =
      str_cat("DDP's control record of synchronised backward ", stats_.synchronised_backwards + 1,
              ", sent with ", buckets_[0].label, ": ", e.what());
  if (const auto* of_peer = dynamic_cast<const PeerError*>(&e))
    throw PeerError(of_peer->cause(), text);
  throw DistError(text);
}

void Reducer::post_record() {
  try {
    mine_bytes_ = mine_.encode();
    group_->post(++epoch_,
                 std::span(mine_bytes_).first(std::min(mine_bytes_.size(), kRecordBytes)));
  } catch (const DistError& e) {
    fail_about_records(e);
  }
}

void Reducer::collect_records() {
  std::vector<std::vector<std::byte>> whole(static_cast<size_t>(group_->size()));
  try {
    // What the first piece does not hold follows now, piece by piece; all ranks' are of one size.
    for (size_t at = 0; at < mine_bytes_.size(); at += kRecordBytes) {
      if (at > 0)
        group_->post(
            ++epoch_,
            std::span(mine_bytes_).subspan(at, std::min(mine_bytes_.size() - at, kRecordBytes)));
      const auto pieces = group_->collect(epoch_);
      for (size_t r = 0; r < whole.size(); ++r)
        whole[r].insert(whole[r].end(), pieces[r].begin(), pieces[r].end());
    }
    for (const auto& bytes : whole)
      records_.push_back(ControlRecord::decode(bytes, parameters_.size()));
  } catch (const DistError& e) {
    fail_about_records(e);
  }
}

/// What no rank uses gets no gradient from DDP; a rank may do with it as it likes until one does.
void Reducer::choose_compared() {
  std::vector<char> is_compared(parameters_.size(), 1);
  for (size_t k = 0; k < is_compared.size() && !records_.empty(); ++k)
    is_compared[k] = is_used(records_, k) || !is_trained(records_, k);
  if (is_compared == is_compared_) return;
  is_compared_ = is_compared;
  compared_ = frozen_;
  for (size_t k = 0; k < is_compared.size(); ++k)
    if (is_compared[k]) compared_.emplace_back(parameters_[k].name, parameters_[k].parameter);
}

/// All ranks decide alike, since they have the same records.
std::string Reducer::find_replica_fault() {
  if (!options_.init_sync || join_) return {};
  const auto any = [&](auto differs) {
    return std::any_of(records_.begin(), records_.end(), differs);
  };
  const ControlRecord& first = records_[0];
  // After a backward without the wrapper, of which the rank was warned, its steps are its own.
  if (any([&](const ControlRecord& r) {
        return r.sample.had_unwrapped_backward || r.sample.processor != first.sample.processor;
      }))
    return {};
  if (!any([&](const ControlRecord& r) {
        return r.sample.elements != first.sample.elements || r.since.writes != first.since.writes;
      }))
    return {};
  const auto [parameter, rank] = compare_replicas(*group_, compared_);
  if (parameter < 0) return {};
  const auto& [name, t] = compared_[static_cast<size_t>(parameter)];
  const bool is_frozen = std::any_of(frozen_.begin(), frozen_.end(),
                                     [&, &t = t](const auto& f) { return f.second.is_same(t); });
  return str_cat(
      "DDP: ", name, " on rank ", rank,
      " has other values than on rank 0; since the last reduction parameters were written ",
      first.since.writes, " times on rank 0, ", records_[static_cast<size_t>(rank)].since.writes,
      " times on rank ", rank,
      "; step the optimizer, load and change parameters alike on all ranks, or on none",
      is_frozen ? ". A frozen parameter that each rank changes for itself (an average of "
                  "the weights, say) belongs into the option `ignored`; init_sync = false "
                  "leaves all parameters uncompared"
                : "");
}

}  // namespace lockstep::dist
