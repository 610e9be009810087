// Call's texts, and the table of patterns.
#include <lockstep/distributed/shm/call.h>

#include <algorithm>
#include <iterator>

namespace lockstep::dist {

namespace {
// By kind: whether streams are combined, who offers, who takes, whether a stream has parts.
constexpr Pattern kPatterns[] = {
    {true, Who::all, Who::all, false},             // all_reduce
    {false, Who::root, Who::all_but_root, false},  // broadcast
    {true, Who::all, Who::root, false},            // reduce
    {false, Who::all, Who::all, false},            // all_gather
    {true, Who::all, Who::all, true},              // reduce_scatter
    {false, Who::all, Who::root, false},           // gather
    {false, Who::root, Who::all, true},            // scatter
    {false, Who::all, Who::all, true},             // all_to_all
    {},                                            // barrier
    {},                                            // send: a Transfer
    {},                                            // recv
    {},                                            // child
    {},                                            // allocate
    {false, Who::all, Who::all, false},            // new_group: gathers the lists
};
static_assert(std::size(kPatterns) == static_cast<size_t>(CallKind::new_group) + 1);

Shape shape_of(const Call& call) {
  return Shape(std::span<const int64_t>(call.shape, static_cast<size_t>(call.dims)));
}
}  // namespace

Call Call::of(const Collective& c) {
  Call call{.kind = static_cast<CallKind>(c.kind), .reduce = c.reduce, .root = c.root};
  if (!c.model().defined()) return call;
  call.dtype = c.model().dtype();
  if (c.kind == CollectiveKind::all_to_all) return call;  // its shapes differ by pair
  call.dims = c.model().dim();
  for (int i = 0; i < call.dims; ++i) call.shape[i] = c.model().shape()[i];
  return call;
}

bool Call::agrees_with(const Call& o) const {
  return kind == o.kind && reduce == o.reduce && dtype == o.dtype && dims == o.dims &&
         root == o.root && sequence == o.sequence && std::equal(shape, shape + dims, o.shape);
}

int64_t Call::numel() const { return shape_of(*this).numel(); }

std::string Call::text() const {
  switch (kind) {
    case CallKind::child:
      return "child";
    case CallKind::allocate:
      return str_cat("allocate of ", shape[0], " bytes");
    case CallKind::new_group:
      return "new_group";
    default:
      return describe(static_cast<CollectiveKind>(kind), reduce, dtype, shape_of(*this), root);
  }
}

std::string NamedCall::text() const {
  if (call.sequence == 0) return "nothing";
  return str_cat(call.text(), ", sequence number ", call.sequence,
                 label.empty() ? std::string() : str_cat(" (", label, ")"));
}

const Pattern& Pattern::of(const Call& call) { return kPatterns[static_cast<size_t>(call.kind)]; }

}  // namespace lockstep::dist
