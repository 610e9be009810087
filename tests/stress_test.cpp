// Random collectives, sends and receives on random groups, by several threads of every rank at once,
// in an order that the ranks share only within each group: all of it against the plain reference.
// LOCKSTEP_STRESS_SECONDS lengthens the soak, LOCKSTEP_STRESS_SEED varies it.
#include <doctest/doctest.h>

#include <deque>
#include <random>

#include <lockstep/distributed/local.h>

#include "exchanges.h"

using namespace lockstep;
using namespace lockstep::dist;

namespace {

double variable(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atof(text) : otherwise;
}

// A random collective for a group of this size.
Ask random_ask(std::mt19937& random, int size, int64_t salt) {
  static constexpr int64_t kSizes[] = {0, 1, 7, 1000, 9000, 40000};
  Ask a{kKinds[random() % std::size(kKinds)], kDTypes[random() % std::size(kDTypes)], {}};
  do a.op = kOps[random() % std::size(kOps)];
  while (!meaningful(a.op, a.dtype));
  const int64_t n = kSizes[random() % std::size(kSizes)];
  const bool strided = random() % 4 == 0;
  a.make = [=](DType t) {
    return strided ? new_tensor({n, 2}, t).select(1, 1) : new_tensor({n}, t);
  };
  a.root = static_cast<int>(random() % static_cast<unsigned>(size));
  a.to = static_cast<int>(random() % static_cast<unsigned>(size));
  if (a.to == a.root) a.to = (a.root + 1) % size;
  if (size == 1 && a.kind >= CollectiveKind::send) a.kind = CollectiveKind::barrier;
  a.salt = salt % 100;
  return a;
}

// Groups made of one parent: all of it, some of it, and some of that.
std::vector<Group> groups_of(const Group& parent, std::mt19937& random) {
  std::vector<Group> groups{parent, Group(parent.process_group().child())};
  for (int k = 0; k < 4; ++k) {
    std::vector<int> ranks;
    for (int r = 0; r < parent.size(); ++r)
      if (random() % 3) ranks.push_back(r);
    std::shuffle(ranks.begin(), ranks.end(), random);
    const bool nests = ranks.size() > 1;
    const auto one = parent.new_group(ranks);
    if (!one) continue;
    groups.push_back(*one);
    if (!nests) continue;
    const auto inner = one->new_group({static_cast<int>(ranks.size()) - 1, 0});
    if (inner) groups.push_back(*inner);
  }
  return groups;
}

// One thread's work on its own groups. What happens in a group comes from the group's generator,
// the same on all its ranks; which group is next, and when to wait, from the rank's.
void work(const Group& parent, unsigned seed, int rounds) {
  std::mt19937 shared(seed), own(seed * 31 + static_cast<unsigned>(parent.rank()));
  const std::vector<Group> groups = groups_of(parent, shared);
  std::vector<std::mt19937> scripts;
  std::vector<int> left(groups.size(), rounds);
  for (const Group& g : groups) {
    // Its members must agree on a seed, whatever its place in each one's list.
    const Tensor t =
        full({1}, static_cast<double>(seed % 1000 + own() % 100), {.dtype = DType::f64});
    g.broadcast(t);
    scripts.emplace_back(static_cast<unsigned>(t.item<double>()));
  }
  std::deque<Started> under_way;
  const auto finish_one = [&] {
    const size_t i = own() % under_way.size();
    under_way[i].finish();
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(i));
  };
  std::vector<size_t> open(groups.size());
  for (size_t i = 0; i < open.size(); ++i) open[i] = i;
  while (!open.empty()) {
    const size_t pick = own() % open.size(), i = open[pick];
    under_way.push_back(
        start(groups[i].process_group(), random_ask(scripts[i], groups[i].size(), left[i])));
    if (--left[i] == 0) open.erase(open.begin() + static_cast<std::ptrdiff_t>(pick));
    if (own() % 8 == 0) parent.process_group().progress();
    if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 500));
    // A rank that waits for one has started all that others need before it in that group; no two
    // ranks may wait for each other's unstarted work in different groups, so nobody waits here.
    while (under_way.size() > 40 && under_way.front().work &&
           under_way.front().work->is_completed()) {
      under_way.front().finish();
      under_way.pop_front();
    }
  }
  while (!under_way.empty()) finish_one();
}

}  // namespace

TEST_CASE("random collectives on random groups from several threads of each rank") {
  const double seconds = variable("LOCKSTEP_STRESS_SECONDS", 2);
  auto seed = static_cast<unsigned>(variable("LOCKSTEP_STRESS_SEED", 20240607));
  const double end = ranks::now() + seconds;
  do {
    CAPTURE(seed);
    const int size = 2 + static_cast<int>(seed % 4);
    run_local(size, [seed](Group g) {
      const Group second(g.process_group().child());
      std::exception_ptr failures[2];
      std::thread other([&] {
        try {
          work(second, seed + 1, 40);
        } catch (...) {
          failures[1] = std::current_exception();
          second.process_group().abort("the stress failed");
        }
      });
      try {
        work(g, seed, 40);
      } catch (...) {
        failures[0] = std::current_exception();
        g.process_group().abort("the stress failed");
      }
      other.join();
      for (const std::exception_ptr& e : failures)
        if (e) std::rethrow_exception(e);
    });
    seed = seed * 1664525 + 1013904223;
  } while (ranks::now() < end);
}
