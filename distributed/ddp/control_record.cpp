// ControlRecord's bytes, and the faults that a round's records show. Every rank runs find_fault() on the
// same records, so all throw the same error or none does.
#include <lockstep/distributed/ddp/control_record.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <lockstep/tensor/error.h>

namespace lockstep::dist {

namespace {

// What precedes, in a record's bytes, the two bits of each parameter: used and trainable.
struct Head {
  ControlRecord::Since since;
  ReplicaSample sample;
  int32_t unfrozen;
  uint8_t flags;
};
static_assert(std::is_trivially_copyable_v<Head>);
constexpr size_t kHead = sizeof(Head);

void put_bits(std::byte* to, const std::vector<char>& bits) {
  for (size_t i = 0; i < bits.size(); ++i)
    if (bits[i]) to[i / 8] |= std::byte{1} << (i % 8);
}
std::vector<char> take_bits(const std::byte* from, size_t count) {
  std::vector<char> bits(count);
  for (size_t i = 0; i < count; ++i)
    bits[i] = (from[i / 8] >> (i % 8) & std::byte{1}) != std::byte{0};
  return bits;
}

}  // namespace

std::vector<std::byte> ControlRecord::encode() const {
  const size_t map = (used.size() + 7) / 8;
  std::vector<std::byte> bytes(kHead + 2 * map);
  const int flags = static_cast<int>(join) | join_options.divide_by_initial_world_size << 2 |
                    join_options.throw_on_early_termination << 3;
  const Head head{since, sample, unfrozen, static_cast<uint8_t>(flags)};
  std::memcpy(bytes.data(), &head, kHead);
  put_bits(bytes.data() + kHead, used);
  put_bits(bytes.data() + kHead + map, trainable);
  return bytes;
}

ControlRecord ControlRecord::decode(std::span<const std::byte> bytes, size_t parameters) {
  const size_t map = (parameters + 7) / 8;
  LOCKSTEP_CHECK(bytes.size() == kHead + 2 * map, DistError, "DDP: a control record of ",
                 bytes.size(), " bytes for ", parameters, " parameters");
  Head head;
  std::memcpy(&head, bytes.data(), kHead);
  ControlRecord r{.since = head.since, .sample = head.sample, .unfrozen = head.unfrozen};
  const int flags = head.flags;
  r.join = static_cast<Join>(flags & 3);
  r.join_options = {(flags & 4) != 0, (flags & 8) != 0};
  r.used = take_bits(bytes.data() + kHead, parameters);
  r.trainable = take_bits(bytes.data() + kHead + map, parameters);
  return r;
}

bool is_used(const std::vector<ControlRecord>& records, size_t parameter) {
  return std::any_of(records.begin(), records.end(),
                     [&](const ControlRecord& r) { return r.used[parameter]; });
}
bool is_trained(const std::vector<ControlRecord>& records, size_t parameter) {
  return std::any_of(records.begin(), records.end(),
                     [&](const ControlRecord& r) { return r.trainable[parameter]; });
}

namespace {

using Records = std::vector<ControlRecord>;
using Join = ControlRecord::Join;

std::string find_join_fault(const Records& records) {
  for (size_t r = 1; r < records.size(); ++r)
    if ((records[r].join == Join::none) != (records[0].join == Join::none)) {
      const bool first = records[0].join == Join::none;
      return str_cat("DDP: join: rank ", first ? r : 0, " is inside join and rank ", first ? 0 : r,
                     " is not; all ranks must enter it together");
    }
  const auto options = [&](size_t r) {
    const JoinOptions& o = records[r].join_options;
    return str_cat("divide_by_initial_world_size ", o.divide_by_initial_world_size,
                   " and throw_on_early_termination ", o.throw_on_early_termination, " on rank ",
                   r);
  };
  for (size_t r = 1; r < records.size(); ++r)
    if (records[r].join != Join::none && records[r].join_options != records[0].join_options)
      return str_cat("DDP: join: the options differ: ", options(0), ", ", options(r),
                     "; pass the same on every rank");
  return {};
}

// Ranks that run the same loop agree in these numbers. Inside join they need not.
std::string find_step_fault(const Records& records) {
  using Since = ControlRecord::Since;
  const Since& first = records[0].since;
  const auto fault = [&](size_t r, uint32_t Since::*number, std::string_view what, bool most,
                         std::string_view reason) {
    const uint32_t other = records[r].since.*number;
    const size_t odd = (other > first.*number) == most ? r : 0;
    return str_cat("DDP: the ranks are out of step: since the last reduction rank 0 ", what, " ",
                   first.*number, ", rank ", r, " ", other,
                   "; their gradients belong to different steps. Likely rank ", odd, " ", reason);
  };
  // Where all ranks take batches from loaders those tell the steps, and a forward more is harmless.
  const bool have_loaders = std::all_of(records.begin(), records.end(),
                                        [](const auto& r) { return r.since.batches > 0; });
  for (size_t r = 1; r < records.size(); ++r) {
    const Since& since = records[r].since;
    if (records[r].join != Join::none) continue;
    const bool same_windows = since.local_backwards == first.local_backwards;
    if (same_windows && since.batches != first.batches)
      return fault(
          r, &Since::batches, "took batches from its loaders:", true,
          "took a batch and did not train on it: look at data under NoGradGuard, and leave "
          "a batch out on every rank or on none (all_reduce the decision)");
    if (have_loaders) continue;
    if (since.skipped_forwards != first.skipped_forwards)
      return fault(r, &Since::skipped_forwards, "left out the backwards of its forwards:", true,
                   "ran a forward in training mode and did not use its output, or gave up a step: "
                   "run a forward for its value alone under NoGradGuard, and skip a step on every "
                   "rank or on none (all_reduce the decision)");
    if (same_windows && (since.forwards == 0) != (first.forwards == 0))
      return fault(r, &Since::forwards, "ran forwards:", false,
                   "ran backward once more through the graph of a step that is over: run as many "
                   "backwards on every rank");
  }
  return {};
}

// A yes or no of each rank that still has inputs: "rank 0 true, rank 1 false".
template <class Predicate>
std::string values_by_rank(const Records& records, Predicate holds) {
  std::string text;
  for (size_t r = 0; r < records.size(); ++r)
    if (!records[r].is_finished())
      text +=
          str_cat(text.empty() ? "rank " : ", rank ", r, holds(records[r]) ? " true" : " false");
  return text;
}

std::string find_frozen_fault(const Records& records, const RecordNames& names) {
  for (const ControlRecord& record : records)
    if (record.unfrozen >= 0 && static_cast<size_t>(record.unfrozen) < names.frozen.size())
      return str_cat(
          "DDP: ", names.frozen[static_cast<size_t>(record.unfrozen)],
          ": requires_grad changed after wrapping (",
          values_by_rank(records, [&](const auto& r) { return r.unfrozen == record.unfrozen; }),
          "); it was frozen then, so it has no bucket: set requires_grad before wrapping");
  for (size_t i = 0; i < names.parameters.size(); ++i) {
    bool some = false, all = true;
    for (const ControlRecord& r : records)
      if (!r.is_finished()) {
        some |= r.trainable[i] != 0;
        all &= r.trainable[i] != 0;
      }
    if (some && !all)
      return str_cat("DDP: ", names.parameters[i], ": requires_grad changed after wrapping (",
                     values_by_rank(records, [&](const auto& r) { return r.trainable[i] != 0; }),
                     "); freeze it on all ranks or on none");
  }
  return {};
}

std::string find_graph_fault(const Records& records, const Records& first,
                             const RecordNames& names) {
  for (size_t r = 0; r < first.size(); ++r) {
    if (records[r].is_finished() || first[r].is_finished()) continue;
    for (size_t i = 0; i < names.parameters.size(); ++i)
      if (records[r].used[i] != first[r].used[i])
        return str_cat("DDP: static_graph: ", names.parameters[i], " was ",
                       first[r].used[i] ? "used" : "unused", " on rank ", r,
                       " in the first step and is ", records[r].used[i] ? "used" : "unused",
                       " now; the graph is not static, leave the option off");
  }
  return {};
}

std::string find_unused_fault(const Records& records, const RecordNames& names) {
  std::string missing;
  for (size_t r = 0; r < records.size(); ++r) {
    if (records[r].is_finished()) continue;
    std::string list;
    for (size_t i = 0; i < names.parameters.size(); ++i)
      if (!records[r].used[i] && is_trained(records, i))
        list += (list.empty() ? "" : ", ") + names.parameters[i];
    if (!list.empty())
      missing += str_cat(missing.empty() ? "" : "; ", list, " received no gradient on rank ", r);
  }
  if (missing.empty()) return {};
  return str_cat("DDP: ", missing,
                 "; set find_unused_parameters or use every output of forward in the loss");
}

}  // namespace

std::string find_fault(const Records& records, const Records& first, const RecordNames& names,
                       const DistributedDataParallelOptions& options) {
  std::string fault = find_join_fault(records);
  if (fault.empty()) fault = find_step_fault(records);
  if (fault.empty()) fault = find_frozen_fault(records, names);
  if (fault.empty() && options.static_graph) fault = find_graph_fault(records, first, names);
  if (fault.empty() && !options.static_graph && !options.find_unused_parameters)
    fault = find_unused_fault(records, names);
  return fault;
}

}  // namespace lockstep::dist
