// The end of a group: work in flight is completed by destroy, by dropping the last handle and at the end of
// the program, cut off by abort alone; and what is asked of a group that is gone is an error. A group ends
// without harm to the groups beside it.
#include "cases.h"

#include <cstdlib>

namespace {

using namespace cases;

constexpr int kMany = 100;

/// Collectives of many sizes and kinds under way, none of them waited for.
struct Flight {
  std::vector<Tensor> sums, copies, rows;
  std::vector<dist::WorkPtr> works;

  Flight(const Group& g, bool keep, int first = 0, int last = kMany) {
    for (int k = first; k < last; ++k) {
      const int64_t n = 1 + 501 * (k % 7);
      sums.push_back(full({n}, k + g.rank()));
      copies.push_back(full({n}, 10 * k + g.rank()));
      rows.push_back(zeros({g.size(), n}));
      auto add = [&](dist::WorkPtr w) {
        if (keep) works.push_back(std::move(w));
      };
      add(g.all_reduce_async(sums.back()));
      if (k % 3 == 0) add(g.broadcast_async(copies.back(), k % g.size()));
      if (k % 5 == 0) add(g.all_gather_async(rows.back(), full({n}, k + g.rank())));
      if (k % 11 == 0) add(g.barrier_async());
    }
  }
  void check(const Group& g, int first = 0) const {
    for (size_t i = 0; i < sums.size(); ++i) {
      const int k = first + static_cast<int>(i), size = g.size();
      const auto all_are = [k](const Tensor& t, double want, const char* what) {
        for (const double v : t.to_vector<double>())
          require(v == want, str_cat(what, " ", k, ": got ", v, ", want ", want));
      };
      all_are(sums[i], size * k + size * (size - 1) / 2, "sum");
      if (k % 3 == 0) all_are(copies[i], 10 * k + k % size, "broadcast");
      for (int r = 0; r < size && k % 5 == 0; ++r) all_are(rows[i][r], k + r, "row");
    }
  }
};

void destroy_at_once(Group g) {
  for (const bool keep : {true, false})
    for (int late = -1; late < g.size(); ++late) {  // a rank that issues the second half later
      const Group own(g.process_group().child());
      Flight first(own, keep, 0, kMany / 2);
      if (g.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      Flight second(own, keep, kMany / 2);
      own.destroy();
      first.check(g);
      second.check(g, kMany / 2);
      for (const auto& w : second.works) {
        require(w->is_completed() && !w->exception(), "destroy left work behind");
        w->wait();
      }
      own.destroy();  // again
    }
  g.barrier();
}

/// The last handle does what destroy does, and works may live longer than their group.
void drop_the_handle(Group g) {
  std::vector<dist::WorkPtr> works;
  std::optional<Flight> flight;
  {
    const Group own(g.process_group().child());
    flight.emplace(own, true);
  }
  flight->check(g);
  for (const auto& w : flight->works) w->wait();
  g.barrier();
}

void use_after_destroy(Group g) {
  const Group own(g.process_group().child());
  own.destroy();
  refuses(g, {"all_reduce(sum) of f32 [3]", "destroyed"}, [&] { own.all_reduce(ones({3})); });
  refuses(g, {"barrier", "destroyed"}, [&] { own.barrier(); });
  refuses(g, {"destroyed"}, [&] { own.process_group().child(); });
  refuses(g, {"destroyed"}, [&] { DistributedDataParallel net{Scalar{}, own}; });
}

/// A peer that has said goodbye is an error for what still needs it, at once.
void use_after_a_goodbye(Group g) {
  for (int leaver = 0; leaver < g.size(); ++leaver) {
    const Group own(g.process_group().child());
    own.barrier();
    if (g.rank() == leaver) {
      own.destroy();
    } else {
      const double begin = ranks::now();
      std::string text = "no error";
      try {
        own.all_reduce(ones({3}));
      } catch (const DistError& e) {
        text = e.what();
      }
      for (const std::string& part :
           {str_cat("rank ", leaver, " has left"), std::string("all_reduce(sum) of f32 [3]"),
            std::string("sequence number 2"), std::string("last completed: barrier")})
        require(contains(text, part), "\"" + text + "\" lacks " + part);
      require(ranks::now() - begin < 2.0 * ranks::kPatience, "the news came late");
    }
    g.barrier();
  }
}

/// One rank aborts while everybody has work under way.
void abort_on_one_rank(Group g) {
  for (int aborter = 0; aborter < g.size(); ++aborter) {
    const Group own(g.process_group().child());
    const Tensor before = full({5}, g.rank() + 1.0);
    own.all_reduce(before);
    std::string text = "no error";
    const double begin = ranks::now();
    try {
      if (g.rank() == aborter) own.process_group().abort("enough of this");
      Flight flight(own, true);
      for (const auto& w : flight.works) w->wait();
    } catch (const DistError& e) {
      text = e.what();
    }
    require(contains(text, "enough of this") && contains(text, str_cat("rank ", aborter)), text);
    require(ranks::now() - begin < 2.0 * ranks::kPatience, "abort freed the ranks late");
    require(before.to_vector<double>() == std::vector<double>(5, g.size() * (g.size() + 1) / 2),
            "what was complete before");
    own.destroy();
    g.barrier();
  }
}

/// An exception on its way out ends the group that it leaves, for everybody, at once.
void left_by_an_exception(Group g) {
  const double begin = ranks::now();
  std::string text = "no error";
  try {
    const Group own(g.process_group().child());
    if (g.rank() == 0) {
      own.all_reduce_async(ones({3}));  // which nobody joins
      throw ValueError("rank 0 gave up");
    }
    own.barrier();
  } catch (const Error& e) {
    text = e.what();
  }
  require(contains(text, g.rank() == 0 ? "gave up" : "rank 0"), text);
  require(ranks::now() - begin < 2.0 * ranks::kPatience, "the others were freed late");
  g.barrier();
}

/// The program ends with work under way, and says nothing.
void no_destroy(Group g) {
  static Flight flight(g, true);
  static DistributedDataParallel net{Scalar{}, g};
  net(f64(g.rank() + 1.0)).backward();
  near(net.module().w.grad().item<double>(), (g.size() + 1) / 2.0, "a step");
  std::exit(0);
}

/// A wrapper and its module live longer than the group.
void wrapper_outlives_group(Group g) {
  std::optional<Group> own(Group(g.process_group().child()));
  DistributedDataParallel net{Scalar{}, *own};
  net(f64(g.rank() + 1.0)).backward();
  own->destroy();
  own.reset();
  g.barrier();
  near(net.module().w.grad().item<double>(), (g.size() + 1) / 2.0, "the gradient");
  require(net.state_dict().size() == 1 && net.module().w.item<double>() == 10, "the module");
}

}  // namespace

const std::vector<cases::Case>& cases::all() {
  static const std::vector<Case> list{
      {"destroy with a hundred collectives under way", 2, destroy_at_once},
      {"destroy with a hundred collectives under way on three ranks", 3, destroy_at_once},
      {"the last handle goes with a hundred collectives under way", 3, drop_the_handle},
      {"a destroyed group is used", 2, use_after_destroy},
      {"a group that a rank has left is used", 3, use_after_a_goodbye},
      {"one rank aborts", 3, abort_on_one_rank},
      {"an exception leaves a group", 3, left_by_an_exception},
      {.name = "no destroy at all",
       .size = 3,
       .body = no_destroy,
       .threads = false,
       .silent = true},
      {"a wrapper that outlives its group", 2, wrapper_outlives_group},
  };
  return list;
}
