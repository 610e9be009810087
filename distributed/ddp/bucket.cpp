#include <lockstep/distributed/ddp/bucket.h>

namespace lockstep::dist {
namespace {

int64_t padded(int64_t elements, DType dtype) {
  const auto line = static_cast<int64_t>(64 / size_of(dtype));
  return (elements + line - 1) / line * line;
}

}  // namespace

std::vector<Bucket> plan_buckets(const std::vector<Replicated>& parameters,
                                 const std::vector<int>& order, BucketCaps caps) {
  std::vector<Bucket> done, open;  // at most one open bucket for each dtype and device
  auto limit = [&](const Bucket&) { return done.empty() ? caps.first_bytes : caps.cap_bytes; };
  for (int i : order) {
    const Tensor& p = parameters[static_cast<size_t>(i)].parameter;
    auto fits = [&](const Bucket& b) {
      const Tensor& other = parameters[static_cast<size_t>(b.parameters[0])].parameter;
      return b.dtype == p.grad_dtype() && other.device() == p.device();
    };
    auto it = std::find_if(open.begin(), open.end(), fits);
    if (it == open.end())
      it = open.insert(open.end(),
                       Bucket{.parameters = {}, .dtype = p.grad_dtype(), .flat = {}, .label = {}});
    it->parameters.push_back(i);
    it->elements = padded(it->elements, p.grad_dtype()) + p.numel();
    if (it->bytes() >= limit(*it)) {
      done.push_back(std::move(*it));
      open.erase(it);
    }
  }
  for (Bucket& b : open) done.push_back(std::move(b));
  for (size_t i = 0; i < done.size(); ++i) {
    const auto& list = done[i].parameters;
    done[i].label = str_cat("DDP bucket ", i, " (", parameters[static_cast<size_t>(list[0])].name);
    if (list.size() > 1) done[i].label += str_cat(" and ", list.size() - 1, " more");
    done[i].label += ')';
  }
  return done;
}

void place_buckets(ProcessGroup& group, const std::vector<Replicated>& parameters,
                   std::vector<Bucket>& buckets, std::vector<Tensor>& slots) {
  slots.resize(parameters.size());
  std::vector<Ref<Storage>>
      memory;  // all of it before anything moves: a failure leaves the old layout whole
  for (Bucket& b : buckets) memory.push_back(group.allocate(std::max<size_t>(b.bytes(), 64)));
  for (size_t k = 0; k < buckets.size(); ++k) {
    Bucket& b = buckets[k];
    auto body = make_ref<TensorBody>();
    body->storage = memory[k];
    body->shape = {b.elements};
    body->strides = {1};
    body->dtype = b.dtype;
    b.flat = Tensor(body);
    b.flat.zero_();
    int64_t offset = 0;
    for (int i : b.parameters) {
      const Tensor& p = parameters[static_cast<size_t>(i)].parameter;
      offset = padded(offset, b.dtype);
      char* bytes =
          static_cast<char*>(memory[k]->data()) + static_cast<size_t>(offset) * size_of(b.dtype);
      // A Storage of its own gives the slot its own version counter, which a write to a neighbour
      // does not move.
      Tensor fresh = from_blob(bytes, p.shape(), {.dtype = b.dtype, .device = p.device()},
                               [keep = memory[k]] {});
      Tensor& slot = slots[static_cast<size_t>(i)];
      if (slot.defined()) {
        fresh.copy_(slot);
        slot.body().storage = fresh.body().storage;
      } else {
        slot = fresh;
      }
      offset += p.numel();
    }
  }
}

}  // namespace lockstep::dist
