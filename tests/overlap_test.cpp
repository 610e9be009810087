// Collectives whose inputs and outputs share memory. Every rank has one buffer of known values;
// inputs and outputs are views of it. What an output must be follows from the values that stood
// there before, whatever lies where, and all else in the buffer must be as it was. Ranks come late
// in turn, and the sizes are on both sides of what a rank may send ahead.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <thread>

#include <lockstep/distributed/local.h>

#include "backends.h"
#include "texts.h"

using namespace lockstep;
using namespace lockstep::dist;
using ranks::require;

namespace {

// Where element i of a view stands in the buffer: at `start` + i * `step`.
struct View {
  int64_t start, step;
  Tensor of(const Tensor& buffer, int64_t n) const {
    return buffer.slice(0, {start, start + (n - 1) * step + 1, step});
  }
};

struct Layout {
  std::string name;
  std::vector<View> inputs, outputs;  // one per rank; where a kind has one, the first
};

// Of views of n elements, on `size` ranks, in a buffer of 4 * size * n elements.
std::vector<Layout> layouts(int size, int64_t n) {
  const auto views = [&](int64_t begin, int64_t distance, int64_t step = 1) {
    std::vector<View> all;
    for (int r = 0; r < size; ++r) all.push_back({begin + r * distance, step});
    return all;
  };
  const auto backwards = [&](int64_t begin) {
    auto all = views(begin, n);
    std::reverse(all.begin(), all.end());
    return all;
  };
  return {
      {"in place", views(0, n), views(0, n)},
      {"in place, backwards", views(0, n), backwards(0)},
      {"shifted by one rank", views(n, n), views(0, n)},
      {"shifted the other way", views(0, n), views(n, n)},
      {"shifted by half a part", views(n / 2, n), views(0, n)},
      {"shifted by one element", views(0, n), views(1, n)},
      {"all inputs one, and one output it", views(0, 0), views(0, n)},
      {"inputs overlap each other and outputs", views(0, n / 2), views(n / 4, n)},
      {"interleaved, in place", views(0, 1, size), views(0, 1, size)},
      {"interleaved inputs under dense outputs", views(0, 1, size), views(0, n)},
      {"dense inputs under interleaved outputs", views(0, n), views(0, 1, size)},
      {"interleaved, apart", views(0, 2, 2 * size), views(1, 2, 2 * size)},
  };
}

double value(int rank, int64_t at) { return static_cast<double>((rank * 131 + at * 7) % 1021); }

struct Case {
  CollectiveKind kind;
  int root;
};

void check(const Group& g, const Case& c, const Layout& layout, int64_t n, int late) {
  const int size = g.size(), me = g.rank();
  const bool at_root = me == c.root;
  const Tensor buffer = empty({4 * size * n});
  float* data = buffer.data<float>();
  for (int64_t i = 0; i < buffer.numel(); ++i) data[i] = static_cast<float>(value(me, i));
  std::vector<Tensor> inputs, outputs;
  for (int r = 0; r < size; ++r) {
    inputs.push_back(layout.inputs[static_cast<size_t>(r)].of(buffer, n));
    outputs.push_back(layout.outputs[static_cast<size_t>(r)].of(buffer, n));
  }
  if (me == late) std::this_thread::sleep_for(Milliseconds(30));
  ProcessGroup& group = g.process_group();
  // What rank r gave as its input k, element i.
  const auto given = [&](int r, int k, int64_t i) {
    const View& v = layout.inputs[static_cast<size_t>(k)];
    return value(r, v.start + i * v.step);
  };
  std::vector<std::function<double(int64_t)>> expected(static_cast<size_t>(size));  // by output
  if (c.kind == CollectiveKind::all_gather) {
    group.all_gather(outputs, inputs[0])->wait();
    for (int r = 0; r < size; ++r)
      expected[static_cast<size_t>(r)] = [=](int64_t i) { return given(r, 0, i); };
  } else if (c.kind == CollectiveKind::gather) {
    group.gather(at_root ? outputs : std::vector<Tensor>(), inputs[0], c.root)->wait();
    for (int r = 0; r < size && at_root; ++r)
      expected[static_cast<size_t>(r)] = [=](int64_t i) { return given(r, 0, i); };
  } else if (c.kind == CollectiveKind::scatter) {
    group.scatter(outputs[0], at_root ? inputs : std::vector<Tensor>(), c.root)->wait();
    expected[0] = [=](int64_t i) { return given(c.root, me, i); };
  } else if (c.kind == CollectiveKind::reduce_scatter) {
    group.reduce_scatter(outputs[0], inputs)->wait();
    expected[0] = [=](int64_t i) {
      double sum = 0;
      for (int r = 0; r < size; ++r) sum += given(r, me, i);
      return sum;
    };
  } else {
    group.all_to_all(outputs, inputs)->wait();
    for (int r = 0; r < size; ++r)
      expected[static_cast<size_t>(r)] = [=](int64_t i) { return given(r, me, i); };
  }
  std::vector<double> right(static_cast<size_t>(buffer.numel()));
  for (int64_t i = 0; i < buffer.numel(); ++i) right[static_cast<size_t>(i)] = value(me, i);
  for (int r = 0; r < size; ++r)
    for (int64_t i = 0; i < n && expected[static_cast<size_t>(r)]; ++i) {
      const View& v = layout.outputs[static_cast<size_t>(r)];
      right[static_cast<size_t>(v.start + i * v.step)] = expected[static_cast<size_t>(r)](i);
    }
  int64_t wrong = 0;
  for (int64_t i = 0; i < buffer.numel(); ++i)
    wrong += static_cast<double>(data[i]) != right[static_cast<size_t>(i)];
  require(wrong == 0, str_cat(name_of(c.kind), ", root ", c.root, ", ", layout.name, ", ", n,
                              " elements, rank ", late, " late: ", wrong, " wrong on rank ", me));
}

// A part of 700,000 bytes is more than a rank may have under way.
void check_all(const Group& g) {
  int late = 0;
  for (const int64_t n : {int64_t{6}, int64_t{175000}})
    for (const Layout& layout : layouts(g.size(), n))
      for (const Case& c :
           {Case{CollectiveKind::all_to_all, 0}, Case{CollectiveKind::all_gather, 0},
            Case{CollectiveKind::reduce_scatter, 0}, Case{CollectiveKind::gather, 1},
            Case{CollectiveKind::scatter, 1}}) {
        check(g, c, layout, n, late);
        late = (late + 1) % g.size();
      }
}

// Results that would overwrite each other, and what a rank alone can see, are refused before
// anything moves.
void check_refused(const Group& g) {
  const auto size = static_cast<int64_t>(g.size());
  ProcessGroup& group = g.process_group();
  const Tensor buffer = zeros({4 * size});
  std::vector<Tensor> overlapping, apart;
  for (int64_t r = 0; r < size; ++r) {
    overlapping.push_back(buffer.narrow(0, r, 2));
    apart.push_back(buffer.narrow(0, 2 * r, 2));
  }
  const auto refused = [&](const std::function<void()>& f) {
    expect(error_of<ValueError>(f), {"share memory", "do not overlap"});
  };
  refused([&] { group.all_gather(overlapping, ones({2})); });
  refused([&] { group.all_to_all(overlapping, apart); });
  refused([&] { all_reduce_coalesced(group, overlapping); });
  refused([&] { broadcast_coalesced(group, overlapping, 0); });
  if (g.rank() == 1) refused([&] { group.gather(overlapping, ones({2}), 1); });
  require(buffer.sum().item<double>() == 0, "written though refused");
  group.all_gather(apart, full({2}, g.rank() + 1))->wait();  // and nobody is out of step
  require(buffer.sum().item<double>() == static_cast<double>(size * (size + 1)), "all_gather");
}

}  // namespace

TEST_CASE("inputs and outputs may overlap in any way: threads") {
  for (const int size : {2, 3}) {
    run_local(size, check_all);
    run_local(size, check_refused);
  }
}
TEST_CASE("inputs and outputs may overlap in any way: ranks as processes") {
  for (const std::string& backend : backends::all())
    for (const int size : {2, 3}) {
      CAPTURE(backend);
      CHECK(ranks::failures(backends::run(backend, size, "rank: overlap", {.deadline = 90})) == "");
    }
}
TEST_CASE("rank: overlap" * doctest::skip()) {
  const Group g = backends::join();
  check_all(g);
  check_refused(g);
}
